"""The conductor in the box: it is what its manifest says, it was trained on this prompt, and it plans."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import policy
from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.errors import VersionRefused
from policy.evaluate.arena import Conducted, evaluate, fixed, main, pools_for, random_plans
from policy.serve.manifest import read_complete
from policy.simulators.arena.families.tasks import make_task
from policy.simulators.arena.oracle import oracle_plan
from policy.simulators.arena.workers import STANDARD

SHIPPED = Path(policy.__file__).parent / "shipped" / "arena-3"
TASKS = 60
SEED = 5_000_000
FLOOR_OF_ORACLE = 0.75  # measured on 900 tasks: 0.86 and 0.85; 60 tasks are noisy


@pytest.fixture(scope="module")
def conductor() -> Iterator[Conducted]:
    made = Conducted(SHIPPED)
    yield made
    made.close()


def test_it_is_small_sealed_and_of_this_prompt() -> None:
    manifest = read_complete(SHIPPED).manifest
    assert manifest.prompt_hash == prompt_hash("compact")
    assert manifest.prompt_version == f"compact-{PROMPT_VERSION}"
    assert manifest.pools == ()
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 8 << 20


def test_it_came_of_the_loop_and_says_how() -> None:
    manifest = read_complete(SHIPPED).manifest
    assert (manifest.name, manifest.version, manifest.parent) == ("arena", "3", "arena@2")
    assert manifest.rollouts > 500
    assert manifest.config["env"] == "logged"
    assert manifest.config["settings"]["seed"] == manifest.seed
    assert len(manifest.revision) == 40
    assert not Path(manifest.config["export"]).is_absolute()
    assert manifest.rounds == 1


@pytest.mark.parametrize("name", ["standard", "held_out"])
def test_it_plans_better_than_any_fixed_worker(conductor: Conducted, name: str) -> None:
    tasks = [make_task(SEED + index, "held_out") for index in range(TASKS)]
    pools = pools_for(name, TASKS, SEED)
    run = partial(evaluate, name, pools, tasks)
    row = run("conductor", conductor)
    best = max(run(w.handle, fixed(w.handle)).right for w in pools[0] if w.skills)
    assert row.valid == 1.0
    assert row.right >= 1.3 * best
    assert row.right >= 1.3 * run("random", random_plans(0)).right
    assert row.right >= FLOOR_OF_ORACLE * run("oracle", oracle_plan).right


def test_another_order_of_the_pool_is_another_prompt_and_often_the_same_plan(conductor: Conducted) -> None:
    tasks = [make_task(SEED + index, "train") for index in range(30)]
    pool = pools_for("standard", 1, SEED)[0]
    once, again = ([conductor.plan(task.text, None, pool, 2) for task in tasks] for _ in range(2))
    assert sum(a == b for a, b in zip(once, again, strict=True)) >= 0.4 * len(tasks)


def test_a_double_question_is_planned_as_child_loops_that_are_planned_in_turn(conductor: Conducted) -> None:
    task = next(task for task in (make_task(index) for index in range(300)) if task.shape == "child")
    pool = pools_for("standard", 1, SEED)[0]
    plan = conductor.plan(task.text, None, pool, 2)
    assert "self" in [step["worker"] for step in plan["steps"]]


def test_weights_of_another_prompt_are_refused(tmp_path: Path) -> None:
    for file in SHIPPED.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace(prompt_hash("compact"), "0" * 64))
    with pytest.raises(VersionRefused, match="trained on prompt"):
        Conducted(tmp_path)


def test_the_command_prints_a_table_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert main(["--model", str(SHIPPED), "--tasks", "4", "--pools", "fresh", "--json", str(out)]) == 0
    assert "simulator figures" in capsys.readouterr().out
    assert '"policy": "oracle"' in out.read_text()
    assert main(["--model", str(tmp_path)]) == 2


def test_pools_of_the_evaluation_are_what_they_say() -> None:
    fresh = pools_for("fresh", 5, 1)
    assert len({tuple(worker.handle for worker in pool) for pool in fresh}) == 5
    assert {worker.name for worker in STANDARD} < {worker.name for worker in pools_for("standard", 1, 0)[0]}
    with pytest.raises(KeyError):
        pools_for("nowhere", 1, 0)
