"""A chat body in the words of its worker: with what only Anthropic's wire can say, or without it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.anthropic.effort import budget_of, fit_budget, lacks_thoughts, with_thinking, without_thoughts
from gateway.core.anthropic.native import BETAS, BLOCK, CACHE, PARAM, without_native

Params = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
_TRANSLATED = ("thinking", "output_config")  # chat has words of its own for them
_UNNAMED = (*_TRANSLATED, BETAS)


@dataclass(frozen=True, slots=True)
class Words:
    """What a worker understands. `model`: of Anthropic, by whose own wire it is asked; empty: it has another wire.
    `by_litellm`: LiteLLM words its requests. `takes`: parameters that OpenAI does not define."""

    model: str
    by_litellm: bool
    takes: frozenset[str]


def natives_of(words: Words, params: Mapping[str, Any]) -> tuple[Params, Params]:
    """(the parameters with those that the worker takes in Anthropic's own words, the rest of those)."""
    rest, own = dict(params), dict(params.get(PARAM) or {})
    rest.pop(PARAM, None)
    taken = {name for name in own if name in words.takes and name not in ("output_config", *rest)}
    if words.model:
        taken |= own.keys() & {"output_config"}
    elif not words.by_litellm or budget_of(own) is None:
        taken.discard("thinking")  # an effort says as much, and more workers know it
    if taken & set(_TRANSLATED):
        rest.pop("reasoning_effort", None)
    return rest | {name: own.pop(name) for name in taken}, own


def worded(
    words: Words, params: Params, own: Params, messages: Messages, bound: int, *, named: bool
) -> tuple[Params, Messages, list[str]]:
    """(the parameters, the messages, what the worker does not get or gets otherwise, as `name` or `name=value`).
    `own`: of `natives_of`. `bound`: tokens of the reply. `named`: the client named this worker."""
    if not words.model:
        messages, lost = without_native(messages, caches=words.by_litellm)
        if "tools" in params:
            names = (BLOCK,) if words.by_litellm else (BLOCK, CACHE)
            params["tools"] = [
                {name: value for name, value in tool.items() if name not in names} for tool in params["tools"]
            ]
        fit_budget(params, bound)
        return params, messages, [*lost, *(name for name in own if name not in _UNNAMED)]
    asked = params.get("thinking")
    params, changes = with_thinking(params, words.model, named=named)
    asked = asked or params.get("thinking")
    if lacks_thoughts(params, messages):
        del params["thinking"]
    fit_budget(params, bound)
    if "thinking" not in params and (asked or changes):
        messages = without_thoughts(messages)
        changes = list(dict.fromkeys([*changes, *(["thinking"] if asked else [])]))
    return params | own, messages, changes
