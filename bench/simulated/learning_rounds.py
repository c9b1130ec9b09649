"""Rounds of learning from the log alone, in this process: what `make demo-learning` does without the servers.

    python -m bench.simulated.learning_rounds --seeds 3 --rounds 6 --rollouts 512 --out rounds.json

Each round the policy as it is plans `--rollouts` new questions at temperature 1, once each; the records, as the gateway
would log them, are all that `train --env logged` then sees (profile `logged`; `--set` changes it). The pool is the
arena's eight workers with nothing said of what they are good at, and no experience is shown, so that what is learnt is
in the weights. Figures are greedy plans on questions that never train: in phrasings that no training saw, and in those
of training. **A simulator's figures** (docs/arena.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.core.pool.workers import MODEL_KINDS
from gateway.files import write_atomic
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from policy.environments.arena import ArenaEnvironment
from policy.environments.base import Episode, Prompt, Split, rng_for
from policy.environments.executor import CAPS, FREE, Executor
from policy.environments.sampling import sample
from policy.evaluate import plot
from policy.evaluate.entrants import RULE
from policy.recipes.stack import ROOT
from policy.recipes.traffic import PolicyScore as Shown
from policy.statistics.baselines import fixed

if TYPE_CHECKING:
    from policy.train.run.initial import Initial
    from policy.train.settings import Settings
    from policy.train.sources.conductor import BatchConductor

SHIPPED = ROOT / "policy" / "shipped" / "arena-3"
NO_TORCH = "learning needs torch: `scripts/install train` (or `make train-env`) puts it into .venv"
WALL_S = 3_600.0  # many episodes are decoded in parallel, and no client waits
AT_ONCE = 256
COLD = 1e-6  # a temperature at which a sampler that divides by it takes the likeliest token
TASKS_APART = 1_000_000  # between the seeds of two rounds' questions


@dataclass(frozen=True, slots=True)
class Score:
    """The results of a policy on one set of questions."""

    accuracy: float
    usd_per_1k: float
    steps: float

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> Score:
        """Return the mean of each figure. Raises StatisticsError if there are none."""
        mean = statistics.fmean
        return cls(
            mean(each.outcome for each in episodes),
            mean(each.cost_nano for each in episodes) / 1e6,
            mean(each.steps for each in episodes),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """After so many rounds: the scores (`train`: at the first and the last alone), what its traffic was (None before
    the first), and processor seconds so far, scoring left out."""

    number: int
    held_out: Score
    train: Score | None
    traffic: Score | None
    nats: float | None  # −log-prob of a sampled plan: how much is explored
    learnt: dict[str, Any]
    cpu_s: float


class Questions:
    """The arena's workers untold, and sets of questions that do not overlap."""

    def __init__(self) -> None:
        executor = Executor(caps=replace(CAPS, wall_s=WALL_S), rounds=1)
        self.environment = ArenaEnvironment(staff="untold", executor=executor)

    def of(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """`n` questions, each with its pool in an order of its own."""
        return self.environment.prompts(split, n, seed)

    async def ask(self, work: Sequence[tuple[Prompt, Any]]) -> list[Episode]:
        """Plan and run each question once."""
        episodes = await sample(self.environment, [(prompt, [one]) for prompt, one in work], concurrency=AT_ONCE)
        return episodes.episodes


class Learner:
    """The weights of one seed, how they plan, and how they are trained."""

    def __init__(self, seed: int, changes: Sequence[str], questions: Questions, init: Path) -> None:
        import torch

        from policy.train.run.initial import initial_weights
        from policy.train.settings import settings_of
        from policy.train.sources.conductor import BatchConductor, Sampler
        from policy.train.spec import TrainSpec
        from policy.train.step.masks import Masks

        self.seed = seed
        self.settings: Settings = settings_of("logged", changes)
        torch.set_num_threads(self.settings.threads)
        self.initial: Initial = initial_weights(TrainSpec(env="logged", init=init, settings=self.settings))
        self.masks = Masks(self.initial.tokens)
        self._questions = questions
        weights, tokens = self.initial.weights, self.initial.tokens
        sampler = Sampler(weights, tokens, self.masks, self.settings.tokens_max)
        self._conductor: BatchConductor = BatchConductor(sampler, tokens, self.masks, weights.context, "rounds@1")

    def plan(self, prompts: Sequence[Prompt], temperature: float, key: str) -> list[Episode]:
        """Sample a plan for each question at a temperature; equal keys draw equal numbers."""
        tokens_max = self.settings.plan_tokens
        profile = self.initial.profile
        asking = ConductorSettings(profile, FREE, WALL_S, tokens_max, temperature, trained=True)
        planners = [ConductorPlanner(self._conductor.of(self.seed, key, prompt.id), asking) for prompt in prompts]
        return asyncio.run(self._questions.ask(list(zip(prompts, planners, strict=True))))

    def learn(self, episodes: Sequence[Episode], number: int) -> dict[str, Any]:
        """`train --env logged` on these rollouts; the last pass's metrics."""
        from policy.environments.base import Spend
        from policy.train.run.loop import Trainer
        from policy.train.sources.logged import LoggedSource, TrainableRows
        from policy.train.sources.sampled import reward_of
        from policy.train.step.rows import rows_of

        rows = []
        for episode in map(self._judged, episodes):
            record = episode.record
            rows += rows_of(episode, reward_of(episode, self.settings.reward), record.id, record.task_type or "")
        source = LoggedSource(TrainableRows(rows, len(episodes), []), "rounds@1")
        settings = self.settings.model_copy(update={"seed": rng_for(self.seed, number).randrange(2**31)})
        with tempfile.TemporaryDirectory(prefix="baton-rounds-") as work:
            trainer = Trainer(self.initial.weights, self.masks, source, settings, Spend(), Path(work), "rounds")
            asyncio.run(trainer.run(False, asyncio.Event(), lambda _: None))
            last = (Path(work) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return dict(json.loads(last))

    def _judged(self, episode: Episode) -> Episode:
        """Add to the episode what the end message of a served conductor holds."""
        for loop in (episode.record, *episode.children):
            for planned in loop.rounds:
                planned.prompt_token_ids = planned.prompt_token_ids or list(
                    self._conductor.prompt_ids(planned.messages)
                )
        return episode


def rounds_of(
    learner: Learner, questions: Questions, rounds: int, rollouts: int, held: Sequence[Prompt], train: Sequence[Prompt]
) -> list[Round]:
    """Return the curve of one seed; its first entry is the cold start."""

    def scored(number: int, cpu_s: float, traffic: Sequence[Episode], learnt: dict[str, Any]) -> Round:
        held_out = Score.of(learner.plan(held, COLD, "score"))
        trained = Score.of(learner.plan(train, COLD, "score")) if number in (0, rounds) else None
        nats = statistics.fmean(-sum(each.record.rounds[0].plan_logprobs) for each in traffic) if traffic else None
        score = Score.of(traffic) if traffic else None
        return Round(number, held_out, trained, score, nats, learnt, cpu_s)

    curve, cpu_s = [scored(0, 0.0, (), {})], 0.0
    say(learner.seed, curve[0])
    for number in range(1, rounds + 1):
        began_s = time.process_time()
        asked = questions.of("train", rollouts, TASKS_APART * (learner.seed + 1) + number)
        traffic = learner.plan(asked, 1.0, f"traffic {number}")
        learnt = learner.learn(traffic, number)
        cpu_s += time.process_time() - began_s
        curve.append(scored(number, cpu_s, traffic, learnt))
        say(learner.seed, curve[-1])
    return curve


def say(seed: int, one: Round) -> None:
    """A line of progress."""
    traffic = f"traffic {one.traffic.accuracy:.1%}, {one.nats:.2f} nats a plan; " if one.traffic else ""
    phrasings = f", train phrasings {one.train.accuracy:.1%}" if one.train else ""
    print(
        f"seed {seed} round {one.number}: {traffic}held out {one.held_out.accuracy:.1%} at "
        f"${one.held_out.usd_per_1k:.3f} per 1,000{phrasings}; {one.cpu_s:.0f} CPU s",
        file=sys.stderr,
        flush=True,
    )


def baselines(questions: Questions, prompts: Sequence[Prompt]) -> dict[str, Score]:
    """Every fixed worker, the rule and the oracle on the same questions."""
    workers = sorted({spec.name for spec in prompts[0].pool if spec.kind in MODEL_KINDS})
    named = {f"fixed:{name}": partial(_always, fixed(name)) for name in workers}
    planners: dict[str, Any] = {**named, "rule": partial(_always, RULE), "oracle": questions.environment.oracle}
    scores = {}
    for name, planner in planners.items():
        work = [(prompt, planner(prompt)) for prompt in prompts]
        scores[name] = Score.of(asyncio.run(questions.ask(work)))
    return scores


def _always(planner: Any, prompt: Prompt) -> Any:
    return planner


def table(curves: Sequence[Sequence[Round]], base: dict[str, Score]) -> str:
    """Medians over the seeds, and the baselines, as Markdown."""
    lines = [
        "| rounds | held out | train phrasings | $ per 1,000 | nats a plan | CPU s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for number in range(len(curves[0])):
        at = [curve[number] for curve in curves]
        held, spread = _median(one.held_out.accuracy for one in at), [one.held_out.accuracy for one in at]
        nats = [one.nats for one in at if one.nats is not None]
        trained = [one.train.accuracy for one in at if one.train is not None]
        lines.append(
            f"| {number} | {held:.1%} ({min(spread):.1%}–{max(spread):.1%}) "
            f"| {f'{_median(trained):.1%}' if trained else ''} "
            f"| {_median(one.held_out.usd_per_1k for one in at):.3f} "
            f"| {f'{_median(nats):.2f}' if nats else '–'} | {_median(one.cpu_s for one in at):.0f} |"
        )
    for name, score in sorted(base.items(), key=lambda item: -item[1].accuracy):
        lines.append(f"| {name} | {score.accuracy:.1%} | | {score.usd_per_1k:.3f} | | |")
    return "\n".join(lines)


def drawn(curves: Sequence[Sequence[Round]], base: dict[str, Score]) -> str:
    """The medians as a picture, with the seeds' lowest and highest; of fixed workers the best alone."""
    held = [[one.held_out for one in at] for at in zip(*curves, strict=True)]
    curve = [_shown([one.accuracy for one in at], _median(one.usd_per_1k for one in at)) for at in held]
    fixed_best = max((name for name in base if name.startswith("fixed:")), key=lambda name: base[name].accuracy)
    others = {name: one for name, one in base.items() if not name.startswith("fixed:") or name == fixed_best}
    title = f"Rounds of learning from the log alone: medians of {len(curves)} seeds"
    levels = {name: _shown([one.accuracy], one.usd_per_1k) for name, one in others.items()}
    return plot.rounds(curve, levels, title, bars="the lowest and the highest")


def _shown(accuracies: Sequence[float], usd_per_1k: float) -> Shown:
    return Shown(len(accuracies), _median(accuracies), min(accuracies), max(accuracies), usd_per_1k)


def _median(values: Any) -> float:
    return float(statistics.median(values))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 without torch, 130 after Ctrl-C with what is finished written."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated.learning_rounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--init", type=Path, default=SHIPPED, help="policy directory to begin with")
    parser.add_argument("--seeds", type=int, default=3, help="so many, from --seed on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rollouts", type=int, default=512, help="a round")
    parser.add_argument("--n", type=int, default=300, help="questions of each kind to score on")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the trainer")
    parser.add_argument("--out", type=Path, help="the figures as JSON, and a picture beside it")
    options = parser.parse_args(argv)
    if find_spec("torch") is None:
        print(NO_TORCH, file=sys.stderr)
        return 2
    questions, curves = Questions(), []
    held, train = questions.of("validation", options.n, 999), questions.of("train", options.n, 998)
    try:
        for seed in range(options.seed, options.seed + options.seeds):
            learner = Learner(seed, options.set, questions, options.init)
            curves.append(rounds_of(learner, questions, options.rounds, options.rollouts, held, train))
    except KeyboardInterrupt:
        pass
    base = baselines(questions, held) if curves else {}
    if options.out and curves:
        body: dict[str, Any] = {"about": {name: str(value) for name, value in vars(options).items()}}
        body |= {"seeds": [[asdict(one) for one in curve] for curve in curves]}
        body |= {"baselines": {name: asdict(score) for name, score in base.items()}}
        write_atomic(options.out, json.dumps(body, indent=2) + "\n")
        write_atomic(options.out.with_suffix(".svg"), drawn(curves, base))
    print(table(curves, base) if curves else "no seed was finished")
    return 0 if len(curves) == options.seeds else 130


if __name__ == "__main__":
    sys.exit(main())
