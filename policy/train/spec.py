"""What one training run is: where rollouts come from, which weights it begins with, every setting. One JSON value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from gateway.core.loop.prompt import Profile
from gateway.errors import ConfigError
from policy.dataset.rules import Rules
from policy.dataset.select import LEARNT, Selection
from policy.graders.judge import RUBRIC
from policy.train.settings import PROFILES, Settings


def _filter_schema() -> dict[str, Any]:
    """The JSON schema of `filters`: the fields of both."""
    both = [TypeAdapter(kind).json_schema()["properties"] for kind in (Selection, Rules)]
    return {"properties": both[0] | both[1], "additionalProperties": False}


def _suitable(env: object, init: object, method: object) -> str:
    """The profile that suits: recorded answers without weights to begin with are taught first (docs/adr/0014)."""
    if method == "sft":
        return "taught"
    if env == "replay" and not init:
        return "recorded"
    return "logged" if env == "logged" else "small"


# Settings that are younger than checkpoints may be: at its default, a run is the one that it was without them.
SETTINGS_SINCE = ("missed_penalty", "repaired_penalty", "rejected_penalty", "verdict_penalty_max")


class TrainSpec(BaseModel):
    """The arguments of `python -m policy train`, as a job stores them. Paths are as given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: Literal["arena", "replay", "logged", "live"]
    method: Literal["grpo", "sft"] = Field("grpo", description="sft: supervised, on plans that won")
    prompt: Profile | None = Field(None, description="sft: the prompt that the student is taught; none: as `init`")
    init: Path | None = Field(None, description="Policy directory whose weights training begins with")
    profile: Literal["small", "recorded", "logged", "taught", "paper"] | None = Field(
        None, description="Whose values the settings have that are not given; none: by `env` and `init`"
    )
    name: str = Field("", description="Of the version that comes out; empty: as `init`")
    version: str = Field("", description="Its number; empty: one more than that of `init`")
    settings: Settings = Settings()
    rollouts: str = Field("", description="…/v1 of a vLLM that samples the plans, with LoRA; empty: this process does")
    staff: Literal["standard", "held_out", "fresh", "untold"] = Field("standard", description="arena: which workers")
    data: Path | None = Field(None, description="replay: recorded answers")
    prices: Path | None = Field(None, description="replay: model → dollars per million tokens")
    workers: tuple[str, ...] = Field((), description="replay: only these models")
    database: str = Field("", description="logged, live: postgresql://…")
    export: Path | None = Field(None, description="logged: a Parquet file of `traces export` instead")
    filters: dict[str, Any] = Field(
        {}, description="logged, live: which rows, as `traces export` chooses them", json_schema_extra=_filter_schema()
    )
    demonstrations: Path | None = Field(None, description="sft: JSON lines with question or messages, and plan")
    url: str = Field("", description="live: the gateway, …/v1")
    key_file: Path | None = Field(None, description="live: a file that holds an API key")
    prompts_file: Path | None = Field(None, description="live: JSON lines as `baton record` takes them")
    pool_file: Path | None = Field(None, description="live, demonstrations: the gateway's pool file")
    pool: str = Field("", description="live, demonstrations: which pool of it")
    grader: str = Field("", description="live: how replies are judged where a question does not say; default exact")
    judge: str = Field("", description="live: the worker that judges what has no reference, and for grader judge")
    rubric: str = Field(RUBRIC, description="live: by which it judges a question without a reference")
    usd_max: str = Field("", description="live: what the run may spend, in dollars")
    episode_usd_max: str = Field("0.05", description="live: what one episode may cost; the cap leaves room for it")

    @model_validator(mode="before")
    @classmethod
    def _profiled(cls, values: Any) -> Any:
        """Fill in the settings of the profile that are not given."""
        if not isinstance(values, dict) or not isinstance(values.get("settings", {}), dict):
            return values
        profile = values.get("profile") or _suitable(values.get("env"), values.get("init"), values.get("method"))
        return {**values, "settings": {**PROFILES.get(str(profile), {}), **values.get("settings", {})}}

    @model_validator(mode="after")
    def _of_the_method(self) -> TrainSpec:
        if self.method == "sft" and self.env not in ("logged", "replay"):
            raise ValueError(
                f"method sft learns from the log or from recordings: give --env logged or replay, not {self.env}"
            )
        if self.prompt is not None and self.method != "sft":
            raise ValueError("prompt: weights are taught another prompt by --method sft alone")
        if self.demonstrations is not None and self.method != "sft":
            raise ValueError("demonstrations train by --method sft alone")
        if self.demonstrations is not None and self.pool_file is None:
            raise ValueError("demonstrations need --pool-file: the workers that their plans name")
        return self

    @field_validator("filters")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            every = plain_filters(*chosen(value))
        except ConfigError as error:
            raise ValueError(error.message) from None
        return {name: every[name] for name in value if name in every}

    @field_validator("usd_max", "episode_usd_max")
    @classmethod
    def _dollars(cls, value: str) -> str:
        if value and (not value.replace(".", "", 1).isdigit() or float(value) <= 0):
            raise ValueError(f"{value} dollars allow nothing: give a number above 0")
        return value

    def digest(self) -> str:
        """Hex digest of what decides the weights: a checkpoint belongs to one run."""
        apart: dict[str, Any] = {"settings": {"checkpoint_steps"}, "name": True, "version": True, "profile": True}
        apart |= {"rollouts": True}  # a vLLM that was lost comes back on another port
        told = self.model_dump(mode="json", exclude=apart)
        for name in SETTINGS_SINCE:
            if told["settings"][name] == Settings.model_fields[name].default:
                del told["settings"][name]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def chosen(filters: Mapping[str, Any]) -> tuple[Selection, Rules]:
    """Selection and rules from plain data; without `planners`, whatever can be learnt from is selected. Raises
    ConfigError naming the field."""
    ours = {"planners": LEARNT, **{name: value for name, value in filters.items() if name in Selection.__slots__}}
    theirs = {name: value for name, value in filters.items() if name in Rules.__slots__}
    if unknown := sorted(set(filters) - set(ours) - set(theirs)):
        raise ConfigError(f"no filter `{unknown[0]}`; there are those of `traces export --help`")
    try:
        return TypeAdapter(Selection).validate_python(ours), TypeAdapter(Rules).validate_python(theirs)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def plain_filters(selection: Selection, rules: Rules) -> dict[str, Any]:
    """The inverse of `chosen`, as JSON: what a spec stores."""
    values = {name: value for name, value in (asdict(selection) | asdict(rules)).items() if value not in (None, ())}
    return dict(json.loads(json.dumps(values, default=datetime.isoformat)))
