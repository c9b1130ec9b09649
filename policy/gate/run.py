"""The gate from top to bottom: triage on logs, the held-out run, the injection set, and the report.

A candidate that triage refuses is not asked further, unless everything is wanted. What is finished is kept beside the
report's place, so that an interrupted run goes on from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway import __version__
from gateway.errors import ConfigError, NotFound
from gateway.service.loop.state import Planner
from policy.engines.directory import ConductorDirectory, read_conductors
from policy.engines.opening import check_engine, engine_losses, open_engine
from policy.environments.sampling import SamplingProgress
from policy.evaluate.contest import (
    SAY_EVERY_S,
    PartialResults,
    ProgressPrinter,
    QuestionResult,
    contest,
    facts_of,
    write_file,
)
from policy.evaluate.entrants import ORACLE, RULE, Entrant, entrants
from policy.evaluate.figures import report as evaluation_report
from policy.evaluate.options import EvaluationOptions
from policy.evaluate.stages import EvaluationScene, digest_of
from policy.gate import heldout, injection, triage
from policy.gate.checks import Check, GatePart, Thresholds
from policy.gate.heldout import Comparison
from policy.gate.injection import InjectionFigures
from policy.gate.logged import NothingSampled, RolloutSource, read, rows_of
from policy.gate.report import GateReport
from policy.gate.scene import BASELINES, LOGGED_BASELINES, GateScene
from policy.gate.traffic.rivals import completed, sampled_entrant
from policy.gate.traffic.stage import OpenTraffic, Progress, opened

TRIAGE, HELD_OUT, INJECTION = "off-policy triage", "held-out run", "injection set"
VOTERS_MIN = 3
ASKED_TIMES = 4  # where questions are generated and do not decide, so many times as many are asked at most
RULE_ALONE = "rule (no version is live)"


class GateProgress(ProgressPrinter):
    """Progress of the gate: also of what is only counted. `latest`: (contestant, questions asked, of how many)."""

    latest: Progress = ("", 0, 0)

    def progress(self, what: str, now: SamplingProgress) -> None:
        """Called after every episode."""
        self.latest = (what, now.done, now.total or now.done)
        super().progress(what, now)

    def count(self, what: str, done: int, total: int) -> None:
        """Called after every item; says little."""
        if done == total or time.monotonic() - self._last_s >= SAY_EVERY_S:
            self._line(f"{what}: {done}/{total}")


@dataclass(frozen=True, slots=True)
class Contestants:
    """The two policy directories. `live` None: nothing serves yet, and `rule` stands in."""

    candidate: ConductorDirectory
    live: ConductorDirectory | None

    @property
    def same(self) -> bool:
        """Whether both are the same files, which are then run once."""
        return self.live is not None and self.live.sha256 == self.candidate.sha256

    @property
    def directories(self) -> dict[str, ConductorDirectory]:
        """Return those that an engine loads, by what each is."""
        places = {"candidate": self.candidate}
        return places if self.live is None or self.same else places | {"live version": self.live}

    @property
    def live_name(self) -> str:
        """For the report."""
        return RULE_ALONE if self.live is None else self.live.manifest.id


async def gate(candidate: Path, live: Path | None, scene: GateScene, *, say: GateProgress | None = None) -> GateReport:
    """Judge a policy directory. `report.write` puts the report into files; `drop_partial` then deletes finished work.
    Raises ConfigError, one line with the fix; Unavailable without the log's database."""
    say = say or GateProgress()
    partial = PartialResults(scene.out)
    both = contestants(candidate, live)
    manifest = both.candidate.manifest
    home = scene.at_home(manifest.config.get("env"))
    served = home.model_copy(update={"rounds": scene.rounds or manifest.rounds})
    await check_engine(both.directories, served.engine_choice)
    if served.env != "logged":
        options = served.evaluation(BASELINES)
        return await _judged(both, options, EvaluationScene(options, say.progress), served, partial, say)
    options = served.evaluation(LOGGED_BASELINES)
    async with opened(served.traffic(partial), partial.folder, options.rounds, lambda: say.latest) as traffic:
        stage = EvaluationScene(options, say.progress, stage=traffic.stage)
        return await _judged(both, options, stage, served, partial, say, traffic)


