"""The gate over a server: one that dies ends it in one line, and the same command goes on from what was finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policy.__main__ import main
from policy.dataset.row import Row
from policy.engines import endpoint
from policy.evaluate.entrants import SHIPPED
from policy.gate.triage import PART
from policy.serve.shape import load_shape
from tests.policy.gate_rows import arena_rows, export
from tests.policy.test_engines import MaskingServer
from tests.policy.test_evaluate_endpoints import on_thread
from tests.upstreams.server import Reply, Request, event, event_stream, json_reply


class LoggingServer(MaskingServer):
    """It plans what was logged. `plans_max`: after so many it is dead."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(SHIPPED, load_shape(SHIPPED).vocab)
        self.rows = {json.dumps(row.messages): row for row in rows}
        self.plans = 0
        self.plans_max = 1_000_000
        self.questions: list[tuple[str, float]] = []  # messages and temperature of each request

    async def __call__(self, request: Request) -> Reply:
        if not request.path.endswith("/chat/completions"):
            return await super().__call__(request)
        self.plans += 1
        self.questions.append((json.dumps(request.body["messages"]), request.body["temperature"]))
        if self.plans > self.plans_max:
            return json_reply({"error": {"message": "EngineDead"}}, 500)
        row = self.rows[json.dumps(request.body["messages"])]
        choice: dict[str, Any] = {"index": 0, "delta": {"content": row.plan_text}, "finish_reason": "stop"}
        opening = {"choices": [], "prompt_token_ids": list(row.prompt_token_ids)}
        return event_stream([event(opening), event({"choices": [choice]}), event("[DONE]")])


def test_a_server_that_dies_during_a_gate_is_one_line_and_finished_work_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "WAITS_S", (0.01,))
    rows = arena_rows(SHIPPED, 24)
    log, out = export(tmp_path / "log.parquet", rows), tmp_path / "gate.json"
    server = LoggingServer(rows)
    server.plans_max = PART
    assert len(rows) > PART
    with on_thread(server) as url:
        command = ["gate", "--candidate", str(SHIPPED), "--live", str(SHIPPED), "--out", str(out), "--env", "arena"]
        command += ["--logged", str(log), "--engine", url, "--set", "ess_min=1"]
        assert main(command) == 1
        [line] = [one for one in capsys.readouterr().err.splitlines() if "EngineDead" in one]
        assert line.endswith(f"finished work is kept in {out}.partial: the same command goes on from there")
        assert not out.exists()
        finished = {messages for messages, _ in server.questions[:PART]}
        server.questions, server.plans_max = [], 1_000_000
        assert main(command) == 4  # its weights are noise
    # Questions are compared, not their number: requests that the first run gave up may arrive during the second.
    greedy = {messages for messages, temperature in server.questions if temperature == 0}
    assert greedy == server.rows.keys() - finished
    assert len({messages for messages, temperature in server.questions if temperature > 0}) == 24
    report = json.loads(out.read_text())
    assert report["parts"][0]["facts"]["engine"] == url
    assert not Path(f"{out}.partial").exists()
