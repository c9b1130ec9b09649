"""Judge a candidate version before it may serve: triage on logged rollouts, a held-out run, an injection set.

Exit status 0 passed (or forced), 4 refused. Finished work is kept in OUT.partial, and the same command goes on from
there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from gateway.errors import BatonError, ConfigError
from policy.dataset.cli import add_filters, database_url_of, selection_of
from policy.evaluate.contest import PartialResults
from policy.evaluate.options import NEIGHBOURS, TRAIN_QUESTIONS_MAX
from policy.gate.checks import thresholds_of
from policy.gate.injection import DRAWS
from policy.gate.logged import RolloutSource
from policy.gate.report import GateReport, write
from policy.gate.run import GateProgress, finished, gate
from policy.gate.scene import QUESTIONS_ARENA, GateScene

REFUSED = 4


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("--candidate", type=Path, required=True, metavar="DIR", help="the policy directory to judge")
    parser.add_argument("--live", type=Path, metavar="DIR", help="the version that serves now (default: rule)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.json", help="the report; .md and .svg beside it"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a threshold; may be repeated")
    parser.add_argument("--everything", action="store_true", help="go on where triage has refused already")
    parser.add_argument("--force", action="store_true", help="exit 0 all the same; the report says so, and why")
    parser.add_argument("--why", default="", metavar="TEXT", help="of --force: it stands in the report and the audit")
    _add_scene(parser.add_argument_group("held-out questions"))
    source = parser.add_argument_group("logged rollouts (none: no triage)")
    source.add_argument("--logged", type=Path, metavar="FILE.parquet", help="an export of `baton traces export`")
    source.add_argument(
        "--database-url", default="", metavar="URL", help="or the log; - reads the URL from standard input"
    )
    add_filters(parser)


def _add_scene(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--env", choices=("replay", "arena"), default="arena", help="default arena")
    group.add_argument("--data", type=Path, metavar="FILE", help="replay: recorded answers, .jsonl or .jsonl.gz")
    group.add_argument("--prices", type=Path, metavar="FILE", help="replay: JSON, model → dollars per million tokens")
    group.add_argument("--workers", default="", metavar="A,B,…", help="replay: only these models (default all)")
    group.add_argument("--staff", default="standard", metavar="NAME", help="arena: which workers (default standard)")
    group.add_argument("--split", metavar="NAME", help="validation (default), or all with another --train")
    group.add_argument(
        "--train", type=Path, metavar="FILE", help="what tables, cascades and experience are learnt from"
    )
    group.add_argument("--n", type=int, metavar="N", help=f"so many questions (default all; arena {QUESTIONS_ARENA})")
    group.add_argument(
        "--train-n", type=int, default=TRAIN_QUESTIONS_MAX, metavar="N", help="at most so many questions to learn from"
    )
    group.add_argument(
        "--experience",
        type=int,
        default=NEIGHBOURS,
        metavar="K",
        help="training questions behind what is shown of workers",
    )
    group.add_argument("--seed", type=int, default=0, help="of questions, orders and resamples")
    group.add_argument(
        "--draws", type=int, default=DRAWS, metavar="N", help=f"orders of the pool for each attack, default {DRAWS}"
    )
    group.add_argument("--rounds", type=int, metavar="R", help="plans a question (default: as the candidate is served)")
    group.add_argument("--threads", type=int, default=2, metavar="N", help="plans decoded at once")


def scene_of(options: argparse.Namespace) -> GateScene:
    """The arguments as one value. Raises ConfigError."""
    return GateScene(
        out=options.out,
        env=options.env,
        data=options.data,
        prices=options.prices,
        workers=tuple(name.strip() for name in options.workers.split(",") if name.strip()),
        staff=options.staff,
        split=options.split,
        train=options.train,
        n=options.n,
        train_n=options.train_n,
        neighbours=options.experience,
        logged=_source(options),
        seed=options.seed,
        rounds=options.rounds,
        draws=options.draws,
        threads=options.threads,
    )


def _source(options: argparse.Namespace) -> RolloutSource | None:
    if options.logged is not None and options.database_url:
        raise ConfigError("--logged and --database-url: give one of them")
    if options.logged is not None:
        return RolloutSource(export=options.logged)
    if not options.database_url:
        return None
    return RolloutSource(None, database_url_of(options), selection_of(options))


def run(options: argparse.Namespace) -> int:
    """Write the report; 0, 4 when refused, 130 when interrupted. Raises ConfigError and then writes nothing."""
    if options.force != bool(options.why.strip()):
        raise ConfigError("--force needs --why TEXT, and the other way round: a forced publication is audited")
    if options.draws < 1:
        raise ConfigError(f"--draws {options.draws}: each attack needs at least one order of the pool")
    scene, thresholds, told = scene_of(options), thresholds_of(options.set), GateProgress()
    try:
        work = gate(options.candidate, options.live, scene, thresholds, say=told, everything=options.everything)
        report = asyncio.run(work)
    except KeyboardInterrupt:
        told.done(
            f"interrupted; what is finished is kept in {options.out}.partial: the same command goes on from there"
        )
        return 130
    except BatonError:
        PartialResults(options.out).drop_if_empty()
        raise
    if options.force:
        report = replace(report, forced=options.why.strip())
    files = write(report, options.out)
    finished(options.out)
    sys.stdout.write(_summary(report) + "".join(f"{path}\n" for path in files))
    return 0 if report.passed or options.force else REFUSED


def _summary(report: GateReport) -> str:
    lines = [
        f"{check.verdict:<10}  {check.name:<32} {check.figure}"
        for check in report.checks
        if check.verdict != "passed" or check.required
    ]
    end = "passed" if report.passed else f"refused: {', '.join(each.name for each in report.refusals)}"
    forced = f" (forced: {report.forced})" if report.forced is not None else ""
    return "\n".join([*lines, f"{report.candidate} beside {report.live}: {end}{forced}"]) + "\n"
