"""The first stage of a job, as a program: what it trains on is written down, so that a resumed job sees the same.

For `logged` the selected rows become a file; for the others the files that are named get their hashes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import file_sha256
from gateway.errors import ConfigError
from gateway.files import write_atomic
from policy.dataset.export import export, summary
from policy.inputs import local
from policy.spec import checked
from policy.train.spec import TrainSpec, chosen

ROWS = "rows.parquet"


def select(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return {train (with the rows), inputs: {path: sha256}, origins: {path: URL}, report} for a `request` of {train,
    database_url, work}. Raises as `policy.inputs.local` and `dataset.export`, and ConfigError for a file that cannot be
    read."""
    work = Path(request["work"])
    given, origins = local(request["train"], work / "inputs")
    spec = checked(TrainSpec, given)
    if spec.env != "logged":
        return {"train": given, "inputs": inputs(spec), "origins": origins, "report": None}
    rows = work / ROWS
    selection, rules = chosen(spec.filters)
    report = export(request["database_url"], selection, rules, rows, split=None)
    sys.stderr.write(f"{summary(report, rows)}\n")
    train = {**given, "export": str(rows), "filters": {}}
    return {"train": train, "inputs": {str(rows): sha256(rows)}, "origins": origins, "report": asdict(report)}


def inputs(spec: TrainSpec) -> dict[str, str]:
    """The files that a spec names, with their hashes. Raises ConfigError naming one that cannot be read."""
    named = [path for path in (spec.data, spec.prices, spec.prompts_file) if path is not None]
    return {str(path.resolve()): sha256(path) for path in named}


def sha256(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that the worker can read") from None


def changed(inputs: Mapping[str, str]) -> str | None:
    """The first file that is not what it was."""
    return next((path for path, was in inputs.items() if sha256(Path(path)) != was), None)


def write_json(path: Path, content: Any) -> None:
    """Replace a file with `content` as JSON."""
    write_atomic(path, json.dumps(content))
