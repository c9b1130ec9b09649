"""Checks of request values, and the reader of request objects: it keeps known properties and drops or refuses others.

A check returns OpenAI's error code for an invalid value, or None for a valid one. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gateway.errors import BadRequest

Check = Callable[[Any], str | None]
Properties = Mapping[str, tuple[Check, str]]  # name -> (check, description of a valid value)
NAME_CHARS_MAX = 64  # of names that are remembered
PROPERTIES_MAX = 256  # of one object; OpenAI's largest has 37
DROPPED_MAX = 4096  # unknown properties of one request
PARTS_MAX = 4096  # content parts of one request, over all messages
WRONG_TYPE = "invalid_type"
CODES = (  # every code that a check can return
    WRONG_TYPE, "invalid_value", "empty_array", "array_above_max_length", "string_above_max_length",
    "object_above_max_properties", "integer_below_min_value", "integer_above_max_value", "decimal_below_min_value",
    "decimal_above_max_value",
)  # fmt: skip
# Names that proxies and client libraries accept as settings inside a body. They could redirect a call, unlock a key or
# fake a reply. Baton passes none of them on, and refuses them so that the sender knows.
REFUSED = frozenset(
    {
        "additional_drop_params", "allowed_openai_params", "api_base", "api_key", "api_keys", "api_secret", "api_type",
        "api_version", "authorization", "azure_endpoint", "base_model", "base_url", "callbacks", "client",
        "content_policy_fallbacks", "context_window_fallback_dict", "context_window_fallbacks", "credentials",
        "custom_llm_provider", "default_fallbacks", "default_headers", "default_query", "deployment_id",
        "drop_params", "endpoint_url", "extra_body", "extra_headers", "extra_query", "failure_callback", "fallbacks",
        "headers", "hf_model_name", "http_client", "input_cost_per_second", "input_cost_per_token", "litellm_params",
        "max_retries", "mock_response", "mock_timeout", "mock_tool_calls", "model_info", "model_list", "num_retries",
        "organization", "output_cost_per_second", "output_cost_per_token", "project", "proxies", "proxy",
        "proxy_server_request", "request_timeout", "retry_policy", "retry_strategy", "secret_fields", "shared_session",
        "ssl_verify", "stream_timeout", "success_callback", "timeout", "use_litellm_proxy", "user_config",
    }
)  # fmt: skip
REFUSED_PREFIXES = (
    "aws_",
    "azure_",
    "bedrock_",
    "gcp_",
    "litellm_",
    "mock_",
    "oci_",
    "sagemaker_",
    "vertex_",
    "watsonx_",
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def number(low: float, high: float) -> Check:
    """Accept a finite JSON number in [low, high]."""
    return lambda v: _outside(v, low, high, "decimal") if isinstance(v, int | float) else WRONG_TYPE


def integer(low: int, high: int) -> Check:
    """Accept a JSON integer in [low, high]."""
    return lambda v: _outside(v, low, high, "integer") if isinstance(v, int) else WRONG_TYPE


def _outside(value: float, low: float, high: float, what: str) -> str | None:
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return WRONG_TYPE
    return f"{what}_below_min_value" if value < low else f"{what}_above_max_value" if value > high else None


def text(chars_max: int, pattern: str | None = None) -> Check:
    """Accept a string of at most `chars_max` characters that matches all of `pattern`, if a pattern is given."""

    def check(value: Any) -> str | None:
        if not isinstance(value, str):
            return WRONG_TYPE
        if len(value) > chars_max:
            return "string_above_max_length"
        return None if pattern is None or re.fullmatch(pattern, value) else "invalid_value"

    return check


def one_of(*names: str) -> Check:
    """Accept one of these strings."""
    return lambda v: WRONG_TYPE if not isinstance(v, str) else None if v in names else "invalid_value"


def array(length_min: int, length_max: int, kind: type | tuple[type, ...] = object) -> Check:
    """Accept a list of `length_min` to `length_max` items of type `kind`."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return WRONG_TYPE
        if len(value) > length_max:
            return "array_above_max_length"
        if kind is not object and not all(isinstance(item, kind) for item in value):
            return WRONG_TYPE
        return "empty_array" if len(value) < length_min else None

    return check


def mapping(value: Any) -> str | None:
    """Accept a JSON object."""
    return None if isinstance(value, dict) else WRONG_TYPE


def string_pairs(value: Any) -> str | None:
    """Accept OpenAI's `metadata`: up to 16 pairs of strings, of at most 64 and 512 characters."""
    if code := mapping(value):
        return code
    pair = text(64), text(512)
    codes = (check(item) for entry in value.items() for check, item in zip(pair, entry, strict=True))
    too_many = "object_above_max_properties" if len(value) > 16 else None
    return next((code for code in codes if code), too_many)


def boolean(value: Any) -> str | None:
    """Accept true or false."""
    return None if isinstance(value, bool) else WRONG_TYPE


