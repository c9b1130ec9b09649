"""The tokens of one call as they will be billed: as its worker reports them (`dialects.py`), or counted. Pure.

Baton believes a report as far as it makes sense. A prompt or a completion that is a count of 0 for a text, or less than
any tokenizer makes of it, counts as unreported, and so does a prompt that is a multiple of what the worker's context
holds. A completion that is a multiple of what was asked for is cut, and the usage says so (`clipped`): above the
request's limit but within that multiple it is charged in full, as some vendors count thinking in addition to
`max_tokens`. Thinking that only a total shows is believed as far as the request allows it.

What a worker does not report is counted: texts, and all else by upper bounds. Counts err on the provider's side: the
additions of a chat template, sound and images count with the bounds that a hold uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import TOKENS_PER_REQUEST, Usage, input_tokens_bound, media_tokens_bound, nano_to_usd
from gateway.core.money.details import PLACES, PROMPT_DETAILS, REPLY_DETAILS, details_json
from gateway.core.openai.chat import choices_in
from gateway.core.openai.parts import LINKS
from gateway.core.openai.vendors.dialects import counts_in, usage_of

BYTES_PER_TOKEN = 4  # the usual rule of thumb for English; used only if the worker reports nothing
BYTES_PER_TOKEN_MAX = 32  # of a whole text: several times what any tokenizer reaches with prose, code or JSON
SENSIBLE_TIMES = 4  # a report of more than so many times what was possible is a mistake
THINKING_TOKENS_MAX = 32_768  # believed beyond the request's limit, as some vendors do not count thinking against it
TOKENS_PER_TURN = 6  # control tokens and role: five in the templates of Llama, Qwen and Gemma, four with OpenAI
TOKENS_PER_CHOICE = 1  # the end of the turn, or the last token of a stream that was cut
TOKENS_PER_TOOL_CALL = 16  # what surrounds a name and its arguments
_TURN_TEXTS = ("content", "name", "tool_call_id", "refusal")
_EXTRA_TEXTS = ("tools", "functions", "tool_choice", "response_format", "suffix")


def read_usage(body: Mapping[str, Any]) -> Usage | None:
    """The usage that a reply or chunk reports, or None if it reports none."""
    return usage_of(counts_in(body))


def usage_body(usage: Usage) -> dict[str, Any]:
    """The inverse of `read_usage`: an OpenAI `usage` object, with its flags that are true, the details that were
    reported, and the bill as `cost`, dollars as text."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    flags = {"estimated": usage.estimated, "unreported": usage.unreported, "clipped": usage.clipped}
    bill = {} if usage.bill_nano is None else {"cost": nano_to_usd(usage.bill_nano)}
    details = {name: counts for name, counts in details_json(usage.details).items() if counts}
    return body | details | {name: True for name, flag in flags.items() if flag} | bill


def billed_usage(
    reported: Usage | None, request: Mapping[str, Any], request_bytes: int, reply_bytes: int, context_tokens: int = 0
) -> Usage:
    """The usage that a call is charged for: the worker's report as far as it makes sense, else bytes ÷ 4 rounded up.

    `request_bytes` is the size of the body that was sent, `reply_bytes` of the text that came back, both in UTF-8.
    """
    usage, asked = reported or Usage(), _tokens_max(request, context_tokens)
    denied = usage.hidden if asked is not None and usage.completion_tokens > asked else 0
    told = usage.completion_tokens - denied
    prompt = _believed_prompt(usage.prompt_tokens, request, request_bytes, context_tokens)
    completion = told if told >= _fewest(reply_bytes) else None
    thought = usage.details.get("reasoning_tokens")
    limit = _limit(asked, reply_bytes, context_tokens * choices_in(request), thought)
    prompt_tokens = _tokens(request_bytes) if prompt is None else prompt
    reply_tokens = _tokens(reply_bytes) if completion is None else completion
    reply_tokens = reply_tokens if limit is None else min(reply_tokens, limit)
    is_reported = reported is not None and (prompt is not None or bool(completion))
    is_changed = (prompt_tokens, reply_tokens) != (usage.prompt_tokens, told)
    return Usage(
        prompt_tokens,
        reply_tokens,
        usage.estimated or is_changed or not is_reported,
        usage.unreported or not is_reported,
        usage.bill_nano,
        _believed_parts(usage, prompt, None if completion is None else reply_tokens, denied),
        clipped=usage.clipped or prompt_tokens < usage.prompt_tokens or reply_tokens < told,
    )


def _believed_prompt(tokens: int, request: Mapping[str, Any], request_bytes: int, context_tokens: int) -> int | None:
    """The prompt's tokens as far as they are possible; None for a count that makes no sense."""
    most = max(context_tokens, request_bytes)
    if tokens > most:
        most = max(most, input_tokens_bound(request.get("messages") or ()))
    elif tokens * BYTES_PER_TOKEN_MAX < request_bytes and tokens < _fewest(_prompt_bytes(request)):
        return None
    return min(tokens, most) if tokens <= SENSIBLE_TIMES * most else None


def _prompt_bytes(request: Mapping[str, Any]) -> int:
    """UTF-8 bytes of the texts of a prompt, without names, calls and tools. Anything else in it counts as a byte."""
    contents = [message.get("content") for message in request.get("messages") or ()]
    contents += [request.get("prompt"), request.get("input")]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [one]) if part is not None]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return sum(len(text.encode("utf-8", "replace")) if isinstance(text, str) else 1 for text in texts)


