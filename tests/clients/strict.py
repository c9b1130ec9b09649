"""OpenAI's schema as the models of its newest SDK have it (they are generated from it), strictly."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

KNOWN_BEYOND = {
    ("Response", "store"),  # in OpenAI's reference and its replies, in no model of the SDK
    ("Response", "presence_penalty"),  # as above
    ("Response", "frequency_penalty"),  # as above
    ("ResponseFunctionCallArgumentsDoneEvent", "name"),  # required by the SDK's 2.x, gone from 3.x
}


def problems(kind: Any, body: Any) -> list[str]:
    """What a model of the SDK would have to overlook in `body`: wrong types, missing keys, keys unknown to it."""
    try:
        model = _adapter(kind).validate_python(body, strict=True)
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return list(_unknown(model, ""))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The union of all stream events takes most of a second to prepare."""
    return TypeAdapter(kind)


def _unknown(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            if (type(value).__name__, name) not in KNOWN_BEYOND:
                yield f"{place}.{name}: not in the schema"
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _unknown(inner, f"{place}.{name}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            yield from _unknown(inner, f"{place}[{index}]")
