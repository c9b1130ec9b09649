"""True usage: what workers report of a prompt and a reply, summed over the tree and charged at its own prices."""

from __future__ import annotations

import random
from decimal import ROUND_CEILING, Decimal
from typing import Any

import pytest
from genai_prices import calc_price

from gateway.core.money.amounts import Usage, worst_case_nano
from gateway.core.money.details import PLACES, details_json, sum_details
from gateway.core.openai.vendors.usage import read_usage, usage_body
from gateway.core.pool.revision import revision_of
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec, pool_hash
from tests.fakes.workers import Says
from tests.kit import Kit, ask, model_worker, plan, pool_file

HASHES = ("efcffd015725", "f26c48848163")  # of this pool before parts had prices
# List prices of November 2026 in dollars a million: input, output, and what else each vendor prices.
LIST: dict[str, dict[str, str]] = {
    "claude": {"input": "3", "output": "15", "cache_read": "0.30", "cache_write": "3.75"},
    "gpt": {"input": "1.25", "output": "10", "cache_read": "0.125"},
    "gemini": {"input": "0.30", "output": "2.50", "cache_read": "0.030", "input_audio": "1.00"},
    "sonar": {"input": "2", "output": "8", "reasoning": "3"},
}
PARTS = {
    "cached_tokens": "cache_read",
    "cache_write_tokens": "cache_write",
    "input_audio_tokens": "input_audio",
    "reasoning_tokens": "reasoning",
}


def listed(name: str, **more: Any) -> WorkerSpec:
    price = Price.model_validate({f"{part}_usd_per_mtok": usd for part, usd in LIST[name].items()})
    return model_worker(name, f"h{name}", price=price, output_tokens_max=64_000, context_tokens=1_000_000, **more)


def by_the_list(name: str, usage: Usage) -> Decimal:
    """Dollars of a call, as a person computes them from the list."""
    prices = {part: Decimal(usd) / 1_000_000 for part, usd in LIST[name].items()}
    usd, prompt, reply = Decimal(0), usage.prompt_tokens, usage.completion_tokens
    for part, tokens in usage.details.items():
        if PARTS[part] in prices:
            usd += tokens * prices[PARTS[part]]
            prompt, reply = (prompt, reply - tokens) if part == "reasoning_tokens" else (prompt - tokens, reply)
    return usd + prompt * prices["input"] + reply * prices["output"]


def a_call(draw: random.Random) -> Usage:
    """A coding agent's turn: a long prompt, most of it cached, and a reply that is partly thinking."""
    cached, written, fresh = (
        draw.randrange(0, 90_000),
        draw.choice([0, draw.randrange(20_000)]),
        draw.randrange(1, 5_000),
    )
    thought, said = draw.choice([0, draw.randrange(8_000)]), draw.randrange(1, 4_000)
    details = {"cached_tokens": cached, "cache_write_tokens": written, "reasoning_tokens": thought}
    return Usage(cached + written + fresh, thought + said, details=details)


async def test_a_months_bill_is_the_list_prices_to_the_nano_dollar() -> None:
    draw = random.Random(11)
    month = [(draw.choice(sorted(LIST)), a_call(draw)) for _ in range(400)]
    said = {name: [Says(usage=usage) for whose, usage in month if whose == name] for name in LIST}
    workers = tuple(listed(name) for name in LIST)
    kit = Kit(workers=said, pools=PoolFile(workers=workers, pools={"default": tuple(LIST)}))
    due = 0
    for number, (name, usage) in enumerate(month):
        running = await kit.serve(ask(model=name, stream=number % 2 == 0))
        nano = int((by_the_list(name, usage) * 10**9).to_integral_value(ROUND_CEILING))
        assert running.record.cost_nano == nano
        due += nano
    assert await kit.posted_nano() == due
    assert await kit.open_nano() == 0
    settled = [event.payload["charged_nano"] for event in kit.journal.of_kind("settle")]
    assert sum(settled) == due


def test_the_list_is_what_the_package_says() -> None:
    models = {"claude": ("claude-sonnet-4-5", "anthropic"), "gpt": ("gpt-5.1", "openai")}
    models["gemini"] = ("gemini-2.5-flash", "google")
    for name, (model, vendor) in models.items():
        usage = {"input_tokens": 1000, "output_tokens": 100, "cache_read_tokens": 900}
        due = calc_price(usage, model, provider_id=vendor)
        told = Usage(1000, 100, details={"cached_tokens": 900})
        assert due.total_price == by_the_list(name, told)


