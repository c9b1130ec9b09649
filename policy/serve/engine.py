"""Decoding: prompts in, tokens out as they are sampled, a bounded number at a time.

Each sequence runs in one worker thread, and its tokens cross to the event loop through a queue no longer than its
token bound. Closing the stream stops the thread before its next token.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any, TypeVar

import numpy as np

from policy.serve.runtime import Cache, Runtime
from policy.serve.sampling import allowed_tokens, behaviour_logprobs, draw, log_softmax, top_tokens
from policy.serve.shape import Array
from policy.serve.tokens import Tokens

PREFIXES_KEPT = 16
PREFIX_BYTES_MAX = 256 * 2**20  # of all prefixes together
PREFIX_TOKENS_MIN = 16
PLANS_KEPT = 32
DRAFT_TOKENS_MAX = 8  # so few more tokens cost a pass little: it waits for the weights, not for the arithmetic
DRAFT_SUFFIX_MAX = 4
SCORED_TOKENS_MAX = 64  # a pass
SUBSET_TOKENS_MAX = 4096  # with more allowed tokens the whole head is as fast
T = TypeVar("T")


class Busy(Exception):
    """Every decoding thread is taken and the queue is full."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One sequence to decode. `schema` None: free text. `tokens_max` counts the end-of-sequence token too."""

    prompt_ids: Sequence[int]
    schema: Mapping[str, Any] | None
    temperature: float
    top_p: float
    seed: int | None
    tokens_max: int
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One token with its behaviour log-prob and the likeliest alternatives; `finish` is set on the last one."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: str | None = None  # stop | length


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """Log-probs (natural) and ranks (1: the likeliest) of given tokens, and the likeliest one after them."""

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    next_token: int


class PrefixCache:
    """The caches of the last few prompts, so that a shared beginning is computed once. Safe across threads."""

    def __init__(self, prefixes_max: int = PREFIXES_KEPT, bytes_max: int = PREFIX_BYTES_MAX) -> None:
        self._kept = prefixes_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[tuple[int, ...], Cache] = OrderedDict()
        self._lock = Lock()

    def longest(self, ids: Sequence[int]) -> Cache | None:
        """The cache of the longest known beginning of `ids` that leaves at least one token to compute."""
        with self._lock:
            best, length = None, PREFIX_TOKENS_MIN - 1
            for prefix, cache in self._entries.items():
                common = min(_common(prefix, ids), len(ids) - 1)
                if common > length:
                    best, length = cache, common
        return best.head(length) if best else None

    def add(self, ids: Sequence[int], cache: Cache) -> None:
        """Remember the cache of `ids`; the oldest entries leave for it. One larger than all room is not remembered."""
        if cache.nbytes > self._bytes_max:
            return
        with self._lock:
            self._drop(tuple(ids))
            self._entries[tuple(ids)] = cache
            self._bytes += cache.nbytes
            while len(self._entries) > self._kept or self._bytes > self._bytes_max:
                self._drop(next(iter(self._entries)))

    def _drop(self, ids: tuple[int, ...]) -> None:
        cache = self._entries.pop(ids, None)
        self._bytes -= cache.nbytes if cache else 0


class Drafts:
    """Guesses how a plan goes on: as one of the last plans did after the same few tokens. Safe across threads."""

    def __init__(self, plans_max: int = PLANS_KEPT) -> None:
        self._plans: deque[tuple[int, ...]] = deque(maxlen=plans_max)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a plan that was decoded."""
        self._plans.append(tuple(tokens))

    def after(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """At most DRAFT_TOKENS_MAX tokens that followed the longest known end of `tokens`; the last plan wins."""
        plans = list(self._plans)
        for size in range(min(DRAFT_SUFFIX_MAX, len(tokens)), 0, -1):
            end = tuple(tokens[-size:])
            for plan in reversed(plans):
                for at in range(len(plan) - size, 0, -1):
                    if plan[at - size : at] == end:
                        return plan[at : at + DRAFT_TOKENS_MAX]
        return ()


class Reading:
    """One sequence as the model reads it: tokens are pushed as they are sampled and fed when a state is wanted. A pass
    feeds guessed tokens too; while the pushed tokens are the guessed ones, their states are there already."""

    def __init__(self, runtime: Runtime, ids: Sequence[int], prefixes: PrefixCache) -> None:
        self._runtime = runtime
        self._prefixes = prefixes
        self._cache = prefixes.longest(ids) or runtime.empty()
        self._unread = list(ids[self._cache.length :])
        self._cached: list[int] | None = list(ids[: self._cache.length])  # None: the prompt was fed
        self._states: Any = ()
        self._row = 0
        self._guessed: tuple[int, ...] = ()  # fed and not pushed yet

    def push(self, token: int) -> None:
        """The next token of the sequence."""
        if self._guessed and self._guessed[0] == token:
            self._guessed = self._guessed[1:]
            self._row += 1
            return
        if self._guessed:
            self._cache = self._cache.head(self._cache.length - len(self._guessed))
            self._guessed = ()
        self._unread.append(token)

    def state(self, guess: Callable[[], Sequence[int]] = tuple) -> Any:
        """The state after all pushed tokens. `guess` is asked where a pass is needed: tokens that may come next."""
        if self._unread:
            self._guessed = tuple(guess()) if self._runtime.several_rows else ()
            fed = [*self._unread, *self._guessed]
            self._states, self._cache = self._runtime.states(fed, self._cache, 1 + len(self._guessed))
            self._row, self._unread = 0, []
            if self._cached is not None:
                self._prefixes.add(self._cached + fed, self._cache)
                self._cached = None
        return self._states[self._row]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading items two sequences share."""
    size = min(len(left), len(right))
    differ = np.nonzero(np.asarray(left[:size]) != np.asarray(right[:size]))[0]
    return int(differ[0]) if len(differ) else size


