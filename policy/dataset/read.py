"""Planning calls out of PostgreSQL: one server-side cursor, bounded batches, one snapshot of the log.

The snapshot is a read-only REPEATABLE READ transaction, so that a log read twice while traffic flows is the same log.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Text, and_, case, exists, func, literal, not_, select, true
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError

from gateway.adapters.postgres.admin_tables import keys, pool_revisions
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.tables import outcomes, rollouts, rounds, steps
from gateway.core.loop.experience.likeness import question_text
from gateway.core.loop.replies.kinds import wanted_kind
from gateway.core.loop.replies.verdicts import StepVerdict, step_verdict
from gateway.errors import BatonError, ConfigError, Unavailable
from policy.dataset.rendered import logged_replies
from policy.dataset.row import Rating, Row, StepRow, settle
from policy.dataset.select import Selection

BATCH_ROWS = 200
STATEMENT_TIMEOUT_S = 120.0
DEPTH_MAX = 64  # of child loops; ends the walk over a log that was tampered with
_NO_TABLE, _CANCELLED = "42P01", "57014"
_ROLLOUT = (
    *(
        "parent_id",
        "depth",
        "created_at",
        "finished_at",
        "key_id",
        "log_mode",
        "pool_name",
        "pool",
        "caps",
        "task_type",
        "tags",
    ),
    *("request", "status", "fallback", "capped", "pool_revision", "turn"),
)
_NOT_ROW = ("request", "finished_at", "pool", "pool_revision", "turn")  # columns that become other fields
_ROUND = (
    *("round", "messages", "prompt_token_ids", "plan_token_ids", "plan_logprobs", "decision_mask", "plan_text", "plan"),
    *("sampling", "schema_hash", "allowed", "quality", "prompt_version", "prompt_hash", "planner", "policy_version"),
    *("refusal", "shown", "decision"),
)
_STEP = tuple(name for name in StepRow.__slots__ if name != "latency_ms")
# what prompts show of a worker beside its pool entry
_SHOWN = ("description", "context_tokens", "latency_hint_s", "output_tokens_max", "cannot")
Record = Mapping[Any, Any]


@contextmanager
def snapshot(database_url: str) -> Iterator[Connection]:
    """A connection that sees the log as it is now. Raises Unavailable when PostgreSQL is away, also half-way, and
    ConfigError on a URL that is none or a database without Baton's tables."""
    engine = sync_engine(database_url, statement_timeout_s=STATEMENT_TIMEOUT_S)
    try:
        with engine.connect() as connection:
            yield connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    except DBAPIError as error:
        raise _explained(error) from None
    finally:
        engine.dispose()


def _explained(error: DBAPIError) -> BatonError:
    state = getattr(error.orig, "sqlstate", None)
    if state == _NO_TABLE:
        return ConfigError("this database has no Baton log: start the gateway once (`baton serve` makes the tables)")
    if state == _CANCELLED:
        return Unavailable(f"PostgreSQL took over {STATEMENT_TIMEOUT_S:g} s for a batch: narrow --since and --until")
    what = (str(error.orig).strip().splitlines() or ["no answer"])[0]
    return Unavailable(f"PostgreSQL is away: {what}; check --database-url and the server, then run this again")


