"""How much a model of Anthropic's thinks: chat's effort as its thinking, a budget below the reply's bound. Pure.

A client that names its worker gets the worker's own words, and its errors. A planned request cannot know which model it
gets, so there the form that the model lacks becomes the one that it has, and the request names the change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

BUDGET_MIN = 1024  # tokens, Anthropic's
BUDGETS = {"minimal": 1024, "low": 1024, "medium": 2048, "high": 4096, "xhigh": 8192, "max": 16_384}
EFFORT_OF_BUDGET = ((10_000, "high"), (5_000, "medium"), (0, "low"))  # tokens of thinking, at least → effort
_BUDGETED = re.compile(r"claude-(v?[0-3]|instant|(opus|sonnet|haiku)-4(-[015](-|$)|-20\d{6}|@|$))")
_ADAPTIVE_ONLY = re.compile(r".*claude.*(opus[-_.]4[-_.][78]|(opus|sonnet|haiku)[-_.][5-9]|fable|mythos)")
_NO_XHIGH = re.compile(r"4[-_.]6")
_EFFORT_TOO = re.compile(r"claude-opus-4-5")  # has an effort, and budgets


def effort_of(budget: int) -> str:
    """The effort that a budget of so many tokens stands for."""
    return next(effort for least, effort in EFFORT_OF_BUDGET if budget >= least)


def budget_of(params: Mapping[str, Any]) -> int | None:
    """The budget of a body's thinking in tokens; None if it has none."""
    thinking = params.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    return budget if isinstance(budget, int) and thinking and thinking.get("type") == "enabled" else None


def with_thinking(params: Mapping[str, Any], model: str, *, named: bool) -> tuple[dict[str, Any], list[str]]:
    """(the parameters with Anthropic's `thinking` and `output_config`, the changes as `name` or `name=value`). `model`:
    without its provider. `named`: the client named this worker."""
    rest = {name: value for name, value in params.items() if name != "reasoning_effort"}
    effort, thinking = params.get("reasoning_effort"), params.get("thinking")
    if effort is not None and thinking is None and "output_config" not in params:
        if effort != "none" and _forces_a_call(params.get("tool_choice")):
            return rest, ["reasoning_effort"]  # Anthropic refuses both together
        return rest | _of_effort(str(effort), model), []
    if named:
        return rest, []
    config = dict(params.get("output_config") or {})
    changes: list[str] = []
    if thinking and thinking.get("type") != "disabled" and _forces_a_call(params.get("tool_choice")):
        changes.append("thinking")
        del rest["thinking"]
        thinking = None
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind in ("adaptive", "between_tools") and _BUDGETED.match(model):
        rest["thinking"] = {"type": "enabled", "budget_tokens": BUDGETS[str(config.get("effort") or "medium")]}
        changes.append("thinking=enabled")
    elif kind == "enabled" and _ADAPTIVE_ONLY.match(model):
        rest["thinking"] = {name: value for name, value in (thinking or {}).items() if name == "display"}
        rest["thinking"]["type"] = "adaptive"
        config.setdefault("effort", effort_of(budget_of(params) or 0))
        changes.append("thinking=adaptive")
    if "effort" in config and _BUDGETED.match(model) and not _EFFORT_TOO.match(model):
        del config["effort"]
        changes.append("output_config.effort")
    rest.pop("output_config", None)
    return rest | ({"output_config": config} if config else {}), changes


def _forces_a_call(choice: Any) -> bool:
    """Whether a `tool_choice` of chat's leaves the model no reply but a call."""
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return bool(choice["allowed_tools"].get("mode") == "required")
    return isinstance(choice, Mapping) or choice == "required"


def _of_effort(effort: str, model: str) -> dict[str, Any]:
    if effort == "none":
        return {}
    if _BUDGETED.match(model) or "claude" not in model:
        return {"thinking": {"type": "enabled", "budget_tokens": BUDGETS[effort]}}
    nearest = {"minimal": "low"} | ({"xhigh": "high"} if _NO_XHIGH.search(model) else {})
    shown = {"type": "adaptive", "display": "summarized"}
    return {"thinking": shown, "output_config": {"effort": nearest.get(effort, effort)}}


def fit_budget(body: MutableMapping[str, Any], bound: int) -> None:
    """Lower the budget of a body's thinking to three quarters of the reply's `bound`, if it does not fit below it. Too
    small a bound leaves no thinking."""
    budget = budget_of(body)
    if budget is None or budget < bound:
        return
    if bound <= BUDGET_MIN:
        del body["thinking"]
        return
    body["thinking"] = {**body["thinking"], "budget_tokens": max(BUDGET_MIN, bound * 3 // 4)}


def lacks_thoughts(params: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether thinking with a budget is on, and the turn that is being continued has tool calls without the thinking
    before them. Anthropic refuses that."""
    if budget_of(params) is None:
        return False
    last = next((message for message in reversed(messages) if message.get("role") == "assistant"), None)
    return last is not None and bool(last.get("tool_calls")) and not last.get("thinking_blocks")


def without_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages without thinking blocks, for a model that no longer thinks."""
    return [{name: value for name, value in message.items() if name != "thinking_blocks"} for message in messages]
