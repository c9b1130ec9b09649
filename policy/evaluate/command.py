"""Compare policies on questions they were not tuned on: accuracy, dollars, calls, with intervals and baselines.

Nothing needs to be started by hand. Finished policies are kept in OUT.partial, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from policy.environments.sampling import SamplingProgress
from policy.evaluate.contest import PartialResults, ProgressPrinter, contest, facts_of
from policy.evaluate.entrants import Entrant, entrants, train_files
from policy.evaluate.figures import check_ends, curves, report
from policy.evaluate.options import EvaluationOptions, read
from policy.evaluate.options import add as add
from policy.evaluate.pages import SIMULATED, write
from policy.evaluate.stages import EvaluationScene


def run(arguments: argparse.Namespace) -> int:
    """Write the report; 0, or 130 when interrupted. Raises ConfigError, one line with the fix, and writes nothing."""
    options, say = read(arguments), ProgressPrinter()
    kept = PartialResults(options.out)
    try:
        done = asyncio.run(_evaluated(options, kept, say))
    except KeyboardInterrupt:
        say.done(f"interrupted; finished policies are kept in {kept.folder}: the same command goes on from there")
        return 130
    finally:
        kept.drop_if_empty()
    kept.drop()
    sys.stdout.write(done)
    return 0


async def _evaluated(options: EvaluationOptions, kept: PartialResults, say: ProgressPrinter) -> str:
    def progress(what: str, now: SamplingProgress) -> None:
        say.progress(what, now)

    scene = EvaluationScene(options, progress, train_files(options.policies))
    found = entrants(options.policies, scene.workers, options.usd_weights, options.qualities)
    check_ends(options, found)
    curves(options, found)  # a curve of unknown policies is refused before minutes are spent
    results = await contest(options, scene, found, kept, say)
    body = {
        "evaluated": facts_of(scene, options, len(scene.stage.prompts)),
        "tuned_on": [lessons.facts() for lessons in scene.learnt],
        "settings": _settings(options),
        **report(options, found, results),
    }
    kinds = {"oracle": "oracle", **{entrant.name: entrant.kind for entrant in found}}
    files = write(options.out, body, kinds, curves(options, found))
    return _summary(body, found) + "".join(f"{path}\n" for path in files)


def _settings(options: EvaluationOptions) -> dict[str, Any]:
    return {
        "policies": list(options.policies),
        "usd_weights": list(options.usd_weights),
        "qualities": list(options.qualities),
        "cost_range": list(options.cost_range),
        "rounds": options.rounds,
        "experience_neighbours": options.neighbours,
        "train_questions_max": options.train_n,
    }


def _summary(body: dict[str, Any], found: list[Entrant]) -> str:
    best, oracle = body["best_single"], body["oracle"]
    lines = [SIMULATED[body["evaluated"]["environment"]]]
    lines += [f"{'policy':<40} {'right':>6} {'95 %':>13} {'$ per 1,000':>12} {'calls':>6} {'valid':>6}"]
    ranked = sorted(body["policies"].items(), key=lambda item: (-item[1]["accuracy"], item[1]["usd_per_1k"]))
    for name, one in ranked:
        low, high = one["accuracy_ci"]
        lines.append(
            f"{name:<40} {one['accuracy']:>6.3f} {low:>6.3f}-{high:.3f} {one['usd_per_1k']:>12.3f} "
            f"{one['calls_per_task']:>6.2f} {one['parse_rate']:>6.3f}"
        )
    single = "" if best is None else f"best single {best}; "
    lines.append(f"{single}oracle {oracle['accuracy']:.3f} at ${oracle['usd_per_1k']:.3f}")
    return "\n".join(lines) + "\n"
