"""The ports of a request: the conductor, workers, media, limits, journal, store, clock. Fakes are in `tests/fakes`.

A port names what a use case needs from outside; shapes, units and errors are the contract, and adapters implement it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from gateway.core.log.events import Event
from gateway.core.log.outcome import Outcome
from gateway.core.log.rollout import RolloutRecord
from gateway.core.money.amounts import Usage
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.parts import Media, MediaPart
from gateway.core.openai.reply import ReplyBuilder
from gateway.core.pool.tools import Tool
from gateway.core.pool.workers import WorkerSpec
from gateway.service.ports.admin import KeyRow
from gateway.service.ports.money import Books, Settlement

REFUSED_STATUSES = (400, 404, 413, 422)  # of a worker: the request is bad, not the worker

# ---------------------------------------------------------------- conductor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a plan is decoded. Every parameter is sent, since a server's default for an absent one may come out of the
    model's files. `logprobs` are always requested: learning from the log needs them."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    tokens_max: int = 512
    seed: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The parameters as JSON data, for the record of a round."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ConductorCall:
    """One planning call: chat messages in, JSON constrained by `schema` out, within `timeout_s`."""

    messages: Sequence[Mapping[str, str]]
    schema: Mapping[str, Any]
    sampling: Sampling
    timeout_s: float
    model: str | None = None  # a policy version by name; None: the live one
    hasty: bool = False  # the request's own time ends before the conductor's: a time-out says nothing about the server
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConductorChunk:
    """A piece of the plan as it is decoded: text with its token ids and log-probs (behaviour, after mask)."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tokens: tuple[str, ...] = ()  # text of each token; it tells decisions from task text


@dataclass(frozen=True, slots=True)
class ConductorEnd:
    """The last item of the stream. `prompt_token_ids` is empty if the server does not report them."""

    model: str
    usage: Usage
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"


class Conductor(Protocol):
    """A language model that decodes plans, behind the OpenAI protocol."""

    def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """Stream a plan; the last item is a ConductorEnd. Raises ConductorError(down | slow | unparseable)."""
        ...

    async def ready(self) -> bool:
        """Whether the server answers and serves the live version."""
        ...


# ---------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """One attempt at one worker. `body` is a chat-completions body without `model` and `stream`. `saw`: the steps that
    this step may see, oldest first, as (handle, task, reply text). Tools such as `vote` read it; for model workers it
    is already rendered into `body["messages"]`."""

    worker: WorkerSpec
    body: Mapping[str, Any]
    timeout_s: float
    rollout_id: str
    step_id: str
    depth: int = 0
    saw: Sequence[tuple[str, str, str]] = ()
    endpoint: Endpoint = (
        "chat"  # completions come back in the shape of chat (core/openai/texts.py), embeddings as they are
    )
    traceparent: str = ""  # of the call's span; empty: the request is not traced
    revision: str = ""  # of the pool that the request began with; empty: the one in use now
    so_far: ReplyBuilder = field(default_factory=ReplyBuilder, compare=False)  # of a whole reply that comes in pieces


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A whole completion as the worker sent it (OpenAI body) with the usage that will be billed. `cost_nano`: the bill
    itself, from a worker inside this process that knows it; None: usage × the worker's price."""

    body: Mapping[str, Any]
    usage: Usage
    headers: Mapping[str, str] = field(default_factory=dict)
    cost_nano: int | None = None


class Workers(Protocol):
    """Calls of workers, one attempt each: without retries and fallbacks."""

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """Return the whole reply. Raises UpstreamError and its children; cancelling closes the upstream connection. A
        worker that can is asked for a stream, and `call.so_far` has what came of it, so that a reply that nobody
        waits for any longer is billed for that."""
        ...

    def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """OpenAI chunks as dicts. Usage is always requested (a last chunk with empty `choices` if the worker sends
        one). Raises as `complete`; an upstream that dies midway raises UpstreamProtocol, never ends quietly."""
        ...


