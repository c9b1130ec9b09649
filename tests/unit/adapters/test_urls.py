"""Files and policy directories by URL: on a local disk, in memory, and on an S3 server on loopback."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gateway.adapters.engines.sealed import read_policy
from gateway.adapters.host import urls
from gateway.adapters.host.urls import (
    as_url,
    below,
    exists,
    fetch,
    fetch_policy,
    read_text,
    send,
    send_policy,
    send_text,
)
from gateway.errors import Conflict, NotFound, Unavailable, VersionRefused
from tests.s3_server import s3_server
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["memory", "file", "s3"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL under which nothing is yet."""
    if request.param == "s3":
        return below(request.getfixturevalue("s3"), tmp_path.name)
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/shelf"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("urls") / "tiny@0", heads=1, heads_kv=1, layers=1)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (Path("s3://bucket/a/b"), "s3://bucket/a/b"),
        (Path("file:///data/x"), "file:///data/x"),
        ("memory://a/b", "memory://a/b"),
        ("/data/x", None),
        (Path("answers.jsonl"), None),
        ("c:/data", None),
        ("", None),
    ],
)
def test_a_url_is_known_even_after_pathlib(given: Any, url: str | None) -> None:
    assert as_url(given) == url


def test_a_file_there_and_back(shelf: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    (tmp_path / "a").write_bytes(data)
    url = below(shelf, "deep/er/a")
    assert not exists(url)
    digest = send(tmp_path / "a", url)
    assert digest == sha256(data).hexdigest()
    fetch(url, tmp_path / "in" / "b", digest)
    assert (tmp_path / "in" / "b").read_bytes() == data
    send_text("one", below(shelf, "state.json"))
    send_text("two", below(shelf, "state.json"))
    assert read_text(below(shelf, "state.json")) == "two"
    urls.remove(url)
    urls.remove(url)
    assert not exists(url)


def test_a_policy_there_and_back_and_again(shelf: str, policy: Path, tmp_path: Path) -> None:
    send_policy(policy, below(shelf, "tiny@0"))
    send_policy(policy, below(shelf, "tiny@0"))
    here = fetch_policy(below(shelf, "tiny@0"), tmp_path / "tiny@0")
    assert read_policy(here, complete=True).manifest == read_policy(policy).manifest
    assert fetch_policy("memory://nowhere", here) == here  # it is here already
    other = write_tiny_model(tmp_path / "other", heads=1, heads_kv=1, layers=1, seed=1)
    with pytest.raises(Conflict, match="another version is there"):
        send_policy(other, below(shelf, "tiny@0"))


def test_an_upload_that_is_cut_leaves_nothing_that_loads(
    shelf: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its files, and at the manifest; the same call again ends it."""
    url, real, count = below(shelf, "tiny@0"), urls._copy, 0
    for cut in range(len(json.loads((policy / "manifest.json").read_text())["sha256"])):
        count = 0

        def failing(source: Any, sink: Any, cut: int = cut) -> str:
            nonlocal count
            count += 1
            if count > cut:
                sink.write(source.read(10))
                raise OSError(errno.EPIPE, "Broken pipe")
            return real(source, sink)

        monkeypatch.setattr(urls, "_copy", failing)
        with pytest.raises(Unavailable, match=r"cannot be written \(Broken pipe\)"):
            send_policy(policy, url)
        monkeypatch.setattr(urls, "_copy", real)
        with pytest.raises(NotFound, match=r"manifest\.json: there is no such file"):
            fetch_policy(url, tmp_path / "tiny@0")
        assert not (tmp_path / "tiny@0").exists()
    send_policy(policy, url)
    assert fetch_policy(url, tmp_path / "tiny@0").is_dir()


def test_a_torn_file_is_refused_and_leaves_no_directory(shelf: str, policy: Path, tmp_path: Path) -> None:
    url = below(shelf, "tiny@0")
    send_policy(policy, url)
    (tmp_path / "torn").write_bytes((policy / "model.safetensors").read_bytes()[:-1])
    send(tmp_path / "torn", below(url, "model.safetensors"))
    with pytest.raises(VersionRefused, match=r"model\.safetensors: does not match its sha256"):
        fetch_policy(url, tmp_path / "tiny@0")
    assert [path.name for path in tmp_path.iterdir() if "tiny" in path.name] == []


def test_a_full_disk_leaves_the_file_that_was_there(
    shelf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    send(tmp_path / "a", below(shelf, "a"))

    def full(source: Any, sink: Any) -> str:
        sink.write(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(urls, "_copy", full)
    with pytest.raises(Unavailable, match=r"a: cannot be fetched \(No space left on device\); make room"):
        fetch(below(shelf, "a"), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"a", "b"}


def test_an_adapter_brings_its_base_from_beside_it(policy: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "toy@1"
    adapter.mkdir()
    (adapter / "adapter.bin").write_bytes(b"x")
    document = {"kind": "adapter", "base": "tiny@0", "sha256": {"adapter.bin": sha256(b"x").hexdigest()}}
    (adapter / "manifest.json").write_text(json.dumps(document))
    shelf = f"memory://{tmp_path.name}"
    send_policy(adapter, below(shelf, "toy@1"))
    send_policy(policy, below(shelf, "tiny@0"))
    fetch_policy(below(shelf, "toy@1"), tmp_path / "here" / "toy@1")
    assert read_policy(tmp_path / "here" / "tiny@0").manifest.id == "tiny@0"


def test_a_base_is_sent_with_the_files_at_its_source(policy: Path, tmp_path: Path) -> None:
    document = json.loads((policy / "manifest.json").read_text())
    (tmp_path / "base@0").mkdir()
    (tmp_path / "base@0" / "manifest.json").write_text(json.dumps({**document, "kind": "base", "source": str(policy)}))
    shelf = f"memory://{tmp_path.name}"
    send_policy(tmp_path / "base@0", below(shelf, "base@0"))
    here = read_policy(fetch_policy(below(shelf, "base@0"), tmp_path / "here" / "base@0"))
    assert (here.manifest.source, here.files) == ("", tmp_path / "here" / "base@0")


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("memory://none/a", "memory://none/a: there is no such file; check the name"),
        ("nosuch://bucket/a", "nosuch://bucket/a: .*; give file:///PATH, s3://BUCKET/KEY or a path"),
    ],
)
def test_an_error_names_the_url_and_a_fix(url: str, line: str, tmp_path: Path) -> None:
    with pytest.raises((NotFound, Unavailable), match=line):
        fetch(url, tmp_path / "a")


def test_a_bucket_that_is_not_there_is_one_line(s3: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    lost = s3.replace("s3://baton", "s3://nobody")
    with pytest.raises((NotFound, Unavailable), match="s3://nobody"):
        send(tmp_path / "a", below(lost, "a"))


def test_an_s3_server_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="check the network, the URL and AWS_ENDPOINT_URL"):
        exists("s3://baton/a")


def test_without_its_package_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError("No module named 'gcsfs'", name="gcsfs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(Unavailable, match=r"gs://b/a: needs the Python package gcsfs; run `pip install '.\[urls\]'`"):
        fetch("gs://b/a", tmp_path / "a")


def test_blocks_are_copied_and_hashed() -> None:
    sink = io.BytesIO()
    assert urls._copy(io.BytesIO(b"abc"), sink) == sha256(b"abc").hexdigest()
    assert sink.getvalue() == b"abc"
