"""Recordings on disk, and the replies of an API as one value, whole or streamed. Pure but for `read_folder`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIRES = ("chat", "compat", "responses", "messages")
PATHS = {"chat": "chat/completions", "compat": "chat/completions", "responses": "responses", "messages": "messages"}
JOINED = ("content", "refusal", "reasoning", "reasoning_content", "arguments", "input", "data", "transcript")
ONCE = ("id", "type", "role", "name", "index", "format", "signature")  # the same in each piece, where it is repeated


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a client sent to a vendor, and what the vendor answered. `place`: file and line of the recording."""

    source: str
    name: str
    wire: str
    host: str
    request: Mapping[str, Any]
    status: int
    type: str
    body: str
    place: str

    @property
    def streamed(self) -> bool:
        return "event-stream" in self.type


def read_folder(folder: Path) -> Iterator[Exchange]:
    """Every exchange of the `*.jsonl.gz` of a folder. Raises SystemExit for a line that is no recording."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path.name}:{number}"
                try:
                    exchange = Exchange(**json.loads(line), place=place)
                except (ValueError, TypeError) as error:
                    raise SystemExit(f"{place}: not a recording ({error})") from None
                if exchange.wire not in WIRES:
                    raise SystemExit(f"{place}: `wire` must be one of {', '.join(WIRES)}")
                yield exchange


def reply_of(wire: str, body: str, *, streamed: bool) -> Any:
    """The reply as one value. Of a stream: what its pieces add up to, and the order of its events."""
    if not streamed:
        try:
            return json.loads(body)
        except ValueError:
            return {"not JSON": body[:200]}
    events = list(events_of(body))
    if wire == "responses":
        return _response(events)
    return _message(events) if wire == "messages" else _completion(events)


def events_of(body: str) -> Iterator[Any]:
    """The data of each event that is JSON; `[DONE]` as a text."""
    for line in body.splitlines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            yield data
        elif data:
            try:
                yield json.loads(data)
            except ValueError:
                yield {"not JSON": data[:200]}


def add(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a delta: texts that come in pieces are joined, lists grow, everything else is replaced unless by null."""
    for name, value in piece.items():
        before = whole.get(name)
        if isinstance(value, Mapping) and isinstance(before, dict):
            add(before, value)
        elif name == "tool_calls" and isinstance(value, list):
            _add_calls(whole, value)
        elif isinstance(value, list) and isinstance(before, list):
            whole[name] = [*before, *value]
        elif name in JOINED and isinstance(value, str) and isinstance(before, str):
            whole[name] = f"{before}{value}"
        elif value is not None or name not in whole:
            whole[name] = json.loads(json.dumps(value))


def _add_calls(whole: dict[str, Any], pieces: list[Any]) -> None:
    calls = whole.get("tool_calls")
    calls = whole["tool_calls"] = calls if isinstance(calls, list) else []
    for piece in pieces:
        same = [call for call in calls if call.get("index") == piece.get("index") and "index" in piece]
        if same:
            add(same[0], piece)
        else:
            calls.append(json.loads(json.dumps(piece)))


def _completion(events: list[Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if event == "[DONE]":
            whole["end"] = event
            continue
        add(whole, {name: value for name, value in event.items() if name != "choices"})
        for choice in event.get("choices") or ():
            add(choices.setdefault(choice.get("index") or 0, {}), choice)
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def _response(events: list[Any]) -> dict[str, Any]:
    order: list[str] = []
    last: Any = None
    for event in events:
        if not isinstance(event, dict):
            continue
        last = event.get("response", last)
        kind = str(event.get("type"))
        kind = f"{event['output_index']} {kind}" if "output_index" in event else kind
        if not order or order[-1] != kind or not kind.endswith(".delta"):
            order.append(kind)
    return {"response": last, "events": [one for one in order if one != "keepalive"]}


def _message(events: list[Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "message_start":
            whole = json.loads(json.dumps(event["message"]))
        elif kind == "content_block_start":
            blocks[event["index"]] = json.loads(json.dumps(event["content_block"]))
        elif kind == "content_block_delta":
            _add_to_block(blocks[event["index"]], event["delta"])
        elif kind == "message_delta":
            add(whole, event["delta"])
            add(whole, {"usage": event.get("usage")})
        elif kind == "error":
            whole["error"] = event.get("error")
    return whole | {"content": [_block(blocks[index]) for index in sorted(blocks)]}


def _add_to_block(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name == "type":
            continue
        into = "citations" if name == "citation" else name
        if name == "citation":
            block[into] = [*(block.get(into) or ()), value]
        else:
            block[into] = str(block.get(into) or "") + str(value)


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """A block with its input read as JSON, so that spaces in it do not count."""
    if "partial_json" in block:
        text = block.pop("partial_json")
        try:
            block["input"] = json.loads(text) if text else block.get("input")
        except ValueError:
            block["input"] = text
    return block
