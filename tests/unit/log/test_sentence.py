"""The sentence that an explanation begins with, for each way in which a request is planned."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.log.rollout import AttemptRecord, RoundRecord
from gateway.core.log.sentence import dollars, sentence
from tests.records import a_rollout, a_round, a_step, tree_of

POOL = [
    {"name": name, "handle": name, "kind": kind}
    for name, kind in (("cheap", "openai"), ("dear", "openai"), ("judge", "tool"), ("vote", "tool"))
]
CHEAP = {"worker": "cheap", "n": 8.0, "right": 1.0, "success": 0.33, "usd": 0.00003, "utility": 0.31, "latency_s": 0.3}
DEAR = {"worker": "dear", "n": 8.0, "right": 7.0, "success": 0.71, "usd": 0.0003, "utility": 0.68, "latency_s": 0.9}
UNKNOWN = {"n": 0.0, "right": 0.0, "success": 0.67}


def plan_of(*workers: str, see: bool = False) -> dict[str, Any]:
    steps = [{"worker": each, "task": None, "see": [0] if see and at else []} for at, each in enumerate(workers)]
    return {"steps": steps}


def decided(chosen: str, *arms: dict[str, Any], planner: str = "rule", **more: Any) -> RoundRecord:
    """A round of a router, with its decision as the log has it."""
    decision = {"planner": planner, "chosen": chosen, "arms": list(arms)} | more
    return a_round(planner=planner, policy_version=None, plan=plan_of(chosen), decision=decision)


def told(*rounds: RoundRecord, **changes: Any) -> str:
    return sentence(tree_of(a_rollout(pool=POOL, rounds=list(rounds), **changes)))


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "$0"),
        (0.0003, "$0.0003"),
        (0.000031, "$0.000031"),
        (0.5, "$0.50"),
        (12.345, "$12.35"),
        (1e-9, "$0.000000001"),
    ],
)
def test_money_is_dollars(usd: float, text: str) -> None:
    assert dollars(usd) == text


def test_the_rule_says_what_each_did_and_at_which_price() -> None:
    assert told(decided("dear", CHEAP, DEAR)) == (
        "dear, because it was right on 7 of 8 alike at $0.0003 where cheap was right on 1 of 8 at $0.00003: "
        "0.71 against 0.33."
    )


def test_a_cheaper_worker_that_is_about_as_good_won_by_its_price() -> None:
    cheap = CHEAP | {"right": 6.5, "success": 0.7, "utility": 0.69}
    assert told(decided("cheap", cheap, DEAR)) == (
        "cheap, because it was right on 6.5 of 8 alike at $0.00003 where dear was right on 7 of 8 at $0.0003: "
        "worth 0.69 against 0.68 after dollars and seconds."
    )


def test_a_worker_that_is_drawn_to_learn_is_told_with_its_chance() -> None:
    drawn = decided("cheap", CHEAP | {"propensity": 0.07}, DEAR | {"propensity": 0.93}, explored=True)
    assert told(drawn) == (
        "cheap, drawn to learn (probability 0.07): right on 1 of 8 alike at $0.00003, where dear was right on 7 of 8 "
        "at $0.0003: 0.33 against 0.71."
    )
    newcomer = told(decided("cheap", CHEAP | UNKNOWN | {"propensity": 0.004}, DEAR))
    assert newcomer.startswith(
        "cheap, drawn to learn (probability 0.004): nothing is known of it yet at $0.00003, where"
    )


def test_without_experience_the_rule_says_that_it_knows_nothing() -> None:
    new = told(decided("cheap", CHEAP | UNKNOWN | {"utility": 0.66}, DEAR | UNKNOWN | {"utility": 0.63}))
    assert new == (
        "cheap, because nothing is known of tasks like this one yet, and at $0.00003 and 0.3 s it is the best bet, "
        "before dear: worth 0.66 against 0.63 after dollars and seconds."
    )
    assert told(decided("dear", DEAR)) == "dear, because no other worker could take the request."
    old = a_round(planner="rule", plan=plan_of("dear"), decision=None)
    assert told(old) == "dear, by the rule; the log has no figures of that decision."


def test_what_was_known_is_told_where_it_was_stale_or_missing() -> None:
    ruled = decided("dear", CHEAP, DEAR)
    assert told(ruled, memory={"state": "missing"}).endswith("; planned blind: no experience could be read.")
    assert told(ruled, memory={"state": "stale", "age_s": 40.2}).endswith("; by experience that was 40 s old.")
    assert told(ruled, memory={"state": "fresh", "age_s": 0.0}) == told(ruled)


def test_a_worker_that_failed_is_told_with_the_one_that_answered() -> None:
    rounds = decided("cheap", CHEAP | {"utility": 0.9}, DEAR), decided("dear", DEAR)
    assert told(*rounds, fallback="worker_timeout") == (
        "dear, because no other worker could take the request; cheap was asked first and did not answer in time."
    )


def test_a_conductor_tells_probabilities_and_whether_it_drew() -> None:
    plan = plan_of("cheap", "dear", see=True)
    drawn = a_round(plan=plan, plan_logprobs=[-0.5], decision_mask=[True])
    assert told(drawn) == "cheap, then dear, as conductor@7 planned: drawn with probability 0.61."
    greedy = a_round(plan=plan, plan_logprobs=[-0.5], decision_mask=[True], sampling={"temperature": 0.0})
    assert told(greedy) == "cheap, then dear, as conductor@7 planned: its likeliest plan, of probability 0.61."
    hosted = a_round(plan=plan_of("dear"), policy_version=None, plan_logprobs=[], decision_mask=[])
    assert told(hosted, hosted) == "dear, as the conductor planned; planned 2 times."


def test_a_fallback_tells_why_the_conductor_did_not_plan() -> None:
    refused = a_round(plan=None, refusal="not_json")
    assert told(refused, decided("dear", CHEAP, DEAR), fallback="conductor_not_json").endswith(
        "0.71 against 0.33; conductor@7 made no plan that could be used, because it wrote no JSON."
    )


def test_a_turn_that_goes_back_and_one_that_does_not() -> None:
    sticky = a_round(planner="sticky", plan=plan_of("dear"))
    kept = {"worker": "dear", "kept": True, "why": "conversation"}
    assert told(sticky, turn=kept) == "dear, again, because the conversation goes on and its prompt is cached there."
    anew = {"worker": "cheap", "kept": False, "why": "failure", "fault": "empty"}
    assert told(decided("dear", CHEAP, DEAR), turn=anew).endswith("; not cheap again, because its last answer failed.")


def test_workers_that_the_request_named() -> None:
    assert told(a_round(planner="fixed:dear", plan=plan_of("dear"))) == "dear, because the request named it."
    verdict = {"by": "judge", "accept": False, "why": "wrong"}
    steps = [
        a_step(0, "cheap"),
        a_step(1, "judge", attempts=[AttemptRecord(1, 2, verdict=verdict)]),
        a_step(2, "dear"),
    ]
    checked = a_round(planner="checked:cheap>dear@judge", plan=plan_of("cheap", "judge", "dear"))
    assert told(checked, steps=steps) == (
        "dear, because the request named this chain, and of the replies judge rejected that of cheap."
    )


def test_votes_and_cascades_tell_whom_they_asked() -> None:
    votes = plan_of("dear", "cheap")["steps"] + [{"worker": "vote", "task": None, "see": [0, 1]}]
    decision = {"planner": "vote", "arms": [CHEAP, DEAR]}
    assert told(a_round(planner="vote", plan={"steps": votes}, decision=decision)) == (
        "dear and cheap, because the vote asks those of the highest expected worth and takes the majority's answer: "
        "dear 0.68, cheap 0.31."
    )
    decision = {"planner": "cascade", "arms": [CHEAP, DEAR]}
    first = a_round(planner="cascade", plan=plan_of("cheap", "vote"), decision=decision)
    then = a_round(planner="cascade", plan=plan_of("dear"), decision=decision)
    assert told(first, then).endswith(
        " and one more if they differ: dear 0.68, cheap 0.31; they differed, and dear decided."
    )


def test_a_cap_tells_what_it_allowed_and_who_set_it() -> None:
    ruled, caps = decided("dear", CHEAP, DEAR), {"cost_nano": 500_000_000, "calls": 16}
    end = {"capped": "cost", "caps": caps, "cost_nano": 120_000, "hold_nano": 140_000}
    assert told(ruled, **end).endswith(
        "; it ran out of dollars: it spent $0.00012 of the $0.00014 that were held for it (its cap is $0.50)."
    )
    by = "key `ann` has $0.00002 left of its budget; raise it"
    assert told(ruled, **end | {"caps": caps | {"capped_by": by}}).endswith(f"; it ran out of dollars: {by}.")
    assert told(ruled, **end | {"hold_nano": 500_000_000}).endswith(": it spent $0.00012 of its cap of $0.50.")
    assert told(ruled, capped="calls", caps=caps).endswith("; it ran out of worker calls (at most 16).")


def test_a_request_without_a_plan_or_without_an_answer_says_so() -> None:
    error = {"code": "no_worker", "message": "every model worker of this pool has failed"}
    refused = a_round(planner="rule", plan=None, refusal="no_worker")
    assert told(refused, status="failed", error=error) == (
        "nobody, because the request ended before anything was planned: every model worker of this pool has failed. "
        "Its planners made no usable plan: rule (no_worker)."
    )
    assert told(decided("dear", DEAR), status="failed", error=error).endswith(
        "; no answer: every model worker of this pool has failed."
    )