def rows_of(connection: Connection, selection: Selection, batch_rows: int = BATCH_ROWS) -> Iterator[Row]:
    """As `read` in a snapshot that is open already, without asking for outcomes."""
    query = (
        select(rollouts.c.id, *(rollouts.c[name] for name in _ROLLOUT), *(rounds.c[name] for name in _ROUND))
        .join(rounds, rounds.c.rollout_id == rollouts.c.id)
        .where(_matching(selection), _trainable())
        .order_by(rollouts.c.created_at, rollouts.c.id, rounds.c.round)
    )
    with connection.execute(query, execution_options={"yield_per": batch_rows}) as result:
        for batch in result.mappings().partitions():
            yield from _joined(connection, batch, selection)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request of a client, as logged. `body`: what it sent, messages included, and empty where that is more than was
    asked for; `pool`: the workers as shown, with what was known of them; `judged`: it has an outcome."""

    id: str
    log_mode: str
    body: Mapping[str, Any]
    tags: Mapping[str, str]
    task_type: str | None
    created_at: datetime
    key_id: str
    pool_name: str
    pool: Sequence[Mapping[str, Any]]
    caps: Mapping[str, Any]
    judged: bool

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """Its conversation."""
        return messages_of(self.body)


def requests_of(
    connection: Connection,
    selection: Selection,
    batch_rows: int = BATCH_ROWS,
    *,
    latest: int | None = None,
    bytes_max: int | None = None,
) -> Iterator[StoredRequest]:
    """The requests of clients that ended well, whoever planned them, oldest first; or the `latest` so many, newest
    first. Of the selection only time, policy version, pool, key and tags count. Never those that said, or whose key
    says, `train: false`. `bytes_max`: of a body, as JSON; a larger one does not leave the database."""
    here = rollouts.c
    has_judgement = exists().where(
        outcomes.c.rollout_id == here.id, outcomes.c.value.is_not(None), outcomes.c.step.is_(None)
    )
    size = func.octet_length(here.request.cast(Text))
    body = here.request if bytes_max is None else case((size <= bytes_max, here.request), else_=literal({}, JSONB))
    columns_asked = (here.id, here.log_mode, body, here.tags, here.task_type, here.created_at, here.key_id)
    columns: tuple[Any, ...] = (*columns_asked, here.pool_name, here.pool, here.caps, has_judgement.label("judged"))
    query = select(*columns).where(*_asked_by_clients(selection))
    if latest is None:
        query = query.order_by(here.created_at, here.id)
    else:
        query = query.order_by(here.created_at.desc(), here.id.desc()).limit(latest)
    with connection.execute(query, execution_options={"yield_per": batch_rows}) as result:
        for batch in result.partitions():
            yield from (StoredRequest(*record) for record in batch)


def count_requests(connection: Connection, selection: Selection) -> int:
    """The number of requests that `requests_of` gives."""
    count: int = connection.execute(
        select(func.count()).select_from(rollouts).where(*_asked_by_clients(selection))
    ).scalar_one()
    return count


def _asked_by_clients(selection: Selection) -> tuple[ColumnElement[bool], ...]:
    ended = and_(rollouts.c.parent_id.is_(None), rollouts.c.status == "done")
    return ended, _of_rollout(selection, rollouts.c.policy_version), _trainable()


def count_withheld(connection: Connection, selection: Selection) -> int:
    """Planning calls that the selection would have had but for `train: false`."""
    count: int = connection.execute(_counting(_matching(selection), not_(_trainable()))).scalar_one()
    return count


def extent(connection: Connection) -> tuple[int, datetime | None, datetime | None]:
    """Planning calls in the whole log, and when its first and last rollout began."""
    total: int = connection.execute(_counting()).scalar_one()
    first, last = connection.execute(select(func.min(rollouts.c.created_at), func.max(rollouts.c.created_at))).one()
    return total, first, last


def _counting(*conditions: ColumnElement[bool]) -> Select[Any]:
    joined = rounds.join(rollouts, rounds.c.rollout_id == rollouts.c.id)
    return select(func.count()).select_from(joined).where(*conditions)


def _trainable() -> ColumnElement[bool]:
    excluded = exists().where(keys.c.public_id == rollouts.c.key_id, not_(keys.c.train))
    return and_(rollouts.c.train, not_(excluded))


def _matching(selection: Selection) -> ColumnElement[bool]:
    return and_(rounds.c.planner.in_(selection.planners), _of_rollout(selection, rounds.c.policy_version))


def _of_rollout(selection: Selection, policy_version: ColumnElement[Any]) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = [true()]
    if selection.since:
        conditions.append(rollouts.c.created_at >= selection.since)
    if selection.until:
        conditions.append(rollouts.c.created_at < selection.until)
    if selection.tags:
        conditions.append(rollouts.c.tags.contains(dict(selection.tags)))
    for column, value in (
        (policy_version, selection.policy_versions),
        (rollouts.c.pool_name, selection.pools),
        (rollouts.c.key_id, selection.keys),
    ):
        if value:
            conditions.append(column.in_(value))
    return and_(*conditions)


# ---------------------------------------------------------------- what belongs to a batch


def _joined(connection: Connection, batch: Sequence[Record], selection: Selection) -> Iterator[Row]:
    """The batch with its requests, steps, outcomes and pool files: six queries, whatever its size."""
    ids = {record["id"] for record in batch}
    root_of = {one: one for one in ids} | _roots(connection, {r["id"] for r in batch if r["parent_id"]})
    roots = set(root_of.values())
    requests = _requests(connection, roots)
    used, ran, replies, verdicts = _steps(connection, roots, ids)
    ratings, demonstrated = _judgements(connection, roots, dict(selection.labels))
    workers = _workers(connection, {record["pool_revision"] for record in batch} - {None})
    for record in batch:
        root = root_of[record["id"]]
        outcome = settle(ratings[root], selection.outcome_sources)
        request = requests[root]
        yield Row(
            rollout_id=record["id"],
            root_id=root,
            group=group_of(request["request"], root),
            request_messages=messages_of(record["request"]),
            pool=[one | workers.get((record["pool_revision"], one.get("name")), {}) for one in record["pool"]],
            **{name: record[name] for name in (*_ROLLOUT, *_ROUND) if name not in _NOT_ROW},
            workers_used=tuple(sorted(used[root])),
            steps=tuple(ran[record["id"], record["round"]]),
            outcome=outcome.value,
            outcome_n=outcome.n,
            outcome_sources=outcome.sources,
            grader_versions=outcome.grader_versions,
            outcome_metadata=outcome.metadata,
            cost_nano=request["cost_nano"],
            latency_ms=_ms(request["created_at"], request["finished_at"]),
            replies=_replies(replies[record["id"]], record),
            demonstration=demonstrated.get(root),
            verdicts=tuple(verdicts[root]),
            turn=record["turn"] or {},
        )


def _roots(connection: Connection, ids: set[str]) -> dict[str, str]:
    """Child loop → the outermost rollout above it that the log has."""
    if not ids:
        return {}
    here, up = rollouts.c, literal(0).label("up")
    line = (
        select(here.id.label("child"), here.id, here.parent_id, up).where(here.id.in_(ids)).cte("line", recursive=True)
    )
    above = select(line.c.child, here.id, here.parent_id, line.c.up + 1).where(here.id == line.c.parent_id)
    line = line.union_all(above.where(line.c.up < DEPTH_MAX))
    upwards = connection.execute(select(line.c.child, line.c.id).order_by(line.c.up))
    return {child: above for child, above in upwards}  # the last one of each is the outermost


def _requests(connection: Connection, roots: set[str]) -> dict[str, Record]:
    here = rollouts.c
    query = select(here.id, here.request, here.cost_nano, here.created_at, here.finished_at).where(here.id.in_(roots))
    return {record["id"]: record for record in connection.execute(query).mappings()}


def _steps(
    connection: Connection, roots: set[str], ids: set[str]
) -> tuple[
    Mapping[str, set[tuple[str, str]]],
    Mapping[tuple[str, int], list[StepRow]],
    Mapping[str, list[tuple[int, Record]]],
    Mapping[str, list[StepVerdict]],
]:
    """Workers with their versions by request, child loops included; the steps of the rollouts `ids` by plan; (round,
    what it replied) of their steps by rollout; and the verdicts on steps by request, child loops included."""
    here, down = rollouts.c, literal(0).label("down")
    family = select(here.id, here.id.label("root"), down).where(here.id.in_(roots)).cte("family", recursive=True)
    below = select(here.id, family.c.root, family.c.down + 1).where(here.parent_id == family.c.id)
    family = family.union_all(below.where(family.c.down < DEPTH_MAX))
    checked = case((steps.c.attempts.contains([{"verdict": {}}]), steps.c.attempts)).label("checked")
    query = (
        select(family.c.root, steps.c.rollout_id, steps.c.round, steps.c.started_at, steps.c.finished_at, checked)
        .add_columns(*(steps.c[name] for name in (*_STEP, "reply", "tool_calls", "finish_reason")))
        .join(steps, steps.c.rollout_id == family.c.id)
        .order_by(steps.c.rollout_id, steps.c.round, steps.c.step)
    )
    used: dict[str, set[tuple[str, str]]] = defaultdict(set)
    ran: dict[tuple[str, int], list[StepRow]] = defaultdict(list)
    replies: dict[str, list[tuple[int, Record]]] = defaultdict(list)
    verdicts: dict[str, list[StepVerdict]] = defaultdict(list)
    for record in connection.execute(query).mappings():
        used[record["root"]].add((record["worker"], record["worker_version"]))
        of_step = (record["rollout_id"], record["round"], record["step"], record["worker"], record["checked"] or ())
        if (verdict := step_verdict(*of_step)) is not None:
            verdicts[record["root"]].append(verdict)
        if record["rollout_id"] in ids:
            fields = {name: record[name] for name in _STEP} | {"see": tuple(record["see"])}
            latency_ms = _ms(record["started_at"], record["finished_at"])
            ran[record["rollout_id"], record["round"]].append(StepRow(**fields, latency_ms=latency_ms))
            replies[record["rollout_id"]].append((record["round"], record))
    return used, ran, replies, verdicts


def _replies(steps_run: Sequence[tuple[int, Record]], record: Record) -> list[dict[str, Any]]:
    """The digests of what the steps of a rollout replied, up to this round; with texts where the prompt showed them."""
    so_far = [step for number, step in steps_run if number <= record["round"]]
    count = (record["allowed"] or {}).get("first_index", len(so_far))
    kind = wanted_kind(record["request"] if isinstance(record["request"], Mapping) else {}, record["tags"])
    handles = {str(one.get("name")): str(one.get("handle")) for one in record["pool"]}
    digests = logged_replies(so_far, count, kind, handles)
    texts = [step["reply"] or "" if record["shown"] else "" for step in so_far]
    return [
        asdict(one) | {"flags": list(one.flags), "differs": list(one.differs), "text": text}
        for one, text in zip(digests, texts, strict=False)
    ]


def _workers(connection: Connection, revisions: set[str]) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """(revision, worker) → what prompts show of it beside its pool entry, from the pool files that served."""
    if not revisions:
        return {}
    query = select(pool_revisions.c.hash, pool_revisions.c.file).where(pool_revisions.c.hash.in_(revisions))
    return {
        (revision, name): {field: worker.get(field) for field in _SHOWN}
        for revision, file in connection.execute(query)
        for name, worker in json.loads(file)["workers"].items()
    }


def _judgements(
    connection: Connection, roots: set[str], labels: Mapping[str, float]
) -> tuple[Mapping[str, list[Rating]], Mapping[str, str]]:
    """Ratings by request, not of single steps, a label that `labels` knows as its value; and the latest
    demonstration."""
    here = outcomes.c
    query = select(here.rollout_id, here.label, here.demonstration, here.value, here.source, here.grader_version)
    query = query.add_columns(here.metadata).where(here.rollout_id.in_(roots), here.step.is_(None))
    query = query.order_by(here.created_at, here.id)
    ratings: dict[str, list[Rating]] = defaultdict(list)
    demonstrated: dict[str, str] = {}
    for rollout_id, label, demonstration, given, *more in connection.execute(query):
        value = labels.get(label) if given is None else given
        if value is not None:
            ratings[rollout_id].append(Rating(value, *more))
        if isinstance(demonstration, str):
            demonstrated[rollout_id] = demonstration
    return ratings, demonstrated


def messages_of(request: Any) -> Sequence[Mapping[str, Any]]:
    """Of a request as logged, which may have been refused for its shape."""
    messages = request.get("messages") if isinstance(request, Mapping) else None
    return [one for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []


def group_of(request: Any, root_id: str) -> str:
    """Of the question's words, case and spaces aside; of the request alone where the log has no text."""
    try:
        words = question_text(messages_of(request)).casefold().split()
    except (AttributeError, TypeError):  # parts of a message that are no objects
        words = []
    return hashlib.sha256(" ".join(words or [root_id]).encode()).hexdigest()[:32]


def _ms(start: datetime | None, end: datetime | None) -> float | None:
    """Never negative: a wall clock may be set back."""
    return max(0.0, (end - start).total_seconds() * 1000) if start and end else None
