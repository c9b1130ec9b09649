"""The pool: its workers, their prices and capabilities, and the differences between two pool files. Pure.

`adapters/host/poolfile.py` reads the YAML. Differences are for people and the audit: they show no secret and no
reference to one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NANO_PER_USD = 1_000_000_000
WorkerKind = Literal["openai", "litellm", "tool", "self"]
Task = Literal["chat", "embeddings"]
MODEL_KINDS: tuple[WorkerKind, ...] = ("openai", "litellm")
VOTE_URL = "builtin:vote"  # of the tool that runs in the gateway
LOCAL = "local:"  # a URL of this scheme names a model that `baton serve` starts
LOCAL_MODELS = ("smollm2",)
Capability = Literal[
    "stream", "image", "audio", "file", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "frequency_penalty", "presence_penalty", "seed", "stop", "logprobs", "top_logprobs", "logit_bias",
    "response_format", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
    "reasoning_effort", "verbosity", "prediction", "modalities", "web_search_options", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention",
]  # fmt: skip
_HOST = re.compile(r"[a-z]+://([^/?#]*)", re.IGNORECASE)
_FAMILY = re.compile(  # of a model's name: a known one anywhere in it, else the letters that it begins with
    r"(?i)claude|gemini|gemma|gpt|grok|deepseek|kimi|glm|minimax|mistral|magistral|llama|nova|qwen|^[a-z]+"
)
Handle = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{1,15}$")]
_TOKEN_PRICES = {"input_usd_per_mtok", "output_usd_per_mtok"}
SecretRef = Annotated[str, Field(pattern=r"^(env:[A-Z_][A-Z0-9_]*|file:.+)$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


PartPrice = Annotated[Decimal, Field(ge=0, le=100_000)] | None
# Each part of a prompt or reply (core/money/details.py) that may have a price of its own, and the price's name.
PROMPT_PARTS = {
    "cached_tokens": "cache_read_usd_per_mtok",
    "cache_write_tokens": "cache_write_usd_per_mtok",
    "input_audio_tokens": "input_audio_usd_per_mtok",
    "input_image_tokens": "input_image_usd_per_mtok",
}
REPLY_PARTS = {
    "reasoning_tokens": "reasoning_usd_per_mtok",
    "output_audio_tokens": "output_audio_usd_per_mtok",
    "output_image_tokens": "output_image_usd_per_mtok",
}
MEDIA_PARTS = frozenset(part for part in (*PROMPT_PARTS, *REPLY_PARTS) if "audio" in part or "image" in part)


class Price(_Frozen):
    """Prices in US dollars per million tokens, as a person writes them, and as the integers that Baton computes with.

    A model needs both token prices, which `WorkerSpec` checks; a tool may have only `call_usd`.
    """

    input_usd_per_mtok: Decimal = Field(default=Decimal(0), ge=0, le=100_000)
    output_usd_per_mtok: Decimal = Field(default=Decimal(0), ge=0, le=100_000)
    call_usd: Decimal = Field(default=Decimal(0), ge=0, le=1_000)
    cache_read_usd_per_mtok: PartPrice = Field(default=None, description="cached prompt tokens; else as input")
    cache_write_usd_per_mtok: PartPrice = Field(default=None, description="tokens written to a cache; else as input")
    input_audio_usd_per_mtok: PartPrice = Field(default=None, description="sound in the prompt; else as input")
    input_image_usd_per_mtok: PartPrice = Field(default=None, description="images in the prompt; else as input")
    reasoning_usd_per_mtok: PartPrice = Field(default=None, description="hidden thinking; else as output")
    output_audio_usd_per_mtok: PartPrice = Field(default=None, description="sound in the reply; else as output")
    output_image_usd_per_mtok: PartPrice = Field(default=None, description="images in the reply; else as output")

    @cached_property
    def input_nano_per_mtok(self) -> int:
        """Nano-dollars per million input tokens, rounded up."""
        return math.ceil(self.input_usd_per_mtok * NANO_PER_USD)

    @cached_property
    def output_nano_per_mtok(self) -> int:
        """Nano-dollars per million output tokens, rounded up."""
        return math.ceil(self.output_usd_per_mtok * NANO_PER_USD)

    @cached_property
    def call_nano(self) -> int:
        """Nano-dollars per call of any size, for tools, rounded up."""
        return math.ceil(self.call_usd * NANO_PER_USD)

    @cached_property
    def prompt_part_rates(self) -> Mapping[str, int]:
        """Nano-dollars per million tokens of each part of a prompt that has a price of its own, rounded up."""
        return self._rates(PROMPT_PARTS)

    @cached_property
    def reply_part_rates(self) -> Mapping[str, int]:
        """The same for the parts of a reply."""
        return self._rates(REPLY_PARTS)

    def worst(self, *, media: bool) -> tuple[int, int]:
        """The most that a million tokens of prompt and of reply may cost, in nano-dollars. `media`: whether the request
        has sound or images."""
        prompt, reply = (
            [rate for part, rate in rates.items() if media or part not in MEDIA_PARTS]
            for rates in (self.prompt_part_rates, self.reply_part_rates)
        )
        return max(self.input_nano_per_mtok, *prompt, 0), max(self.output_nano_per_mtok, *reply, 0)

    def _rates(self, parts: Mapping[str, str]) -> Mapping[str, int]:
        amounts = {part: getattr(self, name) for part, name in parts.items()}
        return {part: math.ceil(usd * NANO_PER_USD) for part, usd in amounts.items() if usd is not None}


class WorkerSpec(_Frozen):
    """One worker of the pool file. `price` is None only until it has been looked up in LiteLLM's offline map."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\s/][^\s]*$")
    handle: Handle
    kind: WorkerKind
    model: str | None = Field(default=None, description="model id sent upstream")
    url: str | None = Field(
        default=None, description="openai: base URL ending in /v1, or local:smollm2; tool: endpoint, or builtin:vote"
    )
    api_key: SecretRef | None = None
    description: str = Field(default="", max_length=400)
    tags: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9 _-]{0,31}$")], ...] = Field(default=(), max_length=16)
    price: Price | None = None
    context_tokens: int = Field(default=8192, ge=16, le=10_000_000)
    output_tokens_max: int = Field(default=1024, ge=1, le=1_000_000)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    concurrency_max: int = Field(default=64, ge=1, le=10_000)
    latency_hint_s: float | None = Field(default=None, ge=0, description="typical seconds, shown to the conductor")
    version: str = Field(default="1", max_length=64, description="change it when the model behind the name changes")
    params: dict[str, object] = Field(default_factory=dict, description="defaults merged into every request body")
    task: Task = Field(default="chat", description="chat, or embeddings: requested by name only, never planned")
    cannot: tuple[Capability, ...] = Field(
        default=(), description="kinds of parts and request properties that the worker does not accept"
    )
    takes: tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ...] = Field(
        default=(),
        max_length=64,
        description="parameters of its vendor that clients may send, beside those that its kind takes anyway",
    )
    bills: bool = Field(
        default=False, description="charge the `usage.cost` (dollars) that it reports, up to the call's worst case"
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="counts unreported tokens: cl100k_base, o200k_base or the path of a tokenizer.json",
    )

    @cached_property
    def identity(self) -> str:
        """The worker's identity as JSON: all fields but the reference to its secret and its tokenizer."""
        left_out: dict[str, Any] = dict.fromkeys(("api_key", "tokenizer", *_later_defaults(self)), True)
        part_prices = (*PROMPT_PARTS.values(), *REPLY_PARTS.values())
        unset = {name for name in part_prices if self.price is not None and getattr(self.price, name) is None}
        return self.model_dump_json(exclude=left_out | ({"price": unset} if unset else {}))

    @property
    def origin(self) -> str:
        """Identifies the vendor behind the worker: what a model of it hands out (signatures, encrypted reasoning), only
        models of the same origin can read. Two workers have one origin if they agree in kind, host and model family."""
        provider, _, rest = (self.model or self.name).partition("/")
        family = _FAMILY.search(rest or provider)
        parts = (self.kind, provider if rest else "", self.host, family[0] if family else rest)
        return hashlib.sha256("\n".join(parts).lower().encode()).hexdigest()[:12]

    @property
    def host(self) -> str:
        """The host of the URL, with its port, in lower case; empty where there is no URL."""
        match = _HOST.match(self.url or "")
        return match[1].lower() if match else ""

    @property
    def local_model(self) -> str | None:
        """The model that `baton serve` serves itself for this worker, if it does."""
        return self.url.removeprefix(LOCAL) if self.url and self.url.startswith(LOCAL) else None

    def __copy__(self) -> WorkerSpec:
        copy = super().__copy__()
        copy.__dict__.pop("identity", None)  # a copy is made in order to change it
        return copy

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> WorkerSpec:
        if self.kind == "openai" and not (self.url and self.model):
            raise ValueError("kind openai needs `url` (…/v1) and `model`")
        if self.local_model and (self.kind != "openai" or self.local_model not in LOCAL_MODELS):
            raise ValueError(f"`url` {self.url}: local models are {', '.join(LOCAL_MODELS)}, of kind openai")
        if self.kind == "litellm" and not self.model:
            raise ValueError("kind litellm needs `model`, e.g. anthropic/claude-sonnet-4-5")
        if self.task == "embeddings" and self.kind not in ("openai", "litellm"):
            raise ValueError(f"kind {self.kind} makes no embeddings; leave `task` out")
        if self.kind == "tool" and not self.url:
            raise ValueError("kind tool needs `url`: an http(s) endpoint or builtin:vote")
        if self.tokenizer is not None and self.kind not in MODEL_KINDS:
            raise ValueError(f"kind {self.kind} has no tokens of its own; leave `tokenizer` out")
        if self.kind != "tool" and self.price and not self.price.model_fields_set >= _TOKEN_PRICES:
            raise ValueError("`price` of a model needs input_usd_per_mtok and output_usd_per_mtok (0 where it is free)")
        return self

    @field_validator("url")
    @classmethod
    def _url_scheme(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if url != VOTE_URL and not re.match(r"(https?://|local:).", url):
            raise ValueError("`url` must start with http:// or https://, or be builtin:vote or local:smollm2")
        return url.rstrip("/")


class PoolFile(_Frozen):
    """The content of `pool.yaml`. A pool is a list of worker names. `default` is the pool of a key that names none."""

    workers: tuple[WorkerSpec, ...] = Field(min_length=1, max_length=256)
    pools: dict[str, tuple[str, ...]]
    default: str = "default"

    @model_validator(mode="after")
    def _names_agree(self) -> PoolFile:
        for field in ("name", "handle"):
            seen: set[str] = set()
            for worker in self.workers:
                value = str(getattr(worker, field))
                if value in seen:
                    raise ValueError(f"two workers share the {field} `{value}`; make it unique")
                seen.add(value)
        worker_names = {worker.name for worker in self.workers}
        for pool, names in self.pools.items():
            if not names:
                raise ValueError(f"pool `{pool}` is empty; list at least one worker")
            if len(set(names)) != len(names):
                raise ValueError(f"pool `{pool}` names a worker twice; list each once")
            for name in names:
                if name not in worker_names:
                    raise ValueError(f"pool `{pool}` names `{name}`, which is not under workers")
        if self.default not in self.pools:
            raise ValueError(f"`default` is `{self.default}`, which is not under pools ({', '.join(self.pools)})")
        return self

    def worker(self, name: str) -> WorkerSpec:
        """The worker called `name`. Raises KeyError."""
        return self._by_name()[name]

    def pool(self, name: str, task: Task = "chat") -> tuple[WorkerSpec, ...]:
        """The workers of the pool `name` that do `task`, in the order of the pool. Raises KeyError."""
        by_name = self._by_name()
        return tuple(by_name[worker] for worker in self.pools[name] if by_name[worker].task == task)

    def _by_name(self) -> dict[str, WorkerSpec]:
        return {worker.name: worker for worker in self.workers}


def pool_hash(workers: tuple[WorkerSpec, ...]) -> str:
    """SHA-256, in hex, over the identities of the workers. A rollout names its pool by it."""
    ordered = sorted(workers, key=lambda worker: worker.name)
    return hashlib.sha256("\n".join(worker.identity for worker in ordered).encode()).hexdigest()


def _later_defaults(worker: WorkerSpec) -> set[str]:
    """Fields that were added later and have their default value. The identity excludes them, so that the hash of an
    older pool does not change."""
    added = (
        ("cannot", worker.cannot),
        ("task", worker.task != "chat"),
        ("bills", worker.bills),
        ("takes", worker.takes),
    )
    return {name for name, is_set in added if not is_set}


def plain_pools(pools: PoolFile) -> dict[str, Any]:
    """The pool file as JSON data without references to secrets: workers by name, amounts in one notation."""
    workers = {worker.name: _plain_worker(worker) for worker in pools.workers}
    return {"workers": workers, "pools": {name: list(names) for name, names in pools.pools.items()}} | {
        "default": pools.default
    }


def canonical_text(pools: PoolFile) -> str:
    """The canonical ASCII text of a pool file. Equal pools have equal texts, however their files are written."""
    return json.dumps(plain_pools(pools), sort_keys=True, separators=(",", ":"))


def revision_of(pools: PoolFile) -> str:
    """SHA-256 of the canonical text, in hex. A rollout names the pool file that it ran on by it."""
    return hashlib.sha256(canonical_text(pools).encode()).hexdigest()


def _plain_worker(worker: WorkerSpec) -> dict[str, Any]:
    price = worker.price or Price()
    amounts = {name: f"{usd.normalize():f}" for name in Price.model_fields if (usd := getattr(price, name)) is not None}
    return worker.model_dump(mode="json", exclude={"api_key", "name", "price"}) | {"price": amounts}


class KeyNames(Protocol):
    """The names of the pool file that a key uses. Empty `workers`: all workers of its pools."""

    @property
    def public_id(self) -> str: ...
    @property
    def pools(self) -> Sequence[str]: ...
    @property
    def workers(self) -> Sequence[str]: ...


def changes(before: PoolFile, after: PoolFile, rekeyed: Collection[str] = ()) -> dict[str, Any]:
    """The differences, as JSON data. Parts without a change are absent, so equal files give an empty mapping.

    `workers`: {added: names, removed: names, changed: {name: {field: [old, new]}}} · `rekeyed`: names of the workers
    with another key · `pools`: {added, removed: {name: workers}, changed: {name: [old, new]}} · `default`: [old, new].
    """
    old, new = plain_pools(before), plain_pools(after)
    workers = _parts(old["workers"], new["workers"])
    if "changed" in workers:
        workers["changed"] = {name: _fields(*pair) for name, pair in workers["changed"].items()}
    for kind in ("added", "removed"):
        if kind in workers:
            workers[kind] = list(workers[kind])
    default = [] if old["default"] == new["default"] else [old["default"], new["default"]]
    rekeyed = sorted(name for name in rekeyed if name in old["workers"] and name in new["workers"])
    parts = {"workers": workers, "rekeyed": rekeyed, "pools": _parts(old["pools"], new["pools"]), "default": default}
    return {name: part for name, part in parts.items() if part}


def lost_names(keys: Iterable[KeyNames], before: PoolFile, after: PoolFile) -> dict[str, list[str]]:
    """Map key ids to the names among the key's pools and workers that exist in `before` but not in `after`."""
    lost = {key.public_id: sorted(_valid_names(key, before) - _valid_names(key, after)) for key in keys}
    return {public_id: names for public_id, names in lost.items() if names}


def _valid_names(key: KeyNames, file: PoolFile) -> set[str]:
    """The names of a key that exist in a file. A key without pools has the default pool."""
    pools = [name for name in key.pools or (file.default,) if name in file.pools]
    reached = {worker for name in pools for worker in file.pools[name]}
    return set(pools if key.pools else ()) | reached.intersection(key.workers)


def change_lines(diff: Mapping[str, Any]) -> list[str]:
    """Describe the result of `changes`, one line for each change."""
    return [*_worker_lines(diff), *_pool_lines(diff)]


def _parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        "added": {name: new[name] for name in sorted(new) if name not in old},
        "removed": {name: old[name] for name in sorted(old) if name not in new},
        "changed": {name: [old[name], new[name]] for name in sorted(new) if name in old and old[name] != new[name]},
    }
    return {kind: part for kind, part in parts.items() if part}


