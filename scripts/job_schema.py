"""Writes gateway/api/operator/job.schema.json from policy's specs: the gateway checks submitted jobs by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from gateway.core.policies.jobs import SET_BY_THE_JOB
from policy.gate.scene import GateSpec
from policy.train.spec import TrainSpec

PAGE = Path(__file__).resolve().parent.parent / "gateway" / "api" / "operator" / "job.schema.json"


class _Job(BaseModel):
    """The body of `POST /admin/jobs`, less `policy`."""

    model_config = ConfigDict(extra="forbid")

    train: TrainSpec
    gate: GateSpec = GateSpec()
    auto: bool = False


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12)."""
    definition = _Job.model_json_schema()
    for name in SET_BY_THE_JOB:
        del definition["$defs"]["TrainSpec"]["properties"][name]
    del definition["properties"]["gate"]["default"]
    del definition["$defs"]["TrainSpec"]["properties"]["settings"]["default"]  # it depends on the profile
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A job of Baton's learning loop"}
    return {**_untitled(definition), **head}


def _untitled(value: Any) -> Any:
    """Return the schema without the titles that pydantic derives from names."""
    if isinstance(value, list):
        return [_untitled(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _untitled(item) for name, item in value.items() if name != "title" or isinstance(item, dict)}


def render() -> str:
    """Return the text of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"
