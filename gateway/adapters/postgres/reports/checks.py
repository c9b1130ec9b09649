"""What judges and checkers said beside outcomes of the same replies: how far they agree with people, and how often they
err."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.credit import BATCH, TIMEOUT_S, finished_steps, judgements_of
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.sources import is_posted
from gateway.adapters.postgres.tables import outcomes, steps
from gateway.core.loop.evidence.calibration import Calibration, calibrated
from gateway.core.loop.evidence.credit import RIGHT_MIN, JudgedLoop, credited
from gateway.core.loop.evidence.sources import PERSON, VERIFIER, is_explicit
from gateway.core.loop.replies.errors import VERIFY, CheckerErrors, checker_errors
from gateway.core.loop.replies.judging import read_judgement
from gateway.core.policies.grading import SOURCE

JUDGED_MAX = 20_000  # requests with a person's judgement, or with any, that are looked at, the latest ones
CHECKED_MAX = 2_000  # of them, requests with a verdict that errors of checkers are counted over, the latest ones


class _Verdict(NamedTuple):
    """A verdict on the reply of step `of`, logged with step `at`. `accept`: None where it could not be read."""

    at: int
    of: int
    checker: str
    by: str
    accept: bool | None


async def judge_calibrations(engine: AsyncEngine) -> list[Calibration]:
    """How far judges and graders agree with people, over the latest requests that people judged. Raises Unavailable."""
    o = outcomes.c
    of_people = select(o.rollout_id).where(o.source == PERSON, o.value.is_not(None)).distinct()
    pairs: list[tuple[str, bool, bool]] = []
    async with transaction(engine, TIMEOUT_S) as connection:
        ids = list(await connection.scalars(of_people.order_by(o.rollout_id.desc()).limit(JUDGED_MAX)))
        for begin in range(0, len(ids), BATCH):
            pairs += await connection.run_sync(_judged_by_both, [str(each) for each in ids[begin : begin + BATCH]])
    return calibrated(pairs)


def _judged_by_both(connection: Connection, ids: Sequence[str]) -> list[tuple[str, bool, bool]]:
    tried, judged, judges = finished_steps(connection, ids), judgements_of(connection, ids), _workers(connection, ids)
    verified = _verdicts(connection, ids)
    pairs = []
    for each in ids:
        people = [one for one in judged[each] if one.source == PERSON]
        right = {index: one.value > RIGHT_MIN for index, one in credited(tried[each], people).items()}
        for step in tried[each]:
            if (each, step.index) in verified:
                if step.see and step.see[-1] in right:
                    pairs.append((*verified[each, step.index], right[step.see[-1]]))
                continue
            verdict = read_judgement(step.reply.text) if step.kind == "tool" and step.see else None
            if verdict is not None and isinstance(verdict.get("accept"), bool) and step.see[-1] in right:
                pairs.append((judges[each, step.index], verdict["accept"], right[step.see[-1]]))
        of_rollout = [one for one in people if one.step is None]
        for version, value in _graded(connection, each) if of_rollout else ():
            pairs.append((version, value > RIGHT_MIN, max(of_rollout, key=lambda one: one.at).value > RIGHT_MIN))
    return pairs


def _verdicts(connection: Connection, ids: Sequence[str]) -> Mapping[tuple[str, int], tuple[str, bool]]:
    """The checker of each verify step that gave a verdict, and whether it accepted, by rollout and step. Whether two
    replies say the same is no verdict on one of them."""
    s = steps.c
    logged = select(s.rollout_id, s.step, s.worker, s.attempts).where(s.rollout_id.in_(ids))
    of_checks = logged.where(s.attempts.contains([{"verdict": {"by": VERIFY}}]), s.status == "done")
    records = {}
    for rollout_id, step, worker, attempts in connection.execute(of_checks):
        verdict = attempts[-1].get("verdict") or {}
        if isinstance(accept := verdict.get("accept"), bool) and not verdict.get("pairwise"):
            records[str(rollout_id), step] = worker, accept
    return records


def _workers(connection: Connection, ids: Sequence[str]) -> Mapping[tuple[str, int], str]:
    columns = (steps.c.rollout_id, steps.c.step, steps.c.worker)
    records = connection.execute(select(*columns).where(steps.c.rollout_id.in_(ids), steps.c.kind == "tool"))
    return {(str(rollout_id), step): worker for rollout_id, step, worker in records}


def _graded(connection: Connection, rollout_id: str) -> Sequence[Any]:
    o = outcomes.c
    graded = select(o.grader_version, o.value).where(o.rollout_id == rollout_id, o.source == SOURCE)
    return connection.execute(graded.where(o.grader_version.is_not(None), o.value.is_not(None))).all()


# ---------------------------------------------------------------- errors of checkers


class PostgresChecks:
    """The port CheckedSteps."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def errors(self) -> list[CheckerErrors]:
        """How often each checker errs, over the latest requests that it checked and that anybody but a verifier judged.
        Raises Unavailable."""
        async with transaction(self._engine, TIMEOUT_S) as connection:
            return await _errors(connection)