class Toolboxes(Protocol):
    """The tools of workers of kind mcp."""

    def tools(self, worker: WorkerSpec, revision: str) -> tuple[Tool, ...]:
        """Those that may be called now; none of a worker whose server is away. `revision`: of the pool that the request
        began with."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The tokens of texts. `tokens_max`: an upper bound where the count is by a tokenizer that may not be the
    worker's own, or where the worker may divide the texts otherwise."""

    tokens: int
    tokens_max: int


class TokenCounter(Protocol):
    """Counts tokens: of prompts before a call, and of calls whose worker did not report any."""

    async def measure(self, worker: WorkerSpec, texts: Sequence[str]) -> TokenCount | None:
        """The tokens of all texts, for what is held. None as in `count`."""
        ...

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        """The tokens of all texts by the worker's tokenizer, at most `at_most`. None if the worker has no tokenizer, or
        if counting takes too long. Bounded in time, in a thread; raises nothing."""
        ...


# ---------------------------------------------------------------- code


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Bounds of one run in the sandbox."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20  # address space
    file_bytes: int = 2**20  # of one file
    disk_bytes: int = 8 * 2**20  # of all files together, where a tmpfs can be had
    files_max: int = 32  # open at once
    processes_max: int = 64  # threads included, where the kernel counts them apart; new processes never start
    result_bytes: int = 65_536


# ---------------------------------------------------------------- media


class MediaSource(Protocol):
    """Fetches the parts of messages that are URLs."""

    def check(self, parts: Sequence[MediaPart]) -> None:
        """Check every part without connecting. Raises BadRequest with the path of the first part that may not be
        fetched."""
        ...

    async def fetch(self, part: MediaPart) -> Media:
        """Fetch the bytes and check their type. Raises BadRequest: not fetched, failed, too large, another type.
        Bounded in time."""
        ...


# ---------------------------------------------------------------- money and limits


@dataclass(frozen=True, slots=True)
class RateState:
    """A key's rates after admission; None: not limited. `reset_s`: seconds until the window is empty, if nothing more
    comes."""

    requests_limit: int | None = None
    requests_left: int | None = None
    tokens_limit: int | None = None
    tokens_left: int | None = None
    reset_s: float | None = field(default=None, compare=False)

    def headers(self) -> dict[str, str]:
        """OpenAI's rate headers, for the rates that are limited."""
        headers: dict[str, str] = {}
        rates = {"requests": (self.requests_limit, self.requests_left), "tokens": (self.tokens_limit, self.tokens_left)}
        for name, (limit, left) in rates.items():
            if limit is not None:
                headers |= {f"x-ratelimit-limit-{name}": str(limit), f"x-ratelimit-remaining-{name}": str(left)}
                if self.reset_s is not None:
                    headers[f"x-ratelimit-reset-{name}"] = go_duration(self.reset_s)
        return headers


def go_duration(seconds: float) -> str:
    """Format a duration in Go's notation, `120ms` or `6m0s`, rounded up to whole milliseconds; at least `0s`."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    total_s, fraction_ms = divmod(milliseconds, 1000)
    hours, minutes, rest_s = total_s // 3600, total_s // 60 % 60, total_s % 60
    fraction = f".{fraction_ms:03d}".rstrip("0") if fraction_ms else ""
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{rest_s}{fraction}s"


class RateLimits(Protocol):
    """Requests and tokens a minute (sliding window), and requests in flight, per key."""

    async def admit(
        self, key_id: str, request_id: str, tokens: int, rpm: int | None, tpm: int | None, concurrency: int | None
    ) -> RateState:
        """Count the request in, or raise RateLimited with the true `retry_after_s`. A request that was counted before
        stays counted once, with these tokens."""
        ...

    async def release(self, key_id: str, request_id: str, tokens_used: int | None) -> None:
        """The request ended: free its place in flight, and replace its tokens by those really used."""
        ...

    async def withdraw(self, key_id: str, request_id: str) -> None:
        """Uncount a request: free its place in flight, and remove it from the window."""
        ...


# ---------------------------------------------------------------- log and store


class Journal(Protocol):
    """The write-ahead journal on this host's disk."""

    def append(self, *events: Event) -> Awaitable[None]:
        """Return once the events are on disk, in this order, all or none of them (group fsync). Raises SpoolFull."""
        ...

    async def shipped(self) -> None:
        """Wait until everything appended so far is in PostgreSQL; raises TimeoutError after the adapter's bound."""
        ...