class Slots:
    """`threads` decoding threads and a queue of `queue_max` before them, shared by every engine of a server."""

    def __init__(self, threads: int = 2, queue_max: int = 64) -> None:
        self.in_flight = 0
        self.threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="decode")
        self._in_flight_max = threads + queue_max

    @property
    def full(self) -> bool:
        """Whether one more job would be refused."""
        return self.in_flight >= self._in_flight_max

    def close(self) -> None:
        """Let running sequences end and stop the threads."""
        self.threads.shutdown(wait=True, cancel_futures=True)


class Engine:
    """Decodes jobs on `threads` threads; at most `queue_max` more wait; or on `slots`, with other engines. Made and
    used on one event loop."""

    def __init__(
        self, runtime: Runtime, tokens: Tokens, threads: int = 2, queue_max: int = 64, slots: Slots | None = None
    ) -> None:
        self.runtime = runtime
        self.tokens = tokens
        self.in_flight = 0  # of this engine's own
        self.decoded = 0  # sequences, those that were cancelled included
        self.busy_s = 0.0  # of all threads together, on those sequences
        self._slots = slots or Slots(threads, queue_max)
        self._prefixes = PrefixCache()
        self._drafts = Drafts()
        self._counting = Lock()

    @property
    def full(self) -> bool:
        """Whether one more job would be refused."""
        return self._slots.full

    async def stream(self, job: DecodeRequest) -> AsyncGenerator[list[TokenSample], None]:
        """Tokens as they come, in batches when the reader is slower. Raises Busy, BadSchema."""
        if self.full:
            raise Busy
        self._enter()
        loop, cancelled = asyncio.get_running_loop(), Event()
        ready: asyncio.Queue[TokenSample | None] = asyncio.Queue(maxsize=job.tokens_max + 1)

        def put(item: TokenSample | None) -> None:
            loop.call_soon_threadsafe(ready.put_nowait, item)

        running = loop.run_in_executor(self._slots.threads, self._run, job, cancelled, put)
        try:
            while batch := await _drain(ready):
                yield batch
            await running
        finally:
            cancelled.set()
            running.add_done_callback(self._left)

    async def score(self, ids: Sequence[int]) -> SequenceScore:
        """What `scored` says of `ids`, on a decoding thread. Raises Busy."""
        return await self.on_thread(lambda: self.scored(ids))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """The result of `work`, which a decoding thread does. Raises Busy."""
        if self.full:
            raise Busy
        self._enter()
        running = asyncio.get_running_loop().run_in_executor(self._slots.threads, work)
        running.add_done_callback(self._left)
        return await asyncio.shield(running)

    def _enter(self) -> None:
        self.in_flight += 1
        self._slots.in_flight += 1

    def _left(self, running: asyncio.Future[Any]) -> None:
        self.in_flight -= 1
        self._slots.in_flight -= 1
        if not running.cancelled():
            running.exception()  # the reader has gone or has seen it: nothing is left to report

    def _run(self, job: DecodeRequest, cancelled: Event, put: Callable[[TokenSample | None], None]) -> None:
        began_s = time.perf_counter()
        try:
            for sampled in self.decode(job):
                if cancelled.is_set():
                    return
                put(sampled)
        finally:
            with self._counting:
                self.decoded += 1
                self.busy_s += time.perf_counter() - began_s
            if not cancelled.is_set():
                put(None)

    def decode(self, job: DecodeRequest) -> Iterator[TokenSample]:
        """The sequence, token by token, on the calling thread. Raises BadSchema."""
        matcher = self.tokens.matcher(job.schema) if job.schema is not None else None
        random = np.random.default_rng(job.seed)
        reading = Reading(self.runtime, job.prompt_ids, self._prefixes)
        plan: list[int] = []

        def guess() -> Sequence[int]:
            drafted = self._drafts.after(plan)[: room - len(plan)] if matcher else ()
            return drafted[: matcher.validate_tokens(list(drafted))] if matcher and drafted else ()

        room = min(job.tokens_max, self.runtime.shape.context - len(job.prompt_ids)) - 1
        for index in range(1, job.tokens_max + 1):
            sampled = self._sampled(job, matcher, random, reading, guess)
            ended = sampled.token in self.tokens.eos_ids
            finish = "stop" if ended else "length" if index == job.tokens_max else None
            plan.append(sampled.token)
            if finish and matcher:
                self._drafts.add(plan)
            yield replace(sampled, finish=finish)
            if finish:
                return
            reading.push(sampled.token)
            if matcher:
                matcher.consume_token(sampled.token)

    def _sampled(
        self, job: DecodeRequest, matcher: Any, random: Any, reading: Reading, guess: Callable[[], Sequence[int]]
    ) -> TokenSample:
        """The next token. What the grammar forces asks the model nothing; else only allowed tokens get a logit."""
        tokens = np.flatnonzero(allowed_tokens(matcher.compute_bitmask(), self.tokens.vocab)) if matcher else None
        if tokens is not None and len(tokens) == 1:
            logits = np.zeros(1, dtype=np.float32)
        elif tokens is not None and len(tokens) <= SUBSET_TOKENS_MAX:
            logits = self.runtime.logits(reading.state(guess), tokens)
        else:
            logits = self.runtime.logits(reading.state(guess))
            logits = logits if tokens is None else logits[tokens]
        logprobs = behaviour_logprobs(logits, None, job.temperature, job.top_p)
        place = draw(logprobs, job.temperature, random)

        def token(at: int) -> int:
            return at if tokens is None else int(tokens[at])

        top = tuple((token(at), logprob) for at, logprob in top_tokens(logprobs, job.top_logprobs))
        return TokenSample(token(place), float(logprobs[place]), top)

    def scored(self, ids: Sequence[int], first: int = 1) -> SequenceScore:
        """Log-prob of each of `ids[first:]` after those before it, at temperature 1 and without a mask, on the calling
        thread. No cache of earlier prompts is used: this is what proves the weights."""
        state, cache = self.runtime.states(ids[:first], self.runtime.empty())
        logprobs, ranks = [], []
        size = SCORED_TOKENS_MAX if self.runtime.several_rows else 1
        for start in range(first, len(ids), size):
            block = ids[start : start + size]
            states, cache = self.runtime.states(block, cache, len(block))
            for token, before in zip(block, [state[-1], *states[:-1]], strict=True):
                scores = log_softmax(self.runtime.logits(before).astype(np.float64))
                logprobs.append(float(scores[token]))
                ranks.append(1 + int(np.count_nonzero(scores > scores[token])))
            state = states
        return SequenceScore(tuple(logprobs), tuple(ranks), int(self.runtime.logits(state[-1]).argmax()))

    def next_token(
        self, ids: Sequence[int], allowed: Sequence[int], temperature: float, seed: int | None, top: int
    ) -> TokenSample:
        """The token after `ids`, drawn from those in `allowed` alone, on the calling thread."""
        mask = np.zeros(self.tokens.vocab, dtype=bool)
        mask[list(allowed)] = True
        [logits] = self.walk(ids, (), [0])
        logprobs = behaviour_logprobs(logits, mask, temperature, 1.0)
        token = draw(logprobs, temperature, np.random.default_rng(seed))
        return TokenSample(token, float(logprobs[token]), tuple(top_tokens(logprobs, top)))

    def walk(self, prompt_ids: Sequence[int], plan_ids: Sequence[int], at: Sequence[int]) -> Iterator[Array]:
        """The logits [vocab] that the plan's tokens at these indices (ascending) are drawn from, on the calling thread.
        The tokens between two of them go in together."""
        logits, cache = self._prefill(prompt_ids)
        fed = 0
        for index in at:
            if index > fed:
                logits, cache = self.runtime.forward(plan_ids[fed:index], cache)
                fed = index
            yield logits

    def _prefill(self, ids: Sequence[int]) -> tuple[Any, Cache]:
        cached = self._prefixes.longest(ids) or self.runtime.empty()
        logits, cache = self.runtime.forward(ids[cached.length :], cached)
        self._prefixes.add(ids, cache)
        return logits, cache

    def close(self) -> None:
        """Let running sequences end and stop the threads."""
        self._slots.close()


async def _drain(ready: asyncio.Queue[TokenSample | None]) -> list[TokenSample]:
    """What is there now, waiting for the first; empty when the sequence is over."""
    batch: list[TokenSample] = []
    item = await ready.get()
    while item is not None:
        batch.append(item)
        if ready.empty():
            return batch
        item = ready.get_nowait()
    if batch:
        ready.put_nowait(None)  # the end was seen early: leave it for the next call
    return batch