async def _errors(connection: AsyncConnection) -> list[CheckerErrors]:
    o, s = outcomes.c, steps.c
    judged = select(o.rollout_id).where(is_posted(o.source), o.source != VERIFIER, o.value.is_not(None)).distinct()
    latest = judged.order_by(o.rollout_id.desc()).limit(JUDGED_MAX).subquery()
    checked = select(s.rollout_id).join(latest, latest.c.rollout_id == s.rollout_id).distinct()
    checked = checked.where(s.attempts.contains([{"verdict": {}}])).order_by(s.rollout_id.desc()).limit(CHECKED_MAX)
    ids = [str(each) for each in await connection.scalars(checked)]
    verdicts: list[tuple[str, str, bool, bool]] = []
    for begin in range(0, len(ids), BATCH):
        verdicts += await connection.run_sync(_judged_verdicts, ids[begin : begin + BATCH])
    return checker_errors(verdicts)


def _judged_verdicts(connection: Connection, ids: Sequence[str]) -> list[tuple[str, str, bool, bool]]:
    """Verdicts on replies of which an outcome says whether they are right. A rejected reply that a later step saw is
    compared with the answer: that it went into one says nothing of it."""
    tried, judged, verdicts = (
        finished_steps(connection, ids),
        judgements_of(connection, ids),
        _verdicts_by_rollout(connection, ids),
    )
    pairs = []
    for each in ids:
        verify = {one.at for one in verdicts[each] if one.by == VERIFY}
        rejected = {one.of for one in verdicts[each] if one.by == VERIFY and not one.accept}
        own = [
            replace(step, see=[seen for seen in step.see if seen not in rejected])
            for step in tried[each]
            if step.index not in verify
        ]
        loop = JudgedLoop(own, [one for one in judged[each] if is_explicit(one.source) and one.source != VERIFIER])
        right = {step: one.value > RIGHT_MIN for step, one in credited(loop.steps, loop.judged, loop.verdicts).items()}
        pairs += [
            (one.checker, one.by, one.accept, right[one.of])
            for one in verdicts[each]
            if one.accept is not None and one.of in right
        ]
    return pairs


def _verdicts_by_rollout(connection: Connection, ids: Sequence[str]) -> Mapping[str, Sequence[_Verdict]]:
    """The verdicts of checkers on replies that stand, by rollout."""
    s = steps.c
    logged = select(s.rollout_id, s.step, s.worker, s.see, s.attempts).where(s.rollout_id.in_(ids), s.status == "done")
    verdicts: dict[str, list[_Verdict]] = defaultdict(list)
    for of, *step in connection.execute(logged.where(s.attempts.contains([{"verdict": {}}]))):
        verdicts[str(of)] += _verdicts_of_step(*step)
    return verdicts


def _verdicts_of_step(
    step: int, worker: str, see: Sequence[int], attempts: Sequence[Mapping[str, Any]]
) -> Iterator[_Verdict]:
    """The verdicts in a step's attempts: of a verify step on what it saw; else those of its contract on its last reply,
    which come after the last attempt of its own. What code alone found has no checker, and whether two replies say the
    same is no verdict on one of them."""
    last = attempts[-1].get("verdict") or {}
    if last.get("pairwise"):
        return
    if last.get("by") == VERIFY:
        yield _Verdict(step, see[-1] if see else -1, worker, VERIFY, last.get("accept"))
        return
    own = max((place for place, each in enumerate(attempts) if not each.get("worker")), default=len(attempts))
    for each in attempts[own + 1 :]:
        if verdict := each.get("verdict"):
            yield _Verdict(step, step, str(each["worker"]), str(verdict["by"]), verdict.get("accept"))
