"""Large pools: a request is planned over the likeliest workers, and the log says who was drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from gateway.adapters.upstream.embedder import LocalEmbedder
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import EMBEDDING_DIM, HASHED
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec, pool_hash
from gateway.errors import Unavailable
from gateway.service.loop.experience.candidates import Shortlist
from tests.fakes.workers import Says
from tests.kit import KEY, Kit, TestClock, ask, pool_file

WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron")
TOPICS = ("weather", "football", "cooking", "chess", "poetry", "history", "botany", "sailing")


WHOSE = ("default", None)  # the organisation, and the type of its tasks


def worker(number: int, **more: Any) -> WorkerSpec:
    topic = TOPICS[number % len(TOPICS)]
    facts = {
        "name": f"model-{number}",
        "handle": f"{WORDS[number % 8]}{chr(97 + number // 8)}",
        "kind": "openai",
        "url": "http://127.0.0.1:1/v1",
        "model": f"m{number}",
        "description": f"good at {topic}",
        "price": Price(input_usd_per_mtok=Decimal(1), output_usd_per_mtok=Decimal(1)),
    }
    return WorkerSpec(**facts | more)


class Records:
    """A memory that knows what workers did, and counts how often it is asked."""

    def __init__(self, *known: WorkerExperience) -> None:
        self.known, self.reads = known, 0

    async def records(self, *_: Any) -> Mapping[str, WorkerExperience]:
        self.reads += 1
        return {one.worker: one for one in self.known}


class Silent:
    """An embedder that is away."""

    name, logged = "away", False

    async def embed(self, text: str) -> list[float]:
        raise Unavailable("the embedder is away")


def shortlist(store: Any = None, embedder: Any = None, **sizes: int) -> Shortlist:
    sizes = {"most": 12, "explored": 2} | sizes
    chosen = embedder or LocalEmbedder(HASHED)
    records: Any = store or Records()
    return Shortlist(chosen, records, TestClock(), 20, **sizes)


async def names(
    chooser: Shortlist, workers: Sequence[WorkerSpec], text: str = "hello", tokens: int = 10, seed: int = 1
) -> tuple[list[str], dict[str, float]]:
    await chooser.of(workers, lambda: text, WHOSE, tokens, Random(seed))
    await chooser.settled()
    chosen = await chooser.of(workers, lambda: text, WHOSE, tokens, Random(seed))
    return [spec.name for spec in chosen.workers], dict(chosen.drawn)


async def test_a_small_pool_is_shown_as_it_is() -> None:
    workers = [worker(number) for number in range(12)]
    shown, drawn = await names(shortlist(), workers)
    assert shown == [spec.name for spec in workers]
    assert drawn == {}


async def test_workers_are_retrieved_by_what_they_are_described_as() -> None:
    workers = [worker(number) for number in range(64)]
    shown, drawn = await names(shortlist(), workers, "Who won the football match?")
    best = [name for name in shown if name not in drawn]
    assert (len(best), len(drawn)) == (10, 2)
    football = {spec.name for spec in workers if "football" in spec.description}
    assert football <= set(best)  # all eight
    shown, _ = await names(shortlist(), workers, "Which poetry form has fourteen lines?")
    assert {spec.name for spec in workers if "poetry" in spec.description} <= set(shown)


async def test_workers_are_retrieved_by_what_they_did() -> None:
    workers = [worker(number, description="") for number in range(64)]
    good = [WorkerExperience(f"model-{number}", 30, 0.95, 1000, 100) for number in (60, 61)]
    bad = [WorkerExperience(f"model-{number}", 30, 0.05, 1000, 100) for number in range(40)]
    store = Records(*good, *bad)
    chooser = shortlist(store)
    shown, drawn = await names(chooser, workers)
    assert {"model-60", "model-61"} <= set(shown) - set(drawn)
    assert not {f"model-{number}" for number in range(40)} & (set(shown) - set(drawn))
    await names(chooser, workers)
    assert store.reads == 1  # within a minute


async def test_every_other_worker_is_drawn_as_often_and_the_probability_is_right() -> None:
    workers = [worker(number) for number in range(40)]
    chooser = shortlist()
    counts: dict[str, int] = {}
    shown, drawn = await names(chooser, workers)
    best = set(shown) - set(drawn)
    for seed in range(600):
        _, drawn = await names(chooser, workers, seed=seed)
        assert set(drawn.values()) == {2 / 30}
        assert not best & set(drawn)
        for name in drawn:
            counts[name] = counts.get(name, 0) + 1
    assert len(counts) == 30
    assert all(15 <= count <= 75 for count in counts.values())  # 40 each


async def test_a_long_prompt_is_planned_over_workers_that_can_hold_it() -> None:
    roomy = [worker(number, context_tokens=200_000, description="") for number in range(50, 55)]
    workers = [*(worker(number) for number in range(50)), *roomy]
    shown, drawn = await names(shortlist(), workers, "football", tokens=20_000)
    assert {spec.name for spec in roomy} <= set(shown)
    assert not drawn  # none is left to draw from


async def test_tools_and_own_workers_keep_their_places() -> None:
    free = Price(call_usd=Decimal(0), input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))
    tools = [
        WorkerSpec(name=f"tool-{n}", handle=f"tool{chr(97 + n)}", kind="tool", url="http://127.0.0.1:1/", price=free)
        for n in range(20)
    ]
    own = [spec for spec in pool_file().workers if spec.kind in ("self", "tool")]
    workers = [*(worker(number) for number in range(20)), *tools, *own]
    shown, drawn = await names(shortlist(), workers)
    assert {"vote", "self"} <= set(shown)
    assert sum(name.startswith("tool-") for name in shown if name not in drawn) == 5
    assert sum(name.startswith("model-") for name in shown if name not in drawn) == 5


async def test_an_embedder_that_is_away_costs_the_request_nothing() -> None:
    shown, drawn = await names(shortlist(embedder=Silent()), [worker(number) for number in range(40)])
    assert (len(shown), len(drawn)) == (12, 2)


# ---------------------------------------------------------------- through the gateway


def large_pool() -> PoolFile:
    return pool_file(*(worker(number, output_tokens_max=64) for number in range(60)))


def large_kit(**more: Any) -> Kit:
    pools = large_pool()
    return Kit(workers={spec.name: Says("42") for spec in pools.workers if spec.kind == "openai"}, pools=pools, **more)


async def test_a_plan_is_made_over_the_candidates_and_the_log_has_their_probability() -> None:
    kit = large_kit()
    await kit.serve(ask("Who won the football match?"))
    await kit.shortlist.settled()
    running = await kit.serve(ask("Who won the football match?"))
    record = running.record
    assert record.rounds[0].allowed is not None
    assert len(record.rounds[0].allowed["handles"]) == 14  # with `vote` and `self`
    prompt = record.rounds[0].messages[-1]["content"]
    assert prompt.count("good at football") >= 8
    assert len(record.pool) == 14
    drawn = [entry["drawn"] for entry in record.pool if "drawn" in entry]
    assert drawn == [2 / 53, 2 / 53]


async def test_a_worker_by_name_is_called_whatever_the_candidates_are() -> None:
    kit = large_kit()
    running = await kit.serve(ask(model="baton/fixed:model-59"))
    assert [step.worker for step in running.record.steps] == ["model-59"]
    names = [(entry["name"], entry.get("drawn")) for entry in running.record.pool]
    assert names == [("model-59", None)], "the record has nothing of workers that the request could not reach"


async def test_a_conversation_goes_back_to_a_worker_that_is_no_candidate_now() -> None:
    kit = large_kit()
    first = await kit.serve(ask("Who won the football match?", model="baton/rule"))
    body = await first.result()
    author = first.record.steps[-1].worker
    kit.shortlist._explored, kit.shortlist._most = 0, 2
    turns = [
        {"role": "user", "content": "Who won the football match?"},
        dict(body["choices"][0]["message"]),
        {"role": "user", "content": "Give me a recipe: cooking."},
    ]
    second = await kit.serve({"model": "baton/rule", "messages": turns})
    assert [step.worker for step in second.record.steps] == [author]
    assert author in [entry["name"] for entry in second.record.pool]


async def test_workers_that_a_checked_policy_names_are_never_left_out() -> None:
    kit = large_kit()
    running = await kit.serve(ask(model="baton/checked:model-57>model-58@model-59"))
    names = [entry["name"] for entry in running.record.pool]
    assert {"model-57", "model-58", "model-59"} <= set(names)
    assert running.record.steps[0].worker == "model-57"


class Outside:
    """An embedder outside the process, which sees what it is sent."""

    name, logged = "outside", True

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def embed(self, text: str) -> list[float]:
        self.seen.append(text)
        return [1.0] * EMBEDDING_DIM


async def test_an_embedder_outside_sees_no_secret_and_no_address_of_a_redacted_key() -> None:
    embedder = Outside()
    kit = large_kit(embedder=embedder)
    question = "Mail ann.lee@example.com the key provider-secret-value, about football"
    redacted = replace(KEY, log_mode="redacted")
    for _ in range(2):
        await kit.serve(ask(question), redacted)
        await kit.shortlist.settled()
    sent = [text for text in embedder.seen if "football" in text and "Mail" in text]
    assert len(sent) >= 2
    assert "example.com" not in "".join(sent)
    assert "provider-secret-value" not in "".join(sent)


class Walked(tuple[WorkerSpec, ...]):
    """Workers that count how often somebody goes through all of them."""

    times = 0

    def __iter__(self) -> Iterator[WorkerSpec]:
        Walked.times += 1
        return super().__iter__()


@pytest.mark.parametrize("model", ["model-7", "baton/rule"])
async def test_a_request_costs_the_same_however_many_workers_there_are(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = large_kit()
    walked = Walked(large_pool().pool("default"))
    monkeypatch.setattr(PoolFile, "pool", lambda *_: walked)
    for _ in range(3):  # what is read of them once, is kept
        await kit.serve(ask(model=model))
        await kit.shortlist.settled()
    Walked.times = 0
    running = await kit.serve(ask(model=model))
    assert running.record.pool_hash
    assert Walked.times == 0


async def test_a_named_request_is_logged_with_the_hash_of_its_pool() -> None:
    kit = large_kit()
    running = await kit.serve(ask(model="model-7"))
    assert running.record.pool_hash == pool_hash(large_pool().pool("default"))
    assert [entry["name"] for entry in running.record.pool] == ["model-7"]
