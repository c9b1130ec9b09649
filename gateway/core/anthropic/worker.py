"""A chat body in the words of its worker: with what only Anthropic's wire can say, or without it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.anthropic.effort import budget_of, fit_budget, lacks_thoughts, with_thinking, without_thoughts
from gateway.core.anthropic.native import BETAS, BLOCK, CACHE, PARAM, without_native
from gateway.core.pool.models import vendor_params
from gateway.core.pool.workers import WorkerSpec

Params = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
_TRANSLATED = ("thinking", "output_config")  # chat has words of its own for them
_UNNAMED = (*_TRANSLATED, BETAS)


def natives_of(spec: WorkerSpec, params: Mapping[str, Any]) -> tuple[Params, Params]:
    """(the parameters with those that the worker takes in Anthropic's own words, the rest of those)."""
    rest, own = dict(params), dict(params.get(PARAM) or {})
    rest.pop(PARAM, None)
    taken = {name for name in own if name in vendor_params(spec) and name not in ("output_config", *rest)}
    if spec.speaks_messages:
        taken |= own.keys() & {"output_config"}
    elif spec.kind != "litellm" or budget_of(own) is None:
        taken.discard("thinking")  # an effort says as much, and more workers know it
    if taken & set(_TRANSLATED):
        rest.pop("reasoning_effort", None)
    return rest | {name: own.pop(name) for name in taken}, own


def worded(
    spec: WorkerSpec, params: Params, own: Params, messages: Messages, bound: int, *, named: bool
) -> tuple[Params, Messages, list[str]]:
    """(the parameters, the messages, what the worker does not get or gets otherwise, as `name` or `name=value`).
    `own`: of `natives_of`. `bound`: tokens of the reply. `named`: the client named this worker."""
    if not spec.speaks_messages:
        caches = spec.kind == "litellm"
        messages, lost = without_native(messages, caches=caches)
        if "tools" in params:
            names = (BLOCK,) if caches else (BLOCK, CACHE)
            params["tools"] = [
                {name: value for name, value in tool.items() if name not in names} for tool in params["tools"]
            ]
        fit_budget(params, bound)
        return params, messages, [*lost, *(name for name in own if name not in _UNNAMED)]
    model = (spec.model or "").partition("/")[2]
    params, changes = with_thinking(params, model, named=named)
    asked = params.get("thinking")
    if lacks_thoughts(params, messages):
        del params["thinking"]
    fit_budget(params, bound)
    if asked and "thinking" not in params:
        messages, changes = without_thoughts(messages), [*changes, "thinking"]
    return params | own, messages, changes
