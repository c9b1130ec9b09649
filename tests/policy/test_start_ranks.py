"""Programs by rank: what a prompt shows of the workers decides who is asked, whatever they are called."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.prompt import DIAL, QUALITY_MAX
from policy.start.recorded.lessons import Posing, lessons
from policy.start.recorded.programs import Program, search
from policy.start.recorded.ranks import RankChoices, in_order, plain, ranks
from policy.statistics.tuning import Nearest, Observation, WorkerResult
from tests.policy.test_start_recorded import environment, known

CENT_NANO = 10_000_000


def experience(**rates: tuple[float, int]) -> dict[str, WorkerExperience]:
    return {name: WorkerExperience(name, 50, rate, nano, 1_000) for name, (rate, nano) in rates.items()}


def test_the_order_is_by_success_less_the_price_of_the_dollars_at_this_place() -> None:
    seen = experience(dear=(0.9, CENT_NANO), cheap=(0.8, CENT_NANO // 100), poor=(0.2, 0))
    assert in_order(["poor", "cheap", "dear"], seen, QUALITY_MAX) == ["dear", "cheap", "poor"]
    assert in_order(["poor", "cheap", "dear"], seen, 0) == ["cheap", "poor", "dear"]
    assert in_order(["new", "poor"], seen, 0) == ["new", "poor"], "two right of three until it is known"
    assert in_order(["b", "a"], {}, 0) == ["b", "a"], "equals stay"


def test_one_outcome_is_not_shown_and_does_not_count() -> None:
    once = {"once": replace(experience(once=(0.0, 0))["once"], n=1)}
    assert in_order(["once", "poor"], once | experience(poor=(0.2, 0)), 5) == ["once", "poor"]


def alternating(n: int) -> list[Observation]:
    """Two kinds of question, on each of which one of two workers is right; a third never is, and is free."""
    observed = []
    for at in range(n):
        kind, right = ("sums", "a") if at % 2 else ("words", "b")
        results = {name: WorkerResult(float(name == right), CENT_NANO, f"{name}{at}") for name in "ab"}
        results["c"] = WorkerResult(0.0, 0, f"c{at}")
        observed.append(Observation(f"{kind} {kind} number {at}", kind, results))
    return observed


def test_the_first_of_the_list_answers_whoever_that_is() -> None:
    observed = alternating(60)
    lines: list[str] = []
    choices = ranks(observed, Nearest(observed, 10), None, lines.append)
    for kind, right in (("sums", "a"), ("words", "b")):
        seen = Nearest(observed, 10).of(f"{kind} {kind} number 7")
        for names in (["a", "b", "c"], ["c", "b", "a"]):
            assert choices.best(QUALITY_MAX, kind, in_order(names, seen, QUALITY_MAX)) == Program((right,))
    assert choices.best(0, "sums", ["x", "y", "z"]).first[0] == "x", "and workers that were never met"
    searched = "searched 4 programs by rank of 3 workers at place"
    assert lines == [f"{searched} 9 of the dial", f"{searched} 0 of the dial"], "once each, when it is asked for"


def test_one_program_serves_all_kinds_and_an_empty_reply_asks_the_next() -> None:
    """The first of the list is empty every third time; the second is right where it is asked then."""
    observed = []
    for at in range(60):
        empty = at % 3 == 0
        results = {
            "first": WorkerResult(float(not empty), CENT_NANO, "" if empty else f"{at}"),
            "second": WorkerResult(float(at % 4 == 0 or empty), CENT_NANO, f"{at}b"),
            "third": WorkerResult(0.0, 0, f"{at}c"),
        }
        observed.append(Observation(f"number {at}", f"kind {at % 5}", results))
    seen = experience(first=(0.67, CENT_NANO), second=(0.5, CENT_NANO), third=(0.0, 0))
    choices = ranks(observed, Nearest(observed, 50), None, lambda _: None)
    names = in_order(["third", "second", "first"], seen, QUALITY_MAX)
    assert {choices.best(QUALITY_MAX, f"kind {at}", names) for at in range(6)} == {Program(("first",), 1, ("second",))}


def test_a_larger_pool_has_the_programs_of_the_largest_that_was_searched() -> None:
    observed = alternating(40)
    choices = ranks(observed, Nearest(observed, 10), (2, 3), lambda _: None)
    assert choices.best(QUALITY_MAX, "sums", list("pqrst")).first == ("p",)
    others = {choices.other(QUALITY_MAX, "sums", list("pqr"), 2, Random(seed)) for seed in range(20)}
    assert len(others) == 2
    assert Program(("p",)) in others
    with pytest.raises(KeyError, match="pool of 1"):
        choices.best(0, "sums", ["alone"])
    with pytest.raises(ValueError, match="at least one worker"):
        RankChoices((), lambda size, place: pytest.fail(f"{size}, {place}"))


def test_the_budget_is_the_highest_place_that_it_pays_for() -> None:
    observed = alternating(60)
    choices = ranks(observed, Nearest(observed, 10), None, lambda _: None)
    assert choices.affordable(1.0) == QUALITY_MAX
    assert choices.affordable(0.0) < QUALITY_MAX, "what is right costs a cent"


def test_side_by_side_workers_stand_in_the_order_of_the_list_and_no_program_is_wasteful() -> None:
    results = {str(at): WorkerResult(float(at % 2), at + 1, f"{at % 3}") for at in range(5)}
    programs = plain(search([Observation("q", "c", results)])).programs
    for each in programs:
        asked = [int(name) for name in (*each.first, *each.then)]
        assert asked == list(range(len(asked))), "the first of the list, then the next"
        assert len(each.first) <= 3
    assert not any(len(each.first) == 2 and not each.enough for each in programs)
    assert len(set(programs)) == len(programs)


async def test_lessons_name_the_workers_by_their_place_in_the_prompt(tmp_path: Path) -> None:
    env = environment(tmp_path)
    observed, _ = await known(env)
    near = Nearest(observed, 5)
    choices = ranks(observed, near, (2, 3), lambda _: None)
    posing = Posing("ranked", near, (2, 3), redraw_handles=True, bare_share=0.0, stray_share=0.0)
    written = await lessons(env, env.prompts("train", 20, 0), choices, posing, 120, seed=3)
    first = 0
    for each in written:
        before, _, rest = each.prompt.rpartition("\nround ")
        state = rest.splitlines()[0]
        following = next(json.loads(line[6:]) for line in rest.splitlines() if line.startswith("next: "))
        asked = [step.worker for step in each.plan.steps if not step.see]
        assert asked == following[: len(asked)], "the likeliest of those that have not replied"
        if not state.startswith("1 "):
            continue
        records = before.splitlines()[-len(each.allowed.handles) + 1 :]
        assert following == [line.split()[0] for line in records][:3]
        assert "vote" not in following, "a tool is no model"
        assert 0 <= int(re.findall(r"quality (\d)", state)[0]) < len(DIAL)
        first += len(asked) > 0
    assert first > len(written) / 4