def _fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The changed fields of a worker: {field: [old, new]}. A price counts as one field for each amount."""
    old_fields, new_fields = dict(_flat(old)), dict(_flat(new))
    names = sorted(name for name in new_fields if old_fields[name] != new_fields[name])
    return {name: [old_fields[name], new_fields[name]] for name in names}


def _flat(worker: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in worker.items():
        if name == "price":
            yield from ((f"price.{kind}", amount) for kind, amount in value.items())
        else:
            yield name, value


def _worker_lines(diff: Mapping[str, Any]) -> Iterator[str]:
    workers = diff.get("workers", {})
    for kind in ("added", "removed"):
        yield from (f"worker {name}: {kind}" for name in workers.get(kind, ()))
    for name, fields in workers.get("changed", {}).items():
        yield from (f"worker {name}: {field}: {_text(old)} -> {_text(new)}" for field, (old, new) in fields.items())
    yield from (f"worker {name}: another api_key" for name in diff.get("rekeyed", ()))


def _pool_lines(diff: Mapping[str, Any]) -> Iterator[str]:
    pools = diff.get("pools", {})
    for kind in ("added", "removed"):
        yield from (f"pool {name}: {kind} ({', '.join(names)})" for name, names in pools.get(kind, {}).items())
    for name, (old, new) in pools.get("changed", {}).items():
        yield f"pool {name}: {', '.join(old)} -> {', '.join(new)}"
    if "default" in diff:
        yield f"default pool: {diff['default'][0]} -> {diff['default'][1]}"


def _text(value: Any) -> str:
    return "none" if value in (None, "", [], {}) else str(value)
