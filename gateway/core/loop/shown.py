"""What a plan may depend on, as every profile of the prompt shows it. Pure.

The conversation is quoted line by line (`> `), so nothing in it can close the quotation or look like a heading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.core.loop.experience.likeness import content_text
from gateway.core.loop.replies.errors import CheckerErrors
from gateway.core.pool.workers import Price

CONVERSATION_CHARS_MAX = 12_000
SHOWN_MIN = 2  # outcomes before a conductor is shown them: it believes what it is shown
UNKNOWN_AGREEMENT = "agreement:unknown"  # flag of a reply of whose agreement with the others nothing is known


@dataclass(frozen=True, slots=True)
class ShownExperience:
    """One worker's record on similar tasks: `n` judged tasks, and means of success (0 to 1), cost and latency."""

    n: int
    success_mean: float
    cost_nano_mean: int
    latency_ms_mean: int


@dataclass(frozen=True, slots=True)
class ShownWorker:
    """The facts about a worker that the prompt shows."""

    handle: str
    description: str
    tags: tuple[str, ...]
    price_tier: int  # 0 free … 4 dearest, see `price_tier`
    context_tokens: int
    latency_s: float | None
    experience: ShownExperience | None = None
    output_tokens_max: int = 0  # 0: not shown
    cannot: tuple[str, ...] = ()  # as in the pool file
    tools: tuple[str, ...] = ()  # signatures of those that may be called now, which only `checked` shows
    errors: CheckerErrors | None = None  # of a worker that checks replies, which only `checked` shows
    is_tool: bool = False  # and no model: `ranked` lists it behind those


@dataclass(frozen=True, slots=True)
class ShownReply:
    """The digest of one finished step (core/loop/digest.py), which later rounds show."""

    index: int
    handle: str
    answer: str | None
    flags: tuple[str, ...]  # e.g. agrees:0, refused, truncated, failed, prose, agreement:unknown
    text: str = ""  # the reply itself, which `guided` shows in part
    differs: tuple[int, ...] = ()  # earlier replies from which it is known to differ, or whose answer it lacks


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """What a request carries, and what is left to it. `rounds`: the plans that it may take in all. `tokens`: of its
    conversation, estimated. `needs`: what it asks of a worker, named as in a pool file's `cannot`."""

    rounds: int
    nano_left: int
    seconds_left: float
    tokens: int
    needs: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The facts as JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan that did well on a similar request of the same key: the question, cut, and the plan as JSON."""

    question: str
    plan: str
    cost_nano: int  # of the whole request


@dataclass(frozen=True, slots=True)
class ShownWarm:
    """The worker that answered this conversation's last turn. `worth_nano`: what its prompt cache saves on this
    conversation, which leaving it costs. `why`: what made this turn be planned (core/loop/turns/replanning.py)."""

    handle: str
    worth_nano: int
    why: str


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Everything that a plan may depend on. `workers` stand in the order of the prompt, which is random per request."""

    messages: Sequence[Mapping[str, Any]]
    workers: tuple[ShownWorker, ...]
    steps_max: int
    depth_left: int
    round: int = 1
    replies: tuple[ShownReply, ...] = ()
    quality: int | None = None  # the dial, 0 to QUALITY_MAX; None: not set
    request: ShownRequest | None = None
    examples: tuple[ShownPlan, ...] = ()
    checkers: tuple[str, ...] = ()  # handles of the workers that may check replies, which only `checked` shows
    runs_tests: bool = False
    toolboxes: tuple[str, ...] = ()  # handles of the workers with tools for others
    warm: ShownWarm | None = None  # of a conversation that is planned anew; only prompts without training show it

    def guidance(self) -> dict[str, Any]:
        """The parts that only `guided` and `checked` show, as JSON data for the record of a round: the prompt can be
        rendered anew from it and the rest of the log. Replies are without their texts, which the steps have."""
        request = self.request.as_json() if self.request else None
        more: dict[str, Any] = {} if self.warm is None else {"warm": asdict(self.warm)}
        if self.replies:
            replies = [{"handle": one.handle, "answer": one.answer, "flags": list(one.flags)} for one in self.replies]
            more["replies"] = replies
        if self.checkers:
            more["errors"] = {one.handle: one.errors.counts() for one in self.workers if one.errors is not None}
        if self.toolboxes:
            more["tools"] = {one.handle: list(one.tools) for one in self.workers if one.tools}
        return {"request": request, "examples": [asdict(one) for one in self.examples], **more}


def comparable(replies: Sequence[ShownReply]) -> list[ShownReply]:
    """The replies whose agreement is known, and the last one."""
    return [reply for reply in replies if UNKNOWN_AGREEMENT not in reply.flags or reply is replies[-1]]


def most_agreeing(replies: Sequence[ShownReply]) -> list[int]:
    """The indices of the replies that give the most common answer, according to their flags. Of equally common answers,
    the one given first wins, so if no two replies agree, the result is the first reply. Empty without replies."""
    groups: dict[int, list[int]] = {}
    for reply in replies:
        leader = next((int(flag.split(":")[1]) for flag in reply.flags if flag.startswith("agrees:")), reply.index)
        groups.setdefault(leader, []).append(reply.index)
    return max(groups.values(), key=len, default=[])


def price_tier(price: Price) -> int:
    """The tier of a price: 0 is free, 1 up to $0.5, 2 up to $2, 3 up to $8, 4 above. The price is dollars per million
    tokens, at three input tokens to one output token, plus 1000 times the price of a call."""
    blended = (3 * price.input_nano_per_mtok + price.output_nano_per_mtok) // 4 + price.call_nano * 1000
    return sum(blended > bound for bound in (0, 500_000_000, 2_000_000_000, 8_000_000_000))


def quote(messages: Sequence[Mapping[str, Any]], chars_max: int = CONVERSATION_CHARS_MAX) -> str:
    """Quote a conversation as one block that cannot close itself: for each message a `[role]` line, then its lines with
    `> ` in front."""
    lines: list[str] = []
    for message in messages:
        role = str(message.get("role", "user"))
        lines.append(f"[{role if role.isalpha() else 'user'}]")
        text = content_text(message.get("content")) or ("(tool calls)" if message.get("tool_calls") else "")
        lines += quote_lines(text)
    return cut_middle("\n".join(lines), chars_max)


def quote_lines(text: str) -> list[str]:
    """The lines of a text, each behind `> `; one line for an empty text."""
    return [f"> {line}" for line in text.splitlines() or [""]]


def cut_middle(text: str, chars_max: int) -> str:
    """Cut a long text in the middle. Its beginning and end stay, because the question is usually in one of them."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}\n> (…)\n> {text[-half:]}"


def price_word(tier: int) -> str:
    return "$" * tier or "free"


def speed_word(latency_s: float | None) -> str:
    if latency_s is None:
        return "?"
    return "fast" if latency_s < 1 else "medium" if latency_s < 6 else "slow"