@dataclass(frozen=True, slots=True)
class WonPlan:
    """The plan of a request that was judged well. `pool` maps its handles to the names of workers."""

    question: str
    plan: Mapping[str, Any]
    pool: Mapping[str, str]
    cost_nano: int


class Embedder(Protocol):
    """Turns a task into a vector; similar tasks have similar vectors."""

    @property
    def name(self) -> str:
        """It is stored with each vector; vectors of different names are never compared."""
        ...

    @property
    def logged(self) -> bool:
        """Whether a rollout's record must contain the vector, because making it again costs something."""
        ...

    async def embed(self, text: str) -> list[float]:
        """EMBEDDING_DIM floats of length 1; all zeros for a text without words. Raises Unavailable, in bounded time."""
        ...


class Store(Protocol):
    """Named queries of PostgreSQL. Each one that reads a rollout takes the owner and returns nothing for others."""

    async def key_get(self, public_id: str) -> KeyRow | None: ...

    async def rollout_get(self, rollout_id: str, key_id: str) -> Mapping[str, Any] | None:
        """A rollout with rounds, steps, outcomes and ledger rows as one JSON-able tree, by rollout or completion id."""
        ...

    async def outcome_insert(self, outcome: Outcome) -> tuple[str, bool]:
        """Insert unless (key, idempotency key) exists; return (outcome id, whether it is new). Raises NotFound for a
        rollout that is not the key's."""
        ...

    async def plans_near(
        self, key_id: str, task_type: str | None, embedding: Sequence[float], embedder: str, k: int
    ) -> Sequence[WonPlan]:
        """At most `k` plans of that key's latest requests that were judged well and are like this one, the nearest
        first. Nothing of another key, and nothing of a request whose text was not logged."""
        ...

    async def open_holds(self) -> Sequence[Mapping[str, Any]]:
        """Holds without a settlement, oldest first: {hold_id, rollout_id, amount_nano, scopes, at, dispatched_nano}:
        what the calls could cost that left under it, None where none did."""
        ...

    async def settled_nano(self, hold_id: str) -> int | None:
        """The nano-dollars that a hold was charged in the ledger; None if it has no settlement there."""
        ...

    async def books(self, settled_max: int) -> Books:
        """The state that the budget store is rebuilt from, with the latest `settled_max` settlements."""
        ...

    async def settled_latest(self, limit: int, since: datetime) -> Sequence[Settlement]:
        """The latest settlements, newest first."""
        ...

    async def ready(self) -> bool: ...


class Clock(Protocol):
    """Time, which tests control. `now` is UTC, for records; `monotonic_s` never goes back, for durations."""

    def now(self) -> datetime: ...
    def monotonic_s(self) -> float: ...

    def now_us(self) -> int:
        """`now` in microseconds since the epoch."""
        return int(self.now().timestamp() * 1_000_000)


class RequestMetrics(Protocol):
    """Counts of the request path."""

    def finished(self, record: RolloutRecord, overhead_ms: float, children: Sequence[RolloutRecord] = ()) -> None:
        """Count a rollout that was settled and logged. `children`: the loops inside it."""
        ...

    def admitted(self, waited_s: float) -> None:
        """Observe how long a request waited from its arrival to its admission."""
        ...

    def dropped(self, fields: int) -> None:
        """Count unknown properties of a request that were dropped."""
        ...

    def degraded(self, what: str) -> None:
        """Count a request that went on without an optional part."""
        ...

    def bug(self, error: Exception) -> None:
        """Count an unexpected error."""
        ...
