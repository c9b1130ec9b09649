"""Vote and cascade as served: whom they ask, when they stop, and what becomes of them under caps and failures."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.loop.caps import Caps
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.replies.agreement import majority
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec
from gateway.errors import BadRequest, Forbidden, UpstreamError
from gateway.service.loop.routers import CascadeRouter, RulePlanner, VoteRouter
from gateway.service.ports.request import WorkerCall
from gateway.service.request.catalog import Shares
from gateway.service.request.running import reply_headers
from tests.fakes.workers import Says
from tests.kit import KEY, Kit, ask, model_worker, plan, pool_file
from tests.unit.openai.test_chat import PNG, image, said

RULE = RulePlanner(draws=False)


def counted(call: WorkerCall) -> Says:
    """What the built-in vote does with the replies it sees."""
    replies = [reply for _, _, reply in call.saw]
    return Says(replies[majority(replies)])


FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


def kit(said: dict[str, Any], **more: Any) -> Kit:
    """A gateway that offers vote and cascade. Nothing is observed unless `seen` says what (worker → success, nano)."""
    seen = more.pop("seen", {})
    more = {"worth": {"usd": 0.05}, **more}  # of a right answer
    made = Kit(workers={**said, "vote": counted}, **more)
    made.catalog._planners |= {"baton/vote": (VoteRouter(), RULE), "baton/cascade": (CascadeRouter(), RULE)}

    made.knows(*(WorkerExperience(name, 50, success, nano, 1000) for name, (success, nano) in seen.items()))
    return made


def asked(running: Any) -> list[str]:
    return [step.worker for step in running.record.steps]


SEEN = {"alpha": (0.9, 20_000_000), "beta": (0.7, 100_000), "gamma": (0.6, 100_000)}  # alpha: good, and $0.02 a call


@pytest.mark.parametrize("stream", [False, True])
async def test_the_majority_is_the_reply(stream: bool) -> None:
    made = kit(
        {"alpha": Says("Answer: 41"), "beta": Says("Answer: 42"), "gamma": Says("So it is. Answer: 42")}, seen=SEEN
    )
    running = await made.serve(ask(model="baton/vote", stream=stream))
    assert await made.text(running) == "Answer: 42"
    assert asked(running) == ["beta", "gamma", "alpha", "vote"]  # the rule's order: what decides a tie comes first
    assert (running.record.policy_used, running.record.fallback) == ("vote", None)
    assert await made.open_nano() == 0


# ---------------------------------------------------------------- a worker that plans


def with_planner(**more: Any) -> PoolFile:
    """A pool in which `brain` plans, and is the cheapest and the only one with eyes."""
    cheap = Price(input_usd_per_mtok=Decimal("0.01"), output_usd_per_mtok=Decimal("0.01"))
    return pool_file(
        *(model_worker(name, f"x{name}", cannot=["image"]) for name in ("one", "two")),
        model_worker("brain", "ember", price=cheap, answers=False, **more),
    ).model_copy(update={"pools": {"default": ("one", "two", "brain", "vote"), "brain": ("brain",)}})


@pytest.mark.parametrize("model", ["baton", "baton/rule", "baton/vote", "baton/cascade"])
async def test_a_worker_that_plans_is_offered_to_no_planner_as_an_answerer(model: str) -> None:
    made = kit({}, script=(plan(("ember", None, [])),), pools=with_planner())
    record = (await made.serve(ask(model=model))).record
    assert record.status == "done"
    assert {call.worker.name for call in made.workers.calls} <= {"one", "two", "vote"}
    assert "brain" not in [worker["name"] for worker in record.pool]
    if model == "baton":
        assert (record.fallback, "ember" in str(made.conductor.calls[0].messages)) == (
            "conductor_unknown_worker",
            False,
        )


async def test_a_worker_that_plans_answers_by_its_name_in_a_chain_and_where_no_other_can() -> None:
    made, alone = kit({}, pools=with_planner()), replace(KEY, pools=("brain",))
    for body, who in (
        (ask(model="brain"), KEY),
        (ask(model="baton/fixed:brain"), KEY),
        (ask(model="baton/checked:brain>one@two"), KEY),
        ({"model": "baton/rule", "messages": [said(image(PNG))]}, KEY),
        (ask(model="baton/rule"), alone),  # of a pool in which there is no other model
    ):
        made.workers.calls.clear()
        assert (await made.serve(body, who)).record.status == "done"
        assert made.workers.calls[0].worker.name == "brain"


async def test_the_pool_of_a_request_is_the_same_whoever_plans() -> None:
    plans, answers = with_planner(), with_planner()
    workers = tuple(spec.model_copy(update={"answers": True}) for spec in answers.workers)
    hashes = [
        (await kit({}, pools=pools).serve(ask(model="baton/rule"))).record.pool_hash
        for pools in (plans, answers.model_copy(update={"workers": workers}))
    ]
    assert hashes[0] == hashes[1]


# ---------------------------------------------------------------- a key without money


async def test_a_key_without_money_is_named_and_makes_no_worker_look_broken() -> None:
    made = kit({name: Says(f"Answer: {name}", usage=Usage(100, 60)) for name in ("alpha", "beta", "gamma")})
    running = await made.serve(ask(model="baton/cascade"), replace(KEY, budget_nano=500_000))
    record = running.record
    assert (record.status, record.capped) == ("done", "cost")
    last = record.steps[-1]
    assert [step.status for step in record.steps] == ["done", "done", "refused"]
    assert (last.error, last.worker in [call.worker.name for call in made.workers.calls]) == ("cap_reached", False)
    told = f"The budget of `key:{KEY.public_id}` has $0.00006 left of $0.0005, too little for the request's next call"
    assert running.headers()["x-baton-capped-by"].startswith(told)
    assert "`baton keys update ID --budget-usd`" in record.caps["capped_by"]


async def test_a_cap_that_no_budget_made_names_none() -> None:
    made = kit({name: Says(f"Answer: {name}") for name in ("alpha", "beta", "gamma")}, caps=Caps(calls=2, wall_s=60.0))
    running = await made.serve(ask(model="baton/cascade"))
    assert running.record.capped == "calls"
    assert "x-baton-capped-by" not in running.headers()


# ---------------------------------------------------------------- a key's pools


async def test_a_key_with_every_pool_uses_those_of_the_file_in_use() -> None:
    made, every = kit({}, pools=with_planner()), replace(KEY, pools=("*",))
    assert made.catalog.pools(every) == ("default", "brain")
    record = (await made.serve(ask(model="baton/rule"), every)).record
    assert record.pool_name == "default"
    record = (await made.serve(ask(model="baton/rule"), every, pool="brain")).record
    assert [step.worker for step in record.steps] == ["brain"]
    made.catalog.adopt(with_planner().model_copy(update={"default": "brain"}))
    assert made.catalog.pools(every) == ("brain", "default")
    with pytest.raises(Forbidden, match=r"may not use pool `else`; it may use brain, default\."):
        await made.serve(ask(), every, pool="else")


@pytest.mark.parametrize("pool", ["brain", "nonsense"])
async def test_a_pool_that_a_key_may_not_use_is_refused_with_the_command_and_no_word_of_whether_it_exists(
    pool: str,
) -> None:
    with pytest.raises(Forbidden) as caught:
        await kit({}, pools=with_planner()).serve(ask(), pool=pool)
    assert caught.value.message == (
        f"this key may not use pool `{pool}`; it may use default. An operator gives it more by "
        f"`baton keys update {KEY.public_id} --pools default,…`, or '*' for all of them"
    )


# ---------------------------------------------------------------- vote and cascade


@pytest.mark.parametrize("planner", ["vote", "cascade"])
async def test_what_decided_among_the_workers_is_logged_without_a_propensity(planner: str) -> None:
    running = await kit({}, seen=SEEN).serve(ask(model=f"baton/{planner}"))
    decision = running.record.rounds[0].decision or {}
    assert (decision["planner"], decision["chosen"]) == (planner, "beta")
    assert "propensity" not in decision
    utilities = {arm["worker"]: arm["utility"] for arm in decision["arms"]}
    assert max(utilities, key=lambda name: utilities[name]) == "beta"


async def test_a_voter_that_fails_leaves_the_others_to_vote() -> None:
    broken = UpstreamError("down", upstream_status=500, retryable=False)
    made = kit({"alpha": broken, "beta": Says("Answer: 42"), "gamma": Says("Answer: 42")})
    running = await made.serve(ask(model="baton/vote"))
    assert await made.text(running) == "Answer: 42"


async def test_without_a_vote_in_the_pool_the_rule_answers_and_the_rollout_says_so() -> None:
    whole = pool_file()
    few = whole.model_copy(update={"pools": {"default": ("alpha", "beta", "gamma")}})
    made = kit({"beta": Says("42")}, pools=few, seen=SEEN)
    running = await made.serve(ask(model="baton/vote"))
    assert await made.text(running) == "42"
    assert running.record.fallback == "vote_no_worker"


async def test_a_vote_of_one_is_one_call() -> None:
    made = kit({}, caps=Caps(steps=2, wall_s=60.0), seen=SEEN)
    assert asked(await made.serve(ask(model="baton/vote"))) == ["beta"]


@pytest.mark.parametrize("stream", [False, True])
async def test_agreement_ships_and_the_dear_one_is_not_asked(stream: bool) -> None:
    made = kit({"beta": Says("Clearly. Answer: 42"), "gamma": Says("Answer: 42.0")}, seen=SEEN)
    running = await made.serve(ask(model="baton/cascade", stream=stream))
    assert await made.text(running) == "Clearly. Answer: 42"  # the better one's words
    assert asked(running) == ["gamma", "beta"]
    assert [planned.planner for planned in running.record.rounds] == ["cascade", "cascade"]


@pytest.mark.parametrize("stream", [False, True])
async def test_disagreement_goes_to_the_most_successful_of_the_others(stream: bool) -> None:
    made = kit({"alpha": Says("Answer: 6"), "beta": Says("Answer: 42"), "gamma": Says("Answer: 41")}, seen=SEEN)
    running = await made.serve(ask(model="baton/cascade", stream=stream))
    assert await made.text(running) == "Answer: 6"
    assert asked(running) == ["gamma", "beta", "alpha"]
    assert running.record.policy_used == "cascade"


async def test_with_nothing_observed_the_dearest_counts_as_the_best() -> None:
    dear = model_worker("delta", "dune", price=Price(input_usd_per_mtok=Decimal(30), output_usd_per_mtok=Decimal(60)))
    made = kit({"beta": Says("Answer: 1"), "gamma": Says("Answer: 2")}, pools=pool_file(dear))
    assert asked(await made.serve(ask(model="baton/cascade"))) == ["beta", "gamma", "delta"]


async def test_one_round_leaves_no_second_opinion_so_the_best_is_asked_at_once() -> None:
    said = {"alpha": Says("Answer: 6", usage=Usage(1, 1))}
    made = kit(said, caps=Caps(rounds=1, wall_s=60.0), seen=SEEN)
    assert asked(await made.serve(ask(model="baton/cascade"))) == ["alpha"]


async def test_two_workers_are_both_asked_and_the_better_ones_word_counts() -> None:
    made = kit({"alpha": Says("1"), "beta": Says("2")}, seen=SEEN)
    who = replace(KEY, workers=("alpha", "beta"))
    running = await made.serve(ask(model="baton/cascade"), who)
    assert asked(running) == ["alpha", "beta"]
    assert await made.text(running) == "2"


ESSAYS = [
    f"{opening} make a street worth walking along, and everybody who lives there knows it well.\n\nPlant {what}."
    for opening, what in (("Trees", "one today"), ("Shade and birds", "a thousand this year"), ("Parks", "them now"))
]


async def test_two_essays_that_differ_are_no_reason_to_ask_a_third_worker() -> None:
    said = dict(zip(("alpha", "beta", "gamma"), map(Says, ESSAYS), strict=True))
    running = await (made := kit(said, seen=SEEN)).serve(ask("Write about trees.", model="baton/cascade"))
    assert asked(running) == ["gamma", "beta"]
    assert await made.text(running) == ESSAYS[1]


def judging(says: Any) -> Kit:
    """A gateway whose workers write essays, and whose pool has a judge that says this."""
    said = dict(zip(("alpha", "beta", "gamma"), map(Says, ESSAYS), strict=True)) | {"judge": says}
    facts = {"name": "judge", "handle": "arbiter", "kind": "tool", "url": "builtin:judge"}
    judge = WorkerSpec.model_validate({**facts, "params": {"model": "alpha"}, "price": {"call_usd": "0.0001"}})
    return kit(said, seen=SEEN, pools=pool_file(judge))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_pools_judge_decides_whether_two_essays_say_the_same(stream: bool) -> None:
    made = judging(Says(json.dumps({"same": True, "reason": "alike", "by": "builtin:judge@1"})))
    running = await made.serve(ask("Write about trees.", model="baton/cascade", stream=stream))
    assert await made.text(running) == ESSAYS[1]
    done = [step.worker for step in running.record.steps if step.status == "done"]
    assert done == ["gamma", "beta", "judge"]


@pytest.mark.parametrize("says", [Says('{"same": false}'), UpstreamError("down", upstream_status=500, retryable=False)])
async def test_the_third_answers_where_the_judge_finds_a_difference_or_fails(says: Any) -> None:
    running = await (made := judging(says)).serve(ask("Write about trees.", model="baton/cascade"))
    assert asked(running) == ["gamma", "beta", "judge", "alpha"]
    assert await made.text(running) == ESSAYS[0]
    assert await made.open_nano() == 0


async def test_no_judge_is_asked_about_short_answers() -> None:
    made = judging(Says('{"same": false}'))
    made.workers._scripts |= {name: [Says("Answer: 42")] for name in ("beta", "gamma")}
    assert asked(await made.serve(ask(model="baton/cascade"))) == ["gamma", "beta"]


async def test_a_reply_without_the_answer_that_another_marks_is_a_reason() -> None:
    said = {"alpha": Says("Answer: 42"), "beta": Says(ESSAYS[0]), "gamma": Says("Answer: 42")}
    made = kit(said, seen=SEEN)
    assert asked(await made.serve(ask(model="baton/cascade"))) == ["gamma", "beta", "alpha"]
    made = kit(said | {"beta": Says("Answer: 42"), "gamma": Says(ESSAYS[0])}, seen=SEEN)
    assert asked(await made.serve(ask(model="baton/cascade"))) == ["gamma", "beta"]


async def test_a_refusal_beside_an_essay_is_a_reason() -> None:
    said = {"alpha": Says(ESSAYS[0]), "beta": Says("I'm sorry, but I can't help with that."), "gamma": Says(ESSAYS[1])}
    made = kit(said, seen=SEEN)
    assert asked(await made.serve(ask("Write about trees.", model="baton/cascade"))) == ["gamma", "beta", "alpha"]


async def test_a_cheap_one_that_fails_is_no_agreement() -> None:
    broken = UpstreamError("down", upstream_status=500, retryable=False)
    made = kit({"alpha": Says("Answer: 6"), "beta": Says("Answer: 42"), "gamma": broken}, seen=SEEN)
    running = await made.serve(ask(model="baton/cascade"))
    assert await made.text(running) == "Answer: 6"


@pytest.mark.parametrize(
    ("seen", "greedy", "exploring"),
    [
        ({"alpha": (0.8, 100_000), "beta": (0.6, 100_000)}, "alpha", "gamma"),  # nobody knows gamma
        ({"alpha": (0.8, 100_000), "beta": (0.6, 100_000), "gamma": (0.1, 100_000)}, "alpha", "alpha"),
    ],
)
async def test_where_the_rule_explores_it_tries_the_unknown_but_not_what_failed(
    seen: dict[str, Any], greedy: str, exploring: str
) -> None:
    for share, worker in ((0.0, greedy), (1.0, exploring)):
        made = kit({}, seen=seen)
        made.completer._admission._policies = replace(made.completer._admission._policies, shares=Shares(share))
        assert asked(await made.serve(ask(model="baton/rule"))) == [worker]


@pytest.mark.parametrize(("metadata", "temperature"), [({}, 1.0), ({"train": "false"}, 0.0)])
async def test_requests_not_for_training_are_never_explored(metadata: dict[str, str], temperature: float) -> None:
    made = kit({})
    made.completer._admission._policies = replace(made.completer._admission._policies, shares=Shares(1.0))
    running = await made.serve(ask(model="baton/conductor", metadata=metadata))
    assert running.record.rounds[0].sampling["temperature"] == temperature


@pytest.mark.parametrize(("n", "shown"), [(1, False), (2, True)])
async def test_the_conductor_is_told_nothing_of_one_lucky_call(n: int, shown: bool) -> None:
    made = kit({})
    made.knows(WorkerExperience("alpha", n, 1.0, 100_000, 1000))
    running = await made.serve(ask(model="baton/conductor"))
    assert ("10 of 10 right" in str(running.record.rounds[0].messages)) is shown


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [FUNCTION]},
        {"tools": [FUNCTION], "tool_choice": "required"},
        {"n": 2},
        {"logprobs": True},
        {"stop": ["\n"]},
        {"functions": [FUNCTION["function"]]},
    ],
)
async def test_what_a_tool_cannot_answer_goes_to_a_model_and_the_client_is_told(asked: dict[str, Any]) -> None:
    made = kit({"gamma": Says("42")}, seen=SEEN)
    running = await made.serve(ask(model="baton/vote", **asked))
    assert running.error is None
    assert "vote" not in [step.worker for step in running.record.steps]
    body = made.workers.calls[0].body
    assert {name: body[name] for name in asked} == asked
    assert reply_headers(running.record)["x-baton-fallback"] == "vote_no_worker"


@pytest.mark.parametrize("asked", [{"tools": [FUNCTION], "tool_choice": "none"}, {"n": 1}, {"logprobs": False}, {}])
async def test_a_vote_is_held_where_nothing_is_asked_that_a_tool_lacks(asked: dict[str, Any]) -> None:
    made = kit({name: Says("42") for name in ("alpha", "beta", "gamma")}, seen=SEEN)
    running = await made.serve(ask(model="baton/vote", **asked))
    assert running.record.steps[-1].worker == "vote"


async def test_a_tool_by_its_name_refuses_what_it_cannot_answer() -> None:
    with pytest.raises(BadRequest, match="worker vote does not take `stop`") as refused:
        await kit({}).start(ask(model="baton/fixed:vote", stop="x"))
    assert (refused.value.param, refused.value.code) == ("stop", "unsupported_parameter")
