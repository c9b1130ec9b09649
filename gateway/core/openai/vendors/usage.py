"""The tokens of one call as they will be billed: read from an OpenAI `usage` object, bounded, or counted. Pure.

Baton does not believe impossible reports. A count that is not a whole number counts as missing, and a count that
neither the request nor the worker's context allows is cut. A count above the request's limit but within the context is
charged in full, as some vendors count thinking in addition to `max_tokens`: to cut it would hide real spending.

Where a worker reports no usage, texts are counted, and all else by upper bounds. Counts err on the provider's side: the
additions of a chat template, sound and images count with the bounds that a hold uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import (
    TOKENS_PER_REQUEST,
    Usage,
    input_tokens_bound,
    media_tokens_bound,
    nano_to_usd,
    usd_to_nano,
)
from gateway.core.money.details import details_json, read_details
from gateway.core.openai.chat import choices_in

BYTES_PER_TOKEN = 4  # the usual rule of thumb for English; used only if the worker reports nothing
TOKENS_PER_TURN = 6  # control tokens and role: five in the templates of Llama, Qwen and Gemma, four with OpenAI
TOKENS_PER_CHOICE = 1  # the end of the turn, or the last token of a stream that was cut
TOKENS_PER_TOOL_CALL = 16  # what surrounds a name and its arguments
_TURN_TEXTS = ("content", "name", "tool_call_id", "refusal")
_EXTRA_TEXTS = ("tools", "functions", "tool_choice", "response_format", "suffix")


def read_usage(body: Mapping[str, Any]) -> Usage | None:
    """The usage that a completion or chunk reports, or None if it reports none that is valid."""
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
    if not (_is_count(prompt) and _is_count(completion)):
        return None
    details, hidden = read_details(usage), _hidden_tokens(usage)
    if hidden:
        details["reasoning_tokens"] = max(details.get("reasoning_tokens", 0), hidden)
    return Usage(
        int(prompt or 0),
        int(completion or 0) + hidden,
        usage.get("estimated") is True,
        usage.get("unreported") is True,
        _bill_nano(usage.get("cost")),
        details,
    )


def _hidden_tokens(usage: Mapping[str, Any]) -> int:
    """The thinking that is in the total alone: the `completion_tokens` of Gemini and Grok leave it out, and their
    vendors bill it as output."""
    prompt, completion, total = (usage.get(f"{name}_tokens", 0) for name in ("prompt", "completion", "total"))
    return max(0, total - prompt - completion) if _is_count(total) and completion else 0


def _bill_nano(cost: Any) -> int | None:
    """A reported `cost` in dollars as nano-dollars, rounded up; None for anything that is no amount."""
    if isinstance(cost, bool) or not isinstance(cost, int | float | str):
        return None
    try:
        return usd_to_nano(str(cost))
    except ValueError:
        return None


def usage_body(usage: Usage) -> dict[str, Any]:
    """The inverse of `read_usage`: an OpenAI `usage` object, with `estimated` and `unreported` where they are true, the
    details that were reported, and the bill as `cost`, dollars as text."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    flags = {"estimated": usage.estimated, "unreported": usage.unreported}
    bill = {} if usage.bill_nano is None else {"cost": nano_to_usd(usage.bill_nano)}
    details = {name: counts for name, counts in details_json(usage.details).items() if counts}
    return body | details | {name: True for name, flag in flags.items() if flag} | bill


def billed_usage(
    reported: Usage | None, request: Mapping[str, Any], request_bytes: int, reply_bytes: int, context_tokens: int = 0
) -> Usage:
    """The usage that a call is charged for: the worker's report, else bytes ÷ 4 rounded up, cut to what is possible.

    What is possible is the larger of what the request allows and `context_tokens`. `request_bytes` is the size of the
    body that was sent, `reply_bytes` of the text that came back, both in UTF-8.
    """
    usage = reported or Usage(_tokens(request_bytes), _tokens(reply_bytes), estimated=True, unreported=True)
    prompt = min(usage.prompt_tokens, max(context_tokens, _prompt_bound(usage.prompt_tokens, request, request_bytes)))
    completion = min(usage.completion_tokens, _completion_bound(usage.completion_tokens, request, context_tokens))
    cut = (prompt, completion) != (usage.prompt_tokens, usage.completion_tokens)
    return Usage(prompt, completion, usage.estimated or cut, usage.unreported, usage.bill_nano, usage.details)


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


def _prompt_bound(prompt_tokens: int, request: Mapping[str, Any], request_bytes: int) -> int:
    if prompt_tokens <= request_bytes:  # the usual case: no need to walk the messages
        return request_bytes
    return max(request_bytes, input_tokens_bound(request.get("messages") or ()))


def _completion_bound(completion_tokens: int, request: Mapping[str, Any], context_tokens: int) -> int:
    tokens_max = request.get("max_completion_tokens") or request.get("max_tokens") or context_tokens
    if not (tokens_max and isinstance(tokens_max, int) and isinstance(request.get("n") or 1, int)):
        return completion_tokens
    return max(tokens_max, context_tokens) * choices_in(request)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
        if part.get("type") in ("text", "refusal"):
            self.add(part.get("text") or part.get("refusal"))
        else:
            media_tokens = media_tokens_bound(part)
            self.tokens += media_tokens
            self.media_tokens += media_tokens


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
