"""What values may look like, and how the objects of a request are read: known keys kept, others named or refused.

A check gives OpenAI's code for what is wrong with a value, or None where it is good. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import BadRequest

Check = Callable[[Any], str | None]
Known = Mapping[str, tuple[Check, str]]  # key -> (check, what a good value is)
PROPERTIES_MAX = 256  # of an object whose names are known; OpenAI's largest has 37
DROPPED_MAX = 4096  # unknown properties of one request
PARTS_MAX = 4096  # parts of all of its messages together
WRONG_TYPE = "invalid_type"
CODES = (  # everything that a check can say
    WRONG_TYPE, "invalid_value", "empty_array", "array_above_max_length", "string_above_max_length",
    "object_above_max_properties", "integer_below_min_value", "integer_above_max_value", "decimal_below_min_value",
    "decimal_above_max_value",
)  # fmt: skip
# Names that proxies and client libraries take as settings beside the body. They could redirect a call, unlock a key or
# fake a reply. Baton hands none of them on; a refusal says so to whoever tries.
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
    """A finite JSON number in [low, high]."""
    return lambda v: _outside(v, low, high, "decimal") if isinstance(v, int | float) else WRONG_TYPE


def integer(low: int, high: int) -> Check:
    """A JSON integer in [low, high]."""
    return lambda v: _outside(v, low, high, "integer") if isinstance(v, int) else WRONG_TYPE


def _outside(value: float, low: float, high: float, what: str) -> str | None:
    if isinstance(value, bool) or not math.isfinite(value):
        return WRONG_TYPE
    return f"{what}_below_min_value" if value < low else f"{what}_above_max_value" if value > high else None


def text(chars_max: int, pattern: str | None = None) -> Check:
    """A string of at most `chars_max` characters, and of `pattern` from end to end where there is one."""

    def check(value: Any) -> str | None:
        if not isinstance(value, str):
            return WRONG_TYPE
        if len(value) > chars_max:
            return "string_above_max_length"
        return None if pattern is None or re.fullmatch(pattern, value) else "invalid_value"

    return check


def one_of(*names: str) -> Check:
    """One of these strings."""
    return lambda v: WRONG_TYPE if not isinstance(v, str) else None if v in names else "invalid_value"


def array(length_min: int, length_max: int, kind: type | tuple[type, ...] = object) -> Check:
    """A list of so many items of that type."""

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
    """A JSON object."""
    return None if isinstance(value, dict) else WRONG_TYPE


def string_pairs(value: Any) -> str | None:
    """OpenAI's `metadata`: up to 16 pairs of strings, of 64 and 512 characters."""
    if code := mapping(value):
        return code
    pair = text(64), text(512)
    codes = (check(item) for entry in value.items() for check, item in zip(pair, entry, strict=True))
    too_many = "object_above_max_properties" if len(value) > 16 else None
    return next((code for code in codes if code), too_many)


def boolean(value: Any) -> str | None:
    """true or false."""
    return None if isinstance(value, bool) else WRONG_TYPE


def either(*checks: Check) -> Check:
    """What one of them takes; else what the last of them says."""

    def check(value: Any) -> str | None:
        found = [each(value) for each in checks]
        return None if None in found else next((code for code in found if code != WRONG_TYPE), WRONG_TYPE)

    return check


def check_size(value: Mapping[str, Any], where: str | None) -> None:
    """Raises BadRequest for an object with more properties than any of OpenAI's has, before one is looked at."""
    if len(value) > PROPERTIES_MAX:
        said = f"`{where or 'the body'}` holds {len(value)} properties; at most {PROPERTIES_MAX} are accepted"
        raise BadRequest(said, param=where, code="object_above_max_properties")


FREE_TEXT = text(2**31), "a string"
FLAG = boolean, "true or false"
OBJECT = mapping, "an object"


def bad(where: str, good: str, code: str) -> BadRequest:
    """The error of a value that is not what it must be."""
    return BadRequest(f"`{where}` must be {good}", param=where, code=code)


def unknown(where: str) -> BadRequest:
    """The error of a property that Baton does not know."""
    return BadRequest(f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter")


def known(given: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """`given`, unchanged. Raises BadRequest naming the first property that is not one of `names`."""
    others = sorted(str(name) for name in given if name not in names)
    if others:
        raise unknown(others[0][:64])
    return given


def whole(text: str) -> int | None:
    """The whole number that up to 19 ASCII digits write; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def missing(where: str) -> BadRequest:
    """The error of a property that must be there."""
    return BadRequest(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")


def refuse_if_dangerous(name: str, where: str) -> None:
    """Raises BadRequest(refused_field) for a property that could redirect a call or unlock something."""
    if is_refused(name):
        raise BadRequest(f"`{where}` is not accepted from clients; leave it out", param=where, code="refused_field")


@dataclass(slots=True)
class Reader:
    """Reads the objects inside one request. `dropped`: paths of the unknown properties that were left out."""

    media_bytes_max: int
    dropped: list[str] = field(default_factory=list)
    parts: int = 0

    def object(self, value: Any, where: str, known: Known, needed: tuple[str, ...] = ()) -> dict[str, Any]:
        """The object with its known properties alone; null counts as absent. Raises BadRequest with the path."""
        if not isinstance(value, dict):
            raise bad(where, "an object", WRONG_TYPE)
        check_size(value, where)
        for name in value:
            if name not in known:
                refuse_if_dangerous(name, f"{where}.{name}")
                self.drop(f"{where}.{name}")
        for name in needed:
            if value.get(name) is None:
                raise missing(f"{where}.{name}")
        for name, (check, good) in known.items():
            if value.get(name) is not None and (code := check(value[name])):
                raise bad(f"{where}.{name}", good, code)
        return {name: item for name, item in value.items() if name in known and (item is not None or name == "content")}

    def count_parts(self, parts: int, where: str) -> None:
        """Note the parts of one message before they are read. Raises BadRequest where there are too many in all."""
        self.parts += parts
        if self.parts > PARTS_MAX:
            said = f"with `{where}` the messages hold {self.parts} parts; at most {PARTS_MAX} are accepted"
            raise BadRequest(said, param=where, code="array_above_max_length")

    def drop(self, where: str) -> None:
        """Note a property that is left out. Raises BadRequest where there are more than `DROPPED_MAX`."""
        self.dropped.append(where[:512])
        if len(self.dropped) > DROPPED_MAX:
            said = f"the request holds more than {DROPPED_MAX} unknown properties; `{where[:512]}` is one"
            raise BadRequest(said, param=where[:512], code="object_above_max_properties")


def is_refused(name: str) -> bool:
    """Whether a property of that name is refused: however it is cased, in `camelCase`, with `-` for `_`, or padded."""
    return any(_listed(spelt) for spelt in (_plain(name), _plain(_HUMP.sub("_", name))))


def _plain(name: str) -> str:
    return re.sub(r"[\s.\-]+", "_", name.strip().lower()).strip("_")


def _listed(name: str) -> bool:
    return name in REFUSED or name.startswith(REFUSED_PREFIXES)