def plain(name: str) -> dict[str, str]:
    return {f"{part}_usd_per_mtok": LIST[name][part] for part in ("input", "output")}


async def test_parts_are_summed_over_the_tree_and_absent_where_nobody_reports_them() -> None:
    one = Usage(100, 50, details={"cached_tokens": 60, "reasoning_tokens": 0})
    two = Usage(10, 5, details={"cached_tokens": 4, "cache_write_tokens": 2})
    script = (plan(("atlas", None, []), ("birch", None, []), ("echo", None, [0, 1])), plan(("grove", None, [])))
    kit = Kit(script, {"alpha": Says(usage=one), "beta": Says(usage=Usage(7, 3)), "gamma": Says(usage=two)})
    running = await kit.serve()
    usage = (await running.result())["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (117, 58)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64, "cache_write_tokens": 2}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert [step.usage_details for step in running.record.steps] == [one.details, None, two.details]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_workers_that_report_no_parts_says_none(stream: bool) -> None:
    running = await Kit().serve(ask(model="alpha", stream=stream))
    assert (running.usage.details, running.record.steps[0].usage_details) == ({}, None)
    assert details_json(running.usage.details) == {"prompt_tokens_details": {}, "completion_tokens_details": {}}


@pytest.mark.parametrize(
    ("usage", "details"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 5, "audio_tokens": None}}, {"cached_tokens": 5}),
        (
            {"cache_read_input_tokens": 5, "cache_creation_input_tokens": 6},
            {"cached_tokens": 5, "cache_write_tokens": 6},
        ),
        ({"prompt_tokens_details": {"cache_creation_tokens": 7}}, {"cache_write_tokens": 7}),
        ({"prompt_cache_hit_tokens": 3}, {"cached_tokens": 3}),
        ({"prompt_tokens_details": "x", "completion_tokens_details": {"reasoning_tokens": True}}, {}),
        ({"completion_tokens_details": {"reasoning_tokens": -1, "audio_tokens": 0}}, {"output_audio_tokens": 0}),
    ],
)
def test_parts_are_read_under_vendors_own_names_too(usage: dict[str, Any], details: dict[str, int]) -> None:
    read = read_usage({"usage": {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20, **usage}})
    assert read is not None
    assert read.details == details


def test_every_part_goes_there_and_back() -> None:
    usage = Usage(100, 100, details={part: len(PLACES) - number for number, part in enumerate(PLACES)})
    again = read_usage({"usage": usage_body(usage)})
    assert again is not None
    assert again.details == usage.details
    assert (usage + usage).details == sum_details([usage.details, None, usage.details])


@pytest.mark.parametrize(
    ("usage", "completion_tokens", "reasoning"),
    [
        (
            {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 530},
            520,
            500,
        ),  # Gemini
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 20,
                "total_tokens": 130,
                "completion_tokens_details": {"reasoning_tokens": 100},
            },
            120,
            100,
        ),  # Grok
        ({"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}, 20, None),
        ({"prompt_tokens": 10, "total_tokens": 10}, 0, None),  # embeddings
    ],
)
def test_thinking_that_is_in_the_total_alone_counts_as_output(
    usage: dict[str, Any], completion_tokens: int, reasoning: int | None
) -> None:
    read = read_usage({"usage": usage})
    assert read is not None
    assert (read.completion_tokens, read.details.get("reasoning_tokens")) == (completion_tokens, reasoning)


def test_a_hold_counts_on_no_discount_and_covers_every_surcharge() -> None:
    price = listed("claude").price
    assert price is not None
    assert worst_case_nano(price, 1_000, 0) == 1_000 * 3_750  # all of it written to the cache
    sound = listed("gemini").price
    assert sound is not None
    assert worst_case_nano(sound, 1_000, 0) == 1_000 * 300
    assert worst_case_nano(sound, 1_000, 0, media=True) == 1_000 * 1_000