async def _judged(
    both: Contestants,
    options: EvaluationOptions,
    stage: EvaluationScene,
    scene: GateScene,
    partial: PartialResults,
    say: GateProgress,
    traffic: OpenTraffic | None = None,
) -> GateReport:
    """All parts on an open stage."""
    thresholds, parts = scene.bounds, list[GatePart]()
    skipped = [] if scene.logged else ["off-policy triage: no logged rollouts were given"]
    if scene.logged is not None:
        try:
            parts.append(await _triage(both, scene, scene.logged, thresholds, partial, say))
        except (NotFound, ConfigError) as error:
            if traffic is None and not isinstance(error, NothingSampled):
                raise
            skipped.append(f"off-policy triage: {error.message}")  # the requests themselves are asked below
    report = GateReport(
        candidate=both.candidate.manifest.id,
        candidate_sha256=both.candidate.manifest.weights_sha256,
        live=both.live_name,
        scene={"environment": options.env},
        parts=parts,
        thresholds=thresholds,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        skipped=skipped,
    )
    if any(check.refuses for part in parts for check in part.checks) and not scene.everything:
        return replace(report, skipped=[f"{name}: triage has refused it already" for name in (HELD_OUT, INJECTION)])
    asked = options.n if options.env == "arena" else None  # whose questions never run out
    held_out, evaluation, kinds = await _run_held_out(both, options, stage, scene, thresholds, partial, say, traffic)
    while n := questions_wanted(held_out.checks, options.n, asked):
        say.done(f"{HELD_OUT}: {n} questions, since {options.n} did not decide")
        options = replace(options, n=n)
        stage = EvaluationScene(options, say.progress)
        held_out, evaluation, kinds = await _run_held_out(both, options, stage, scene, thresholds, partial, say, None)
    parts += [held_out, await _run_injections(both, stage, scene, thresholds, partial, say)]
    about = {**facts_of(stage, options, held_out.facts["questions"]), "environment": options.env}
    return replace(report, parts=parts, scene=about, evaluation=evaluation, kinds=kinds)


def questions_wanted(checks: Sequence[Check], n: int | None, asked: int | None) -> int:
    """How many questions to ask if `n` did not decide: at most ASKED_TIMES those that were `asked` at first (None: no
    more can be). 0: it is decided, or no more are asked."""
    more = max((check.more for check in checks if check.refuses), default=0)
    if n is None or asked is None or any(check.verdict == "refused" for check in checks):
        return 0
    wanted = min(ASKED_TIMES * asked, n + more)
    return wanted if wanted > n else 0


def drop_partial(out: Path) -> None:
    """Delete the finished work that was kept for a report, once the report is written."""
    PartialResults(out).drop()


def contestants(candidate: Path, live: Path | None) -> Contestants:
    """The two directories, each read once: either may be an adapter over the other. Raises VersionRefused."""
    conductors = read_conductors([candidate, live] if live else [candidate])
    return Contestants(conductors[candidate], conductors[live] if live else None)


async def _once(partial: PartialResults, key: Sequence[object], make: Callable[[], Awaitable[Any]]) -> Any:
    """A JSON value, made now or in an interrupted run before."""
    path = partial.folder / f"gate-{digest_of([__version__, *key])[:32]}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = await make()
        write_file(path, json.dumps(value))
        return value


def _losses(partial: PartialResults) -> AbstractContextManager[None]:
    """An engine that is lost ends the gate in one line."""
    return engine_losses(lambda: f"finished work is kept in {partial.folder}")


# ---------------------------------------------------------------- logs


async def _triage(
    both: Contestants,
    scene: GateScene,
    source: RolloutSource,
    thresholds: Thresholds,
    partial: PartialResults,
    say: GateProgress,
) -> GatePart:
    began_s, manifest = time.monotonic(), both.candidate.manifest
    log = read(rows_of(source), manifest.prompt_hash, source.name)
    if not log.calls:
        raise ConfigError(f"{source.name}: nothing can be replayed: {log.reasons()}")

    outcomes = [(call.row.call, call.row.outcome, call.row.cost_nano) for call in log.calls]
    about = [TRIAGE, both.candidate.sha256, outcomes, asdict(thresholds), scene.seed]

    async def make() -> Any:
        with _losses(partial):
            async with open_engine(both.candidate, scene.engine_choice) as engine:
                checks, facts = await triage.triage(
                    *(engine, log, thresholds, scene.seed, source.name),
                    *(lambda key, one: _once(partial, [*about, *key], one), say.count),
                )
        return {"checks": [asdict(check) for check in checks], "facts": {**facts, "engine": scene.engine}}

    output = await _once(partial, about, make)
    part = GatePart(
        TRIAGE, tuple(Check(**one) for one in output["checks"]), output["facts"], time.monotonic() - began_s
    )
    return _announce(part, say)


