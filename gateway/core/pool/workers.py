"""The pool: its workers, their prices and capabilities, and the differences between two pool files. Pure.

`adapters/host/poolfile.py` reads the YAML. Differences are for people and the audit: they show no secret and no
reference to one.
"""

from __future__ import annotations

import hashlib
import re
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from gateway.core.pool.prices import NANO_PER_USD as NANO_PER_USD
from gateway.core.pool.prices import PROMPT_PARTS, REPLY_PARTS, FrozenModel
from gateway.core.pool.prices import Price as Price
from gateway.core.pool.tools import TOOLS_MAX
from gateway.core.pool.tools import ToolSpec as ToolSpec
from gateway.core.pool.ways import Detour, WayFields

WorkerKind = Literal["openai", "litellm", "tool", "mcp", "self"]
Task = Literal["chat", "embeddings", "moderation", "rerank", "images", "speech", "transcription"]
MODEL_KINDS: tuple[WorkerKind, ...] = ("openai", "litellm")
TOOL_KINDS: tuple[WorkerKind, ...] = ("tool", "mcp")
ANTHROPIC_URL = "https://api.anthropic.com"  # of its models whose entries have no `url`
VOTE_URL, PYTHON_URL = "builtin:vote", "builtin:python"  # of the tools that run in the gateway
JUDGE_URL = "builtin:judge"  # of the tool that asks the model worker of its `params`
BUILTINS = (VOTE_URL, PYTHON_URL, JUDGE_URL)
LOCAL = "local:"  # a URL of this scheme names a model that `baton serve` starts
LOCAL_MODELS = ("smollm2",)
Capability = Literal[
    "stream", "image", "audio", "file", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "frequency_penalty", "presence_penalty", "seed", "stop", "logprobs", "top_logprobs", "logit_bias",
    "response_format", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
    "reasoning_effort", "verbosity", "prediction", "modalities", "web_search_options", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention",
]  # fmt: skip
Turn = Literal["developer", "system", "late_system", "repeated_roles", "name", "empty_content"]
TURNS: tuple[str, ...] = get_args(Turn)  # what a chat template may refuse: it gets another form of them
URL_PROVIDERS = ("openai", "anthropic", "azure", "openrouter", "groq", "mistral", "xai")  # LiteLLM sends them URLs
RESPONSES_LACK = (  # what chat completions have and the Responses API has not
    *("n", "stop", "seed", "logit_bias", "frequency_penalty", "presence_penalty", "prediction", "modalities", "audio"),
    *("functions", "function_call", "web_search_options"),
)
_HOST = re.compile(r"[a-z]+://([^/?#]*)", re.IGNORECASE)
_FAMILY = re.compile(  # of a model's name: a known one anywhere in it, else the letters that it begins with
    r"(?i)claude|gemini|gemma|gpt|grok|deepseek|kimi|glm|minimax|mistral|magistral|llama|nova|qwen|^[a-z]+"
)
EVERY_POOL = "*"  # in a key's pools: all of the file, whatever file is used
WORKERS_MAX = 2000  # of a pool file; a request is planned over a few of them (service/loop/candidates.py)
Handle = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{1,15}$")]
_TOKEN_PRICES = {"input_usd_per_mtok", "output_usd_per_mtok"}
_REFERENCE = r"^(env:[A-Z_][A-Z0-9_]*|file:.+)$"
SecretRef = Annotated[str, Field(pattern=_REFERENCE)]


def is_reference(text: str) -> bool:
    """Whether a value names a secret, as `api_key` does."""
    return re.match(_REFERENCE, text) is not None