def _fewest(size_bytes: int) -> int:
    """The fewest tokens that a text may have: one if it is not empty."""
    return max(size_bytes // BYTES_PER_TOKEN_MAX, int(size_bytes > 0))


def _tokens_max(request: Mapping[str, Any], context_tokens: int) -> int | None:
    """The most tokens that all choices may have by the request, else by the worker's context; None: nobody knows."""
    tokens_max = request.get("max_completion_tokens") or request.get("max_tokens") or context_tokens
    if not (tokens_max and isinstance(tokens_max, int) and isinstance(request.get("n") or 1, int)):
        return None
    return tokens_max * choices_in(request)


def _limit(asked: int | None, reply_bytes: int, context_tokens: int, thought: int | None) -> int | None:
    """The most completion tokens that are believed: a multiple of those that were asked for, as many as the text has
    bytes, or those that were asked for and thinking, if it was reported; and no more than asked for or the context."""
    if asked is None:
        return None
    sensible = max(SENSIBLE_TIMES * asked, reply_bytes, asked + THINKING_TOKENS_MAX if thought else 0)
    return min(sensible, max(asked, context_tokens))


def _believed_parts(usage: Usage, prompt: int | None, completion: int | None, denied: int) -> dict[str, int]:
    """The parts of what was believed, no more than it. `denied`: the thinking that was not."""
    wholes = {PROMPT_DETAILS: prompt, REPLY_DETAILS: completion}
    parts = {
        name: count
        for name, count in usage.details.items()
        if name not in PLACES or wholes[PLACES[name][0]] is not None
    }
    if denied:
        parts.pop("reasoning_tokens", None)
    if not parts:
        return parts
    room = {"cached_tokens": prompt, "cache_write_tokens": (prompt or 0) - parts.get("cached_tokens", 0)}
    room |= {"reasoning_tokens": completion}
    for name, most in room.items():
        if name in parts:
            parts[name] = max(0, min(parts[name], most or 0))
    if "cache_write_1h_tokens" in parts:
        parts["cache_write_1h_tokens"] = min(parts["cache_write_1h_tokens"], parts.get("cache_write_tokens", 0))
    return parts


def text_bytes(pieces: Iterable[Mapping[str, Any]]) -> int:
    """UTF-8 bytes of the generated text in messages or deltas: content, reasoning, refusal and tool calls."""
    return sum(_piece_bytes(piece) for piece in pieces)


def generated_texts(piece: Mapping[str, Any]) -> tuple[list[str], int]:
    """(texts, number of tool calls) of one message or delta."""
    texts = [piece.get(key) for key in ("content", "reasoning_content", "reasoning", "refusal")]
    calls = 0
    for call in piece.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            texts += [function.get("name"), function.get("arguments")]
            calls += 1
    return [text for text in texts if isinstance(text, str)], calls


def _piece_bytes(piece: Mapping[str, Any]) -> int:
    texts = generated_texts(piece)[0]
    return sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts)


def _tokens(size_bytes: int) -> int:
    return -(-size_bytes // BYTES_PER_TOKEN)


@dataclass(slots=True)
class Text:
    """Texts for a tokenizer to count, and the number of tokens to add to its count. `media_tokens`: those of them that
    are the bounds of images, sound and files."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    media_tokens: int = 0

    def add(self, value: Any) -> None:
        """Add a string, content parts, a token id, or a list of these. Any other value counts as its JSON."""
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, int):
            self.tokens += 1
        elif isinstance(value, list):
            for item in value:
                self._add_part(item) if isinstance(item, Mapping) else self.add(item)
        elif value is not None:
            self.texts.append(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))

    def _add_part(self, part: Mapping[str, Any]) -> None:
        if part.get("type") in LINKS:
            media_tokens = media_tokens_bound(part)
            self.tokens += media_tokens
            self.media_tokens += media_tokens
        elif part.get("type") in ("text", "refusal") and not part.get("block"):
            self.add(part.get("text") or part.get("refusal"))
        else:  # a block of thinking, or one that is sent in place of its part
            self.add(dict(part))


def request_text(body: Mapping[str, Any]) -> Text:
    """The prompt of a request body: messages, or the texts or token ids of the completions and embeddings endpoints."""
    text = Text(tokens=TOKENS_PER_REQUEST if "messages" in body else 0)
    for message in body.get("messages") or ():
        text.tokens += TOKENS_PER_TURN
        for name in (*_TURN_TEXTS, *sorted(message.keys() - {"role", "tool_calls", *_TURN_TEXTS})):
            text.add(message.get(name))
        for call in message.get("tool_calls") or ():
            text.tokens += TOKENS_PER_TOOL_CALL
            text.add(dict(call))
    for name in ("prompt", "input"):
        text.add(body.get(name))
    for name in _EXTRA_TEXTS:
        for item in _items(body.get(name)):
            text.add(item)
    return text


def declared_text(body: Mapping[str, Any]) -> Text:
    """The JSON of tools and of the reply's schema, which some chat templates write with indents."""
    return request_text({name: body.get(name) for name in _EXTRA_TEXTS})


def reply_text(pieces: Iterable[Mapping[str, Any]]) -> Text:
    """What a worker generated in these messages: content, reasoning, refusals, tool names and arguments."""
    text = Text()
    for piece in pieces:
        texts, calls = generated_texts(piece)
        text.texts += texts
        text.tokens += TOKENS_PER_CHOICE + TOKENS_PER_TOOL_CALL * calls
    return text


def _items(value: Any) -> Iterable[Any]:
    """The items of a list of tools, each to be counted as JSON; any other value as its only item."""
    return value if isinstance(value, list) else (value,)