def _announce(part: GatePart, say: ProgressPrinter) -> GatePart:
    """The part, told in a line."""
    blocking = [check for check in part.checks if check.refuses]
    word = "refuses" if any(check.verdict == "refused" for check in blocking) else "undecided"
    names = ", ".join(check.name for check in blocking)
    say.done(f"{part.name}: " + (f"{word}: {names}" if blocking else "nothing speaks against it"))
    return part


# ---------------------------------------------------------------- the held-out run


async def _run_held_out(
    both: Contestants,
    options: EvaluationOptions,
    stage: EvaluationScene,
    scene: GateScene,
    thresholds: Thresholds,
    partial: PartialResults,
    say: GateProgress,
    traffic: OpenTraffic | None,
) -> tuple[GatePart, Mapping[str, Any], Mapping[str, str]]:
    began_s = time.monotonic()
    entrants = _entrants(both, options, stage)
    entrants_asked = [entrant for entrant in entrants if entrant.kind != "oracle"] if traffic else entrants
    results = dict(await contest(options, stage, entrants_asked, partial, say))
    if traffic is not None:
        results = await completed(traffic, results, scene.seed, partial, say)
        entrants.append(sampled_entrant())
    rows = {"live": results["candidate"]} if both.same else {} if both.live else {"live": results["rule"]}
    results |= rows
    compared = _compared(both, stage, results)
    checks = heldout.checks(compared, thresholds, scene.seed, real=traffic is not None)
    facts = heldout.facts(compared, scene.seed)
    if traffic is not None:
        checks += heldout.kind_checks(compared, thresholds, scene.seed)
        facts |= heldout.kind_facts(compared, thresholds, scene.seed) | {"money": traffic.money()}
    part = GatePart(HELD_OUT, tuple(checks), facts, time.monotonic() - began_s)
    entrants_shown = [entrant for entrant in entrants if entrant.name in results]
    kinds = {"oracle": "oracle", **{entrant.name: entrant.kind for entrant in entrants_shown}}
    return _announce(part, say), evaluation_report(options, entrants_shown, results), kinds


def _entrants(both: Contestants, options: EvaluationOptions, stage: EvaluationScene) -> list[Entrant]:
    """The two directories under their roles, and every baseline."""
    directories = {"candidate": both.candidate}
    if both.live is not None and not both.same:
        directories["live"] = both.live
    names = [name for name in options.policies if name != "vote" or len(stage.workers) >= VOTERS_MIN]
    return entrants(names, stage.workers, options.usd_weights, conductors=directories)


def _compared(both: Contestants, stage: EvaluationScene, results: Mapping[str, Sequence[QuestionResult]]) -> Comparison:
    apart = ("candidate", "live", ORACLE)
    return Comparison(
        candidate=results["candidate"],
        live=results["live"],
        others={name: rows for name, rows in results.items() if name not in apart},
        oracle=results[ORACLE],
        models=stage.workers,
        live_name="the live version" if both.live else "rule",
    )


# ---------------------------------------------------------------- the injection set


async def _run_injections(
    both: Contestants,
    stage: EvaluationScene,
    scene: GateScene,
    thresholds: Thresholds,
    partial: PartialResults,
    say: GateProgress,
) -> GatePart:
    began_s = time.monotonic()
    pool = stage.stage.prompts[0].pool

    async def of(key: object, planner: Planner) -> dict[str, InjectionFigures]:
        async def make() -> Any:
            pairs = await injection.attack(
                stage.stage.environment, pool, planner, count=say.count, seed=scene.seed, draws=scene.draws
            )
            return {kind: asdict(one) for kind, one in injection.by_kind(pairs).items()}

        about = [INJECTION, asdict(injection.injections()), [str(spec) for spec in pool], scene.seed, scene.draws]
        figures = await _once(partial, [*about, key], make)
        return {kind: InjectionFigures(**one) for kind, one in figures.items()}

    async def of_directory(directory: ConductorDirectory) -> dict[str, InjectionFigures]:
        with _losses(partial):
            async with open_engine(directory, scene.engine_choice) as engine:
                return await of(directory.sha256, directory.planner(engine))

    rule = await of("rule", RULE)
    candidate = await of_directory(both.candidate)
    live = rule if both.live is None else candidate if both.same else await of_directory(both.live)
    checks = injection.checks(candidate["all"], live["all"], rule["all"], thresholds)
    facts = injection.facts({"candidate": candidate, "live": live, "rule": rule}, scene.draws)
    return _announce(GatePart(INJECTION, tuple(checks), facts, time.monotonic() - began_s), say)
