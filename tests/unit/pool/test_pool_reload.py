"""What stands around a reload: the file and the settings that name parts of it, keys in logs, SIGHUP, the command."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from gateway import cli
from gateway.adapters.host import poolfile
from gateway.adapters.host.poolfile import PoolFileSource
from gateway.cli.admin.client import AdminClient
from gateway.cli.pool import pools
from gateway.cli.process import runtime
from gateway.core.access.audit import Act
from gateway.core.log.redact import SECRET, Redactor
from gateway.core.pool.revision import canonical_text
from gateway.core.pool.workers import pool_hash
from gateway.errors import ConfigError, Unavailable
from gateway.service.admin.pools import Pools

FILE = """
workers:
  - {{name: one, handle: atlas, kind: openai, model: m, url: "http://127.0.0.1:1/v1", api_key: "file:{key}",
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
pools: {{main: [one], other: [one]}}
default: main
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("first-key-1\n")
    return path


@pytest.fixture
def path(tmp_path: Path, key: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(FILE.format(key=key))
    return path


def source(
    path: Path,
    default: str | None = None,
    judge: str | None = None,
    summarizer: str | None = None,
    planner: str | None = None,
) -> PoolFileSource:
    return PoolFileSource(path, dict, default, {"BATON_JUDGE": judge, "BATON_SUMMARIZER": summarizer}, planner)


# ---------------------------------------------------------------- the file


def test_secrets_are_looked_up_anew_each_time_and_are_not_shown(path: Path, key: Path) -> None:
    one = source(path, default="other", judge="one")
    first = one.load()
    assert (first.pools.default, first.secrets) == ("other", {"one": "first-key-1"})
    key.write_text("second-key-2")
    second = one.load()
    assert (second.pools, second.secrets) == (first.pools, {"one": "second-key-2"})
    assert "key-1" not in repr(first)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"default": "main2"}, "BATON_DEFAULT_POOL_NAME=main2: no such pool; there are main, other"),
        ({"judge": "two"}, "BATON_JUDGE=two: no pool has such a worker"),
        ({"summarizer": "two"}, "BATON_SUMMARIZER=two: no pool has such a worker"),
        ({"planner": "two"}, "BATON_CONDUCTOR=worker:two: no such model; known: one"),
        ({"planner": "onee"}, "BATON_CONDUCTOR=worker:onee: no such model; did you mean `one`?"),
    ],
)
async def test_a_file_that_does_not_fit_the_settings_is_refused_as_at_a_start(
    path: Path, given: Mapping[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await source(path, **given).read()
    assert caught.value.message == said


@pytest.mark.parametrize(("entry", "answers"), [("", False), (", answers: true", True), (", answers: false", False)])
def test_the_worker_that_plans_answers_only_if_its_entry_says_so(path: Path, entry: str, answers: bool) -> None:
    path.write_text(path.read_text().replace("handle: atlas", f"handle: atlas{entry}"))
    assert source(path, planner="one").load().pools.worker("one").answers is answers
    assert source(path).load().pools.worker("one").answers is (entry != ", answers: false")


def test_the_part_of_a_worker_changes_no_pool_hash(path: Path) -> None:
    plans, answers = source(path, planner="one").load().pools, source(path).load().pools
    assert pool_hash(plans.workers) == pool_hash(answers.workers)
    assert "answers" not in canonical_text(answers)


def test_a_mistake_is_one_line_with_its_place(path: Path, key: Path) -> None:
    key.unlink()
    with pytest.raises(ConfigError, match=r"pool.yaml:3: workers\[0\].api_key: `file:.*key` cannot be read.*create"):
        source(path).load()
    path.write_text(path.read_text().replace("handle: atlas", "handel: atlas"))
    with pytest.raises(ConfigError, match=r"pool.yaml:3: workers\[0\].handel: unknown key; did you mean `handle`\?"):
        source(path).load()


async def test_a_disk_that_hangs_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poolfile, "READ_S_MAX", 0.0)
    with pytest.raises(ConfigError, match="not read in 0 s; check the disk"):
        await source(path).read()


# ---------------------------------------------------------------- keys that become known


def test_a_redactor_learns_new_keys_and_keeps_the_old_ones() -> None:
    redactor = Redactor(["old-provider-key"])
    redactor.learn(["new-provider-key", "short"])
    text = redactor.scrub_text("old-provider-key, new-provider-key, short")
    assert text == f"{SECRET}, {SECRET}, short"


def test_a_redactor_forgets_the_oldest_of_very_many() -> None:
    redactor = Redactor(["first-key-of-all"])
    redactor.learn(f"key-number-{number}" for number in range(5_000))
    assert redactor.scrub_text("first-key-of-all") == "first-key-of-all"
    assert redactor.scrub_text("key-number-0") == SECRET


def test_the_programs_log_learns_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(runtime.Scrubbed(Redactor(["old-provider-key"])))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    runtime.scrub_from_log(iter(["new-provider-key"]))
    record = logging.makeLogRecord({"msg": "old-provider-key new-provider-key"})
    assert handler.format(record).endswith(f"{SECRET} {SECRET}")


# ---------------------------------------------------------------- SIGHUP


class Reloading:
    """Stands for `Pools`: answers each reload by the script, and stops whoever waits after the last."""

    def __init__(self, *script: Any) -> None:
        self.script, self.acts = list(script), list[Act]()
        self.done = asyncio.Event()

    async def reload(self, act: Act) -> dict[str, Any]:
        self.acts.append(act)
        says = self.script.pop(0)
        if not self.script:
            self.done.set()
        if isinstance(says, Exception):
            raise says
        return {"changed": says, "hash": "ab" * 32}


async def test_a_signal_that_cannot_be_followed_is_a_line_and_the_next_one_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "gateway.pools")
    fake = Reloading(ConfigError("pool.yaml:3: no"), Unavailable("away"), RuntimeError("a bug"), False, True)
    hangups = runtime.Hangups()
    hangups.signal()  # before anybody listens
    serving = asyncio.create_task(hangups.serve(cast(Pools, fake)))
    while not fake.done.is_set():
        hangups.signal()
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert {act.actor for act in fake.acts} == {"signal:SIGHUP"}
    assert len(fake.acts) == 5
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the pool file was not taken: pool.yaml:3: no",
        "the pool file was not taken: away",
        "the pool file was not taken",
        "the pool file has not changed: abababababab",
    ]


