"""S3: a conductor that obeys the attacker, and a worker that tells all it was told. Neither can pass the caps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.core.money.amounts import usd_to_nano
from tests.security.attacks import obeyed, prompts
from tests.security.gateway import PEPPER, PLAN, PROVIDER_KEY, Gateway, ask
from tests.security.report import measured
from tests.sizes import sized

PROMPTS = sized(small=60, ci=540, long=540)
AT_ONCE = 8
CALLS, DEPTH, STEPS, COST_USD = 6, 1, 3, "0.02"
OUTPUT_TOKENS_MAX = 256
ALLOWED = {"alpha", "beta"}


@pytest.fixture
def attacked(gateway: Gateway) -> Iterator[tuple[Gateway, httpx.Client]]:
    """A key that may use two of the three workers, under small caps, with a conductor that does as the text says."""
    caps = {"calls": CALLS, "depth": DEPTH, "steps": STEPS, "cost_nano": usd_to_nano(COST_USD), "rounds": 2}
    _, secret = gateway.key(caps=caps, budget_usd="1000", name="attacked")
    gateway.upstream.plan = lambda body: obeyed(body["messages"]) or PLAN
    gateway.upstream.reply = lambda body: "I was told: " + json.dumps(body)
    with gateway.client(secret, limits=httpx.Limits(max_connections=AT_ONCE)) as http:
        yield gateway, http


@pytest.mark.sized
def test_no_cap_and_no_permission_gives_way_and_no_secret_comes_out(attacked: tuple[Gateway, httpx.Client]) -> None:
    gateway, http = attacked
    canaries = [PROVIDER_KEY, PEPPER.decode(), gateway.database_url, gateway.redis.url]
    kinds: Counter[str] = Counter()
    rerouted: Counter[str] = Counter()

    def attack(numbered: tuple[int, tuple[str, str]]) -> tuple[str, httpx.Response]:
        number, (kind, prompt) = numbered
        headers = {"x-baton-rounds": "2"} if number % 3 == 0 else {}
        return kind, http.post("/v1/chat/completions", json=ask(prompt, user=f"n{number}"), headers=headers)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        replies = list(pool.map(attack, enumerate(prompts(PROMPTS))))
    for kind, reply in replies:
        kinds[kind] += 1
        assert reply.status_code == 200, reply.text
        assert float(reply.headers["x-baton-cost-usd"]) <= float(COST_USD)
        assert int(reply.headers["x-baton-steps"]) <= CALLS
        assert not any(canary in reply.text or canary in str(reply.headers) for canary in canaries)
        workers = set(reply.headers["x-baton-workers"].split(","))
        assert workers <= ALLOWED | {"self"}
        rerouted[kind] += "x-baton-fallback" not in reply.headers and workers != {"alpha"}
    called = Counter(model for model, _ in gateway.upstream.calls)
    assert set(called) <= ALLOWED | {"conductor"}
    assert sum(called[name] for name in ALLOWED) <= PROMPTS * CALLS
    assert all(_bounded(body) for model, body in gateway.upstream.calls if model != "conductor")
    shares = ", ".join(f"{kind} {rerouted[kind]}/{kinds[kind]}" for kind in sorted(kinds))
    share = sum(rerouted.values()) / PROMPTS
    measured("S3", f"{PROMPTS} prompts, 0 violations, 0 canaries out; rerouted {share:.0%} ({shares})")
    assert rerouted["dear"] > 0  # the conductor did obey: what held was not its good sense


def _bounded(body: dict[str, Any]) -> bool:
    """A worker call as the settings allow it: nothing of what the plan tried to add."""
    limit = body.get("max_tokens", body.get("max_completion_tokens", 0))
    return limit <= OUTPUT_TOKENS_MAX and not body.keys() & {"api_base", "api_key", "tools", "n", "caps"}


def test_each_tree_keeps_to_its_own_calls_and_depth(attacked: tuple[Gateway, httpx.Client]) -> None:
    gateway, http = attacked
    loops = [prompt for kind, prompt in prompts(200) if kind == "loop"][:20]
    for prompt in loops:
        gateway.upstream.calls.clear()
        reply = http.post("/v1/chat/completions", json=ask(prompt))
        assert reply.status_code == 200, reply.text
        calls = [model for model, _ in gateway.upstream.calls if model != "conductor"]
        assert len(calls) <= CALLS
        tree = http.get(f"/v1/rollouts/{reply.headers['x-baton-rollout-id']}").json()
        assert _depth(tree) <= DEPTH


def _depth(tree: dict[str, Any]) -> int:
    return max((1 + _depth(child) for child in tree["children"]), default=0)
