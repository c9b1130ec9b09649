"""What a policy says of plans that another one sampled: their log-probs, on the server's own runtime and grammar.

A logged plan is fed to the weights token by token as it would have been decoded, with the same mask, temperature and
nucleus, so its log-prob is the propensity that the candidate would have logged. Tokens that the grammar forces have
log-prob 0, free task text is no decision: both are fed along with the next decision, without a pass of their own. No
torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from policy.evaluate.inprocess import ConductorDirectory
from policy.serve.engine import DecodeRequest, Engine
from policy.serve.sampling import GREEDY_BELOW, allowed_tokens, behaviour_logprobs
from policy.serve.tokens import TextStream

PLAN_TOKENS_MAX = 512  # as the gateway's conductor settings
AHEAD = 64
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LoggedPlan:
    """A planning call as it was logged: prompt and plan tokens, which of these decide, and how they were sampled."""

    prompt_ids: Sequence[int]
    plan_ids: Sequence[int]
    decisions: Sequence[bool]
    schema: Mapping[str, Any]
    temperature: float
    top_p: float = 1.0


class Scorer(Engine):
    """An engine that can also score. Safe from several threads; `threads` of them share one prefix cache."""

    def propensities(self, call: LoggedPlan) -> list[float]:
        """Log-prob of each plan token [T]: 0 for what the grammar forces and for what is no decision, −inf from the
        first token on that it forbids."""
        matcher = self.tokens.matcher(call.schema)
        temperature = call.temperature if call.temperature >= GREEDY_BELOW else 1.0
        logits, cache = self._prefill(call.prompt_ids)
        logprobs: list[float] = []
        unseen: list[int] = []
        for token, decides in zip(call.plan_ids, call.decisions, strict=True):
            allowed = allowed_tokens(matcher.compute_bitmask(), self.tokens.vocab)
            if not (0 <= token < len(allowed) and allowed[token]):
                return logprobs + [-math.inf] * (len(call.plan_ids) - len(logprobs))
            logprob = 0.0
            if decides and np.count_nonzero(allowed) > 1:
                if unseen:
                    logits, cache = self.runtime.forward(unseen, cache)
                    unseen = []
                logprob = float(behaviour_logprobs(logits, allowed, temperature, call.top_p)[token])
            logprobs.append(logprob)
            unseen.append(token)
            if token not in self.tokens.eos_ids:
                matcher.consume_token(token)
        return logprobs

    def plan(self, prompt_ids: Sequence[int], schema: Mapping[str, Any], temperature: float, seed: int) -> str:
        """One plan as the server would sample it. Empty where the prompt leaves no room for one."""
        room = self.runtime.shape.context - len(prompt_ids)
        if room < 1:
            return ""
        job = DecodeRequest(prompt_ids, schema, temperature, 1.0, seed, min(PLAN_TOKENS_MAX, room))
        text = TextStream()
        parts = [text.feed(self.tokens.token_bytes(one.token), one.finish is not None) for one in self.decode(job)]
        return "".join(parts)


@contextmanager
def open_scorer(directory: ConductorDirectory, threads: int) -> Iterator[Scorer]:
    """A scorer over a policy directory. Raises VersionRefused where the embedded runtime cannot load it."""
    scorer = Scorer(*directory.load(), threads)
    try:
        yield scorer
    finally:
        scorer.close()


async def spread(work: Sequence[T], do: Callable[[T], R], threads: int) -> AsyncGenerator[R, None]:
    """`do` of each item on `threads` threads, in order; at most AHEAD items are in hand when it is cancelled."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="gate")
    try:
        for start in range(0, len(work), AHEAD):
            for result in await asyncio.gather(
                *(loop.run_in_executor(pool, do, item) for item in work[start : start + AHEAD])
            ):
                yield result
    finally:
        pool.shutdown(cancel_futures=True)
