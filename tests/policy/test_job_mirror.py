"""A job's directory at a URL: what another machine finds after each upload, whole or cut; and inputs by URL."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.engines.sealed import read_policy
from gateway.adapters.host import urls
from gateway.adapters.host.urls import below, exists, read_text
from gateway.errors import Conflict, NotFound, Unavailable
from policy import inputs
from policy.__main__ import main
from policy.jobs.mirror import Mirror
from policy.spec import plain
from policy.train.spec import TrainSpec
from tests.tiny_model import write_tiny_model


@pytest.fixture
def shelf(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/job"


def write(place: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = place / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("new").write_text(text)
        path.with_name("new").replace(path)
    return place


def test_another_machine_goes_on_from_the_last_checkpoint(shelf: str, tmp_path: Path) -> None:
    here = write(tmp_path / "here", train__checkpoint="step 1", metrics="x")
    mirror = Mirror(shelf, here, 1)
    assert mirror.keep()
    assert not mirror.keep()
    write(here, train__checkpoint="step 2")
    assert mirror.keep()
    there = tmp_path / "there"
    there.mkdir()
    assert Mirror(shelf, there, 2).restore() == 1
    assert (there / "train" / "checkpoint").read_text() == "step 2"
    state = read_text(below(shelf, "state.json"))
    assert state.count("checkpoint") == 1
    assert Mirror(shelf, there, 2).restore() == 0  # it has what the list says


def test_what_this_machine_wrote_itself_is_as_new_or_newer(shelf: str, tmp_path: Path) -> None:
    here = write(tmp_path / "here", train__checkpoint="step 1")
    Mirror(shelf, here, 1).keep()
    write(here, train__checkpoint="step 2")  # and then it was killed
    assert Mirror(shelf, here, 2).restore() == 0
    assert (here / "train" / "checkpoint").read_text() == "step 2"
    other = write(tmp_path / "other", train__checkpoint="step 7")
    Mirror(shelf, other, 3).keep()
    assert Mirror(shelf, here, 4).restore() == 1
    assert (here / "train" / "checkpoint").read_text() == "step 7"


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_upload_leaves_the_checkpoint_before_it(
    shelf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Cut in the file, and between the file and the list."""
    here = write(tmp_path / "here", train__checkpoint="step 1")
    mirror = Mirror(shelf, here, 1)
    mirror.keep()
    write(here, train__checkpoint="step 2")

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if cut == 0:
            patch.setattr(urls, "_copy", full)
        else:
            patch.setattr(type(urls._opened(shelf)[0]), "pipe_file", full)
        with pytest.raises(Unavailable, match=r"cannot be written \(No space left on device\); make room"):
            mirror.keep()
    there = tmp_path / "there"
    there.mkdir()
    Mirror(shelf, there, 2).restore()
    assert (there / "train" / "checkpoint").read_text() == "step 1"
    assert mirror.keep()


def test_a_file_replaced_while_it_is_uploaded_waits_for_the_next_time(
    shelf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = write(tmp_path / "here", train__checkpoint="step 1")
    mirror = Mirror(shelf, here, 1)
    mirror.keep()
    write(here, train__checkpoint="step 2")
    real = urls._copy

    def replaced(source: Any, sink: Any) -> str:
        sink.write(b"torn")
        return real(source, sink) + "?"

    with monkeypatch.context() as patch:
        patch.setattr(urls, "_copy", replaced)
        assert not mirror.keep()
    assert mirror.keep()
    there = tmp_path / "there"
    there.mkdir()
    Mirror(shelf, there, 2).restore()
    assert (there / "train" / "checkpoint").read_text() == "step 2"


def test_an_attempt_that_was_overtaken_writes_no_more(shelf: str, tmp_path: Path) -> None:
    here, there = (write(tmp_path / name, train__checkpoint=name) for name in ("here", "there"))
    Mirror(shelf, there, 2).keep()
    with pytest.raises(Conflict, match="attempt 2 has taken the job over"):
        Mirror(shelf, here, 1).keep()


def test_a_damaged_list_is_one_line(shelf: str, tmp_path: Path) -> None:
    urls.send_text("{", below(shelf, "state.json"))
    with pytest.raises(Unavailable, match=r"state\.json: cannot be read; delete it"):
        Mirror(shelf, tmp_path, 1).restore()


# ---------------------------------------------------------------- inputs by URL


def test_a_spec_may_name_its_inputs_by_url(tmp_path: Path) -> None:
    source = f"memory://{tmp_path.name}"
    (tmp_path / "answers.jsonl").write_text("{}")
    urls.send(tmp_path / "answers.jsonl", below(source, "answers.jsonl"))
    given = {"env": "replay", "data": Path(below(source, "answers.jsonl")), "prices": tmp_path / "p.json"}
    spec = plain(TrainSpec, given)
    assert spec["data"] == f"{source}/answers.jsonl"
    assert spec["prices"] == str(tmp_path / "p.json")
    found, origins = inputs.local(spec, tmp_path / "inputs")
    assert Path(found["data"]).read_text() == "{}"
    assert found["data"].endswith("-answers.jsonl")
    assert origins == {found["data"]: spec["data"]}
    assert found["prices"] == spec["prices"]
    urls.remove(below(source, "answers.jsonl"))
    assert inputs.local(spec, tmp_path / "inputs") == (found, origins)
    with pytest.raises(NotFound, match="memory://"):
        inputs.local(spec, tmp_path / "elsewhere")
    assert not exists(below(source, "answers.jsonl"))


def test_an_upload_that_failed_is_all_that_resume_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = pytest.importorskip("policy.train.run.session", reason="the train extra is not installed")
    shelf, runs = f"memory://{tmp_path.name}", []
    weights = write_tiny_model(tmp_path / "weights", heads=1, heads_kv=1, layers=1)
    urls.send_policy(weights, below(shelf, "weights"))

    def trained(spec: TrainSpec, out: Path, *_: Any) -> Any:
        runs.append(spec.init)
        shutil.copytree(str(spec.init), out)
        return session.TrainResult(out, read_policy(out).manifest, 1, 1, 0, False)

    def full(source: Any, sink: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session, "train", trained)
    given = ["train", "--env", "arena", "--init", below(shelf, "weights"), "--out", below(shelf, "new")]
    assert main(given) == 2
    assert "give --work DIR too" in capsys.readouterr().err
    given += ["--work", str(tmp_path / "work"), "--resume"]
    inputs.local({"init": below(shelf, "weights")}, tmp_path / "work" / "inputs")
    with monkeypatch.context() as patch:
        patch.setattr(urls, "_copy", full)
        assert main(given) != 0
    assert "new/config.json: cannot be written (No space left on device); make room" in capsys.readouterr().err
    assert not exists(below(shelf, "new/manifest.json"))
    assert main(given) == 0
    assert len(runs) == 1
    assert read_policy(urls.fetch_policy(below(shelf, "new"), tmp_path / "here")).manifest.id == "tiny@0"
