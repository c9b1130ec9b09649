"""Journal records as binary rows for COPY: what the shipper stores where nothing is odd.

A record is decoded once, by a struct that is made from its tables' columns; what becomes jsonb stays the bytes of the
journal. `rows.py` reads every other record, and every batch that PostgreSQL refuses: both ways store the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Double,
    Integer,
    SmallInteger,
    Table,
    Text,
    Uuid,
)

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import identifiers, query
from gateway.adapters.postgres.tables import JSONB, ledger, rollouts, rounds, steps
from gateway.core.loop.experience.likeness import Embedding, question_text

COPIED = (rollouts, rounds, steps, ledger)  # in the order in which foreign keys allow them
_NULL = b"\xff\xff\xff\xff"
_HEAD, _END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"  # of the format: signature, flags, extension; the last row
_MOMENT_US = 946_684_800_000_000  # PostgreSQL counts from 2000-01-01
_BOOLEANS = {False: b"\0\0\0\1\0", True: b"\0\0\0\1\1"}
_INT4, _TEXT, _FLOAT4, _FLOAT8, _BOOL = 23, 25, 700, 701, 16  # types of elements, by their numbers
_REALS = np.dtype([("size", ">i4"), ("value", ">f4")])
_DOUBLES = np.dtype([("size", ">i4"), ("value", ">f8")])
_length = struct.Struct("!i").pack
_NOTHING = msgspec.Raw(b"null")
Pack = Callable[[Any], bytes]


class Odd(ValueError):
    """A record that `rows.py` reads."""


ODD = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, struct.error)


# ---------------------------------------------------------------- values


def _text(value: str) -> bytes:
    content = value.encode()
    return _length(len(content)) + content


def _json(value: msgspec.Raw | bytes) -> bytes:
    content = bytes(value)
    return _NULL if content == b"null" else _length(len(content) + 1) + b"\1" + content  # 1: the format's version


def _uuid(value: str) -> bytes:
    """As PostgreSQL stores it. Raises Odd for any other form than the canonical one."""
    content = bytes.fromhex(value.replace("-", ""))
    if len(content) != 16 or len(value) != 36:
        raise Odd("not a UUID in its canonical form")
    return b"\0\0\0\x10" + content


def _time(us: int) -> bytes:
    return _eight(us - _MOMENT_US) if us else _NULL  # 0: it never happened


def _array(element: int, n: int, content: bytes) -> bytes:
    head = struct.pack("!iiiii", 1, 0, element, n, 1) if n else struct.pack("!iii", 0, 0, element)
    return _length(len(head) + len(content)) + head + content


def _integers(values: Sequence[int]) -> bytes:
    flat = [4] * (2 * len(values))
    flat[1::2] = values
    return _array(_INT4, len(values), struct.pack(f"!{len(flat)}i", *flat))


def _doubles(values: Sequence[float]) -> bytes:
    if not values:
        return _array(_FLOAT8, 0, b"")
    sized = np.empty(len(values), _DOUBLES)
    sized["size"], sized["value"] = 8, values
    return _array(_FLOAT8, len(values), sized.tobytes())


def _booleans(values: Sequence[bool]) -> bytes:
    return _array(_BOOL, len(values), b"".join([_BOOLEANS[value] for value in values]))


def _texts(values: Sequence[str]) -> bytes:
    return _array(_TEXT, len(values), b"".join([_text(value) for value in values]))


_two: Pack = partial(struct.Struct("!ih").pack, 2)
_eight: Pack = partial(struct.Struct("!iq").pack, 8)
_double: Pack = partial(struct.Struct("!id").pack, 8)
_SCALARS: Mapping[type, tuple[Any, Pack]] = {  # of a column's type: what JSON has for it, and its binary form
    Text: (str, _text),
    Uuid: (str, _uuid),
    JSONB.__class__: (msgspec.Raw, _json),
    Boolean: (bool, _BOOLEANS.__getitem__),
    SmallInteger: (int, _two),
    BigInteger: (int, _eight),
    Double: (float, _double),
    DateTime: (int, _time),
}
_ARRAYS: Mapping[type, tuple[Any, Pack]] = {
    Integer: (list[int], _integers),
    Double: (list[float], _doubles),
    Boolean: (list[bool], _booleans),
    Text: (list[str], _texts),
}


def _kind(column: Column[Any]) -> tuple[Any, Pack]:
    kind = column.type
    return _ARRAYS[type(kind.item_type)] if isinstance(kind, ARRAY) else _SCALARS[type(kind)]


# ---------------------------------------------------------------- records


class _Hold(msgspec.Struct, forbid_unknown_fields=True):
    hold_id: str
    amount_nano: int
    scopes: msgspec.Raw
    rollout_id: str | None = None


class _Dispatch(msgspec.Struct, forbid_unknown_fields=True):
    hold_id: str
    bound_nano: int
    step_id: str
    attempt: int
    worker: str
    rollout_id: str | None = None


class _Settle(msgspec.Struct, forbid_unknown_fields=True):
    hold_id: str
    state: str
    charged_nano: int
    scopes: msgspec.Raw
    rollout_id: str | None = None


class _Asked(msgspec.Struct):
    messages: Any = None


@dataclass(frozen=True, slots=True)
class _Form:
    """How rows of a table are made: the struct of a record, and the binary form of its first fields, the columns.
    `columns`: all that are copied, those of other origin included, which stand before or behind."""

    record: Any
    packers: Sequence[Pack]
    columns: Sequence[str]
    head: bytes  # the start of each row: the number of its columns

    def row(self, record: Any, *before: bytes) -> bytes:
        """A row but for the columns behind the table's own."""
        values = zip(self.packers, msgspec.structs.astuple(record), strict=False)
        return b"".join([self.head, *before, *[_NULL if value is None else pack(value) for pack, value in values]])


