"""A prompt is held for by its tokens: what that leaves for the reply, what a client is told, and what is too long."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from gateway.adapters.upstream import tokens as tokenizers
from gateway.adapters.upstream.tokens import Tokenizers, check
from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import PoolFile, Price
from gateway.errors import BadRequest, CapReached, UpstreamRefused
from gateway.service.ports.request import TokenCounter
from gateway.service.request.running import reply_headers
from tests.fakes.tokens import WordCounter
from tests.fakes.workers import Says
from tests.kit import Kit, ask, model_worker, plan, pool_file
from tests.waiting import BOUND_S

PROSE = "The conductor plans each request, and the workers carry its steps out. "
LONG = PROSE * (165_000 // len(PROSE))
DEAR = Price(input_usd_per_mtok=Decimal(3), output_usd_per_mtok=Decimal(15))


def pools(**fields: Any) -> PoolFile:
    """A pool with one more worker, `delta`, that writes at most 8192 tokens for $3 and $15 a million."""
    return pool_file(model_worker("delta", "dune", **{"price": DEAR, "output_tokens_max": 8192, **fields}))


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary is there, and a busy machine may take its time."""
    check("o200k_base")
    monkeypatch.setattr(tokenizers, "MEASURE_S_MAX", BOUND_S)


def kit_of(said: Says | None = None, caps: Caps | None = None, tokens: TokenCounter | None = None, **more: Any) -> Kit:
    return Kit(workers={"delta": said or Says()}, pools=pools(**more), caps=caps, tokens=tokens or Tokenizers())


@pytest.mark.parametrize("tokenizer", [None, "o200k_base"])
async def test_a_long_prompt_leaves_the_reply_what_was_asked(tokenizer: str | None) -> None:
    kit = kit_of(tokenizer=tokenizer)
    running = await kit.serve(ask(LONG, model="delta", max_tokens=8192))
    assert running.error is None
    assert kit.workers.calls[0].body["max_tokens"] == 8192
    assert running.record.steps[0].lowered is None
    assert "x-baton-lowered" not in reply_headers(running.record)


async def test_a_prompt_over_200_kilobytes_is_served() -> None:
    running = await kit_of(context_tokens=200_000).serve(ask(PROSE * 4_000, model="delta", max_tokens=100))
    assert running.error is None


async def test_what_is_held_covers_a_prompt_that_a_stand_in_has_counted_too_low() -> None:
    kit = kit_of(Says(usage=Usage(60_000, 8192)))  # of 165 KB; OpenAI's encoding makes 35,000
    running = await kit.serve(ask(LONG, model="delta", max_tokens=8192))
    assert running.record.cost_nano == 60_000 * 3_000 + 8192 * 15_000
    assert running.record.cost_nano <= running.record.hold_nano


@pytest.mark.parametrize(
    ("caps", "by"),
    [(Caps(cost_nano=100_000_000, wall_s=60.0), "cost"), (Caps(tokens=10_000, wall_s=60.0), "tokens")],
)
async def test_a_lowered_bound_is_told_to_the_client_and_in_the_rollout(caps: Caps, by: str) -> None:
    kit = kit_of(caps=caps)
    running = await kit.serve(ask(PROSE * 500, model="delta", max_tokens=8192))
    bound = kit.workers.calls[0].body["max_tokens"]
    assert 16 <= bound < 8192
    assert running.record.steps[0].lowered == {"asked": 8192, "max_tokens": bound, "by": by}
    assert reply_headers(running.record)["x-baton-lowered"] == f"max_tokens={bound}, asked=8192, by={by}"


async def test_a_bound_above_the_workers_own_is_told_too() -> None:
    running = await kit_of(output_tokens_max=64).serve(ask(model="delta", max_tokens=100, stream=True))
    assert running.record.steps[0].lowered == {"asked": 100, "max_tokens": 64, "by": "worker"}


async def test_a_child_loops_lowered_bound_is_told() -> None:
    kit = Kit((plan(("echo", None, [])), plan(("atlas", None, []))), {"alpha": Says()})
    running = await kit.serve(ask(max_tokens=100))
    assert reply_headers(running.record)["x-baton-lowered"] == "max_tokens=64, asked=100, by=worker"


