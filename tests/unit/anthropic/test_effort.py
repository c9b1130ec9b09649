"""Efforts and budgets: a named worker gets the client's own words, a planned one what its model has."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.anthropic.effort import fit_budget, lacks_thoughts, with_thinking

BUDGET = {"type": "enabled", "budget_tokens": 3000}
ADAPTIVE = {"type": "adaptive"}


@pytest.mark.parametrize(
    ("model", "effort", "thinking", "config"),
    [
        ("claude-sonnet-4-5", "low", {"type": "enabled", "budget_tokens": 1024}, None),
        ("claude-3-7-sonnet-latest", "max", {"type": "enabled", "budget_tokens": 16_384}, None),
        ("claude-sonnet-4-20250514", "high", {"type": "enabled", "budget_tokens": 4096}, None),
        ("claude-opus-4-6", "xhigh", {"type": "adaptive", "display": "summarized"}, {"effort": "high"}),
        ("claude-opus-5", "xhigh", {"type": "adaptive", "display": "summarized"}, {"effort": "xhigh"}),
        ("claude-sonnet-5", "minimal", {"type": "adaptive", "display": "summarized"}, {"effort": "low"}),
        ("claude-sonnet-5", "none", None, None),
    ],
)
def test_an_effort_of_chat_is_the_models_own_thinking(model: str, effort: str, thinking: Any, config: Any) -> None:
    params, changes = with_thinking({"reasoning_effort": effort}, model, named=True)
    assert (params.get("thinking"), params.get("output_config"), changes) == (thinking, config, [])
    assert "reasoning_effort" not in params


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "claude-opus-4-8"])
@pytest.mark.parametrize("thinking", [BUDGET, ADAPTIVE, {"type": "disabled"}])
def test_a_named_worker_gets_the_clients_own_words(model: str, thinking: Any) -> None:
    asked = {"thinking": thinking, "output_config": {"effort": "max"}}
    assert with_thinking(asked, model, named=True) == (asked, [])


@pytest.mark.parametrize(
    ("model", "asked", "given", "changes"),
    [
        (
            "claude-sonnet-4-5",
            {"thinking": ADAPTIVE, "output_config": {"effort": "high"}},
            {"thinking": {"type": "enabled", "budget_tokens": 4096}},
            ["thinking=enabled", "output_config.effort"],
        ),
        (
            "claude-opus-4-5",
            {"thinking": BUDGET, "output_config": {"effort": "high"}},
            {"thinking": BUDGET, "output_config": {"effort": "high"}},
            [],
        ),
        (
            "claude-opus-4-8",
            {"thinking": {**BUDGET, "display": "omitted"}},
            {"thinking": {**ADAPTIVE, "display": "omitted"}, "output_config": {"effort": "low"}},
            ["thinking=adaptive"],
        ),
        ("claude-opus-4-6", {"thinking": BUDGET}, {"thinking": BUDGET}, []),
    ],
)
def test_a_planned_request_gets_what_the_model_has(model: str, asked: Any, given: Any, changes: list[str]) -> None:
    assert with_thinking(asked, model, named=False) == (given, changes)


ONE = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "forces"),
    [
        ("auto", False),
        ("none", False),
        ("required", True),
        (ONE, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ONE]}}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ONE]}}, True),
    ],
)
def test_a_forced_call_is_made_without_thinking(choice: Any, forces: bool) -> None:
    """Anthropic refuses both together; a client that names its worker and its thinking is told so by the vendor."""
    asked = {"tool_choice": choice}
    params, changes = with_thinking({**asked, "reasoning_effort": "low"}, "claude-sonnet-4-5", named=True)
    assert ("thinking" not in params, changes) == (forces, ["reasoning_effort"] if forces else [])
    params, changes = with_thinking({**asked, "thinking": BUDGET}, "claude-sonnet-4-5", named=False)
    assert ("thinking" not in params, changes) == (forces, ["thinking"] if forces else [])
    assert with_thinking({**asked, "thinking": BUDGET}, "claude-sonnet-4-5", named=True)[0]["thinking"] == BUDGET


@pytest.mark.parametrize(
    ("budget", "bound", "left"), [(3000, 4096, 3000), (4096, 4096, 3072), (9000, 1200, 1024), (2000, 1024, None)]
)
def test_a_budget_stays_below_the_bound_of_the_reply(budget: int, bound: int, left: int | None) -> None:
    body: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": budget}}
    fit_budget(body, bound)
    assert body.get("thinking", {}).get("budget_tokens") == left
    assert left is None or left < bound
    other: dict[str, Any] = {"thinking": ADAPTIVE}
    fit_budget(other, 10)
    assert other == {"thinking": ADAPTIVE}


def test_calls_without_their_thinking_are_seen() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "c"}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    assert lacks_thoughts({"thinking": BUDGET}, [calls, result])
    assert not lacks_thoughts({"thinking": BUDGET}, [{**calls, "thinking_blocks": [{}]}, result])
    assert not lacks_thoughts({"thinking": BUDGET}, [calls, result, {"role": "assistant", "content": "x"}])
    assert not lacks_thoughts({"thinking": ADAPTIVE}, [calls, result])
    assert not lacks_thoughts({"thinking": BUDGET}, [])