def _field(column: Column[Any]) -> tuple[str, Any, Any]:
    name, kind = rows.field_of(str(column.name)), _kind(column)[0]
    return (name, kind, _NOTHING) if kind is msgspec.Raw else (name, kind | None, None)


def _form(table: Table, before: Sequence[str] = (), behind: Sequence[str] = (), more: Sequence[Any] = ()) -> _Form:
    own = [column for column in table.columns if column.name not in (*before, *behind)]
    fields = [_field(column) for column in own]
    record = msgspec.defstruct(f"{table.name}_record", [*fields, *more], kw_only=True)
    columns = [*before, *(column.name for column in own), *behind]
    return _Form(record, [_kind(column)[1] for column in own], columns, struct.pack("!h", len(columns)))


_ROUND, _STEP = _form(rounds, before=["rollout_id"]), _form(steps, before=["rollout_id"])
_VECTOR = ["task_embedding", "task_embedder"]
_ROLLOUT = _form(
    rollouts,
    behind=_VECTOR,
    more=[
        ("rounds", list[_ROUND.record]),  # type: ignore[name-defined]
        ("steps", list[_STEP.record]),  # type: ignore[name-defined]
        ("task_embedding", list[float] | None, None),
        ("task_embedder", str | None, None),
        ("answered_by", str | None, None),
        ("marks", dict[str, float] | None, None),
        ("failures", list[msgspec.Raw] | None, None),
        ("facts", msgspec.Raw, _NOTHING),
    ],
)
_LEDGER = _form(ledger)
_FORMS = {"rollouts": _ROLLOUT, "rounds": _ROUND, "steps": _STEP, "ledger": _LEDGER}
_decode_request = msgspec.json.Decoder(_Asked).decode


def _decoder(payload: Any) -> Callable[[bytes], Any]:
    fields = [("id", str), ("kind", str), ("payload", payload), ("ts_us", int)]
    return msgspec.json.Decoder(msgspec.defstruct("Record", fields, forbid_unknown_fields=True)).decode


@dataclass(slots=True)
class LogRecord:
    """One journal record as rows. `kind` is None if the bytes are not an event, `error` is None for a good record.
    `copied`: (table, row) for COPY; `new`: what statements insert. `question`: the text whose vector the rollout, the
    first row, lacks; `fill_vectors` adds it."""

    payload: bytes
    kind: str | None
    ts_us: int
    is_request: bool = False  # the rollout of a client's request, and not of a loop inside one
    copied: list[tuple[str, bytes]] = field(default_factory=list)
    new: rows.Rows | None = None
    question: str | None = None
    error: str | None = None


def read(payload: bytes) -> LogRecord:
    """The rows of a record. Raises one of ODD for a record that `rows.py` has to read."""
    convert = _CONVERSIONS.get(payload[_KIND])
    if convert is None or rows.needs_cleaning(payload):
        raise Odd("of another kind, or PostgreSQL would refuse it as it is")
    return convert(payload)


def _hold(payload: bytes) -> LogRecord:
    event = _decode_hold(payload)
    return _money(payload, event, b"\0\0\0\4hold", event.payload.amount_nano, _scopes(event.payload.scopes), _EMPTY)


def _dispatch(payload: bytes) -> LogRecord:
    event = _decode_dispatch(payload)
    call = event.payload
    detail = _json(msgspec.json.encode({"attempt": call.attempt, "step_id": call.step_id, "worker": call.worker}))
    return _money(payload, event, b"\0\0\0\x0adispatched", call.bound_nano, _NONE, detail)


def _settle(payload: bytes) -> LogRecord:
    event = _decode_settle(payload)
    end = event.payload
    return _money(payload, event, _text(end.state), end.charged_nano, _scopes(end.scopes), _EMPTY)


def _money(payload: bytes, event: Any, kind: bytes, nano: int, scopes: bytes, detail: bytes) -> LogRecord:
    money = event.payload
    rollout = _NULL if money.rollout_id is None else _uuid(money.rollout_id)
    cells = (_LEDGER.head, _uuid(event.id), _text(money.hold_id), rollout, kind, _eight(nano), scopes, detail)
    row = b"".join((*cells, _time(event.ts_us)))
    return LogRecord(payload, event.kind, event.ts_us, copied=[("ledger", row)])


