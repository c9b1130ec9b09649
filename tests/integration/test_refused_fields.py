"""What could redirect a call or unlock something is a 400 wherever it stands, however it is spelt; nothing leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.openai.shapes import REFUSED, REFUSED_PREFIXES, is_refused
from tests.fakes.workers import Says
from tests.integration.test_api import served
from tests.kit import Kit, ask
from tests.security.report import measured

NAMES = sorted(REFUSED) + [f"{prefix}thing" for prefix in REFUSED_PREFIXES]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
EVIL = "http://127.0.0.1:1/v1"


def user(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": "x", **more}


def part(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x", **more}]}]


def picture(**more: Any) -> list[dict[str, Any]]:
    link = {"url": "data:image/png;base64,iVBORw0KGgo=", **more}
    return [{"role": "user", "content": [{"type": "image_url", "image_url": link}]}]


def asking(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]


PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "the body": lambda name: {name: EVIL},
    "null in the body": lambda name: {name: None},
    "a message": lambda name: {"messages": [user(**{name: EVIL})]},
    "a part": lambda name: {"messages": part(**{name: EVIL})},
    "an image": lambda name: {"messages": picture(**{name: EVIL})},
    "a tool call": lambda name: {"messages": asking({**CALL, name: EVIL})},
    "a called function": lambda name: {"messages": asking({**CALL, "function": {**CALL["function"], name: EVIL}})},  # type: ignore[dict-item]
    "stream_options": lambda name: {"stream": True, "stream_options": {name: EVIL}},
    "response_format": lambda name: {"response_format": {"type": "text", name: EVIL}},
    "json_schema": lambda name: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, name: EVIL}}
    },
    "a tool": lambda name: {"tools": [{**TOOL, name: EVIL}]},
    "a function": lambda name: {"tools": [{"type": "function", "function": {"name": "f", name: EVIL}}]},
    "tool_choice": lambda name: {"tools": [TOOL], "tool_choice": {**TOOL, name: EVIL}},
    "audio": lambda name: {"audio": {"voice": "alloy", "format": "wav", name: EVIL}},
    "prediction": lambda name: {"prediction": {"type": "content", "content": "x", name: EVIL}},
    "web_search_options": lambda name: {"web_search_options": {name: EVIL}},
    "extra_body": lambda name: {"extra_body": {name: EVIL}},
}


def spellings(name: str) -> list[str]:
    camel = re.sub(r"_(.)", lambda m: m[1].upper(), name)
    return [name.upper(), name.title(), name.replace("_", "-"), camel, camel[0].upper() + camel[1:], f" {name} "]


@pytest.mark.parametrize("place", PLACES)
async def test_every_refused_name_in_every_place_is_a_400_and_reaches_no_worker(place: str) -> None:
    assert len(NAMES) * len(PLACES) >= 1000
    kit = Kit(workers={"alpha": Says("no")})
    async with served(kit) as gateway:
        for name in NAMES:
            reply = await gateway.http.post("/v1/chat/completions", json=ask() | PLACES[place](name))
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "refused_field"), name
            assert error["param"].split(".")[-1] in (name, "extra_body")
    assert kit.workers.calls == []
    assert kit.journal.events == []
    assert kit.conductor.calls == []


async def test_another_spelling_is_refused_too() -> None:
    ways = sum(len(spellings(name)) for name in NAMES)
    measured("S1", f"{len(NAMES)} names x {len(PLACES)} places = {len(NAMES) * len(PLACES)} cases, {ways} spellings")
    kit = Kit()
    async with served(kit) as gateway:
        for name in NAMES:
            for spelt in spellings(name):
                reply = await gateway.http.post("/v1/chat/completions", json=ask() | {spelt: EVIL})
                assert (reply.status_code, reply.json()["error"]["code"]) == (400, "refused_field"), spelt
    assert kit.workers.calls == []


async def test_in_metadata_and_in_headers_they_are_words_and_go_nowhere() -> None:
    """Metadata is the client's own, and a header is no property: neither is refused, and neither is passed on."""
    kit = Kit(workers={"alpha": Says("ok")})
    async with served(kit) as gateway:
        for start in range(0, len(NAMES), 16):
            names = NAMES[start : start + 16]
            headers = {re.sub("_", "-", name): "evil" for name in names if name not in ("authorization", "headers")}
            body = ask(metadata=dict.fromkeys(names, "evil"))
            reply = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
    assert kit.workers.calls
    for call in kit.workers.calls:
        assert "evil" not in json.dumps(call.body)
        assert call.worker.url == "http://127.0.0.1:1/v1"


@pytest.mark.parametrize("name", ["model", "messages", "seed", "timezone", "top_k", "apiculture", "max_tokens"])
def test_ordinary_names_are_not_refused(name: str) -> None:
    assert not is_refused(name)