def test_a_process_without_a_terminal_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(6, "No such device or address")

    monkeypatch.setattr(os, "open", refuse)
    assert not runtime.has_terminal()
    monkeypatch.undo()
    monkeypatch.setattr(os, "open", lambda *_: 99)
    closed: list[int] = []
    monkeypatch.setattr(os, "close", closed.append)
    assert runtime.has_terminal()
    assert closed == [99]
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # whoever started the tests
    assert runtime.ends_with_terminal()
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # as under nohup
    assert not runtime.ends_with_terminal()


# ---------------------------------------------------------------- the command


def test_the_command_asks_the_gateway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    hash_ = "ab" * 32
    worker = {"name": "one", "handle": "atlas", "kind": "openai", "model": "m"}
    said = {
        "hash": hash_,
        "before": "x",
        "changed": True,
        "applied": False,
        "changes": {},
        "lines": ["worker x: added"],
    }
    whole = {
        "at": "then",
        "actor": "local:ann",
        "pool": {"workers": {"one": worker}, "pools": {"a": []}, "default": "a"},
    }

    def ask(self: AdminClient, method: str, path: str, body: Any = None, more: Any = None) -> Any:
        asked.append((method, path, body))
        if method == "POST":
            return said
        return whole if path.endswith("%2F..") else {"data": [{name: "x" for name in pools.REVISION_COLUMNS}]}

    monkeypatch.setattr(AdminClient, "__init__", lambda self, url, key_file, **more: None)
    monkeypatch.setattr(AdminClient, "ask", ask)
    assert cli.main(["pools", "reload", "--dry-run", "--why", "w"]) == 0
    assert capsys.readouterr().out == "worker x: added\ndry run: nothing was changed\n"
    said |= {"applied": True}
    assert cli.main(["pools", "reload"]) == 0
    assert capsys.readouterr().out == f"worker x: added\nnow {hash_}\n"
    said |= {"changed": False}
    assert cli.main(["pools", "reload"]) == 0
    assert capsys.readouterr().out == f"nothing changed: {hash_}\n"
    assert cli.main(["pools", "revisions"]) == 0
    assert capsys.readouterr().out.split() == [*pools.REVISION_COLUMNS, *"xxxxx"]
    assert cli.main(["pools", "revisions", "a/.."]) == 0
    assert "first loaded then by local:ann" in capsys.readouterr().out
    assert asked == [
        ("POST", "/admin/pools/reload", {"dry_run": True, "why": "w"}),
        *[("POST", "/admin/pools/reload", {"dry_run": False, "why": ""})] * 2,
        ("GET", "/admin/pools/revisions", None),
        ("GET", "/admin/pools/revisions/a%2F..", None),
    ]
