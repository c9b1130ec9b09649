"""The suite behind docs/benchmarks.md: its pure parts, its client against a real server, its page and its run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.cost import used
from bench.suite import cores, page, pictures, run
from bench.suite.client import Crowd, Target
from bench.suite.machine import machine
from bench.suite.parts import console, flat, gateways, memory, overload, plans, processes, training
from bench.suite.peers.gateways import NotInstalled, free_port, install
from bench.suite.rounds import Arm, Cell, interleave, percentile, ratios, rounded, summary, turned
from bench.suite.sizes import SIZES, TINY
from bench.suite.upstream import CHUNKS, answer
from tests.upstreams.server import Reply, Request, Server, event_stream, json_reply

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {
    "date": "2026-01-01",
    "commit": "abc",
    "machine": {"processor": "P", "cores": 2, "memory_gib": 1, "kernel": "K", "python": "3", "baton": "0"}
    | {"packages": {"uvloop": "1"}},
    "size": {"rounds": 2},
    "load": [2.0, 1.0],
    "took_s": 1,
}


def row(arm: str, at: int, *, cell: str = "many", cpu_us: float = 100.0, per_s: float = 10.0, **more: Any) -> Any:
    usual = {"p50_ms": 1.0, "p99_ms": 2.0, "data_us": 0.0, "asked": 10, "refused": 0}
    return {"arm": arm, "cell": cell, "round": at, "cpu_us": cpu_us, "per_s": per_s, **usual, **more}


# ---------------------------------------------------------------- figures


def test_ratios_are_taken_within_a_round_and_their_spread_is_kept() -> None:
    rows = [
        *(row("a", at, cpu_us=cpu_us) for at, cpu_us in enumerate((100.0, 1000.0, 100.0))),
        *(row("b", at, cpu_us=cpu_us) for at, cpu_us in enumerate((300.0, 2000.0, 500.0))),
    ]
    assert ratios(rows, "a")["b"]["many"]["cpu_us"] == [3.0, 2.0, 5.0]
    assert "a" not in ratios(rows, "a")
    assert summary(rows)["b"]["many"]["cpu_us"] == 500.0
    assert summary(rows)["b"]["many"]["asked"] == 30


def test_a_ratio_to_nothing_is_left_out() -> None:
    rows = [row("a", 0, data_us=0.0), row("b", 0, data_us=5.0)]
    assert "data_us" not in ratios(rows, "a")["b"]["many"]
    ended = [
        row(arm, at, data_us=us - 3 * at * (arm == "b")) for at in range(3) for arm, us in (("a", 2.0), ("b", 4.0))
    ]
    assert ratios(ended, "a")["b"]["many"]["data_us"] == [0.5, 0.0, 2.0]
    assert ratios(rows, "absent") == {}


def test_the_order_turns_by_one_each_round() -> None:
    arms = [Arm(name, Target("http://127.0.0.1:1/v1", "m")) for name in "abc"]
    assert [[arm.name for arm in turned(arms, number)] for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_numbers_have_three_digits_and_no_exponent() -> None:
    assert [page.plain(value) for value in (0.0123456, 1.234, 99.95, 1234567.0, 0.0)] == [
        "0.0123",
        "1.23",
        "100",
        "1,234,567",
        "0",
    ]
    assert page.spread([1.0, 0.5, 2.0]) == "1 (0.5–2)"
    assert page.spread(None) == "–"
    assert (rounded(1234.5), percentile([], 0.5), percentile([3.0, 1.0, 2.0], 0.5)) == (1230.0, 0.0, 2.0)


def test_plans_are_measured_over_the_slowest_step_and_the_merge() -> None:
    (found,) = plans.over_slowest([row("a", 0, p50_ms=130.0, p99_ms=150.0)], [30, 35, 40, 20])
    assert (found["p50_ms"], found["p99_ms"]) == (70.0, 90.0)
    assert plans.waits_ms(TINY) == (15, 18, 20, 10)


def test_growth_of_memory_counts_from_where_it_is_warm() -> None:
    raw = {"points": [[0.0, 100.0], [1000, 200.0], [2000, 200.0], [5000, 203.0]], "in_flight": 4}
    found = memory.figures_of_requests(raw)
    assert (found["warm_mib"], found["last_mib"], found["ratio"]) == (200.0, 203.0, 1.015)
    assert found["mib_per_100k"] == 75.0


# ---------------------------------------------------------------- client and upstream


async def test_the_client_counts_replies_streams_and_refusals() -> None:
    seen: list[Request] = []

    def handler(request: Request) -> Any:
        seen.append(request)
        if len(seen) % 5 == 0:
            return json_reply({"error": {}}, 503, {"Retry-After": "1"})
        return answer(request)

    async with Server(handler) as server:
        target = Target(f"{server.url}/v1", "m", {"x-more": "yes"})
        crowd = Crowd(target.address, [target.request(), target.request(stream=True)])
        replies = await crowd.closed(3, 0.3)
        crowd.close()
    assert replies.requests == len(seen) == replies.statuses[200] + replies.statuses[503]
    assert replies.statuses[503] == len(seen) // 5 == replies.retry_after
    assert replies.good == replies.statuses[200]
    assert replies.per_s > 0
    assert {request.headers["x-more"] for request in seen} == {"yes"}
    assert seen[0].path == "/v1/chat/completions"


async def test_the_client_notices_a_broken_connection_and_no_server() -> None:
    async with Server(lambda _: Reply(b"half", headers={"content-length": "100"}, cut=True)) as server:
        target = Target(f"{server.url}/v1", "m")
        crowd = Crowd(target.address, [target.request()])
        assert set((await crowd.closed(1, 0.05)).statuses) == {0}
        crowd.close()
    async with Server(lambda _: event_stream([b"data: {}\n\n"])) as server:
        target = Target(f"{server.url}/v1", "m")
        crowd = Crowd(target.address, [target.request(stream=True)])
        assert set((await crowd.closed(1, 0.05)).statuses) == {0}  # a stream without its mark
        crowd.close()
    nowhere = Crowd(("127.0.0.1", free_port()), [b"x"])
    replies = await nowhere.open(100, 0.1)
    assert set(replies.statuses) == {0}
    assert "refused" in replies.examples[0].lower()
    assert replies.good == 0


async def test_a_stream_of_the_upstream_has_its_chunks() -> None:
    target = Target("http://127.0.0.1:1/v1", "m")
    body = target.request(stream=True).partition(b"\r\n\r\n")[2]
    reply = answer(Request("POST", "/v1/chat/completions", {}, body))
    assert isinstance(reply, Reply)
    assert reply.pieces is not None
    pieces = [piece async for piece in reply.pieces]
    assert len(pieces) == CHUNKS
    assert pieces[-1].endswith(b"data: [DONE]\n\n")


async def test_all_arms_are_measured_in_every_round() -> None:
    async with Server(answer) as server:
        arms = [Arm(name, Target(f"{server.url}/v1", "m"), os.getpid()) for name in ("a", "b")]
        cells = [Cell("one", 1), Cell("stream", 2, {"stream": True}, spread_s=0.01)]
        rows = await interleave(arms, cells, 2, 0.05)
    places = [(one["round"], one["cell"], one["arm"]) for one in rows]
    assert places[:4] == [(0, "one", "a"), (0, "one", "b"), (0, "stream", "a"), (0, "stream", "b")]
    assert places[4:6] == [(1, "one", "b"), (1, "one", "a")]
    assert all(one["refused"] == 0 < one["asked"] for one in rows)
    assert all(one["p50_ms"] > 0 for one in rows)


# ---------------------------------------------------------------- processes


def test_a_program_runs_on_the_cores_that_it_was_started_on() -> None:
    last = frozenset(sorted(cores.ALL)[-1:])
    with cores.on(last):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert os.sched_getaffinity(0) == cores.ALL
        assert os.sched_getaffinity(child.pid) == last
        cores.move([child.pid], cores.ALL)
        assert os.sched_getaffinity(child.pid) == cores.ALL
        assert cores.rss_mib(child.pid) > 0
        assert cores.data_servers(child.pid) == []
    finally:
        child.communicate(b"\n")
    assert cores.UNDER_TEST <= cores.ALL
    assert cores.REST


def test_the_machine_is_described_without_its_name_and_paths() -> None:
    text = json.dumps(machine())
    assert platform.node() not in text
    assert not re.search(r"/\w+/", text)
    assert {"processor", "cores", "kernel", "python", "baton"} <= set(machine())


def test_what_does_not_install_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "scripts" / "peers"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "noise" >&2\necho "$1 does not install on this machine" >&2\nexit 75\n')
    script.chmod(0o755)
    monkeypatch.setattr("bench.suite.peers.gateways.ROOT", tmp_path)
    with pytest.raises(NotInstalled, match=r"^portkey does not install on this machine$"):
        install("portkey")


def test_every_peer_is_pinned() -> None:
    versions = {peer.name: peer.version() for peer in gateways.PEERS}
    assert versions["portkey"] == "1.15.2, @hono/node-server 1.13.8"
    assert all(re.match(r"\d+\.\d+", version) for version in versions.values()), versions
    assert versions["litellm"] not in ("1.82.7", "1.82.8")
    script = (ROOT / "scripts" / "peers").read_text()
    assert all(name in script for name in versions)


# ---------------------------------------------------------------- the run


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """One part whose measurement is a count of its runs; the page goes to `tmp_path`."""
    runs: list[int] = []

    def measure(_directory: Path, size: Any) -> dict[str, Any]:
        if size.rounds == 13:
            raise SystemExit("the gateway did not start")
        runs.append(size.rounds)
        return {"runs": len(runs)}

    monkeypatch.setattr(run, "PARTS", {"memory": run.Part(measure, dict, "a test")})
    monkeypatch.setattr(page, "FIGURES", tmp_path / "docs")
    monkeypatch.setattr(page, "files", lambda: iter([(tmp_path / "page.md", "text")]))
    monkeypatch.setattr(page, "PAGE", ROOT / "docs" / "benchmarks.md")
    return runs


def test_a_part_that_is_there_is_passed_over(part: list[int], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert run.main(["--size", "tiny", *out]) == 0
    assert run.main(["memory", "--size", "tiny", *out]) == 0
    assert part == [TINY.rounds]
    assert run.main(["--size", "tiny", "--rounds", "3", *out]) == 0  # another size
    assert run.main(["--size", "tiny", "--rounds", "3", "--again", *out]) == 0
    assert part == [TINY.rounds, 3, 3]
    shown = json.loads((tmp_path / "docs" / "memory.json").read_text())
    assert shown["figures"] == {"runs": 3}
    assert (tmp_path / "page.md").read_text() == "text"
    raw = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert raw["about"]["size"] == asdict(replace(TINY, rounds=3))


def test_a_part_that_fails_is_named_and_ends_with_1(
    part: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--size", "tiny", "--rounds", "13", "--out", str(tmp_path / "out")]) == 1
    assert "memory: failed: the gateway did not start" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()
    assert part == []


@pytest.mark.parametrize(
    ("words", "reason"), [(["nothing"], "no part nothing; there are gateways"), (["--keys", "0"], "--keys must be")]
)
def test_a_wrong_option_is_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.options_of(words)
    assert reason in capsys.readouterr().err


def test_every_size_can_be_given_by_name() -> None:
    options = run.options_of(["--rollouts", "10000000", "--overload-s", "2.5"])
    assert options.size == replace(SIZES["modest"], rollouts=10_000_000, overload_s=2.5)


# ---------------------------------------------------------------- the page


def test_the_page_is_written_from_the_figures_beside_it() -> None:
    stale = [path.name for path, text in page.files() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `python -m bench --page`"


def test_every_part_has_its_section_and_every_picture_its_link() -> None:
    assert set(page.SECTIONS) == set(run.PARTS)
    text = page.PAGE.read_text(encoding="utf-8")
    assert sorted(path.stem for path in page.FIGURES.glob("*.svg")) == sorted(
        re.findall(r"\(benchmarks/(\w+)\.svg\)", text)
    )


def test_a_section_without_figures_says_how_to_get_them() -> None:
    assert "Not measured yet: `python -m bench overload`." in page.render({})
    assert list(pictures.of({})) == []


def figures_of_all() -> dict[str, dict[str, Any]]:
    """Figures of every part, from rows with made-up numbers."""
    arms = [gateways.DIRECT, gateways.BATON, "litellm", "vllm-router"]
    cells = (gateways.ONE, gateways.MANY, gateways.STREAM, gateways.CROWD)
    rows = [
        row(arm, at, cell=cell, cpu_us=0.0 if arm == gateways.DIRECT else 100.0 * (place + at), refused=place % 2)
        for at in range(2)
        for cell in cells
        for place, arm in enumerate(arms)
    ]
    versions = {peer.name: "1.0" for peer in gateways.PEERS}
    side = {"missing": {"portkey": "portkey does not install on this machine"}, "versions": versions}
    raw: dict[str, dict[str, Any]] = {
        "gateways": {"rows": rows, "in_flight": dict.fromkeys(cells, 4), **side},
        "plans": {"rows": [row(arm, 0, cell=plans.PLANS) for arm in ("baton", "langgraph")]}
        | {"missing": {}, "versions": {"langgraph": "1"}, "waits_ms": [3, 4, 5, 2], "in_flight": 2, "fallbacks": 0},
        "keys": {"rows": [row(a, 0, cell="named") for a in (flat.FEW, flat.MANY, flat.EACH)]}
        | {"counts": {flat.FEW: 1, flat.MANY: 5, flat.EACH: 5}},
        "console": {"took_ms": {name: {"a query": [9.0, 300.0, 250.0]} for name in (console.FEW, console.MANY)}}
        | {"counts": {console.FEW: 1_000, console.MANY: 9_000}},
        "memory": {"points": [[0, 1.0], [10, 2.0]], "in_flight": 2},
        "streams": {"streams": 3, "open": 3, "before_mib": 10.0, "with_mib": 11.0},
        "processes": {"rows": [row(arm, 0) for arm in ("one", "two")], "in_flight": 2, "cores": 2, "shared": True}
        | {"shares": {"share": 0.25, "rows": [row(arm, 0) for arm in ("one", "two")]}},
        "training": {
            "rows": [{"environment": "replay", "steps": 1, "cpu_us": each} for each in (400.0, 500.0, 1000.0)],
            "steps": {"small": [{"episodes": 8, "decoding": 1.0, "environment": 2.0, "update": 1.0}]},
            "missing": {"large": "torch is not installed"},
            "batches": training.BATCHES,
        },
    }
    for name in ("workers", "rollouts"):
        cell = "named" if name == "workers" else "rule"
        raw[name] = {"rows": [row(a, 0, cell=cell) for a in ("few", "many")], "counts": {"few": 5, "many": 500}}
    probes = {"asked": 5, "failed": {"admin: 503": 1}, "p50_ms": 1.0, "p99_ms": 2.0}
    over = {name: 1.0 for name in ("refused_p50_ms", "refused_p99_ms", "served_p50_ms", "capacity_p50_ms")}
    over |= {"capacity_per_s": 10.0, "served_per_s": 9.0}
    more = {"asked": 50, "refused": 40, "no_retry_after": 0, "other": {}, "probes": probes, "probes_calm": probes}
    raw["overload"] = {"rows": [{"round": 0, **over, **more}], "times": 5, "in_flight": 8}
    return {name: run.PARTS[name].figures(one) for name, one in raw.items()}


def test_all_sections_are_rendered_and_fit_a_terminal() -> None:
    figures = figures_of_all()
    assert set(figures) == set(run.PARTS)
    text = page.render({name: {"about": ABOUT, "figures": one} for name, one in figures.items()})
    assert [line for line in text.splitlines() if len(line) > 140] == []
    assert "Not measured yet" not in text
    assert "Not measured: Portkey: portkey does not install on this machine." in text
    assert "| goodput, of the capacity (goal: 0.9) | 0.9 (0.9–0.9) |" in text
    assert "| health, admin, models, outcomes: failed; at capacity | 1 of 5; 1 of 5 |" in text
    assert "| OpenAI Agents SDK | not measured |" in text
    assert "5 keys, each in turn" in text
    assert "| replay | 1 | 2,000 (1,000–2,500) |" in text
    assert "| 12 × 16 | 2 | 25 % | 50 % | 25 % |" in text
    assert "not measured, torch is not installed." in text
    assert text.count("- P, 2 cores, 1 GiB; K; Python 3; Baton 0") == 1
    assert {line.count("|") for line in text.splitlines() if line.startswith(("| ", "|-"))} >= {3, 7, 8}
    drawn = pictures.of(figures)
    assert set(drawn) == {"gateways", "plans"}
    assert drawn["gateways"].count("<rect") == 1 + 1 + 4  # ground, Baton, two peers with two bars each


def test_a_rollout_id_is_read_from_a_reply() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Baton-Rollout-Id: abc\r\ncontent-length: 2\r\n"
    assert overload.value_of(head, overload.ROLLOUT) == "abc"
    assert overload.value_of(head, b"\nx-none:") == ""


def test_a_group_of_processes_has_no_more_than_its_share_of_a_core() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with cores.limited([[busy.pid]], 0.2):
            before, began_s = used(busy.pid), time.monotonic()
            time.sleep(1.0)
            seconds = time.monotonic() - began_s
            assert 0 < used(busy.pid).since(before).tree_s < 0.4 * seconds
            groups = Path(f"/proc/{busy.pid}/cgroup").read_text()
            assert "baton-bench" in groups
        assert "baton-bench" not in Path(f"/proc/{busy.pid}/cgroup").read_text()
    except cores.NoQuota as error:
        pytest.skip(str(error))
    finally:
        busy.kill()
        busy.wait()


def test_a_machine_without_control_groups_says_so(tmp_path: Path) -> None:
    with pytest.raises(cores.NoQuota, match="no control groups"), cores.limited([[os.getpid()]], 0.5, tmp_path):
        pass
    raw = {"rows": [row(arm, 0) for arm in ("one", "two")], "in_flight": 2, "cores": 2, "shared": True}
    assert "No shares of a core: none here." in page.of_processes(processes.figures(raw | {"no_shares": "none here"}))


def test_two_processes_share_the_first_two_cores() -> None:
    assert len(processes.CORES) <= 2
    assert processes.CORES | processes.REST == cores.ALL