class WorkerSpec(WayFields):
    """One worker of the pool file. `price` is None only until it has been looked up in LiteLLM's offline map."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[^\s/][^\s]*$")
    handle: Handle
    kind: WorkerKind
    model: str | None = Field(default=None, description="model id sent upstream")
    url: str | None = Field(
        default=None,
        description="openai: base URL ending in /v1, or local:smollm2; tool: endpoint, or builtin:NAME (docs/pool.md); "
        "mcp: endpoint of a server over streamable HTTP",
    )
    api_key: SecretRef | None = None
    description: str = Field(default="", max_length=400)
    tags: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9 _-]{0,31}$")], ...] = Field(default=(), max_length=16)
    price: Price | None = None
    context_tokens: int = Field(default=8192, ge=16, le=10_000_000)
    output_tokens_max: int = Field(default=1024, ge=1, le=1_000_000)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    first_token_timeout_s: float | None = Field(
        default=None, gt=0, le=3600, description="time to the first token of a reply that comes as a stream"
    )
    chunk_gap_s: float | None = Field(
        default=None, gt=0, le=3600, description="longest silence inside such a reply; unset: BATON_WORKER_IDLE_S"
    )
    exact_model: bool = Field(
        default=False, description="a reply that names another model than `model` is a failure; a dated name is not"
    )
    concurrency_max: int = Field(default=64, ge=1, le=10_000)
    latency_hint_s: float | None = Field(default=None, ge=0, description="typical seconds, shown to the conductor")
    version: str = Field(default="1", max_length=64, description="change it when the model behind the name changes")
    params: dict[str, object] = Field(default_factory=dict, description="defaults merged into every request body")
    task: Task = Field(default="chat", description="only chat is planned; others are requested by name")
    cannot: tuple[Capability | Turn, ...] = Field(
        default=(), description="kinds of parts, request properties and turns that the worker does not accept"
    )
    takes: tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ...] = Field(
        default=(),
        max_length=64,
        description="parameters of its vendor that clients may send, beside those that its kind takes anyway; and what "
        "Baton would take its model's template to refuse",
    )
    fetches: bool = Field(
        default=False, description="fetches images by URL itself: it is sent the URL, and Baton fetches nothing"
    )
    api: Literal["chat", "responses"] = Field(
        default="chat", description="openai: how its server is asked, by chat completions or by OpenAI's Responses API"
    )
    hosted: tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ...] = Field(
        default=(),
        max_length=32,
        description="openai, and litellm's anthropic/: types of hosted tools that its server runs, e.g. web_search",
    )
    answers: bool = Field(
        default=True,
        description="whether planned requests may be answered by it; without this field a worker that plans "
        "(BATON_CONDUCTOR=worker:NAME) does not",
    )
    bills: bool = Field(
        default=False, description="charge the `usage.cost` (dollars) that it reports, up to the call's worst case"
    )
    command: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=64, description="mcp: the program of a server over stdio, and its arguments"
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict,
        description="mcp: variables of that program, beside PATH and HOME; a secret is env:NAME or file:/path",
    )
    tools: dict[Annotated[str, Field(min_length=1, max_length=128)], ToolSpec] = Field(
        default_factory=dict, max_length=TOOLS_MAX, description="mcp: the tools that may be called, and no others"
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="counts unreported tokens: cl100k_base, o200k_base or the path of a tokenizer.json",
    )

    @cached_property
    def identity(self) -> str:
        """The worker's identity as JSON: all fields but the references to its secrets, its tokenizer and its part."""
        left_out: dict[str, Any] = dict.fromkeys(
            ("api_key", "answers", "env", "tokenizer", *Detour._fields, *_later_defaults(self)), True
        )
        part_prices = (*PROMPT_PARTS.values(), *REPLY_PARTS.values(), "unit_usd")
        unset = {name for name in part_prices if self.price is not None and getattr(self.price, name) is None}
        unset |= set() if self.price is not None and self.price.above else {"above"}
        return self.model_dump_json(exclude=left_out | ({"price": unset} if unset else {}))

    @cached_property
    def origin(self) -> str:
        """Identifies the vendor behind the worker: what a model of it hands out (signatures, encrypted reasoning), only
        models of the same origin can read. Two workers have one origin if they agree in kind, host and model family."""
        provider, _, rest = (self.model or self.name).partition("/")
        family = _FAMILY.search(rest or provider)
        parts = (self.kind, provider if rest else "", self.host, family[0] if family else rest)
        return _digest(*(part.lower() for part in parts))

    @cached_property
    def place(self) -> str:
        """Identifies what answers for the worker: another URL, model or key under the same name is another place."""
        return _digest(self.name, self.kind, self.url or "", self.model or "", self.api_key or "")

    @cached_property
    def account(self) -> str:
        """Identifies the account that pays for the worker: its key at its host. Without a key it is the worker's own
        place."""
        if self.api_key is None:
            return self.place
        return _digest(self.kind, self.host or (self.model or "").partition("/")[0], self.api_key)

    @property
    def silence_s_max(self) -> float:
        """The seconds for which the worker may say nothing to a call."""
        return min(self.first_token_timeout_s or self.timeout_s, self.timeout_s)

    @cached_property
    def host(self) -> str:
        """The host of the URL, with its port, in lower case; empty where there is no URL."""
        match = _HOST.match(self.url or "")
        return match[1].lower() if match else ""

    @property
    def speaks_messages(self) -> bool:
        """Whether it is asked by Anthropic's Messages API, in its own words and without LiteLLM."""
        return self.claude != ""

    @property
    def claude(self) -> str:
        """The model as Anthropic names it, of a worker that is asked by Anthropic's API; empty for any other."""
        provider, _, model = (self.model or "").partition("/")
        return model if self.kind == "litellm" and self.task == "chat" and provider == "anthropic" else ""

    @property
    def local_model(self) -> str | None:
        """The model that `baton serve` serves itself for this worker, if it does."""
        return self.url.removeprefix(LOCAL) if self.url and self.url.startswith(LOCAL) else None

    def __copy__(self) -> WorkerSpec:
        copy = super().__copy__()
        for name in ("identity", "origin", "host", "place", "account"):  # a copy is made in order to change it
            copy.__dict__.pop(name, None)
        return copy

    @model_validator(mode="before")
    @classmethod
    def _api_lacks(cls, data: Any) -> Any:
        """The Responses API has no property for some that chat has; a worker behind it cannot take them."""
        if not isinstance(data, dict) or data.get("api") != "responses":
            return data
        fields = data.get("cannot") or ()
        return data | {"cannot": (*fields, *(name for name in RESPONSES_LACK if name not in fields))}

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> WorkerSpec:
        if self.kind == "openai" and not (self.url and self.model):
            raise ValueError("kind openai needs `url` (…/v1) and `model`")
        if self.local_model and (self.kind != "openai" or self.local_model not in LOCAL_MODELS):
            raise ValueError(f"`url` {self.url}: local models are {', '.join(LOCAL_MODELS)}, of kind openai")
        if self.kind == "litellm" and not self.model:
            raise ValueError("kind litellm needs `model`, e.g. anthropic/claude-sonnet-4-5")
        if self.task != "chat" and self.kind not in MODEL_KINDS:
            raise ValueError(f"kind {self.kind} has no task {self.task}; leave `task` out")
        provider = (self.model or "").partition("/")[0] if self.kind == "litellm" else self.kind
        if self.fetches and provider not in URL_PROVIDERS:
            raise ValueError(f"kind {self.kind} would be fetched for in this process; leave `fetches` out")
        if self.kind == "tool" and not self.url:
            raise ValueError("kind tool needs `url`: an http(s) endpoint, builtin:vote or builtin:python")
        if self.tokenizer is not None and self.kind not in MODEL_KINDS:
            raise ValueError(f"kind {self.kind} has no tokens of its own; leave `tokenizer` out")
        if self.price and self.price.unit_usd is not None and self.task in ("chat", "embeddings"):
            raise ValueError(f"task {self.task} is priced by tokens; leave `unit_usd` out")
        if self.kind not in TOOL_KINDS and self.price and not self._is_priced(self.price):
            raise ValueError("`price` of a model needs input_usd_per_mtok and output_usd_per_mtok (0 where it is free)")
        return self

    @model_validator(mode="after")
    def _api_is_of_its_kind(self) -> WorkerSpec:
        if self.api != "chat" and (self.kind != "openai" or self.task != "chat"):
            raise ValueError("`api` is of kind openai and of task chat")
        if self.hosted and not self.speaks_messages and (self.kind != "openai" or self.task != "chat"):
            raise ValueError("`hosted` is of task chat, and of kind openai or of Anthropic's models")
        return self

    @model_validator(mode="after")
    def _server_is_named_once(self) -> WorkerSpec:
        if self.kind != "mcp":
            if self.command or self.env or self.tools:
                raise ValueError(f"kind {self.kind} has no `command`, `env` and `tools`; they are of kind mcp")
            return self
        if bool(self.command) == bool(self.url):
            raise ValueError("kind mcp needs `command` (a program over stdio) or `url` (streamable HTTP), one of them")
        if not self.tools:
            raise ValueError(
                "kind mcp needs `tools`: the names of those that may be called, e.g. `tools: {search: {}}`"
            )
        if self.url and (self.env or not self.url.startswith("http")):
            raise ValueError("`url` of kind mcp is http(s)://…, and `env` is of a `command`")
        if self.command and self.api_key:
            raise ValueError("a `command` gets its key by `env: {NAME: env:NAME}`; leave `api_key` out")
        return self

    def _is_priced(self, price: Price) -> bool:
        """Whether a model's price says what a call costs."""
        return price.unit_usd is not None or price.model_fields_set >= _TOKEN_PRICES

    @field_validator("url")
    @classmethod
    def _url_scheme(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if url not in BUILTINS and not re.match(r"(https?://|local:).", url):
            names = ", ".join(BUILTINS)
            raise ValueError(f"`url` must start with http:// or https://, or be {names} or local:smollm2")
        return url.rstrip("/")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class RightAnswer(FrozenModel):
    """What a right answer is worth, as far as anybody says."""

    usd: float | None = Field(None, gt=0, le=1e9)
    seconds: float | None = Field(None, gt=0, le=1e9)


class PoolFile(FrozenModel):
    """The content of `pool.yaml`. A pool is a list of worker names. `default` is the pool of a key that names none."""

    workers: tuple[WorkerSpec, ...] = Field(min_length=1, max_length=WORKERS_MAX)
    pools: dict[str, tuple[str, ...]]
    default: str = "default"
    worth: dict[str, RightAnswer] = Field(default_factory=dict)  # of a right answer, by pool
    share_experience: tuple[str, ...] = ()  # pools in which evidence of other organisations counts, within a bound

    @model_validator(mode="after")
    def _names_agree(self) -> PoolFile:
        for field in ("name", "handle"):
            unique: set[str] = set()
            for worker in self.workers:
                value = str(getattr(worker, field))
                if value in unique:
                    raise ValueError(f"two workers share the {field} `{value}`; make it unique")
                unique.add(value)
        worker_names = {worker.name for worker in self.workers}
        for pool, names in self.pools.items():
            if not names:
                raise ValueError(f"pool `{pool}` is empty; list at least one worker")
            if len(set(names)) != len(names):
                raise ValueError(f"pool `{pool}` names a worker twice; list each once")
            for name in names:
                if name not in worker_names:
                    raise ValueError(f"pool `{pool}` names `{name}`, which is not under workers")
        self._check_pools()
        return self

    def _check_pools(self) -> None:
        if self.default not in self.pools:
            raise ValueError(f"`default` is `{self.default}`, which is not under pools ({', '.join(self.pools)})")
        for pool in self.share_experience:
            if pool not in self.pools:
                raise ValueError(f"`share_experience` names `{pool}`, which is not under pools")
        for pool in self.worth:
            if pool not in self.pools:
                raise ValueError(f"`worth` names `{pool}`, which is not under pools")

    def worker(self, name: str) -> WorkerSpec:
        """The worker called `name`. Raises KeyError."""
        return self._by_name[name]

    def pool(self, name: str, task: Task = "chat") -> tuple[WorkerSpec, ...]:
        """The workers of the pool `name` that do `task`, in the order of the pool: the same object each time. Raises
        KeyError."""
        found = self._of_task.get((name, task))
        if found is None:
            found = self._of_task[name, task] = tuple(one for one in self._pools[name] if one.task == task)
        return found

    @cached_property
    def _of_task(self) -> dict[tuple[str, Task], tuple[WorkerSpec, ...]]:
        return {}

    @cached_property
    def _pools(self) -> dict[str, tuple[WorkerSpec, ...]]:
        return {pool: tuple(self._by_name[name] for name in names) for pool, names in self.pools.items()}

    @cached_property
    def _by_name(self) -> dict[str, WorkerSpec]:
        return {worker.name: worker for worker in self.workers}


def pool_hash(workers: tuple[WorkerSpec, ...]) -> str:
    """SHA-256, in hex, over the identities of the workers. A rollout names its pool by it."""
    return _hash_of(tuple(worker.identity for worker in sorted(workers, key=lambda worker: worker.name)))


@lru_cache(maxsize=256)
def _hash_of(identities: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(identities).encode()).hexdigest()


def _later_defaults(worker: WorkerSpec) -> set[str]:
    """Fields that were added later and have their default value. The identity excludes them, so that the hash of an
    older pool does not change."""
    added = (
        ("cannot", worker.cannot),
        ("task", worker.task != "chat"),
        ("bills", worker.bills),
        ("takes", worker.takes),
        ("fetches", worker.fetches),
        ("api", worker.api != "chat"),
        ("hosted", worker.hosted),
        ("command", worker.command),
        ("tools", worker.tools),
        ("first_token_timeout_s", worker.first_token_timeout_s),
        ("chunk_gap_s", worker.chunk_gap_s),
        ("exact_model", worker.exact_model),
    )
    return {name for name, is_set in added if not is_set}
