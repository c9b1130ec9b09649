"""When a conversation is planned anew instead of going back to the worker that answered last. Pure.

A turn goes back unless something speaks against it, in this order: the last turn failed; a tool's result is declared an
error; a cap is in sight; the user wants something else; another worker is better by more than the prompt cache is worth
that would be lost. Nothing of it reads words: failures and errors are marked by the APIs, caps are numbers, and what
the user wants is compared by meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gateway.core.loop.experience.likeness import content_text, words_of
from gateway.core.loop.experience.worth import Worth
from gateway.core.pool.workers import NANO_PER_USD, Price

Trigger = Literal["failure", "tool_error", "cap", "intent", "better"]
TRIGGERS: tuple[Trigger, ...] = get_args(Trigger)
DISTANCE_MAX = 0.85  # 1 − cosine by the embedder that ships; docs/conversations.md has the measurement
INTENT_WORDS_MIN = 8  # a shorter message leans on what came before: its distance says nothing
RESULT_CHARS_MAX = 262_144  # of a tool's result that is parsed
ERROR_FLAGS = ("isError", "is_error")  # of a result in MCP's shape, and in Anthropic's
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Replanning:
    """The settings. `distance_max`: 1 − cosine; None: no measured bound, so meaning decides nothing. `turns_left`: a
    cap is in sight where fewer turns like the last one fit. `gain_min`: by how much of a right answer another worker
    must be better. `outcomes_min`: judged tasks of a worker before it is compared."""

    triggers: frozenset[str] = frozenset(TRIGGERS)
    distance_max: float | None = DISTANCE_MAX
    turns_left: int = 2
    gain_min: float = 0.1
    outcomes_min: int = 3


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What a turn leaves for the next one. It holds no text.

    `planned`: the mark of the user's message that was planned for last. `fault`: why the turn counts as failed.
    `prefix_tokens`: of the conversation in the worker's prompt cache, as far as can be known. The rest is what the call
    that wrote the reply took.
    """

    planned: str | None = None
    fault: str | None = None
    prefix_tokens: int = 0
    completion_tokens: int = 0
    cost_nano: int = 0
    calls: int = 1

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def read(cls, data: Any) -> TurnFacts:
        """The facts in JSON data; of none, or of another form, those of a turn of which nothing is known."""
        fields = {name: data[name] for name in cls.__slots__ if name in data} if isinstance(data, Mapping) else {}
        whole = all(isinstance(value, str | None) == (name in ("planned", "fault")) for name, value in fields.items())
        return cls(**fields) if whole else cls()


NO_FACTS = TurnFacts()


# ---------------------------------------------------------------- failures and errors


def fault_of(body: Mapping[str, Any], capped: str | None) -> str | None:
    """Why a reply counts as a failed turn: it was the best that a cap left, was filtered, refused, or is empty. None
    for any other. `capped`: the cap that ended the request."""
    if capped:
        return f"capped_{capped}"
    choice = (body.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    if choice.get("finish_reason") == "content_filter":
        return "content_filter"
    if message.get("refusal"):
        return "refusal"
    says = message.get("content") or message.get("tool_calls") or message.get("function_call") or message.get("audio")
    return None if says else "empty"


def has_tool_error(conversation: Sequence[Message]) -> bool:
    """Whether a tool's result behind the last reply is declared an error: by Anthropic's `is_error`, MCP's `isError`,
    or an `error` that is an object or a text in a result that is a JSON object."""
    for message in reversed(conversation):
        if message.get("role") == "assistant":
            return False
        if message.get("role") in ("tool", "function") and _is_error(message):
            return True
    return False


def _is_error(message: Message) -> bool:
    if message.get("is_error") is True:
        return True
    text = content_text(message.get("content")).strip()
    if not text.startswith("{") or len(text) > RESULT_CHARS_MAX:
        return False
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return False
    error = result.get("error")
    return any(result.get(flag) is True for flag in ERROR_FLAGS) or (isinstance(error, str | dict) and bool(error))


# ---------------------------------------------------------------- caps


@dataclass(frozen=True, slots=True)
class Left:
    """What is left: `nano` of the request's hold; `calls` of its session, None where nothing counts them; `tokens` of
    the worker's context behind the conversation, None where the pool file does not say how long that is."""

    nano: int
    calls: int | None = None
    tokens: int | None = None


def cap_in_sight(facts: TurnFacts, left: Left, turns: int) -> str | None:
    """The cap that fewer than `turns` turns like the last one would reach: cost, calls or context. None for none."""
    if turns * facts.cost_nano > left.nano:
        return "cost"
    if left.calls is not None and turns * facts.calls > left.calls:
        return "calls"
    if left.tokens is not None and turns * facts.completion_tokens > left.tokens:
        return "context"
    return None


# ---------------------------------------------------------------- meaning


def has_intent(text: str) -> bool:
    """Whether a message is long enough to say by itself what it wants."""
    return len(words_of(text)) >= INTENT_WORDS_MIN


def distance(one: Sequence[float], other: Sequence[float]) -> float | None:
    """1 − cosine of two vectors of length 1; None where one of them has no words."""
    return 1.0 - sum(a * b for a, b in zip(one, other, strict=True)) if any(one) and any(other) else None


# ---------------------------------------------------------------- a better worker


@dataclass(frozen=True, slots=True)
class Expected:
    """What experience expects of a worker: `n` judged tasks, the posterior mean of its success in [0, 1], nano-dollars
    and seconds of a call."""

    n: float
    success: float
    cost_nano: int
    latency_s: float


def cache_worth_nano(price: Price, prefix_tokens: int) -> int:
    """Nano-dollars that a warm prompt cache saves on a prefix: its tokens at the full price less the same at the cached
    one. 0 where the worker has no price for cached tokens, or none below the full one."""
    price = price.at(prefix_tokens)
    cached = price.prompt_part_rates.get("cached_tokens", price.input_nano_per_mtok)
    return max(0, price.input_nano_per_mtok - cached) * prefix_tokens // 1_000_000


def better_worker(
    expected: Mapping[str, Expected], warm: str, worth_nano: int, rules: Replanning, worth: Worth
) -> str | None:
    """The worker of the highest utility, as the rule reckons it, where it is above the warm worker's by `gain_min` and
    more than the lost cache is worth. None where there is none, and where too little is known of the warm one."""
    known = {name: one for name, one in expected.items() if one.n >= rules.outcomes_min}
    if warm not in known:
        return None
    utility = {
        name: one.success - worth.penalty(one.cost_nano / NANO_PER_USD, one.latency_s) for name, one in known.items()
    }
    utility[warm] += worth_nano / NANO_PER_USD / worth.usd + rules.gain_min
    best = max(utility, key=lambda name: (utility[name], name))
    return None if utility[best] <= utility[warm] else best
