"""A curated selection as a file: whole or not at all, the same bytes of data for the same log.

The file is written beside its place, synced and renamed. What a killed export left there is removed by the next one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Literal, get_args

from gateway.errors import ConfigError, Unavailable
from policy.dataset import parquet, shapes
from policy.dataset.curate import Curated, curated
from policy.dataset.row import Row
from policy.dataset.rules import ROUTERS, Report, Rules, reward_of
from policy.dataset.select import Selection
from policy.reward import RewardSettings

Format = Literal["parquet", "verl", "art", "hf", "jsonl", "sft", "dpo"]
FORMATS: tuple[Format, ...] = get_args(Format)
LINES: tuple[Format, ...] = ("art", "jsonl", "sft", "dpo")  # one JSON object a line
TEXTS: tuple[Format, ...] = ("hf", "jsonl", "sft", "dpo")  # of words alone: a hosted planner's plans do, without tokens
WON_ABOVE = 0.5  # the outcome of a plan that sft imitates
PROGRESS_S = 0.5
NOTHING: Mapping[str, str] = {
    "sft": f"no plan has an outcome above {WON_ABOVE}: there is nothing to imitate",
    "dpo": "no two plans for the very same prompt have different rewards; --format sft needs no pairs",
}


def export(
    database_url: str,
    selection: Selection,
    rules: Rules,
    out: Path,
    form: Format = "parquet",
    *,
    split: str | None = None,
    reward: RewardSettings | None = None,
    progress: IO[str] | None = None,
) -> Report:
    """Write `out` (`split`: only that side) and say what is in it. Raises ConfigError on a path that can't be written,
    Unavailable on a full disk, and as `curate.curated`; then `out` is as it was."""
    _check(form, selection, rules)
    if form in TEXTS:
        rules = replace(rules, tokens_required=False, texts_required=True)
    with replacing(out) as file, curated(database_url, selection, rules) as curation:
        rows = (row for row in curation.rows() if split in (None, row.split))
        total = curation.report.kept if split is None else getattr(curation.report, split)
        if not total:
            raise ConfigError(f"the {split} side is empty: set --validation-share or --split-at")
        _write(file, form, _counted(rows, total, progress), curation, reward or RewardSettings())
    return curation.report


def _check(form: Format, selection: Selection, rules: Rules) -> None:
    if form not in LINES:
        parquet.require()
    if form != "parquet" and not (selection.min_outcomes and (form in TEXTS or rules.tokens_required)):
        needs = "outcomes" if form in TEXTS else "tokens and outcomes"
        raise ConfigError(f"--format {form} needs {needs} in every row: use --format parquet without them")
    if form in ("verl", "art") and (routers := set(selection.planners) & set(ROUTERS)):
        raise ConfigError(f"--format {form} has sampled tokens: plans of {min(routers)} have none")


def _write(file: IO[bytes], form: Format, rows: Iterable[Row], curation: Curated, reward: RewardSettings) -> None:
    if form == "parquet":
        parquet.write(file, parquet.row_schema(), map(parquet.row_record, rows), _about(form, curation))
        return
    paid = ((row, reward_of(row, row.root_id not in curation.unparsed, reward)) for row in rows)
    if form in LINES:
        lines = _lines(form, paid)
        for one in lines:
            file.write(json.dumps(one, ensure_ascii=False).encode() + b"\n")
        if not file.tell():
            raise ConfigError(NOTHING.get(form, "no row is left"))
        return
    shape, schema = (
        (shapes.verl, parquet.verl_schema()) if form == "verl" else (shapes.conversation, parquet.hf_schema())
    )
    parquet.write(file, schema, (shape(index, *one) for index, one in enumerate(paid)), _about(form, curation))


def _lines(form: Format, paid: Iterable[tuple[Row, float]]) -> Iterator[dict[str, Any]]:
    if form == "dpo":
        return shapes.preferences(paid)
    if form == "sft":
        won = (row for row, _ in paid if row.parsed and row.outcome is not None and row.outcome > WON_ABOVE)
        return (shapes.lesson(row) for row in won)
    shape = shapes.art if form == "art" else shapes.conversation
    return (shape(index, *one) for index, one in enumerate(paid))


def _about(form: Format, curation: Curated) -> dict[str, str]:
    return {"shape": form, "selection": str(curation.selection), "report": json.dumps(asdict(curation.report))}


def _counted(rows: Iterable[Row], total: int, progress: IO[str] | None) -> Iterator[Row]:
    """The rows, with a line that counts them on a terminal."""
    show = progress is not None and progress.isatty()
    said_s, done = 0.0, 0
    for done, row in enumerate(rows, 1):
        if show and progress and time.monotonic() - said_s > PROGRESS_S:
            progress.write(f"\r{done:,} of {total:,} rows")
            progress.flush()
            said_s = time.monotonic()
        yield row
    if show and progress:
        progress.write(f"\r{done:,} of {total:,} rows\n")


@contextmanager
def replacing(out: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `out` when the block ends well; otherwise nothing is left of it."""
    if out.is_dir() or not out.name:
        raise ConfigError(f"{out} is a directory; name a file in it", param="--out")
    _sweep(out)
    part = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        file = part.open("wb")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a file in a directory you can write", param="--out") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        what = error.strerror or str(error)
        raise Unavailable(f"{out} could not be written: {what}; free some space or name another place") from None
    finally:
        part.unlink(missing_ok=True)


def _sweep(out: Path) -> None:
    """Remove what killed exports to the same place left."""
    for left in out.parent.glob(f".{out.name}.*.partial"):
        pid = left.name.split(".")[-2]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
            with suppress(OSError):
                left.unlink()


def summary(report: Report, out: Path) -> str:
    """What a person is told at the end, one fact a line."""
    mean = "" if report.outcome_mean is None else f", mean outcome {report.outcome_mean:.3f}"
    lines = [
        f"wrote {out}: {report.train} rows to train on, {report.validation} to validate{mean}",
        f"{report.keys} keys, the largest holds {100 * report.key_share:.1f} %",
    ]
    return "\n".join([*lines, *([f"left out: {report.reasons()}"] if report.left_out else [])])
