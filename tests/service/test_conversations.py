"""Conversations that are planned anew, and what their planner is shown: over the whole request path."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.adapters.upstream.embedder import LocalEmbedder
from gateway.core.log.explain import Surroundings, explain
from gateway.core.loop.caps import Caps
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.core.loop.turns.replanning import Replanning
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import PoolFile, Price
from gateway.errors import Unavailable, UpstreamTimeout
from gateway.files import shipped
from tests.fakes.workers import Says
from tests.kit import Kit, ask, model_worker, pool_file
from tests.service.test_sticky import ASKING, SUNNY, TO_ALPHA, TO_BETA, TOOLS, next_turn, said, workers_of

MEANING = LocalEmbedder(by_meaning(shipped(TABLE_FILE)))
QUESTION = "Explain how TCP congestion control works."
MORE = {"role": "user", "content": "And then?"}
OTHER = {"role": "user", "content": "Write a haiku about the autumn rain, and one about snow, please."}
CACHED = Price(input_usd_per_mtok=Decimal(3), output_usd_per_mtok=Decimal(15), cache_read_usd_per_mtok=Decimal("0.3"))


def cached_pool() -> PoolFile:
    """The usual pool; `beta` has a price for cached tokens."""
    pools = pool_file()
    workers = tuple(
        spec if spec.name != "beta" else spec.model_copy(update={"price": CACHED}) for spec in pools.workers
    )
    return PoolFile(workers=workers, pools=dict(pools.pools))


def with_experience(kit: Kit, **seen: tuple[float, int]) -> Kit:
    """The kit, where experience says of each worker: (success, nano-dollars) of twenty judged tasks."""
    kit.knows(*(WorkerExperience(name, 20, success, nano, 1000) for name, (success, nano) in seen.items()))
    return kit


async def test_a_follow_up_goes_back_and_another_intent_is_planned() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), embedder=MEANING)
    first = await kit.serve(ask(QUESTION))
    second = await next_turn(
        kit, first, {"role": "user", "content": "How does slow start in TCP congestion control work then?"}
    )
    assert (workers_of(second), second.record.policy_used) == (["beta"], "sticky")
    assert second.record.turn is not None
    assert (second.record.turn["kept"], second.record.turn["why"]) == (True, "conversation")
    assert second.record.turn["distance"] < 0.85
    third = await next_turn(kit, second, OTHER)
    assert (workers_of(third), third.record.policy_used) == (["alpha"], "conductor")
    assert third.record.turn is not None
    assert (third.record.turn["kept"], third.record.turn["why"]) == (False, "intent")
    assert third.record.turn["distance"] > 0.85
    assert await kit.open_nano() == 0


async def test_the_message_that_was_planned_for_counts_not_the_one_before() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), embedder=MEANING)
    first = await kit.serve(ask(QUESTION))
    second = await next_turn(kit, first, {"role": "user", "content": "Thank you."})
    third = await next_turn(
        kit, second, {"role": "user", "content": "What does congestion control do when TCP loses packets?"}
    )
    assert third.record.policy_used == "sticky"
    assert first.record.facts is not None
    assert third.record.facts is not None
    assert first.record.facts["planned"] == second.record.facts["planned"] == third.record.facts["planned"]  # type: ignore[index]
    fourth = await next_turn(kit, third, OTHER)
    assert fourth.record.policy_used == "conductor"
    assert fourth.record.facts["planned"] != third.record.facts["planned"]  # type: ignore[index]


async def test_a_client_that_no_longer_sends_the_planned_message_is_not_judged_by_it() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]}, embedder=MEANING)
    first = await kit.serve(ask(QUESTION, tools=TOOLS))
    shortened = [{"role": "assistant", "tool_calls": (await said(first))["tool_calls"]}, SUNNY, OTHER]
    second = await kit.serve({"model": "baton", "messages": shortened, "tools": TOOLS})
    assert second.record.policy_used == "sticky"
    assert "distance" not in (second.record.turn or {})


async def test_an_embedder_that_is_away_plans_nothing_anew() -> None:
    class Away(LocalEmbedder):
        async def embed(self, text: str) -> list[float]:
            raise Unavailable("no vectors")

    kit = Kit((TO_BETA, TO_ALPHA), embedder=Away(by_meaning(shipped(TABLE_FILE))))
    second = await next_turn(kit, await kit.serve(ask(QUESTION)), OTHER)
    assert second.record.policy_used == "sticky"
    assert "sticky" in kit.metrics.degradations


@pytest.mark.parametrize("reply", [Says(""), Says("I", finish_reason="content_filter")])
async def test_a_turn_after_a_failed_one_is_planned(reply: Says) -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": reply})
    first = await kit.serve()
    messages = [*first.chat.messages, {"role": "assistant", "content": (await said(first))["content"]}, MORE]
    second = await kit.serve({"model": "baton", "messages": messages})
    assert (workers_of(second), (second.record.turn or {})["why"]) == (["alpha"], "failure")


async def test_asking_again_after_an_error_in_the_middle_of_a_stream_is_planned() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [Says("one"), Says("two three four", dies_after=2)]}, attempts_max=1)
    first = await kit.serve()
    messages = [*first.chat.messages, await said(first), MORE]
    broken = await kit.serve({"model": "baton", "messages": messages, "stream": True})
    assert broken.error is not None
    again = await kit.serve({"model": "baton", "messages": messages, "stream": True})
    assert workers_of(again) == ["alpha"]
    assert again.record.turn is not None
    assert (again.record.turn["why"], again.record.turn["fault"]) == ("failure", broken.error.code)


async def test_a_worker_that_fails_before_its_first_word_is_why_the_turn_is_planned() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [Says("one"), UpstreamTimeout("late")]}, attempts_max=1)
    second = await next_turn(kit, await kit.serve(), MORE)
    assert workers_of(second) == ["beta", "alpha"]
    assert (second.record.turn or {})["why"] == "worker_failed"


FAILED = {**SUNNY, "content": '{"isError": true, "content": [{"type": "text", "text": "no such city"}]}'}


async def test_a_tools_declared_error_is_planned_and_its_text_is_not_read() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]})
    first = await kit.serve(ask(tools=TOOLS))
    assert (await next_turn(kit, first, {**SUNNY, "content": "Error: no such city"})).record.policy_used == "sticky"
    planned = await next_turn(kit, first, FAILED)
    assert (workers_of(planned), (planned.record.turn or {})["why"]) == (["alpha"], "tool_error")


async def test_the_mark_of_an_error_reaches_no_worker() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]})
    planned = await next_turn(kit, await kit.serve(ask(tools=TOOLS)), {**SUNNY, "is_error": True})
    assert (planned.record.turn or {})["why"] == "tool_error"
    assert kit.workers.calls[-1].body["messages"][-1] == SUNNY


async def test_a_cap_in_sight_is_planned() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": Says("ok"), "alpha": Says("ok")})
    first = await kit.serve()
    for place, (turn, until_s) in list(kit.conversations.known.items()):
        kit.conversations.known[place] = (replace(turn, facts=replace(turn.facts, cost_nano=20_400_000)), until_s)
    assert (await next_turn(kit, first, MORE)).record.policy_used == "sticky"
    planned = await next_turn(kit, first, MORE, caps={"cost_nano": 30_000_000})
    assert (workers_of(planned), (planned.record.turn or {})["cap"]) == (["alpha"], "cost")


async def test_a_context_that_is_nearly_full_is_planned() -> None:
    workers = (model_worker("alpha", "atlas"), model_worker("beta", "birch", context_tokens=220))
    pools = PoolFile(workers=workers, pools={"default": ("alpha", "beta")})
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": Says("word " * 90, usage=Usage(20, 90))}, pools=pools)
    first = await kit.serve()
    planned = await next_turn(kit, first, MORE)
    assert (workers_of(planned), (planned.record.turn or {})["cap"]) == (["alpha"], "context")


# ---------------------------------------------------------------- a better worker, a warm cache


async def test_a_better_worker_is_planned_unless_the_cache_is_worth_more() -> None:
    said_by_beta = {"beta": Says("ok", usage=Usage(40, 5))}
    for prefix, why in ((40, "better"), (100_000, "conversation")):
        kit = Kit((TO_BETA, TO_ALPHA), said_by_beta, pools=cached_pool(), caps=Caps(cost_nano=5_000_000_000))
        with_experience(kit, alpha=(0.9, 1_000_000), beta=(0.5, 1_000_000))
        first = await kit.serve()
        for place, (turn, until_s) in list(kit.conversations.known.items()):
            facts = replace(turn.facts, prefix_tokens=prefix)
            kit.conversations.known[place] = (replace(turn, facts=facts), until_s)
        second = await next_turn(kit, first, MORE)
        assert second.record.turn is not None
        assert second.record.turn["why"] == why
        assert second.record.turn["worth_nano"] == prefix * 2_700 // 1
        assert workers_of(second) == (["alpha"] if why == "better" else ["beta"])


async def test_what_a_worker_has_cached_is_what_it_wrote_and_read_where_it_says_so() -> None:
    wrote = Usage(9_000, 5, details={"cached_tokens": 3_000, "cache_write_tokens": 1_000})
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": Says(usage=wrote)}, pools=cached_pool())
    first = await kit.serve(ask("long " * 4_000))
    assert first.record.facts is not None
    assert first.record.facts["prefix_tokens"] == 4_000


async def test_the_prompted_planner_is_shown_who_is_warm_and_what_leaving_costs() -> None:
    wrote = Usage(9_000, 5, details={"cached_tokens": 3_000, "cache_write_tokens": 1_000})
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": Says(usage=wrote)}, pools=cached_pool(), profile="guided", embedder=MEANING)
    first = await kit.serve(ask("Explain TCP congestion control. " * 600))
    second = await next_turn(kit, first, OTHER)
    shown = str(kit.conductor.calls[-1].messages[-1]["content"])
    assert "answered the last turn; leaving it costs its cached prompt, about $0.011" in shown
    assert "This turn is planned anew: the user wants something else than before." in shown
    assert second.record.rounds[0].shown is not None
    assert second.record.rounds[0].shown["warm"] == {"handle": "birch", "worth_nano": 10_800_000, "why": "intent"}
    assert "answered the last turn" not in str(kit.conductor.calls[0].messages)


async def test_the_rule_counts_a_warm_cache_for_the_worker_that_has_it() -> None:
    turns = []
    for pools in (cached_pool(), pool_file()):
        kit = Kit(workers={"beta": Says(usage=Usage(4_000, 5))}, pools=pools, embedder=MEANING)
        with_experience(kit, alpha=(0.1, 900_000), beta=(0.9, 1_000_000), gamma=(0.1, 900_000))
        first = await kit.serve(ask("Explain TCP congestion control. " * 600, model="baton/rule"))
        with_experience(kit, alpha=(0.9, 900_000), beta=(0.9, 1_000_000), gamma=(0.1, 900_000))
        second = await next_turn(kit, first, OTHER)
        assert second.record.policy_used == "rule"
        turns.append(workers_of(second))
    assert turns == [["beta"], ["alpha"]]


async def test_a_hold_covers_a_prompt_whose_cache_has_gone_cold() -> None:
    """A provider may have forgotten the prefix; then all of it is charged at the full price."""
    cold = Usage(4_000, 5, details={"cached_tokens": 0})
    kit = Kit((TO_BETA,), {"beta": Says(usage=cold)}, pools=cached_pool())
    text = "long " * 800
    first = await kit.serve(ask(text))
    second = await next_turn(kit, first, MORE)
    assert second.record.policy_used == "sticky"
    assert second.record.cost_nano == 4_000 * 3_000 + 5 * 15_000 <= second.record.hold_nano


# ---------------------------------------------------------------- settings, log


async def test_each_trigger_can_be_switched_off() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("")]}, replanning=Replanning(frozenset()), embedder=MEANING)
    first = await kit.serve(ask(QUESTION, tools=TOOLS))
    second = await next_turn(kit, first, FAILED)
    assert second.record.policy_used == "sticky"
    messages = [*second.chat.messages, {"role": "assistant", "content": ""}, OTHER]
    third = await kit.serve({"model": "baton", "messages": messages, "tools": TOOLS})
    assert third.record.policy_used == "sticky"


async def test_the_log_and_the_explanation_say_why_a_turn_went_back_or_did_not() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]})
    first = await kit.serve(ask(tools=TOOLS))
    assert first.record.turn is None
    kept, planned = await next_turn(kit, first, SUNNY), await next_turn(kit, first, FAILED)
    for running, why in ((kept, "tool_results"), (planned, "tool_error")):
        tree = await kit.store.rollout_get(running.record.id, running.record.key_id)
        assert tree is not None
        explained = explain(tree, Surroundings())
        assert explained["turn"] == running.record.turn
        assert explained["turn"]["why"] == why
