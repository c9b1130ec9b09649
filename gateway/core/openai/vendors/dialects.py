"""How vendors report usage: where the object stands in a reply, what its counts are called, what they include. Pure.

One table holds all of it. A reply, chunk or event is walked along the table, so that a gateway may mix the names of
several vendors. What the counts mean together is decided afterwards, by names, total and sizes (`usage_of`):

- OpenAI and most others count cached tokens inside the prompt. Anthropic, Bedrock and llama.cpp's timings count them
  apart, and so do gateways that rename Anthropic's counts to `prompt_tokens`: their total or the parts' size says so.
- OpenAI counts thinking inside the completion. xAI and Gemini count it apart; Gemini's OpenAI endpoint shows it in the
  total alone.
- A stream reports once at its end, or sums that grow from chunk to chunk, or the prompt first and the completion last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.core.money.amounts import Usage, usd_to_nano
from gateway.core.money.details import BILLED, PLACES, PROMPT_DETAILS, REPLY_DETAILS

COUNT_MAX = 10**15  # what is larger is no count of tokens
_DIGITS = re.compile(r"\d{1,16}|\d{1,3}(,\d{3}){1,4}")
Counts = dict[str, int]  # by the names of the table's leaves; money in nano-dollars
Read = Callable[[Any], int | None]


def _count(value: Any) -> int | None:
    """A number of tokens as an integer: of a whole number, a fraction (rounded up) or their text; None for others."""
    if type(value) is int:
        return value if 0 <= value <= COUNT_MAX else None
    if isinstance(value, str):
        whole, _, fraction = value.strip().partition(".")
        if not _DIGITS.fullmatch(whole) or fraction.strip("0"):
            return None
        value = int(whole.replace(",", ""))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= COUNT_MAX:
        return None
    return math.ceil(value)


def _dollars(value: Any) -> int | None:
    """An amount in dollars as nano-dollars, rounded up; None for anything that is no amount."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return usd_to_nano(str(value))
    except ValueError:
        return None


def _cost(value: Any) -> int | None:
    return _dollars(value.get("total_cost") if isinstance(value, Mapping) else value)


