"""What is known of models by name, and what becomes of a request's preferences."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.pool.models import OPEN_SERVERS, OPENROUTER, PENALTIES, SAMPLING, adapt, model_of, vendor_params
from gateway.core.pool.workers import WorkerSpec
from tests.kit import model_worker

COLD: dict[str, Any] = {"temperature": 0, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1}


def adapted(model: str, **params: Any) -> tuple[dict[str, Any], list[str]]:
    return adapt(model_worker("w", "atlas", model=model), params)


@pytest.mark.parametrize(
    ("model", "left_out"),
    [
        *((name, SAMPLING) for name in ("o1", "o3", "o3-mini", "o4-mini-2025-04-16", "openai/o3", "azure/o1")),
        *((name, SAMPLING) for name in ("gpt-5", "gpt-5-mini", "gpt-5-nano-2025-08-07", "openrouter/openai/gpt-5")),
        *((name, ()) for name in ("gpt-5.1", "gpt-5.2", "gpt-5.4-mini", "gpt-4o", "gpt-4.1-mini", "gpt-5-chat-latest")),
        *(
            (name, SAMPLING)
            for name in (
                "gpt-5.5",
                "us.openai.gpt-5.6-sol",
                "gpt-6-luna",
                "gpt-5.2-codex",
                "kimi-k2.5",
                "moonshotai/kimi-k2.6",
            )
        ),
        *((name, ()) for name in ("kimi-k2", "llama-3.3-70b", "qwen3-32b", "gpt-oss-120b", "deepseek-reasoner", "o")),
        *((name, PENALTIES) for name in ("grok-4", "xai/grok-4-fast", "grok-3-mini")),
        *((name, PENALTIES) for name in ("anthropic/claude-haiku-4-5", "us.anthropic.claude-sonnet-4-5-v1:0")),
        *((name, SAMPLING) for name in ("anthropic/claude-opus-4-7", "claude-sonnet-5", "claude-opus-4.8")),
    ],
)
def test_sampling_is_left_out_where_the_model_refuses_it(model: str, left_out: tuple[str, ...]) -> None:
    params, changes = adapted(model, **COLD)
    assert changes == list(left_out)
    assert params == {name: value for name, value in COLD.items() if name not in left_out}


def test_a_default_goes_through() -> None:
    defaults = {"temperature": 1, "presence_penalty": 0.0, "frequency_penalty": 0}
    assert adapted("o3", **defaults) == (defaults, [])


@pytest.mark.parametrize(
    ("model", "effort", "sent"),
    [
        *(("o3", "minimal", "low"), ("o3", "max", "high"), ("o3", "medium", "medium")),
        *(("gpt-5", "none", "minimal"), ("gpt-5", "xhigh", "high"), ("gpt-5.1", "minimal", "low")),
        *(("gpt-5.2", "xhigh", "xhigh"), ("gpt-5.2", "max", "xhigh"), ("gpt-6-sol", "max", "max")),
        *(("gpt-4o", "low", None), ("grok-4", "high", None), ("qwen3-32b", "max", "max")),
    ],
)
def test_an_effort_becomes_one_that_the_model_knows(model: str, effort: str, sent: str | None) -> None:
    params, changes = adapted(model, reasoning_effort=effort)
    assert params.get("reasoning_effort") == sent
    assert changes == ([] if sent == effort else ["reasoning_effort" if sent is None else f"reasoning_effort={sent}"])


@pytest.mark.parametrize(
    ("model", "effort", "taken"),
    [
        *(("gpt-5.2", None, True), ("gpt-5.2", "none", True), ("gpt-5.2", "low", False), ("gpt-5.5", "none", True)),
        *(("claude-haiku-4-5", None, True), ("claude-haiku-4-5", "low", False), ("claude-haiku-4-5", "none", True)),
    ],
)
def test_some_models_take_sampling_unless_they_reason(model: str, effort: str | None, taken: bool) -> None:
    asked = {"temperature": 0} | ({} if effort is None else {"reasoning_effort": effort})
    assert ("temperature" in adapted(model, **asked)[0]) is taken


def test_preferences_that_the_pool_file_rules_out_are_left_out_too() -> None:
    worker = model_worker("w", "atlas", model="some", cannot=("temperature", "parallel_tool_calls", "seed"))
    params, changes = adapt(worker, {"temperature": 1, "seed": 1, "top_p": 0.1})
    assert (params, changes) == ({"seed": 1, "top_p": 0.1}, ["temperature"])


@pytest.mark.parametrize(
    ("model", "newer"),
    [("o3", True), ("gpt-5", True), ("gpt-5.6", True), ("gpt-4o", False), ("gpt-5-chat", False), ("x/llama", False)],
)
def test_reasoning_models_bound_completion_tokens(model: str, newer: bool) -> None:
    assert model_of(model_worker("w", "atlas", model=model)).completion_tokens is newer


@pytest.mark.parametrize(
    ("entry", "takes"),
    [
        ({"url": "http://127.0.0.1:8000/v1"}, OPEN_SERVERS),
        ({"url": "https://api.openai.com/v1"}, ()),
        ({"url": "https://x.openai.azure.com/v1", "takes": ("top_k",)}, ("top_k",)),
        ({"url": "https://openrouter.ai/api/v1"}, OPENROUTER),
        (
            {"kind": "litellm", "model": "anthropic/claude-haiku-4-5"},
            ("top_k", "thinking", "output_config", "cache_control", "context_management"),
        ),
        ({"kind": "litellm", "model": "mistral/large"}, ()),
    ],
)
def test_each_kind_takes_its_vendors_parameters(entry: dict[str, Any], takes: tuple[str, ...]) -> None:
    assert vendor_params(model_worker("w", "atlas", **entry)) == set(takes)


@pytest.mark.parametrize(
    ("model", "is_taken"), [("anthropic/claude-sonnet-4-5", True), ("azure/x", True), ("gemini/gemini-3-pro", False)]
)
def test_only_a_vendor_that_litellm_sends_urls_may_fetch_itself(model: str, is_taken: bool) -> None:
    entry = {"name": "w", "handle": "atlas", "kind": "litellm", "model": model, "fetches": True}
    if is_taken:
        assert WorkerSpec.model_validate(entry).fetches
        return
    with pytest.raises(ValueError, match="fetched for in this process"):
        WorkerSpec.model_validate(entry)
