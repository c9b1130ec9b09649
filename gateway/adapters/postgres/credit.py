"""Experience in PostgreSQL: credit of steps, and what is computed again when rules or the embedder change.

The experience of a request follows from its log and its outcomes alone, so it is computed afresh with each outcome,
child loops included.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    REAL,
    Connection,
    DateTime,
    Double,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    false,
    func,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import question_vector
from gateway.adapters.postgres.sources import is_heard, what_counts_first
from gateway.adapters.postgres.tables import MODEL_KINDS, experience, outcomes, rollouts, sources, steps
from gateway.core.loop.evidence.credit import (
    CREDIT_VERSION,
    Evidence,
    FinishedStep,
    JudgedLoop,
    credited_tree,
)
from gateway.core.loop.evidence.sources import SourceWeights, prior_weights
from gateway.core.loop.experience.likeness import Embedding
from gateway.core.loop.experience.past import FAILURE
from gateway.core.loop.replies.errors import VERIFY
from gateway.core.loop.replies.kinds import ReplyKind, read_message, wanted_kind
from gateway.core.policies.watch import SERVER_FAULTS
from gateway.core.pool.drift import Judged

BATCH = 100  # rows a transaction
TIMEOUT_S = 60.0
LOOPS_MAX = 256  # of one request
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def credit_tree(connection: Connection, rollout_id: str) -> None:
    """Store the credit of every step of the request that a rollout belongs to. Requests that are judged at the same
    time wait for each other."""
    root = _root(connection, rollout_id)
    connection.execute(select(rollouts.c.id).where(rollouts.c.id == root).with_for_update(key_share=True))
    for each, credit_of in credited_tree(_loops(connection, root), root).items():
        _store(connection, each, credit_of)


def _root(connection: Connection, rollout_id: str) -> str:
    for _ in range(LOOPS_MAX):
        parent = connection.scalar(select(rollouts.c.parent_id).where(rollouts.c.id == rollout_id))
        if parent is None:
            break
        rollout_id = str(parent)
    return rollout_id


def _loops(connection: Connection, root: str) -> Mapping[str, JudgedLoop]:
    """The loops of a request by rollout id."""
    tree = select(rollouts.c.id).where(rollouts.c.id == root).cte(recursive=True)
    tree = tree.union_all(select(rollouts.c.id).where(rollouts.c.parent_id == tree.c.id))
    ids = [str(each) for each in connection.scalars(select(tree.c.id).limit(LOOPS_MAX))]
    tried, judged = finished_steps(connection, ids), judgements_of(connection, ids)
    return {each: JudgedLoop(tried[each], judged[each]) for each in ids}


def finished_steps(connection: Connection, ids: Sequence[str]) -> Mapping[str, Sequence[FinishedStep]]:
    r, s = rollouts.c, steps.c
    requests = select(r.id, r.request["response_format"], r.tags).where(r.id.in_(ids))
    wanted = {str(of): _wanted(format_, tags) for of, format_, tags in connection.execute(requests)}
    checks = func.coalesce(s.attempts.contains([{"verdict": {"by": VERIFY}}]), false())
    columns = (s.rollout_id, s.step, s.kind, s.see, s.reply, s.tool_calls, s.task.is_(None), s.child_rollout_id, checks)
    done = select(*columns).where(s.rollout_id.in_(ids), s.status == "done").order_by(s.rollout_id, s.step)
    steps_of: dict[str, list[FinishedStep]] = defaultdict(list)
    for of, step, kind, see, reply, calls, alone, child, is_check in connection.execute(done):
        typed = read_message({"content": reply or "", "tool_calls": calls}, wanted[str(of)] if alone else None)
        ran_as = None if child is None else str(child)
        steps_of[str(of)].append(FinishedStep(step, kind, see, typed, alone, ran_as, is_check))
    return steps_of


def _wanted(format_: Any, tags: Any) -> ReplyKind | None:
    return wanted_kind({"response_format": format_}, tags if isinstance(tags, Mapping) else None)


def judgements_of(connection: Connection, ids: Sequence[str]) -> Mapping[str, Sequence[Evidence]]:
    o, known = outcomes.c, sources.c
    weights = (known.weight_right, known.weight_wrong)
    query = select(o.rollout_id, o.value, o.created_at, o.source, o.step, *weights).where(o.rollout_id.in_(ids))
    query = query.join(rollouts, rollouts.c.id == o.rollout_id)
    query = query.outerjoin(sources, and_(known.org == rollouts.c.org, known.source == o.source))
    evidence_of: dict[str, list[Evidence]] = defaultdict(list)
    for of, value, at, source, step, right, wrong in connection.execute(query.where(o.value.is_not(None))):
        learnt = prior_weights(source) if right is None else SourceWeights(right, wrong)
        each = Evidence(value, (at - _EPOCH) // _MICROSECOND, source, step, weights=learnt)
        evidence_of[str(of)].append(each)
    return evidence_of


def _store(connection: Connection, rollout_id: str, credit_of: Mapping[int, Evidence]) -> None:
    old = delete(experience).where(experience.c.rollout_id == rollout_id, experience.c.source != FAILURE)
    connection.execute(old.where(experience.c.step.not_in(list(credit_of))))
    new = [
        {
            "of_rollout": rollout_id,
            "of_step": index,
            "credit": each.value,
            "judged_at": _EPOCH + each.at * _MICROSECOND,
            "judged_by": each.source,
            "reliable": each.weight,
        }
        for index, each in sorted(credit_of.items())
    ]
    if new:
        connection.execute(_CREDIT, new)


def _credit_statement() -> Any:
    """Credit one finished step, if it is of a model worker."""
    latency_s = func.extract("epoch", steps.c.finished_at - steps.c.started_at)
    source = {
        "rollout_id": steps.c.rollout_id,
        "round": steps.c.round,
        "step": steps.c.step,
        "worker": steps.c.worker,
        "worker_version": steps.c.worker_version,
        "pool_name": rollouts.c.pool_name,
        "org": rollouts.c.org,
        "key_id": rollouts.c.key_id,
        "task_type": rollouts.c.task_type,
        "embedding": rollouts.c.task_embedding,
        "embedder": rollouts.c.task_embedder,
        "source": cast(bindparam("judged_by"), Text),
        "weight": cast(bindparam("reliable"), REAL),
        "success": cast(bindparam("credit"), REAL),
        "cost_nano": steps.c.cost_nano,
        "latency_ms": cast(func.coalesce(latency_s * 1000, 0), Integer),
        "at": cast(bindparam("judged_at"), experience.c.at.type),
        "changed_at": func.clock_timestamp(),
    }
    rows = select(*source.values()).select_from(steps.join(rollouts, rollouts.c.id == steps.c.rollout_id))
    rows = rows.where(steps.c.rollout_id == bindparam("of_rollout"), steps.c.step == bindparam("of_step"))
    rows = rows.where(steps.c.status == "done", or_(*(steps.c.kind == kind for kind in MODEL_KINDS)))
    new = pg.insert(experience).from_select(list(source), rows)
    judged = ("success", "at", "source", "weight", "changed_at")
    return new.on_conflict_do_update(
        index_elements=list(experience.primary_key.columns), set_={name: new.excluded[name] for name in judged}
    )


_CREDIT = _credit_statement()


class PostgresJudgements:
    """The port JudgedSteps."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def judged(self, after: Mapping[str, datetime], limit: int) -> list[Judged]:
        given = (
            func.unnest(
                cast(list(after), pg.ARRAY(Text)), cast(list(after.values()), pg.ARRAY(DateTime(timezone=True)))
            )
            .table_valued("name", "after", name="given")
            .render_derived()
        )
        e = experience.c
        each = select(e.worker, e.worker_version, e.task_type, e.success, e.at, e.org)
        each = each.where(e.worker == given.c.name, e.at > given.c.after, is_heard(e.source), e.source != FAILURE)
        each = each.order_by(e.at).limit(limit)
        lateral = each.lateral()
        async with transaction(self._engine) as connection:
            rows = await connection.execute(select(lateral).join_from(given, lateral, true()).order_by(lateral.c.at))
            return [Judged(*row) for row in rows]


