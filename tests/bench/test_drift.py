"""What `bench.simulated.drift` and `bench.simulated.experience` count, on runs whose figures can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import yaml

from bench.simulated.drift import Changing, Plan, arguments, planned, pool_file
from bench.simulated.drift_figures import Called, Trial, curve, drawn, markdown, share, until_first, until_half
from bench.simulated.experience import figures, learned, table, truth, weights_now, weights_then
from gateway.core.loop.experience.likeness import NEAR
from gateway.core.pool.workers import PoolFile
from policy.simulators.arena.families.tasks import make_family_task
from policy.simulators.arena.workers import STANDARD
from tests.models.experience import nearness

OLD, SPARE, NEW = frozenset({"old"}), frozenset({"spare"}), frozenset({"new"})
BOTH = frozenset({"old", "spare"})


def trial(fallen: Sequence[Called], joined: Sequence[Called] = (SPARE,) * 20, seed: int = 0) -> Trial:
    return Trial("baton/rule", 0.1, seed, {"warm": [SPARE] * 30 + [OLD] * 30, "fallen": fallen, "joined": joined})


def test_a_share_is_of_rollouts_and_a_rollout_may_have_several_workers() -> None:
    assert share([OLD, SPARE, BOTH, SPARE], "old") == 0.5
    with pytest.raises(ValueError, match="no rollouts"):
        share([], "old")


def test_the_share_has_halved_when_a_window_of_ten_says_so() -> None:
    assert until_half(trial([OLD] * 20 + [SPARE] * 20)) == 26  # of the ten up to there four went to the old one
    assert until_half(trial([SPARE] * 20)) == 10
    assert until_half(trial([OLD, SPARE] * 20)) is None  # exactly half is not less
    assert until_half(trial([BOTH] * 40)) is None


def test_the_newcomer_leads_when_nobody_has_more() -> None:
    assert until_first(trial([OLD] * 20, [OLD] * 10 + [NEW] * 10)) == 16
    assert until_first(trial([OLD] * 20, [NEW] * 20)) == 10
    assert until_first(trial([OLD] * 20, [OLD] * 20)) is None


def test_the_table_has_medians_and_a_run_that_never_gets_there_is_endless() -> None:
    runs = [trial([SPARE] * 20), trial([OLD] * 20 + [SPARE] * 20, seed=1), trial([OLD] * 40, seed=2)]
    line = markdown(runs).splitlines()[2]
    assert "| `baton/rule` | 10% | 100% |" in line
    assert "26 (10, 26, –)" in line
    assert "never (–, –, –)" in line


def test_the_picture_shows_every_window_of_every_role() -> None:
    runs = [trial([SPARE] * 20), trial([OLD] * 20, seed=1), trial([OLD] * 20, seed=2)]
    found = curve(runs, "old")
    assert [at for at, _ in found] == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert [value for _, value in found] == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    picture = drawn(runs)
    assert picture.count("<polyline") == 3
    assert "baton/rule, exploring 10%" in picture


def test_every_run_has_its_own_workers_and_the_newcomer_is_in_one_pool_of_two() -> None:
    plans = planned(3)
    pools = PoolFile.model_validate(yaml.safe_load(pool_file(plans, "http://127.0.0.1:1")))
    assert len({worker.name for plan in plans for worker in plan.staff.values()}) == 5 * len(plans) == 30
    for plan in plans:
        new = plan.staff["new"].name
        assert new not in pools.pools[plan.name]
        assert set(pools.pools[f"{plan.name}-joined"]) == {*pools.pools[plan.name], new}


def test_a_worker_that_falls_keeps_its_name_and_gets_worse() -> None:
    plan: Plan = planned(1)[0]
    old = plan.staff["old"]
    speaker = Changing((old,), seed=0)
    tasks = [make_family_task("convert", seed) for seed in range(80)]

    def right() -> float:
        said = [speaker.say(old.name, {"messages": [{"role": "user", "content": task.text}]}) for task in tasks]
        texts = ["".join(one.choices[0]) for one in said]
        return sum(task.answer in text.split("Answer:")[1] for task, text in zip(tasks, texts, strict=True)) / len(
            tasks
        )

    assert right() > 0.8
    speaker.become(replace(old, skills={"units": 0.4}))
    assert right() < 0.6


@pytest.mark.parametrize("wrong", [["--seeds", "8"], ["--warm", "3"], ["--set", "PATH=x"], ["--set", "BATON_X"]])
def test_arguments_out_of_range_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(wrong)


# ---------------------------------------------------------------- bench.simulated.experience


def test_then_and_now_weigh_the_same_steps_differently() -> None:
    past = learned(40)
    similar = np.linspace(0, 1, 40)
    then, now = weights_then(similar, past), weights_now(similar, past)
    assert then.sum() == 40  # fewer than 50 steps a worker: all of them
    assert now[similar < (1 + NEAR) / 2 - 0.01].sum() == 0
    newest = [np.flatnonzero(past.workers == worker)[-1] for worker in range(len(STANDARD))]
    assert all(now[index] == 1.0 for index in newest if similar[index] > 0.9)
    own = np.flatnonzero(past.workers == past.workers[39])
    assert now[own[-2]] == pytest.approx(nearness(2 * similar[own[-2]] - 1))


def test_the_truth_is_what_one_worker_alone_can_do() -> None:
    assert truth(STANDARD[3], make_family_task("convert", 1)) == 0.996
    assert truth(STANDARD[0], make_family_task("convert", 1)) == 0.0
    assert truth(STANDARD[0], make_family_task("bill", 1)) == 0.0  # it takes two


def test_now_is_purer_and_nearer_to_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.simulated.experience.ASKED", 20)
    past = learned(200)
    (kind_then, shown_then, error_then), (kind_now, shown_now, error_now) = (
        figures(past, "train", weigh, 0.5) for weigh in (weights_then, weights_now)
    )
    assert kind_now > 3 * kind_then
    assert error_now < 0.6 * error_then
    assert shown_now < shown_then == 1.0
    assert table([60]).count("\n") == 7