def any_of(*checks: Check) -> Check:
    """Accept a value that one of the checks accepts. Otherwise return the first code that is not `WRONG_TYPE`."""

    def check(value: Any) -> str | None:
        codes = [accept(value) for accept in checks]
        return None if None in codes else next((code for code in codes if code != WRONG_TYPE), WRONG_TYPE)

    return check


def check_size(value: Mapping[str, Any], where: str | None) -> None:
    """Raises BadRequest for an object with more properties than any object of OpenAI's API has. Call it before reading
    any property."""
    if len(value) > PROPERTIES_MAX:
        problem = f"`{where or 'the body'}` holds {len(value)} properties; at most {PROPERTIES_MAX} are accepted"
        raise BadRequest(problem, param=where, code="object_above_max_properties")


FREE_TEXT = text(2**31), "a string"
FLAG = boolean, "true or false"
OBJECT = mapping, "an object"


def bad_value(where: str, description: str, code: str) -> BadRequest:
    """The error for an invalid value. `description` says what a valid value is."""
    return BadRequest(f"`{where}` must be {description}", param=where, code=code)


def unknown_parameter(where: str) -> BadRequest:
    """The error for a property that Baton does not know."""
    return BadRequest(f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter")


def check_names(values: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return `values` unchanged. Raises BadRequest, which names the first property that is not in `names`."""
    unknown = sorted(str(name) for name in values if name not in names)
    if unknown:
        raise unknown_parameter(unknown[0][:64])
    return values


def parse_digits(text: str) -> int | None:
    """Return the integer that up to 19 ASCII digits spell, or None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def missing_parameter(where: str) -> BadRequest:
    """The error for an absent property that is required."""
    return BadRequest(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")


def refuse_if_dangerous(name: str, where: str) -> None:
    """Raises BadRequest(refused_field) for a property that could redirect a call or unlock something."""
    if is_refused(name):
        raise BadRequest(f"`{where}` is not accepted from clients; leave it out", param=where, code="refused_field")


def refuse_inside(value: Any, where: str) -> None:
    """Raises BadRequest(refused_field) for such a property at any depth of a value that Baton does not read itself."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_if_dangerous(str(name), f"{where}.{name}")
            refuse_inside(item, f"{where}.{name}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            refuse_inside(item, f"{where}[{at}]")


@dataclass(slots=True)
class Reader:
    """Reads the objects inside one request. `dropped` collects the paths of the unknown properties it removes."""

    media_bytes_max: int
    dropped: list[str] = field(default_factory=list)
    parts: int = 0

    def object(self, value: Any, where: str, properties: Properties, required: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the object with only its known properties; null counts as absent. Raises BadRequest with the path."""
        if not isinstance(value, dict):
            raise bad_value(where, "an object", WRONG_TYPE)
        check_size(value, where)
        for name in value:
            if name not in properties:
                refuse_if_dangerous(name, f"{where}.{name}")
                self.drop(f"{where}.{name}")
        for name in required:
            if value.get(name) is None:
                raise missing_parameter(f"{where}.{name}")
        for name, (check, description) in properties.items():
            if value.get(name) is not None and (code := check(value[name])):
                raise bad_value(f"{where}.{name}", description, code)
        return {
            name: item for name, item in value.items() if name in properties and (item is not None or name == "content")
        }

    def count_parts(self, parts: int, where: str) -> None:
        """Count the parts of one message before they are read. Raises BadRequest if the request has too many in all."""
        self.parts += parts
        if self.parts > PARTS_MAX:
            problem = f"with `{where}` the messages hold {self.parts} parts; at most {PARTS_MAX} are accepted"
            raise BadRequest(problem, param=where, code="array_above_max_length")

    def drop(self, where: str) -> None:
        """Record a property that is removed. Raises BadRequest if there are more than `DROPPED_MAX`."""
        self.dropped.append(where[:512])
        if len(self.dropped) > DROPPED_MAX:
            problem = f"the request holds more than {DROPPED_MAX} unknown properties; `{where[:512]}` is one"
            raise BadRequest(problem, param=where[:512], code="object_above_max_properties")


def is_refused(name: str) -> bool:
    """Whether a property of that name is refused, in any case, in `camelCase`, with `-` for `_`, or with padding."""
    return _is_known_refused(name) if len(name) <= NAME_CHARS_MAX else _is_refused(name)


def _is_refused(name: str) -> bool:
    return any(_is_listed(spelling) for spelling in (_snake_case(name), _snake_case(_HUMP.sub("_", name))))


_is_known_refused = lru_cache(maxsize=4096)(_is_refused)


def _snake_case(name: str) -> str:
    return re.sub(r"[\s.\-]+", "_", name.strip().lower()).strip("_")


def _is_listed(name: str) -> bool:
    return name in REFUSED or name.startswith(REFUSED_PREFIXES)