class OldCredit:
    """Credits again the requests whose outcomes were counted under earlier rules, oldest first.

    Each outcome bears the version of the rules it was counted under, so a sweep that is killed goes on where it was,
    and several share the work. When it has been through, it rests until the next start.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._last = ""  # the id of the last outcome looked at
        self._is_done = False

    async def left(self) -> int:
        """The outcomes that are still counted under earlier rules. Raises Unavailable."""
        async with transaction(self._engine, TIMEOUT_S) as connection:
            return int(await connection.scalar(select(func.count()).select_from(outcomes).where(_OLD)) or 0)

    async def sweep(self, limit: int) -> int:
        """Count up to about `limit` outcomes again and return how many. Raises Unavailable."""
        count = 0
        while not self._is_done and count < limit:
            batch = await self._batch(min(BATCH, limit - count))
            count += batch
            self._is_done = not batch
        return count

    async def _batch(self, size: int) -> int:
        o = outcomes.c
        async with transaction(self._engine, TIMEOUT_S) as connection:
            query = select(o.id, o.rollout_id).where(_OLD).order_by(o.id).limit(size)
            query = query.where(o.id > self._last) if self._last else query
            old: Sequence[Any] = (await connection.execute(query.with_for_update(skip_locked=True))).all()
            for rollout_id in dict.fromkeys(str(row.rollout_id) for row in old):
                await connection.run_sync(credit_tree, rollout_id)
            done = update(outcomes).where(o.id.in_([row.id for row in old])).values(credited=CREDIT_VERSION)
            if old:
                await connection.execute(done)
        if old:
            self._last = str(old[-1].id)
        return len(old)


_OLD = and_(outcomes.c.value.is_not(None), outcomes.c.credited < CREDIT_VERSION)


# ---------------------------------------------------------------- vectors

_e = experience.c
_KEY = (_e.rollout_id, _e.round, _e.step)
_SET = (
    update(experience)
    .where(*(column == bindparam(f"of_{column.name}") for column in _KEY))
    .values(
        embedding=cast(bindparam("vector"), ARRAY(REAL)), embedder=bindparam("name"), changed_at=func.clock_timestamp()
    )
)


class OldVectors:
    """Gives each stored vector of an embedder that `embedding` replaces, or of none known, a vector of `embedding`.

    It goes through the experience once, newest first, and then rests until the next start. A gateway that is killed in
    between goes on where it was, because rows of the present embedder are skipped. Several gateways share the work.
    """

    def __init__(self, engine: AsyncEngine, embedding: Embedding | None) -> None:
        """`embedding`: None for an endpoint, whose calls nobody ordered."""
        self._engine = engine
        self._embedding = embedding
        self._is_done = embedding is None or not embedding.replaces
        self._last: tuple[Any, ...] | None = None  # the key of the last row looked at

    async def sweep(self, limit: int) -> int:
        """Replace up to `limit` vectors and return their number. A row whose question is not logged loses its vector.
        Raises Unavailable."""
        count = 0
        while self._embedding is not None and not self._is_done and count < limit:
            replaced = await self._batch(self._embedding, min(BATCH, limit - count))
            count += replaced
            self._is_done = not replaced
        return count

    async def _batch(self, embedding: Embedding, size: int) -> int:
        async with transaction(self._engine, TIMEOUT_S) as connection:
            old = (await connection.execute(self._old(embedding).limit(size))).all()
            changes = []
            for row in old:
                changes.append(_change(row, embedding))
                await asyncio.sleep(0)  # requests go on between two texts
            if changes:
                await connection.execute(_SET, changes)
        if old:
            self._last = tuple(old[-1][:3])
        return len(old)

    def _old(self, embedding: Embedding) -> Select[Any]:
        """(key, request) of rows with a vector to replace, newest first. Rows that another gateway works on are left
        to it."""
        query = select(*_KEY, rollouts.c.request).join(rollouts, rollouts.c.id == _e.rollout_id)
        query = query.where(_e.embedding.is_not(None), or_(_e.embedder.is_(None), _e.embedder.in_(embedding.replaces)))
        if self._last is not None:
            query = query.where(tuple_(*_KEY) < self._last)
        query = query.order_by(*(column.desc() for column in _KEY))
        return query.with_for_update(of=experience, skip_locked=True)


def _change(row: Sequence[Any], embedding: Embedding) -> dict[str, Any]:
    rollout_id, round_index, step, request = row
    vector = question_vector(request or {}, embedding)
    key = {"of_rollout_id": rollout_id, "of_round": round_index, "of_step": step}
    return key | {"vector": vector if any(vector) else None, "name": embedding.name}


def version_figures(version: str, since: datetime, until: datetime | None, latest: int) -> Select[Any]:
    """The query of `Registry.figures`."""
    c = rollouts.c
    recent = select(c.id, c.org, c.fallback, c.status, c.cost_nano).where(
        c.policy_assigned == version,
        c.depth == 0,
        c.created_at > since,
        c.policy_requested.not_like("%@%"),
        c.fallback.is_(None) | c.fallback.not_in(SERVER_FAULTS),
    )
    if until is not None:
        recent = recent.where(c.created_at <= until)
    seen = recent.order_by(c.created_at.desc()).limit(latest).cte("seen")
    last = (
        select(outcomes.c.value)
        .where(outcomes.c.rollout_id == seen.c.id, outcomes.c.value.is_not(None), outcomes.c.step.is_(None))
        .where(is_heard(outcomes.c.source))
        .order_by(*what_counts_first(outcomes.c))
        .limit(1)
        .scalar_subquery()
    )
    each = select(seen, last.label("value")).cte("each_one")
    e = each.c
    cost = cast(e.cost_nano, Double)
    said = select(e.org, func.count().label("n"), func.sum(e.value).label("total")).where(e.value.is_not(None))
    by_org = said.group_by(e.org).subquery()
    pair = func.jsonb_build_array(by_org.c.n, by_org.c.total)
    outcomes_by_org = select(func.jsonb_object_agg(by_org.c.org, pair)).scalar_subquery()
    return select(
        func.count().label("requests"),
        func.count().filter(e.fallback.is_(None) | e.fallback.like("worker%")).label("valid"),
        func.count().filter(e.status == "failed").label("failed"),
        func.count(e.value).label("judged"),
        func.coalesce(func.sum(e.value), 0.0).label("outcome_sum"),
        func.coalesce(func.sum(e.value * e.value), 0.0).label("outcome_square_sum"),
        func.coalesce(func.sum(e.cost_nano), 0).label("cost_nano_sum"),
        func.coalesce(func.sum(cost * cost), 0.0).label("cost_nano_square_sum"),
        outcomes_by_org.label("outcomes_by_org"),
    ).select_from(each)
