"""The teacher: what the search finds, that a program carried out gives what the search reckoned, and its lessons."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from gateway.core.loop.prompt import DIAL, QUALITY_MAX
from policy.environments.executor import Executor
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import sample
from policy.start.recorded.lessons import Posing, ProgramPlanner, lessons
from policy.start.recorded.observed import with_checks
from policy.start.recorded.programs import Choices, Program, ProgramWorth, gives, search
from policy.statistics.tuning import Nearest, Observation, WorkerResult, observe
from tests.policy.environments import PRICES, SUMS, WORDS, lines, recorded
from tests.sizes import sized

PROGRAMS = sized(small=4, ci=25, long=25)


def environment(path: Path, rounds: int = 3) -> ReplayEnvironment:
    return recorded(path / "r.jsonl", lines(120), executor=Executor(rounds=rounds))


async def known(env: ReplayEnvironment) -> tuple[list[Observation], ProgramWorth]:
    observed = await observe(env, env.prompts("train", env.count("train"), 0))
    return observed, search(observed)


async def test_agreement_is_enough_where_it_is_to_be_trusted(tmp_path: Path) -> None:
    _, worth = await known(environment(tmp_path))
    best = worth.best(usd_weight=10.0)
    assert best[SUMS] == Program(("mid", "cheap"), 2, ("dear",))
    assert best[WORDS] == Program(("mid",))


async def test_the_price_of_a_dollar_moves_the_choice(tmp_path: Path) -> None:
    _, worth = await known(environment(tmp_path))
    assert worth.best(1e6)[SUMS] == Program(("cheap",))
    spent = [
        sum(worth.usd[worth.programs.index(program)].sum() for program in {*worth.best(weight).values()})
        for weight in worth.prices(1.0)
    ]
    assert len(spent) == QUALITY_MAX + 1
    assert spent[0] < spent[-1]


@pytest.mark.sized
async def test_a_program_carried_out_gives_what_the_search_reckoned(tmp_path: Path) -> None:
    """Outcome and dollars of sampled programs, run by the served executor on the questions they were searched on."""
    env = environment(tmp_path)
    prompts = env.prompts("train", env.count("train"), 0)
    observed, worth = await known(env)
    for index in Random(3).sample(range(len(worth.programs)), min(PROGRAMS, len(worth.programs))):
        program = worth.programs[index]
        found = await sample(env, [(prompt, [ProgramPlanner(program)]) for prompt in prompts])
        assert sum(episode.outcome for episode in found.episodes) == pytest.approx(worth.outcome[index].sum()), program
        usd = sum(episode.cost_nano for episode in found.episodes) / 1e9
        assert usd == pytest.approx(worth.usd[index].sum()), program
        assert all(episode.parsed for episode in found.episodes)
        results = [gives(program, each) for each in observed]
        assert [result.outcome for result in results] == [episode.outcome for episode in found.episodes], program
        assert [result.cost_nano for result in results] == [episode.cost_nano for episode in found.episodes], program


async def test_a_check_ships_a_cheap_answer_that_it_finds_valid(tmp_path: Path) -> None:
    """`cheap` is right on even sums and costs little, `check` knows; questions without checks ask `dear` at once."""
    rows = lines(24)
    for number, row in enumerate(rows[:24]):
        right = bool(row["workers"]["cheap"]["correct"])
        row["checks"] = {"cheap": {"valid": right, "cost_usd": 0.00001}} if number % 8 else {"mid": {"valid": False}}
    path = tmp_path / "checked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ReplayEnvironment.open(path, PRICES, executor=Executor(rounds=3))
    prompts = env.prompts("train", env.count("train"), 0)
    observed = with_checks(env, prompts, await observe(env, prompts))
    worth = search(observed)
    checking = [program for program in worth.programs if program.check]
    assert {program.first for program in checking} == {("cheap",), ("mid",), ("dear",)}  # they say the same at times
    for program in checking:
        found = await sample(env, [(prompt, [ProgramPlanner(program)]) for prompt in prompts])
        results = [gives(program, each) for each in observed]
        assert [result.outcome for result in results] == [episode.outcome for episode in found.episodes], program
        assert [result.cost_nano for result in results] == [episode.cost_nano for episode in found.episodes], program
        at = worth.index[program]
        assert sum(one.outcome for one in results) == pytest.approx(worth.outcome[at].sum())
        assert sum(one.cost_nano for one in results) / 1e9 == pytest.approx(worth.usd[at].sum())
    best = worth.best(1.0)["sums"]
    assert (best.first, best.check) == (("cheap",), True)


async def test_of_one_worker_an_answer_is_enough_and_an_empty_reply_asks_another(tmp_path: Path) -> None:
    rows = lines(24)
    for row in rows[::3]:
        row["workers"]["mid"] |= {"output": "", "correct": False}
    env = recorded(tmp_path / "r.jsonl", rows, executor=Executor(rounds=3))
    prompts = env.prompts("train", env.count("train"), 0)
    observed = await observe(env, prompts)
    worth = search(observed)
    program = Program(("mid",), 1, ("dear",))
    episodes = (await sample(env, [(prompt, [ProgramPlanner(program)]) for prompt in prompts])).episodes
    assert {episode.workers for episode in episodes} == {("mid",), ("mid", "dear")}
    for episode, each in zip(episodes, observed, strict=True):
        assert (episode.workers == ("mid",)) == bool(each.results["mid"].answer)
        result = gives(program, each)
        assert (result.outcome, result.cost_nano) == (episode.outcome, episode.cost_nano)
    assert sum(episode.outcome for episode in episodes) == pytest.approx(worth.outcome[worth.index[program]].sum())
    assert Program(("dear",), 1, ("mid",)) not in worth.programs, "it is never empty"


async def test_without_a_second_round_the_first_beginning_answers(tmp_path: Path) -> None:
    env = environment(tmp_path, rounds=1)
    prompt = env.prompts("train", 1, 0)[0]
    episode = await env.episode(prompt, ProgramPlanner(Program(("cheap", "mid"), 2, ("dear",))))
    assert episode.error is None
    assert episode.workers == ("cheap", "mid", "vote")


def test_few_questions_are_drawn_towards_what_holds_for_all() -> None:
    def asked(category: str, right: str) -> Observation:
        results = {name: WorkerResult(float(name == right), 1, name) for name in "ab"}
        return Observation(f"{category} {right}", category, results)

    worth = search([*(asked("many", "a") for _ in range(60)), asked("few", "b")])
    assert worth.best(0.0)["few"] == Program(("a",))
    settled = search([*(asked("many", "a") for _ in range(60)), *(asked("few", "b") for _ in range(200))])
    assert settled.best(0.0)["few"] == Program(("b",))
    assert settled.best(0.0)["many"] == Program(("a",)) or settled.best(0.0)["many"].first[0] == "b"


def test_an_answer_that_was_not_given_agrees_with_nothing() -> None:
    silent = Observation("q", "c", {name: WorkerResult(0.0, 1, "") for name in "abc"})
    worth = search([silent])
    assert all(program.enough <= 3 for program in worth.programs)
    asking = [program for program in worth.programs if program == Program(("a", "b"), 2, ("c",))]
    assert asking, "two silent workers count as two of one answer"


async def test_lessons_are_what_the_server_would_show_and_decode(tmp_path: Path) -> None:
    env = environment(tmp_path)
    prompts = env.prompts("train", 20, 0)
    observed, worth = await known(env)
    prices = worth.prices(1.0)
    dial = worth.dial(prices, 1.0)
    choices, posing = Choices(worth, dial, prices), Posing(near=Nearest(observed, 5))
    told = await lessons(env, prompts, choices, posing, 60, seed=1)
    assert told == await lessons(env, prompts, choices, posing, 60, seed=1)
    assert len(told) > 60
    assert {line for each in told for line in each.prompt.splitlines()[:1]} >= {
        f"steps 5 depth 2 round 1 quality {quality}" for quality in (0, QUALITY_MAX)
    }
    for each in told:
        assert set(json.loads(each.text)) == {"steps"}
        assert " " not in each.text
    assert any("round 2" in each.prompt and each.text == '{"steps":[]}' for each in told)
    assert any(" right" in each.prompt for each in told)
    assert any(" right" not in each.prompt for each in told)


async def test_no_training_question_is_an_error() -> None:
    with pytest.raises(ValueError, match="no training question"):
        await lessons(None, [], None, Posing(), 1, 0)  # type: ignore[arg-type]


async def test_a_smaller_pool_is_taught_the_best_program_over_its_workers(tmp_path: Path) -> None:
    _, worth = await known(environment(tmp_path))
    prices = worth.prices(1.0)
    choices = Choices(worth, worth.dial(prices, 1.0), prices)
    every = ("cheap", "mid", "dear")
    assert choices.best(QUALITY_MAX, SUMS, every) == worth.dial(prices, 1.0)[QUALITY_MAX][SUMS]
    pair = choices.best(QUALITY_MAX, WORDS, ("cheap", "dear"))
    assert {*pair.first, *pair.then} <= {"cheap", "dear"}
    assert choices.best(QUALITY_MAX, SUMS, ("cheap",)) == Program(("cheap",))
    others = {choices.other(5, SUMS, ("cheap", "mid"), 3, Random(seed)).first for seed in range(40)}
    assert len(others) == 3
    assert all(set(first) <= {"cheap", "mid"} for first in others)
    with pytest.raises(KeyError, match="no program"):
        choices.best(0, SUMS, ("stranger",))


async def test_lessons_of_drawn_pools_under_new_handles_share_their_beginning(tmp_path: Path) -> None:
    env = environment(tmp_path)
    observed, worth = await known(env)
    prices = worth.prices(1.0)
    choices = Choices(worth, worth.dial(prices, 1.0), prices)
    posing = Posing("brief", Nearest(observed, 5), (1, 3), redraw_handles=True, places=4)
    told = await lessons(env, env.prompts("train", 10, 0), choices, posing, 40, seed=2)
    groups = {number: [each for each in told if each.posed == number] for number in {each.posed for each in told}}
    assert len(groups) == 10
    for group in groups.values():
        assert len({each.prompt.partition("\nround ")[0] for each in group}) == 1
        handles = {line.partition(":")[0] for line in group[0].prompt.split("\n[user]")[0].splitlines()}
        assert all(step["worker"] in handles for each in group for step in json.loads(each.text)["steps"])
    assert len({each.prompt.partition(":")[0] for each in told}) > 5, "handles are drawn anew"


async def test_a_budget_has_a_place_of_its_own_between_two_prices(tmp_path: Path) -> None:
    _, worth = await known(environment(tmp_path))
    cheap, dear = worth.best(1e6), worth.best(0.0)
    budget = (worth.usd_of(cheap) + worth.usd_of(dear)) / 2
    within = worth.within(budget, cheap)
    assert worth.usd_of(cheap) < worth.usd_of(within) <= budget
    tables = worth.dial([1e6, 1e-3, 0.0], budget)
    assert tables[0] == cheap
    assert worth.usd_of(cheap) < worth.usd_of(tables[1]) <= budget
    assert tables[2] == dear, "the last place is the best at any price"
    assert worth.dial([1e6, 0.0, 0.0], 1.0)[1:] == [dear, dear]


def priced(scale: int) -> ProgramWorth:
    """Two workers, right by turns or together: a dear one on six of eight questions, a cheap one on four."""
    right = [(float(i % 2), float(i > 1)) for i in range(8)]
    return search(
        [
            Observation(
                "q",
                "c",
                {"cheap": WorkerResult(cheap, scale, f"{cheap}"), "dear": WorkerResult(dear, 40 * scale, f"{dear}")},
            )
            for cheap, dear in right
        ]
    )


def test_the_dial_spans_what_workers_cost_whatever_that_is() -> None:
    """The same choices at prices a thousand times as high."""
    cents, dollars = priced(10_000), priced(10_000_000)
    assert cents.prices(1.0) == pytest.approx([1000 * price for price in dollars.prices(1.0)])
    assert cents.dial(cents.prices(1.0), 1.0) == dollars.dial(dollars.prices(1.0), 1.0)
    prices = cents.prices(1.0)
    assert len(prices) == QUALITY_MAX + 1
    assert list(prices) == sorted(prices, reverse=True)
    assert cents.best(prices[0]) == {"c": Program(("cheap",))}
    assert prices[-1] == 0.0


def test_a_budget_stretches_the_dial_to_itself() -> None:
    worth = priced(1_000_000)
    assert worth.prices(0.005)[QUALITY_MAX - 1] > worth.prices(1.0)[QUALITY_MAX - 1]


def test_workers_without_a_price_have_a_dial_all_the_same() -> None:
    worth = priced(0)
    assert worth.prices(0.005) == DIAL
    assert len({frozenset(table.items()) for table in worth.dial(worth.prices(0.005), 0.005)}) == 1


@pytest.mark.parametrize("names", [("cheap",), ("cheap", "dear")])
def test_a_pool_of_one_or_two_has_a_dial(names: tuple[str, ...]) -> None:
    """Nobody is left to ask where two differ: a worker, or the vote of both."""
    results = {"cheap": WorkerResult(0.5, 1_000_000, "a"), "dear": WorkerResult(1.0, 9_000_000, "b")}
    worth = search([Observation("q", "c", {name: results[name] for name in names})] * 150)
    tables = worth.dial(worth.prices(0.005), 0.005)
    assert tables[0] == {"c": Program(("cheap",))}
    assert tables[QUALITY_MAX] == {"c": Program((names[-1],))}
    assert all(program.first and not program.then for program in worth.programs)


def test_workers_that_are_all_alike_leave_the_cheapest() -> None:
    found = [
        Observation(
            "q", "c", {name: WorkerResult(float(i % 2), cost * 10_000, str(i)) for cost, name in enumerate("cba", 1)}
        )
        for i in range(40)
    ]
    worth = search(found)
    assert worth.dial(worth.prices(0.005), 0.005) == [{"c": Program(("c",))}] * (QUALITY_MAX + 1)


def test_of_workers_that_agree_the_one_with_a_valid_answer_is_chosen() -> None:
    """Both give the same answer, and only one of them writes it so that it counts."""

    def asked(i: int) -> Observation:
        sure = i % 2 == 0
        results = {
            "loud": WorkerResult(float(not sure), 1, "7" if sure else "8"),
            "neat": WorkerResult(float(sure), 1, "7" if sure else "9"),
            "wise": WorkerResult(1.0, 100, "3"),
        }
        return Observation("q", "c", results)

    worth = search([asked(i) for i in range(40)])
    neat, loud = (Program(first, 2, ("wise",)) for first in (("neat", "loud"), ("loud", "neat")))
    assert worth.outcome[worth.index[neat]].sum() == 40
    assert worth.outcome[worth.index[loud]].sum() == 20
    assert worth.best(0.0)["c"] == neat
