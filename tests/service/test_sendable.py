"""Schemas that LiteLLM would enlarge: what is held for is what is sent, and what is refused is refused first."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.openai.vendors.schemas import COPIES_MAX
from gateway.errors import BadRequest
from tests.fakes.workers import Says
from tests.kit import Kit, ask, model_worker, plan, pool_file

SEAT = {"type": "object", "properties": {"row": {"type": "integer"}, "why": {"type": "string"}}}


def tools(levels: int) -> list[dict[str, Any]]:
    """A tool whose definitions double `levels` times where they are copied."""
    names = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2} for n in range(levels)}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**names, f"D{levels}": SEAT}}
    return [{"type": "function", "function": {"name": "book", "parameters": schema}}]


def kit_of(**more: Any) -> Kit:
    gemini = model_worker("delta", "dune", kind="litellm", model="gemini/gemini-2.5-pro", context_tokens=100_000)
    return Kit(workers={"delta": Says(), "alpha": Says()}, pools=pool_file(gemini), **more)


async def held_nano(model: str, levels: int) -> int:
    running = await kit_of().serve(ask(model=model, tools=tools(levels), max_tokens=16))
    assert running.error is None
    return running.record.hold_nano


async def test_the_copies_are_held_for_and_sent() -> None:
    kit = kit_of()
    running = await kit.serve(ask(model="delta", tools=tools(6), max_tokens=16))
    assert running.error is None
    sent = str(kit.workers.calls[0].body["tools"])
    assert sent.count("'row'") == 2**6
    assert "$ref" not in sent
    assert await held_nano("delta", 6) > await held_nano("delta", 1) > 0


async def test_other_workers_get_the_schema_as_it_is() -> None:
    kit = kit_of()
    assert (await kit.serve(ask(model="alpha", tools=tools(18)))).error is None
    assert kit.workers.calls[0].body["tools"] == tools(18)


async def test_a_schema_that_grows_too_far_is_refused_before_anything_is_held() -> None:
    kit = kit_of()
    with pytest.raises(BadRequest, match=f"more than {COPIES_MAX} references") as caught:
        await kit.serve(ask(model="delta", tools=tools(18)))
    assert caught.value.param == "tools[0].function.parameters"
    assert not kit.workers.calls


async def test_a_planned_request_goes_to_the_workers_that_take_its_schema() -> None:
    kit = kit_of(script=(plan(("atlas", None, [])),))
    running = await kit.serve(ask(tools=tools(18)))
    assert running.error is None
    assert "delta" not in [worker["name"] for worker in running.record.pool]
    assert kit.workers.calls[0].worker.name == "alpha"
