"""What is known of a worker by its host, its provider and the family of its model."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.openai.vendors.hosts import Limits
from gateway.core.openai.vendors.roles import ANY, Template
from gateway.core.pool.workers import WorkerSpec
from gateway.service.loop.bodies import vendor_for

LOCAL = "http://10.0.0.7:8000/v1"
ALTERNATING = Template(developer=False, late_system=False, repeated_roles=False)


def worker(url: str | None, model: str, kind: str = "openai", **more: Any) -> WorkerSpec:
    return WorkerSpec.model_validate({"name": "w", "handle": "atlas", "kind": kind, "model": model, "url": url, **more})


def template_of(spec: WorkerSpec) -> Template:
    return vendor_for(spec).template(spec.cannot, spec.takes)


@pytest.mark.parametrize(
    ("url", "model", "template"),
    [
        ("https://api.openai.com/v1", "gpt-5.2", ANY),
        ("https://me.openai.azure.com/openai/v1", "my-deployment", ANY),
        ("https://openrouter.ai/api/v1", "openai/gpt-5.2", ANY),
        ("https://openrouter.ai/api/v1", "anthropic/claude-sonnet-4.5", Template(developer=False)),
        ("https://openrouter.ai/api/v1", "qwen/qwen3-32b", Template(developer=False, late_system=False)),
        ("https://api.groq.com/openai/v1", "moonshotai/kimi-k2", Template(developer=False, name=False)),
        ("https://api.mistral.ai/v1", "mistral-large-latest", Template(developer=False, name=False)),
        ("https://api.perplexity.ai", "sonar-pro", ALTERNATING),
        (LOCAL, "Qwen/Qwen3-32B", Template(developer=False, late_system=False)),
        (LOCAL, "openai/gpt-oss-120b", Template(developer=False, late_system=False)),
        (LOCAL, "mistralai/Devstral-Small-2507", ALTERNATING),
        (LOCAL, "google/gemma-3-27b-it", ALTERNATING),
        (LOCAL, "google/gemma-2-9b-it", Template(False, False, False, False)),
        (LOCAL, "something-new", Template(developer=False, late_system=False)),
    ],
)
def test_a_template_is_known_by_host_and_family(url: str, model: str, template: Template) -> None:
    assert template_of(worker(url, model)) == template


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ("anthropic/claude-sonnet-4-5", Template(developer=False, empty_content=False)),
        ("gemini/gemini-3-pro-preview", Template(developer=False, empty_content=False)),
        ("azure/my-deployment", ANY),
        ("groq/llama-3.3-70b", Template(developer=False, name=False)),
        ("hosted_vllm/mistralai/Devstral-Small-2507", ALTERNATING),
    ],
)
def test_a_provider_of_litellm_is_known_by_its_name(model: str, template: Template) -> None:
    assert template_of(worker(None, model, "litellm")) == template


def test_the_pool_file_adds_and_takes_away() -> None:
    spec = worker(LOCAL, "mine", cannot=["tools", "repeated_roles", "logprobs"], takes=["developer", "late_system"])
    assert template_of(spec) == Template(tools=False, repeated_roles=False)


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (worker("https://api.openai.com/v1", "gpt-5.2"), Limits(64, 128, 4)),
        (worker(LOCAL, "mine"), Limits()),
        (worker(None, "anthropic/claude-sonnet-4-5", "litellm"), Limits(128)),
        (worker(None, "gemini/gemini-3-pro-preview", "litellm"), Limits(64, 512, 5)),
    ],
)
def test_a_vendors_limits_are_known(spec: WorkerSpec, limits: Limits) -> None:
    assert vendor_for(spec).limits == limits


def test_what_is_over_a_limit_is_named_with_it() -> None:
    limits = Limits(tools=2, stop=1)
    assert limits.over({"tools": [1, 2], "stop": "a", "n": 9}) == {}
    assert limits.over({"tools": [1, 2, 3], "functions": [1], "stop": ["a", "b"]}) == {"tools": 2, "stop": 1}
    assert Limits().over({"tools": [1] * 1000}) == {}
