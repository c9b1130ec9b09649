"""One request's money, calls and tokens: nothing is drawn that is not left, whatever the order."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.loop.caps import Caps, Draw, Meter
from gateway.errors import CapReached


def meter(granted_nano: int = 1000, **caps: int) -> Meter:
    return Meter(granted_nano, Caps(**caps))


@pytest.mark.parametrize("seed", range(200))
def test_neither_money_nor_tokens_are_ever_drawn_twice(seed: int) -> None:
    """Any order of draws and settlements, each settled at no more than was drawn."""
    rng = Random(seed)
    kept = meter(granted_nano=rng.randint(0, 5000), tokens=rng.randint(0, 5000))
    out: list[Draw] = []
    refused = 0
    for _ in range(100):
        draw = Draw(rng.randint(0, 600), rng.randint(0, 600))
        before = (kept.left_nano, kept.left_tokens)
        if out and rng.random() < 0.5:
            done = out.pop(rng.randrange(len(out)))
            kept.settle(done, rng.randint(0, done.nano), rng.randint(0, done.tokens))
            assert kept.left_nano >= before[0]
            assert kept.left_tokens >= before[1]
        elif draw.nano <= before[0] and draw.tokens <= before[1]:
            kept.draw(draw)
            out.append(draw)
        else:
            with pytest.raises(CapReached):
                kept.draw(draw)
            refused += 1
            assert (kept.left_nano, kept.left_tokens) == before
        assert 0 <= kept.spent_nano + kept.drawn_nano <= kept.granted_nano
        assert 0 <= kept.tokens + kept.drawn_tokens <= kept.caps.tokens
        assert (kept.drawn_nano, kept.drawn_tokens) == (sum(d.nano for d in out), sum(d.tokens for d in out))
    assert refused


def test_the_last_nano_dollar_and_token_can_be_used() -> None:
    kept = meter(granted_nano=10, tokens=20)
    kept.draw(Draw(10, 20))
    assert (kept.left_nano, kept.left_tokens) == (0, 0)
    kept.draw(Draw(0, 0))


@pytest.mark.parametrize(
    ("draw", "cap"), [(Draw(1001, 0), "cost"), (Draw(0, 21), "tokens"), (Draw(1001, 21), "tokens")]
)
def test_the_error_names_the_cap_and_nothing_is_drawn(draw: Draw, cap: str) -> None:
    kept = meter(tokens=20)
    with pytest.raises(CapReached) as reached:
        kept.draw(draw)
    assert reached.value.cap == cap
    assert kept == meter(tokens=20)


def test_calls_are_counted_up_to_their_cap() -> None:
    kept = meter(calls=2)
    kept.count_call()
    kept.count_call()
    with pytest.raises(CapReached, match="cap of 2 worker calls") as reached:
        kept.count_call()
    assert reached.value.cap == "calls"
    assert kept.calls == 2


def test_a_worker_that_bills_above_its_bound_is_counted_in_full_and_ends_the_spending() -> None:
    kept = meter(granted_nano=100, tokens=10)
    kept.draw(Draw(60, 5))
    kept.settle(Draw(60, 5), 150, 12)
    assert (kept.spent_nano, kept.tokens) == (150, 12)
    assert (kept.left_nano, kept.left_tokens) == (-50, -2)
    with pytest.raises(CapReached):
        kept.draw(Draw(1, 0))