def _ticks(value: Any) -> int | None:
    """xAI's ticks, ten billion to the dollar, as nano-dollars."""
    count = _count(value)
    return None if count is None else -(-count // 10)


def _flag(value: Any) -> int | None:
    return int(value) if isinstance(value, bool) else None


class _Leaf:
    """A count of the table: its name, and how its value is read."""

    __slots__ = ("name", "read")

    def __init__(self, name: str, read: Read = _count) -> None:
        self.name, self.read = name, read


class _Named:
    """A list of objects, one for each value of their field `by`."""

    def __init__(self, by: str, items: Mapping[str, Mapping[str, Any]]) -> None:
        self.by, self.items = by, items


Table = Mapping[str, Any]  # names of a reply's objects and counts -> _Leaf, _Named or the table of the object


def _leaves(**names: str) -> dict[str, _Leaf]:
    """{name in a reply: leaf} of texts in which a leaf's names are separated by spaces."""
    return {name: _Leaf(leaf) for leaf, text in names.items() for name in text.split()}


_WRITES = _leaves(w5="ephemeral_5m_input_tokens", w1h="ephemeral_1h_input_tokens")
_OF_PROMPT: Table = {
    **_leaves(
        cached="cached_tokens cache_read_tokens cache_read_input_tokens",
        written="cache_write_tokens cache_creation_tokens cache_creation_input_tokens",  # the last: DashScope
        w1h="cache_write_1h_tokens",
        input_audio_tokens="audio_tokens",
        input_image_tokens="image_tokens",
    ),
    "cache_creation": _WRITES,  # DashScope
    "cache_creation_token_details": _WRITES,  # LiteLLM
}
_OF_REPLY: Table = {
    **_leaves(
        thought="reasoning_tokens thinking_tokens",
        output_audio_tokens="audio_tokens",
        output_image_tokens="image_tokens",
    ),
    **_leaves(**{name: name for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")}),
}


def _by_modality(audio: str, image: str) -> _Named:
    return _Named("modality", {"AUDIO": _leaves(**{audio: "tokenCount"}), "IMAGE": _leaves(**{image: "tokenCount"})})


_USAGE: Table = {
    **_leaves(
        prompt="prompt_tokens promptTokenCount prompt_token_count prompt_eval_count",  # Gemini's, Ollama's
        input="input_tokens inputTokens inputTokenCount prompt_n",  # Anthropic, OpenAI's Responses; Bedrock; llama.cpp
        completion="completion_tokens output_tokens outputTokens outputTokenCount candidatesTokenCount "
        "candidates_token_count responseTokenCount eval_count predicted_n",
        total="total_tokens totalTokens totalTokenCount total_token_count",
        cached="cached_tokens num_cached_tokens prompt_cache_hit_tokens "  # Moonshot and Together; Mistral; DeepSeek
        "cachedContentTokenCount cached_content_token_count cache_read_tokens",
        read="cache_read_input_tokens cacheReadInputTokens cacheReadInputTokenCount cache_n",
        written="cache_write_tokens cache_creation_tokens",
        creation="cache_creation_input_tokens cacheWriteInputTokens cacheWriteInputTokenCount cacheCreationInputTokens",
        w5="claude_cache_creation_5_m_tokens",  # new-api
        w1h="claude_cache_creation_1_h_tokens",
        thought="reasoning_tokens thinking_tokens",  # SGLang, Perplexity
        thoughts="thoughtsTokenCount thoughts_token_count",
        tool_prompt="toolUsePromptTokenCount tool_use_prompt_token_count",
    ),
    **dict.fromkeys(
        (PROMPT_DETAILS, "prompt_token_details", "input_tokens_details", "input_token_details"), _OF_PROMPT
    ),
    **dict.fromkeys((REPLY_DETAILS, "output_tokens_details", "output_token_details"), _OF_REPLY),
    "promptTokensDetails": _by_modality("input_audio_tokens", "input_image_tokens"),
    "candidatesTokensDetails": _by_modality("output_audio_tokens", "output_image_tokens"),
    "cache_creation": _WRITES,  # Anthropic
    "cacheDetails": _Named("ttl", {"5m": _leaves(w5="inputTokens"), "1h": _leaves(w1h="inputTokens")}),  # Bedrock
    "billed_units": _leaves(prompt="input_tokens", completion="output_tokens"),  # Cohere
    "cost": _Leaf("cost", _cost),  # OpenRouter, LiteLLM's proxy; Perplexity's is an object
    "cost_details": {"upstream_inference_cost": _Leaf("upstream", _dollars)},
    "is_byok": _Leaf("is_byok", _flag),
    "cost_in_usd_ticks": _Leaf("cost", _ticks),  # xAI
    **{name: _Leaf(name, _flag) for name in ("estimated", "unreported", "clipped")},  # Baton's own
}
_HOLDER: Table = {"usage": _USAGE}
_OBJECTS = ("usage", "usageMetadata", "usage_metadata", "usage_info", "amazon-bedrock-invocationMetrics", "timings")
BODY: Table = {
    **{name: _USAGE for name in _OBJECTS},
    "choices": _HOLDER,  # Moonshot: in the choice of the last chunk
    "x_groq": _HOLDER,  # Groq: beside the choices of a stream
    "message": _HOLDER,  # Anthropic: `message_start`
    "delta": _HOLDER,  # Cohere: `message-end`
    "response": _HOLDER,  # OpenAI's Responses events
    "metadata": _HOLDER,  # Bedrock: the last event of ConverseStream
    "meta": _USAGE,  # Cohere v1
    **{name: _USAGE[name] for name in ("prompt_eval_count", "eval_count")},  # Ollama
}


def counts_in(body: Mapping[str, Any]) -> Counts:
    """What a reply, chunk or event reports, by the names of the table. Of a count that is told twice, the larger."""
    counts: Counts = {}
    _collect(body, BODY, counts)
    return counts


def _collect(value: Mapping[str, Any], table: Table, counts: Counts) -> None:
    for name in table if len(table) < len(value) else value:
        below, entry = table.get(name), value.get(name)
        if below is None or entry is None:
            continue
        if type(below) is _Leaf:
            count = below.read(entry)
            if count is not None and count >= counts.get(below.name, 0):
                counts[below.name] = count
        elif isinstance(entry, Mapping):
            if type(below) is not _Named:
                _collect(entry, below, counts)
        elif isinstance(entry, list):
            for item in entry:
                if isinstance(item, Mapping):
                    inner = below.items.get(str(item.get(below.by)), {}) if type(below) is _Named else below
                    _collect(item, inner, counts)


_SUMS = frozenset(("prompt", "completion", "total"))


class UsageTally:
    """The usage of one reply, from all that reports it: of each count, the last that is above 0."""

    def __init__(self) -> None:
        self._counts: Counts = {}

    def add(self, body: Mapping[str, Any]) -> None:
        """Add what a whole reply, a chunk or an event reports."""
        for name, count in counts_in(body).items():
            self._counts[name] = count or self._counts.get(name, 0)

    def usage(self) -> Usage | None:
        """What was reported; None for nothing."""
        return usage_of(self._counts)


def usage_of(counts: Counts) -> Usage | None:
    """The usage that these counts report, in OpenAI's sense: the prompt with its cached tokens, the completion with its
    thinking. None where they hold neither tokens nor a bill."""
    if _SUMS.issuperset(counts) and counts.get("total") == counts.get("prompt", 0) + counts.get("completion", 0):
        return Usage(counts.get("prompt", 0), counts.get("completion", 0))  # most reports
    sums, bill_nano = _sums(counts), _bill(counts)
    if sums is None and bill_nano is None:
        return None
    prompt, completion, gap = sums or (0, 0, 0)
    cached, written = _largest(counts, "cached", "read"), _largest(counts, "written", "creation")
    hour = counts.get("w1h")
    if hour is not None or "w5" in counts:
        written = max(written or 0, (hour or 0) + counts.get("w5", 0))
    apart = _apart(counts, prompt, gap, cached or 0, written or 0) + counts.get("tool_prompt", 0)
    prompt, gap = prompt + apart, gap - apart
    thought, added, hidden = _thinking(counts, completion, max(0, gap))
    completion += added
    parts = {
        "cached_tokens": cached,
        "cache_write_tokens": written,
        "cache_write_1h_tokens": hour,
        "reasoning_tokens": None if thought is None else min(thought, completion),
    }
    details = {part: parts.get(part, counts.get(part)) for part in PLACES} | {BILLED: bill_nano}
    return Usage(
        prompt,
        completion,
        bool(counts.get("estimated")),
        bool(counts.get("unreported")),
        bill_nano,
        {part: count for part, count in details.items() if count is not None},
        hidden,
        bool(counts.get("clipped")),
    )


def _sums(counts: Counts) -> tuple[int, int, int] | None:
    """(prompt, completion, what the total has beyond them). One that is missing is the rest of the total."""
    prompt, completion = counts.get("prompt", counts.get("input")), counts.get("completion")
    total = counts.get("total")
    if prompt is None and completion is None and total is None:
        return None
    if prompt is None:
        prompt = max(0, (total or 0) - (completion or 0))
    if completion is None:
        completion = max(0, (total or 0) - prompt)
    return prompt, completion, max(0, (total or 0) - prompt - completion)


def _largest(counts: Counts, *names: str) -> int | None:
    return max((counts[name] for name in names if name in counts), default=None)


def _apart(counts: Counts, prompt: int, gap: int, cached: int, written: int) -> int:
    """The cached tokens that the prompt's count leaves out: all of them by Anthropic's names, where they are more than
    the prompt, or where the total has them beside it; a part of them where the total has just that part beside it."""
    both, thought = cached + written, counts.get("thought", 0)
    anthropic = "prompt" not in counts and ("read" in counts or "creation" in counts)
    if anthropic or both > prompt:
        return both
    return next((part for part in (both, cached, written) if part and gap in (part, part + thought)), 0)


def _thinking(counts: Counts, completion: int, gap: int) -> tuple[int | None, int, int]:
    """(the thinking, as much of it as the completion's count leaves out, as much of it as only the total shows)."""
    if "thoughts" in counts:  # Gemini
        return counts["thoughts"], counts["thoughts"], 0
    thought = counts.get("thought")
    if not thought:
        hidden = gap if completion else 0
        return hidden or thought, hidden, hidden
    is_apart = gap == thought or ("total" not in counts and thought > completion)
    return thought, thought if is_apart else 0, 0


def _bill(counts: Counts) -> int | None:
    """What the worker says that the call cost, in nano-dollars. OpenRouter's `cost` is its fee where the client's own
    key at the vendor paid the rest."""
    cost, upstream = counts.get("cost"), counts.get("upstream", 0)
    if cost is not None and counts.get("is_byok", upstream > cost):
        return cost + upstream
    return cost
