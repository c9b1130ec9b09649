"""Who plans, the next rung and how far away it is: each rung, from the settings and the judged requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.core.policies.earning import Bar, Rewards
from gateway.core.pool.workers import PoolFile
from gateway.service.policies.standing import Charge, PoolStanding, outcomes_wanted, standing_of
from gateway.service.policies.standings import Standings
from tests.kit import model_worker

TRIAL = Charge("trial", "chief", share=0.1, trained=frozenset({"known"}))


def pools_of(models: int) -> PoolFile:
    names = [f"w{at}" for at in range(models)]
    workers = (*(model_worker(name, f"{name}x") for name in names), model_worker("chief", "chief", answers=False))
    return PoolFile(workers=workers, pools={name: (*names, "chief") for name in ("default", "other", "known")})


def judged(n: int, planner: str = "rule", kind: str | None = None, mean: float = 0.5, pool: str = "default") -> Rewards:
    return Rewards(pool, kind, planner, n, n * mean, n * mean)


def standing(
    rewards: Sequence[Rewards] | None, charge: Charge = TRIAL, models: int = 2, **more: object
) -> PoolStanding:
    return standing_of(pools_of(models), "default", charge, rewards, **more)  # type: ignore[arg-type]


def test_the_rule_says_how_many_outcomes_tell_its_workers_apart() -> None:
    fresh = standing([], Charge("rule"), models=8)
    assert fresh.line == (
        "`baton`: the rule plans (0 outcomes). Next: about 64 outcomes until the rule routes 8 models by kind."
    )
    assert (fresh.rung, fresh.short) == ("learning", "outcomes=0/64")
    some = standing([judged(10, kind="sums"), judged(2), judged(50, pool="other")], Charge("rule"))
    assert (some.outcomes, some.short) == (12, "outcomes=12/16")
    assert "about 4 outcomes more" in some.next
    enough = standing([judged(16)], Charge("rule"))
    assert (enough.rung, enough.now, enough.short) == ("knows", "the rule plans by kind (16 outcomes)", "")
    assert "CONDUCTOR=worker:NAME" in enough.next


def test_the_number_is_derived_from_the_models_and_the_certainty() -> None:
    assert [outcomes_wanted(models, Bar().z) for models in (2, 3, 8)] == [16, 24, 64]
    assert outcomes_wanted(2, 3.0) == 36
    # at a success of one half, 8 outcomes each put a difference of one half two standard errors from none
    assert pytest.approx(2.0) == 0.5 / (2 * 0.25 / 8) ** 0.5


def test_a_pool_with_one_model_says_that_there_is_nothing_to_choose() -> None:
    alone = standing([], Charge("rule"), models=1)
    assert (alone.rung, alone.next) == ("alone", "a second model in the pool")


def test_before_anybody_counted_no_count_is_shown() -> None:
    unread = standing(None)
    assert unread.outcomes is None
    assert unread.now == "the rule plans, and chief on trial in 10 % of the requests"
    assert unread.next == (
        "about 16 outcomes until the rule routes 2 models by kind; then 30 judged requests of a kind each until "
        "conductor and rule are compared"
    )


def test_a_trial_counts_down_the_kind_that_is_nearest() -> None:
    rewards = [judged(40, kind="sums"), judged(12, "conductor", "sums"), judged(9), judged(3, "conductor")]
    trial = standing(rewards)
    assert trial.rung == "trial"
    assert trial.next == "18 judged requests more of `sums` until conductor and rule are compared there"
    assert trial.short == "judged=42/60"
    assert standing([judged(40)], Charge("trial", "chief", Bar(outcomes_min=50))).short == "judged=40/100"


def test_a_kind_that_is_compared_says_what_the_lead_lacks() -> None:
    compared = standing([judged(40, kind="sums", mean=0.6), judged(30, "conductor", "sums", mean=0.7)])
    assert (compared.rung, compared.short) == ("compared", "")
    assert "of `sums` must be surely above 0: mean reward 0.70 against 0.60, the lead at least -0." in compared.next


def test_what_the_conductor_has_earned_is_said() -> None:
    rewards = [judged(40, kind="sums"), judged(30, "conductor", "sums"), judged(30, "conductor", "prose"), judged(9)]
    earned = standing(rewards, earned={("", "default", "sums"), ("", "other", "prose"), ("eve", "default", "prose")})
    assert earned.now == "chief plans `sums`, the rule the rest (109 outcomes)"
    assert "baton train status" in earned.next
    both = standing(rewards, earned={("", "default", None), ("", "default", "sums")})
    assert both.now.startswith("chief plans `sums` and 1 kind more, the rule")


def test_each_organisation_has_its_own_outcomes() -> None:
    rewards = [replace(judged(12), org="acme"), replace(judged(5), org="other")]
    known = standing(rewards)
    assert (known.outcomes, known.short) == (12, "outcomes=12/16")  # of the one with the most
    assert standing(rewards, org="other").outcomes == 5
    assert standing(rewards, org="new").short == "outcomes=0/16"


def test_weights_that_were_trained_for_a_pool_plan_it_at_once() -> None:
    known = standing_of(pools_of(2), "known", TRIAL, [])
    assert (known.rung, known.now) == ("conductor", "chief plans (0 outcomes)")
    assert standing([], Charge("simulated", "the shipped conductor")).rung == "simulated"


async def test_counts_are_read_anew_and_a_new_pool_counts_from_then_on() -> None:
    rows: list[Rewards] = []

    async def read() -> Sequence[Rewards]:
        return tuple(rows)

    standings = Standings(read, TRIAL, pools_of(2))
    assert standings.short("default", "") == ""
    await standings.rewards()
    assert standings.short("default", "") == "outcomes=0/16"
    rows.append(judged(5))
    assert standings.short("default", "") == "outcomes=0/16"
    assert [one.pool for one in await standings.count()] == ["default", "known", "other"]
    assert standings.short("default", "") == "outcomes=5/16"
    standings.adopt(pools_of(4))
    assert (standings.short("default", ""), standings.of("default").outcomes) == ("outcomes=5/32", 5)
