"""Judge a candidate version before it may serve: triage on logged rollouts, a held-out run, an injection set.

Exit status 0 passed (or forced), 4 refused or undecided. Finished work is kept in OUT.partial, and the same command
goes on from there.
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
from policy.gate.checks import GOOD
from policy.gate.logged import RolloutSource
from policy.gate.report import GateReport, write
from policy.gate.run import GateProgress, drop_partial, gate
from policy.gate.scene import GateScene, GateSpec, add_spec, given_of
from policy.spec import checked, read

REFUSED = 4


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("--candidate", type=Path, required=True, metavar="DIR", help="the policy directory to judge")
    parser.add_argument("--live", type=Path, metavar="DIR", help="the version that serves now (default: rule)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.json", help="the report; .md and .svg beside it"
    )
    parser.add_argument("--force", action="store_true", help="exit 0 all the same; the report says so, and why")
    parser.add_argument("--why", default="", metavar="TEXT", help="of --force: it stands in the report and the audit")
    parser.add_argument("--spec", type=Path, metavar="FILE.json", help="the scene as one file, instead of arguments")
    add_spec(parser)
    parser.add_argument(
        "--database-url",
        default="",
        metavar="URL",
        help="the log; - reads the URL from standard input",
    )
    add_filters(parser)


def scene_of(options: argparse.Namespace) -> GateScene:
    """The arguments, or the file of --spec, as one value. Raises ConfigError."""
    spec = read(GateSpec, options.spec) if options.spec else checked(GateSpec, given_of(options))
    return GateScene(out=options.out, logged=_source(options, spec.rows), **dict(spec))


def _source(options: argparse.Namespace, rows: Path | None) -> RolloutSource | None:
    if rows is not None and options.database_url:
        raise ConfigError("--logged and --database-url: give one of them")
    if rows is not None:
        return RolloutSource(export=rows)
    if not options.database_url:
        return None
    return RolloutSource(None, database_url_of(options), selection_of(options))


def run(options: argparse.Namespace) -> int:
    """Write the report; 0, 4 if it is refused or undecided, 130 if interrupted. Raises ConfigError and then writes
    nothing."""
    if options.force != bool(options.why.strip()):
        raise ConfigError("--force needs --why TEXT, and the other way round: a forced publication is audited")
    scene, progress = scene_of(options), GateProgress()
    try:
        report = asyncio.run(gate(options.candidate, options.live, scene, say=progress))
    except KeyboardInterrupt:
        progress.done(
            f"interrupted; what is finished is kept in {options.out}.partial: the same command goes on from there"
        )
        return 130
    except BatonError:
        PartialResults(options.out).drop_if_empty()
        raise
    if options.force:
        report = replace(report, forced=options.why.strip())
    files = write(report, options.out)
    drop_partial(options.out)
    sys.stdout.write(_summary(report) + "".join(f"{path}\n" for path in files))
    return 0 if report.passed or options.force else REFUSED


def _summary(report: GateReport) -> str:
    lines = [
        f"{check.verdict:<10}  {check.name:<32} {check.figure}"
        for check in report.checks
        if check.verdict not in GOOD or check.required
    ]
    end = report.verdict
    end += "" if report.passed else f": {', '.join(each.name for each in report.refusals)}"
    forced = f" (forced: {report.forced})" if report.forced is not None else ""
    return "\n".join([*lines, f"{report.candidate} beside {report.live}: {end}{forced}"]) + "\n"
