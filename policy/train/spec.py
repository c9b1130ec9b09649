"""What one training run is: where rollouts come from, which weights it begins with, every setting. One JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from gateway.errors import ConfigError
from policy.dataset.rules import Rules
from policy.dataset.select import Selection
from policy.train.settings import Settings

SPEC_BYTES_MAX = 4 << 20


class TrainSpec(BaseModel):
    """The arguments of `python -m policy train`, as a job stores them. Paths are as given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: Literal["arena", "replay", "logged", "live"]
    init: Path | None = Field(None, description="Policy directory whose weights training begins with")
    name: str = Field("", description="Of the version that comes out; empty: as `init`")
    version: str = Field("", description="Its number; empty: one more than that of `init`")
    settings: Settings = Settings()
    staff: Literal["standard", "held_out", "fresh", "untold"] = Field("standard", description="arena: which workers")
    data: Path | None = Field(None, description="replay: recorded answers")
    prices: Path | None = Field(None, description="replay: model → dollars per million tokens")
    workers: tuple[str, ...] = Field((), description="replay: only these models")
    database: str = Field("", description="logged: postgresql://…")
    export: Path | None = Field(None, description="logged: a Parquet file of `traces export` instead")
    filters: dict[str, Any] = Field({}, description="logged: arguments of policy.dataset.select.Selection and Rules")
    url: str = Field("", description="live: the gateway, …/v1")
    key_file: Path | None = Field(None, description="live: a file that holds an API key")
    prompts_file: Path | None = Field(None, description="live: JSON lines with id, messages or question, reference")
    pool_file: Path | None = Field(None, description="live: the gateway's pool file")
    pool: str = Field("", description="live: which pool of it")
    grader: str = Field("exact", description="live: how replies are judged, by name")
    usd_max: str = Field("", description="live: what the run may spend, in dollars")

    episode_usd_max: str = Field("0.05", description="live: what one episode may cost; the cap leaves room for it")

    @field_validator("usd_max", "episode_usd_max")
    @classmethod
    def _dollars(cls, value: str) -> str:
        if value and (not value.replace(".", "", 1).isdigit() or float(value) <= 0):
            raise ValueError(f"{value} dollars allow nothing: give a number above 0")
        return value

    def digest(self) -> str:
        """Hex digest of what decides the weights: a checkpoint belongs to one run."""
        told = self.model_dump(mode="json", exclude={"settings": {"checkpoint_steps"}, "name": True, "version": True})
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def read_spec(path: Path) -> TrainSpec:
    """From a JSON file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return TrainSpec.model_validate_json(file.read(SPEC_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"--spec {path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise ConfigError(f"--spec {path}: {first_of(error)}") from None


def first_of(error: ValidationError) -> str:
    """The first thing wrong, in one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'spec'}: {first['msg']}"


def chosen(filters: Mapping[str, Any]) -> tuple[Selection, Rules]:
    """Selection and rules from plain data. Raises ConfigError naming the field."""
    ours = {name: value for name, value in filters.items() if name in Selection.__slots__}
    theirs = {name: value for name, value in filters.items() if name in Rules.__slots__}
    if unknown := sorted(set(filters) - set(ours) - set(theirs)):
        raise ConfigError(f"filters: `{unknown[0]}` is none; there are those of `traces export --help`")
    try:
        return TypeAdapter(Selection).validate_python(ours), TypeAdapter(Rules).validate_python(theirs)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"filters: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def plain_filters(selection: Selection, rules: Rules) -> dict[str, Any]:
    """The inverse of `chosen`: what a spec stores."""
    values = asdict(selection) | asdict(rules)
    plain = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value not in (None, ())}