def _scopes(raw: msgspec.Raw) -> bytes:
    return _scope_pairs(bytes(raw))


@lru_cache(maxsize=4096)
def _scope_pairs(content: bytes) -> bytes:
    return _json(msgspec.json.encode(rows.scope_pairs(msgspec.json.decode(content))))


def _rollout(payload: bytes) -> LogRecord:
    event = _decode_rollout(payload)
    record = event.payload
    request, key = bytes(record.request), _uuid(record.id)
    if request[:1] != b"{" or b'"conversation":' in request or record.failures:
        raise Odd("no object, a turn of a stored conversation, or evidence of a failure")
    row, question = _ROLLOUT.row(record), None
    if record.log_mode == "metadata" or record.task_embedding == []:
        row += _NULL + _NULL
    elif record.task_embedding is not None:
        row += _reals(np.array([record.task_embedding]))[0]
        row += _NULL if record.task_embedder is None else _text(record.task_embedder)
    else:
        question = _question(request)
    copied = [("rollouts", row)]
    copied += [("rounds", _ROUND.row(one, key)) for one in record.rounds]
    copied += [("steps", _STEP.row(one, key)) for one in record.steps]
    return LogRecord(payload, "rollout", event.ts_us, record.parent_id is None, copied, _rest(record), question)


_decode_hold, _decode_dispatch, _decode_settle = _decoder(_Hold), _decoder(_Dispatch), _decoder(_Settle)
_decode_rollout = _decoder(_ROLLOUT.record)
_NONE, _EMPTY = _json(b"[]"), _json(b"{}")
_KIND = slice(53, 57)  # of a record in its canonical form: {"id":"…","kind":"…
_CONVERSIONS = {b"hold": _hold, b"disp": _dispatch, b"sett": _settle, b"roll": _rollout}


def _question(request: bytes) -> str:
    try:
        return question_text(_decode_request(request).messages)
    except (AttributeError, TypeError):
        return ""


def _rest(record: Any) -> rows.Rows | None:
    """What the rollout adds beside its own rows: the marks of the conversation's next turn, and a grade to give."""
    is_graded = b'"grader":' in bytes(record.tags)
    if not (record.answered_by and record.marks) and not is_graded:
        return None
    row = {name: getattr(record, name) for name in ("id", "key_id", "depth")}
    row |= {"created_at": rows.at(record.created_us), "finished_at": rows.at(record.finished_us)}
    told = {"answered_by": record.answered_by, "marks": record.marks, "facts": _value(record.facts)}
    graded = rows.grading_row(row | {"tags": _value(record.tags)}) if is_graded else None
    return rows.Rows(continuations=rows.continuation_rows(row, told), gradings=[graded] if graded else [])


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


# ---------------------------------------------------------------- vectors


def fill_vectors(records: Sequence[LogRecord], embedding: Embedding | None) -> None:
    """Add the vectors of all questions, computed together. `embedding` None: they stay without."""
    asked = [record for record in records if record.question is not None]
    vectors = [_NULL] * len(asked)
    if embedding is not None and asked:
        vectors = _reals(embedding.embed_all([str(record.question) for record in asked]))
    named = _NULL if embedding is None else _text(embedding.name)
    for record, vector in zip(asked, vectors, strict=True):
        table, row = record.copied[0]
        record.copied[0] = table, row + vector + (_NULL if vector == _NULL else named)
        record.question = None


def _reals(vectors: NDArray[np.float64]) -> list[bytes]:
    """Each row as an array of `real`; of zeros alone: NULL."""
    sized = np.empty(vectors.shape, _REALS)
    with np.errstate(over="raise"):
        sized["size"], sized["value"] = 4, vectors
    n = vectors.shape[1]
    return [
        _array(_FLOAT4, n, row.tobytes()) if some else _NULL
        for row, some in zip(sized, map(np.any, vectors), strict=True)
    ]


# ---------------------------------------------------------------- COPY


def copy(connection: Connection, records: Sequence[LogRecord]) -> None:
    """Copy all rows, in the order of their primary keys, with which they begin. Raises psycopg.Error, where a row is
    stored already too."""
    by_table: dict[str, list[bytes]] = {table.name: [] for table in COPIED}
    for record in records:
        for table, row in record.copied:
            by_table[table].append(row)
    driver: psycopg.Connection[Any] = connection.connection.driver_connection  # type: ignore[assignment]
    with driver.cursor() as cursor:
        for table, lines in by_table.items():
            if lines:
                with cursor.copy(_statement(table)) as into:
                    into.write(b"".join([_HEAD, *sorted(lines), _END]))


@lru_cache(maxsize=8)
def _statement(table: str) -> str:
    return query("copy_rows", table=sql.Identifier(table), columns=identifiers(_FORMS[table].columns)).text
