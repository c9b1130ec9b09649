"""Specs: the input of a program as one JSON value, made from its arguments or read from a file, and validated here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from gateway.adapters.host.urls import as_url
from gateway.errors import ConfigError

SPEC_BYTES_MAX = 4 << 20
VALUE_CHARS_MAX = 60  # of a value in a message
S = TypeVar("S", bound=BaseModel)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given: not None, not False, not empty. 0 counts as given."""
    return {name: value for name, value in values.items() if value or (value == 0 and value is not False)}


def checked(kind: type[S], values: Mapping[str, Any]) -> S:
    """The spec. Raises ConfigError with the first thing that is wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(first_of(error)) from None


def read(kind: type[S], path: Path) -> S:
    """The spec in a JSON file, or in the `config` of a policy version's manifest. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(SPEC_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"--spec {path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"--spec {path}: no JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--spec {path}: no JSON object")
    sealed = isinstance(content.get("config"), dict) and "sha256" in content
    values = content["config"] if sealed else content
    try:
        return checked(kind, values)
    except ConfigError as error:
        raise ConfigError(f"--spec {path}: {error.message}") from None


def plain(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of a spec as JSON, with absolute paths or URLs: its reader runs in another directory. Raises
    ConfigError."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in kind.model_fields.items()}
    path_values = {name: value for name, value in values.items() if Path in kinds.get(name, ())}
    paths = {name: Path(value).resolve() for name, value in path_values.items() if as_url(value) is None}
    urls = {name: as_url(value) for name, value in path_values.items() if as_url(value)}
    return _subset(checked(kind, {**values, **paths}).model_dump(mode="json"), values) | urls


def _subset(all_values: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: value for name, value in values.items() if isinstance(value, dict)}
    values_set = {name: all_values[name] for name in values if name in all_values}
    return values_set | {name: _subset(values_set[name], value) for name, value in inner.items()}


def first_of(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors()[0]
    path, message = ".".join(map(str, first["loc"])) or "spec", first["msg"].removeprefix("Value error, ")
    shown = isinstance(first["input"], str | int | float) and first["type"] not in ("value_error", "extra_forbidden")
    value = f", not {str(first['input'])[:VALUE_CHARS_MAX]}" if shown else ""
    return f"{path}: {message}{value}"