@pytest.mark.parametrize("where", ["part", "tool", "params"])
async def test_a_cache_for_an_hour_is_held_for_at_its_price(where: str) -> None:
    worker = listed("claude", kind="litellm", model="anthropic/claude-sonnet-4-5")
    bounds = []
    for ttl in ("5m", "1h"):
        mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
        text = {"type": "text", "text": "x" * 4096, **(mark if where == "part" else {})}
        message = {"role": "user", "content": [text]}
        tool = {"type": "function", "function": {"name": "f"}, **(mark if where == "tool" else {})}
        spec = worker.model_copy(update={"params": mark if where == "params" else {}})
        details = {"cache_write_tokens": 4_000, "cache_write_1h_tokens": 4_000 if ttl == "1h" else 0}
        said = {"claude": [Says(usage=Usage(4_000, 9, details=details))]}
        kit = Kit(workers=said, pools=PoolFile(workers=(spec,), pools={"default": ("claude",)}))
        running = await kit.serve(ask(model="claude", messages=[message], tools=[tool], max_tokens=16))
        assert running.error is None
        [dispatch] = kit.journal.of_kind("dispatch")
        assert running.record.cost_nano == 4_000 * (6_000 if ttl == "1h" else 3_750) + 9 * 15_000
        bounds.append(dispatch.payload["bound_nano"])
        assert bounds[-1] >= running.record.cost_nano
    assert bounds[1] / bounds[0] == pytest.approx(6 / 3.75, rel=0.02)


async def test_a_worker_that_caches_for_an_hour_by_itself_is_held_for_so() -> None:
    prices = {f"{part}_usd_per_mtok": usd for part, usd in LIST["claude"].items()}
    for hour, rate in ((None, 3_750), ("6", 6_000)):
        price = Price.model_validate(prices | {"cache_write_1h_usd_per_mtok": hour})
        spec = model_worker("claude", "hclaude", price=price, context_tokens=1_000_000)
        kit = Kit(pools=PoolFile(workers=(spec,), pools={"default": ("claude",)}))
        running = await kit.serve(ask("x" * 4096, model="claude", max_tokens=16))
        assert running.error is None
        [dispatch] = kit.journal.of_kind("dispatch")
        assert dispatch.payload["bound_nano"] // rate in range(4096, 4400)


@pytest.mark.parametrize(
    ("name", "usage", "nano"),
    [
        # a prompt that its vendor's own tools made longer, and thinking
        ("gemini", Usage(21_000, 900, details={"reasoning_tokens": 800}), 21_000 * 300 + 900 * 2_500),
        # a cached prefix that the worker adds by itself
        (
            "claude",
            Usage(80_020, 12, details={"cache_write_tokens": 80_000, "cache_write_1h_tokens": 80_000}),
            20 * 3_000 + 80_000 * 6_000 + 12 * 15_000,
        ),
    ],
)
async def test_a_prompt_that_is_longer_than_its_text_is_charged_as_reported(name: str, usage: Usage, nano: int) -> None:
    pools = PoolFile(workers=(listed(name),), pools={"default": (name,)})
    kit = Kit(workers={name: [Says(usage=usage)]}, pools=pools)
    running = await kit.serve(ask("how much?", model=name, max_tokens=512))
    assert running.record.cost_nano == await kit.posted_nano() == nano
    assert running.record.steps[0].usage_details == usage.details


async def test_what_is_held_for_a_prompt_with_sound_is_at_the_price_of_sound() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}
    kit = Kit(pools=PoolFile(workers=(listed("gemini"),), pools={"default": ("gemini",)}))
    heard = await kit.serve(ask(model="gemini", messages=[{"role": "user", "content": [sound]}], max_tokens=16))
    read = await kit.serve(ask("x" * 4096, model="gemini", max_tokens=16))
    bounds = [event.payload["bound_nano"] for event in kit.journal.of_kind("dispatch")]
    assert (heard.error, read.error) == (None, None)
    assert bounds[0] > 3 * bounds[1] * 0.9


def test_pools_without_prices_of_parts_keep_their_hashes() -> None:
    hashes = (pool_hash(pool_file().workers)[:12], revision_of(pool_file())[:12])
    assert hashes == HASHES
    spec = model_worker("alpha", "atlas", price=Price.model_validate(plain("gpt") | {"reasoning_usd_per_mtok": "1"}))
    assert "reasoning" in spec.identity
