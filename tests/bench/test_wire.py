"""The replay of recorded exchanges: what counts as the same, and a run over a folder of its own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.wire.__main__ import main
from bench.wire.compare import differences, is_loss
from bench.wire.exchanges import read_folder, reply_of

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def chat_reply(text: str, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    head = {"id": "chatcmpl-x", "object": "chat.completion", "created": 1, "model": "m-2026"}
    return {**head, "choices": [choice], "usage": USAGE, "service_tier": "default", **more}


def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-y", "object": "chat.completion.chunk", "created": 1, "model": "m-2026"}
    return "data: " + json.dumps({**head, "service_tier": "default", "choices": [choice]}) + "\n\n"


def exchange(name: str, body: str, **more: Any) -> dict[str, Any]:
    request = {"model": "m", "messages": [{"role": "user", "content": "Count."}]}
    made = {"source": "us", "name": name, "wire": "chat", "host": "vendor.test", "request": request, "status": 200}
    return {**made, "type": "application/json", "body": body, **more}


def write(folder: Path, *exchanges: dict[str, Any]) -> Path:
    with gzip.open(folder / "us.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(one) + "\n" for one in exchanges)
    return folder


def test_ids_times_and_names_of_models_do_not_count() -> None:
    said = chat_reply("one") | {"id": "a", "created": 9}
    assert list(differences(said, chat_reply("one"))) == []
    assert list(differences({"tool_calls": [{"id": "a"}]}, {"tool_calls": [{"id": "b"}]})) == [
        ("changed tool_calls[].id", "'a' → 'b'")
    ]


def test_what_is_lost_changed_and_added_is_told_by_its_path() -> None:
    said = {"usage": {"cost": 1, "cached": None}, "choices": [{"text": "a"}, {"text": "b"}], "logprobs": None}
    came = {"usage": {"more": 2}, "choices": [{"text": "a"}]}
    kinds = [kind for kind, _ in differences(said, came)]
    assert kinds == ["lost usage.cost", "lost usage.cached (null)", "added usage.more", "changed choices[] length"]
    assert [kind for kind in kinds if is_loss(kind)] == ["lost usage.cost", "changed choices[] length"]


def test_a_stream_is_what_its_pieces_add_up_to() -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "sum", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a":1}'}}
    body = chunk({"role": "assistant", "content": None, "tool_calls": [call]}) + chunk({"tool_calls": [more]})
    whole = reply_of("chat", body + chunk({}, "tool_calls") + "data: [DONE]\n\n", streamed=True)
    delta = whole["choices"][0]["delta"]
    assert delta["tool_calls"][0]["function"] == {"name": "sum", "arguments": '{"a":1}'}
    assert (whole["choices"][0]["finish_reason"], whole["end"]) == ("tool_calls", "[DONE]")
    blocks = [
        {"type": "message_start", "message": {"role": "assistant", "content": [], "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
    ]
    message = reply_of("messages", "".join(f"data: {json.dumps(one)}\n" for one in blocks), streamed=True)
    assert message["content"] == [{"type": "tool_use", "input": {"a": 1}}]
    assert (message["stop_reason"], message["usage"]) == ("tool_use", {"input_tokens": 1, "output_tokens": 4})


def test_a_line_that_is_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"us\.jsonl\.gz:2: not a recording"):
        list(read_folder(write(tmp_path, exchange("one", "{}"), {"source": "us"})))


def test_a_folder_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = chunk({"role": "assistant", "content": ""}) + chunk({"content": "one"}) + chunk({}, "stop")
    folder = write(
        tmp_path,
        exchange("whole", json.dumps(chat_reply("one two"))),
        exchange("odd", json.dumps(chat_reply("one", vendors_own={"a": 1}))),
        exchange("streamed", stream + "data: [DONE]\n\n", type="text/event-stream")
        | {"request": {"model": "m", "messages": [{"role": "user", "content": "Count."}], "stream": True}},
        exchange("refused", json.dumps({"error": {"message": "no such model"}}), status=404),
    )
    details = tmp_path / "details.jsonl"
    assert main([str(folder), "--details", str(details)]) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    refusals = [line for line in lines if line["name"] == "refused"]
    assert "| us | chat | 3 | 1 | 3 |" in printed
    assert len(refusals) == 1
    assert all(line["name"] != "whole" or not is_loss(line["kind"]) for line in lines)


def test_nothing_chosen_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path, exchange("one", "{}"))), "--wire", "messages"]) == 1
    assert "no exchange" in capsys.readouterr().err
