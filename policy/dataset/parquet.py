"""Parquet, as `datasets`, DuckDB, Polars and pandas read it. The one file that imports pyarrow (extra `train`).

`rows`: a column is a field of `row.Row`. Open-ended JSON (pool, tags, request_messages, plan, sampling) is text: every
reader sees the same types. `verl`: the columns verl's `RLHFDataset` wants (data_source, prompt, ability,
reward_model, extra_info) and, named as in its `DataProto`, what was sampled (prompts, responses, response_mask,
rollout_log_probs). The file's metadata holds `baton.traces.version` (of this schema), `.shape`, `.selection` and
`.report`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC
from itertools import islice
from pathlib import Path
from typing import IO, Any

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:  # the extra is not installed: said by name when a file is asked for
    pa = pq = None

from gateway.core.loop.replies.verdicts import StepVerdict
from gateway.errors import ConfigError
from policy.dataset.row import Row, StepRow
from policy.reward import Faults

VERSION = "5"
READABLE = ("2", "3", "4", VERSION)  # 4 lacks decisions of routers, 3 also verdicts, 2 also replies and demonstrations
ROW_GROUP_ROWS = 1_000
JSON_COLUMNS = (
    *("pool", "caps", "allowed", "tags", "request_messages", "plan", "sampling", "outcome_metadata"),
    *("replies", "turn", "shown", "decision"),
)


def require() -> None:
    """Raises ConfigError where pyarrow is not installed."""
    if pa is None:
        raise ConfigError("Parquet needs pyarrow: pip install '.[train]' (or pyarrow), or export --format art")


def _messages() -> Any:
    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def _steps() -> Any:
    kinds = {"step": pa.int16(), "see": pa.list_(pa.int16()), "prompt_tokens": pa.int64()}
    kinds |= {"completion_tokens": pa.int64(), "cost_nano": pa.int64(), "latency_ms": pa.float64()}
    return pa.list_(pa.struct([(name, kinds.get(name, pa.string())) for name in StepRow.__slots__]))


def _verdicts() -> Any:
    kinds = {"round": pa.int32(), "step": pa.int16(), "accept": pa.bool_(), "repaired": pa.bool_()}
    return pa.list_(pa.struct([(name, kinds.get(name, pa.string())) for name in StepVerdict.__slots__]))


def row_schema() -> Any:
    """Columns of the shape `rows`; text where nothing else is said."""
    kinds = dict.fromkeys(("prompt_token_ids", "plan_token_ids"), pa.list_(pa.int32()))
    kinds |= dict.fromkeys(("round", "depth", "quality", "outcome_n"), pa.int32())
    kinds |= dict.fromkeys(("outcome_sources", "grader_versions"), pa.list_(pa.string()))
    kinds |= dict.fromkeys(("outcome", "latency_ms"), pa.float64())
    kinds |= {
        "created_at": pa.timestamp("us", tz="UTC"),
        "workers_used": pa.list_(pa.struct([("worker", pa.string()), ("version", pa.string())])),
        "messages": _messages(),
        "plan_logprobs": pa.list_(pa.float32()),
        "decision_mask": pa.list_(pa.bool_()),
        "steps": _steps(),
        "verdicts": _verdicts(),
        "cost_nano": pa.int64(),
    }
    return pa.schema([(name, kinds.get(name, pa.string())) for name in Row.__slots__])


def verl_schema() -> Any:
    """Columns of the shape `verl`."""
    info = {"index": pa.int64(), "round": pa.int32(), "outcome": pa.float64(), "cost_usd": pa.float64()}
    info |= {"latency_s": pa.float64(), "parsed": pa.bool_()}
    info |= dict.fromkeys(Faults.__slots__, pa.int32())
    names = ("split", "group", "rollout_id", "key_id", "policy_version", "prompt_hash", "schema_hash")
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": _messages(),
            "ability": pa.string(),
            "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
            "extra_info": pa.struct([*info.items(), *((name, pa.string()) for name in names)]),
            "uid": pa.string(),
            "prompts": pa.list_(pa.int32()),
            "responses": pa.list_(pa.int32()),
            "response_mask": pa.list_(pa.int8()),
            "decision_mask": pa.list_(pa.int8()),
            "rollout_log_probs": pa.list_(pa.float32()),
            "reward": pa.float64(),
        }
    )


def hf_schema() -> Any:
    """Columns of the shape `conversation`."""
    texts = ("split", "group", "rollout_id", "policy_version", "pool_name", "task_type")
    numbers = {"index": pa.int64(), "round": pa.int32(), "reward": pa.float64(), "outcome": pa.float64()}
    named = {"messages": _messages(), **numbers, "parsed": pa.bool_(), **dict.fromkeys(texts, pa.string())}
    return pa.schema({**named, "verdicts": _verdicts()})


def row_record(row: Row) -> dict[str, Any]:
    """A row as the schema of `rows` has it."""
    record: dict[str, Any] = {name: getattr(row, name) for name in Row.__slots__}
    for name in JSON_COLUMNS:
        record[name] = None if record[name] is None else json.dumps(record[name], ensure_ascii=False)
    record["workers_used"] = [{"worker": worker, "version": version} for worker, version in row.workers_used]
    record["steps"] = [{name: getattr(step, name) for name in StepRow.__slots__} for step in row.steps]
    record["verdicts"] = None if row.verdicts is None else [asdict(one) for one in row.verdicts]
    record["messages"] = [{"role": one.get("role"), "content": one.get("content")} for one in row.messages]
    return record


def write(
    file: IO[bytes], schema: Any, records: Iterable[Mapping[str, Any]], about: Mapping[str, str],
    row_group_rows: int = ROW_GROUP_ROWS,
) -> None:  # fmt: skip
    """All records, zstd, one row group in memory at a time. `about` becomes metadata under `baton.traces.`."""
    tagged = {f"baton.traces.{name}": value for name, value in {"version": VERSION, **about}.items()}
    remaining = iter(records)
    with pq.ParquetWriter(file, schema.with_metadata(tagged), compression="zstd") as writer:
        while group := list(islice(remaining, row_group_rows)):
            writer.write_table(_table(group, schema))


def _table(records: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    return pa.Table.from_pylist(list(records), schema=schema)


def read(path: Path) -> Iterator[Row]:
    """The rows of an export of the shape `rows`, as they were written. Raises ConfigError on any other file."""
    require()
    try:
        with pq.ParquetFile(path) as file:
            about = file.schema_arrow.metadata or {}
            version = about.get(b"baton.traces.version", b"none").decode()
            if about.get(b"baton.traces.shape") != b"parquet" or version not in READABLE:
                raise ConfigError(
                    f"{path}: not an export of this version ({version}): `baton traces export` writes one"
                )
            for batch in file.iter_batches(ROW_GROUP_ROWS):
                yield from map(_row, batch.to_pylist())
    except (OSError, pa.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"{path}: cannot be read ({why}); `baton traces export` writes such a file") from None


def _row(record: Mapping[str, Any]) -> Row:
    """The inverse of `row_record`."""
    fields = dict(record)
    for name in JSON_COLUMNS:
        if name in fields:
            fields[name] = None if fields[name] is None else json.loads(fields[name])
    fields["created_at"] = fields["created_at"].astimezone(UTC)
    fields["workers_used"] = tuple((one["worker"], one["version"]) for one in fields["workers_used"])
    fields["steps"] = tuple(StepRow(**{**step, "see": tuple(step["see"])}) for step in fields["steps"])
    fields |= {name: tuple(fields[name]) for name in ("outcome_sources", "grader_versions")}
    if fields.get("verdicts") is not None:
        fields["verdicts"] = tuple(StepVerdict(**one) for one in fields["verdicts"])
    return Row(**fields)