async def test_a_short_prompt_is_counted_where_its_bytes_would_lower_the_reply() -> None:
    text = PROSE * 50  # 3.6 KB: at $3 a million, bytes would take more than the cap
    kit = kit_of(caps=Caps(cost_nano=10_000_000, wall_s=60.0))
    running = await kit.serve(ask(text, model="delta", max_tokens=200))
    assert (running.error, running.record.steps[0].lowered) == (None, None)


async def test_the_context_has_room_for_the_reply() -> None:
    kit = kit_of(context_tokens=4_000)
    running = await kit.serve(ask(PROSE * 250, model="delta", max_tokens=8192))
    bound = kit.workers.calls[0].body["max_tokens"]
    assert running.record.steps[0].lowered == {"asked": 8192, "max_tokens": bound, "by": "context"}
    assert 0 < bound < 4_000


@pytest.mark.parametrize("model", ["delta", "baton/rule"])
async def test_a_prompt_over_every_context_is_refused_with_the_numbers_and_no_call(model: str) -> None:
    narrow = [model_worker(name, handle, context_tokens=4_000) for name, handle in (("delta", "dune"), ("eps", "elm"))]
    kit = Kit(pools=PoolFile(workers=tuple(narrow), pools={"default": ("delta", "eps")}), tokens=Tokenizers())
    who = "delta" if model == "delta" else "delta, the longest of the 2 workers here,"
    said = (
        rf"of {who} is 4000 tokens\. .* about \d{{5}} tokens\. .* messages, or name a model whose context is longer\."
    )
    with pytest.raises(BadRequest, match=said) as refused:
        await kit.start(ask(LONG, model=model))
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    assert (kit.workers.calls, await kit.posted_nano(), await kit.open_nano()) == ([], 0, 0)


async def test_a_planned_request_goes_to_workers_whose_context_holds_it() -> None:
    narrow = [model_worker(name, name[:4], context_tokens=4_000) for name in ("alpha", "beta")]
    wide = model_worker("wide", "wide", context_tokens=100_000, price=DEAR)
    names = ("alpha", "beta", "wide")
    kit = Kit(pools=PoolFile(workers=(*narrow, wide), pools={"default": names}), tokens=Tokenizers())
    running = await kit.serve(ask(LONG, model="baton/rule", max_tokens=50))
    assert [call.worker.name for call in kit.workers.calls] == ["wide"]
    assert running.error is None


async def test_a_step_that_sees_too_much_for_its_context_fails_before_the_call() -> None:
    said = Says(PROSE * 300)
    kit = Kit(
        (plan(("atlas", None, []), ("dune", "Check it.", [0])),),
        {"alpha": said},
        pools=pools(context_tokens=2_000),
        tokens=Tokenizers(),
    )
    running = await kit.serve(ask())
    failed = running.record.steps[1]
    assert (failed.error, failed.attempts) == ("context_length_exceeded", [])
    assert running.record.fallback == f"worker_{UpstreamRefused.kind}"
    assert "delta" not in [call.worker.name for call in kit.workers.calls]


async def test_a_prompt_over_the_cap_on_tokens_is_too_long() -> None:
    kit = kit_of(caps=Caps(tokens=20_000, wall_s=60.0))
    with pytest.raises(BadRequest, match=r"is 20000 tokens.* or raise x-baton-max-tokens") as refused:
        await kit.start(ask(LONG, model="delta"))
    assert refused.value.code == "context_length_exceeded"


async def test_without_a_tokenizer_a_token_is_a_byte() -> None:
    kit = kit_of(tokens=WordCounter(without=["delta"]), context_tokens=4_000, caps=Caps(cost_nano=10**9, wall_s=60.0))
    running = await kit.serve(ask(LONG, model="delta", max_tokens=100))
    assert running.error is None  # the worker itself knows its context
    with pytest.raises(CapReached, match="could cost"):
        await kit_of(tokens=WordCounter(without=["delta"]), caps=Caps(cost_nano=10**8)).start(ask(LONG, model="delta"))
