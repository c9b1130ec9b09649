"""The stream of one plan: chunks of a chat completion with token ids and log-probs, as vLLM sends them.

Most chunks hold one piece of the plan and nothing else. Those are decoded into structs; any other is read field by
field, which also says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import msgspec

from gateway.core.openai.body import parse_json
from gateway.core.openai.finish import finish_reason
from gateway.core.openai.vendors.dialects import UsageTally
from gateway.core.openai.vendors.usage import billed_usage
from gateway.errors import ConductorError
from gateway.service.ports.request import ConductorChunk, ConductorEnd

MESSAGE_CHARS_MAX = 300
_INT = frozenset({int})  # and not bool


class _Token(msgspec.Struct, gc=False):
    token: str
    logprob: float


class _Tokens(msgspec.Struct, gc=False):
    content: list[_Token] | None = None


class _Delta(msgspec.Struct, gc=False):
    content: Annotated[str, msgspec.Meta(min_length=1)]


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta
    token_ids: list[int] | None = None
    logprobs: _Tokens | None = None
    finish_reason: None = None


class PlanChunk(msgspec.Struct, gc=False, eq=False):
    """A chunk that holds a piece of the plan, and nothing that `PlanStream._read` would have to note."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    prompt_token_ids: None = None
    usage: None = None
    error: None = None


Piece = tuple[str, Sequence[int], Sequence[float], Sequence[str]]  # text, token ids, log-probs, texts of the tokens
read_chunk = msgspec.json.Decoder(PlanChunk).decode  # raises ValueError or RecursionError for any other chunk


class PlanStream:
    """Reads the stream of one plan: checks each chunk, and collects the facts for the end of the stream."""

    def __init__(self, model: str, text_bytes_max: int) -> None:
        self._model = model
        self._text_bytes_max = text_bytes_max
        self._text_bytes = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._usage = UsageTally()
        self._finish: str | None = None
        self._error: ConductorError | None = None
        self.is_over = False

    def take(self, events: Sequence[PlanChunk | str], is_end: bool) -> ConductorChunk | None:
        """The piece of the plan in the events that came together, or None: chunks that `read_chunk` has read, and the
        data of others. An error among them waits for `check`."""
        self.is_over = is_end
        pieces: list[Piece] = []
        try:
            for event in events:
                piece = self._read(json_object(event)) if isinstance(event, str) else self._piece(event)
                if piece:
                    pieces.append(piece)
        except ConductorError as error:
            self._error = error
        return _joined(pieces) if pieces else None

    def check(self) -> None:
        """Raises ConductorError(down | unparseable) for an event that `take` could not read."""
        if self._error is not None:
            raise self._error

    def _piece(self, chunk: PlanChunk) -> Piece:
        """The piece of the plan in a chunk. Raises ConductorError(unparseable)."""
        choice = chunk.choices[0]
        text, ids, entries = choice.delta.content, choice.token_ids or (), choice.logprobs and choice.logprobs.content
        if ids and entries and len(ids) != len(entries):
            raise ConductorError("unparseable", _invalid(_uneven(ids, entries)))
        self._model = chunk.model
        self._count(text)
        if not entries:
            return text, ids, (), ()
        return text, ids, [entry.logprob for entry in entries], [entry.token for entry in entries]

    def _read(self, body: Mapping[str, Any]) -> Piece | None:
        """The piece of the plan in any event, or None. Raises ConductorError(down | unparseable)."""
        if body.get("error"):
            raise ConductorError(
                "down", f"the conductor failed while it decoded: {str(body['error'])[:MESSAGE_CHARS_MAX]}"
            )
        self._usage.add(body)
        if isinstance(model := body.get("model"), str) and model:
            self._model = model
        try:
            self._prompt_ids = _ints(body.get("prompt_token_ids")) or self._prompt_ids
            piece = self._choice(json_objects(body.get("choices")))
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise ConductorError("unparseable", _invalid(error)) from None
        if piece is not None:
            self._count(piece[0])
        return piece

    def _count(self, text: str) -> None:
        self._text_bytes += len(text) if text.isascii() else len(text.encode(errors="replace"))
        if self._text_bytes > self._text_bytes_max:
            raise ConductorError("unparseable", f"the plan is longer than {self._text_bytes_max} bytes")

    def _choice(self, choices: list[dict[str, Any]]) -> Piece | None:
        if not choices:
            return None
        choice = choices[0]
        self._finish = finish_reason(choice.get("finish_reason")) or self._finish
        text = choice["delta"].get("content") or ""
        entries = json_objects((choice.get("logprobs") or {}).get("content"))
        ids = _ints(choice.get("token_ids"))
        if ids and entries and len(ids) != len(entries):
            raise ValueError(_uneven(ids, entries))
        if not (isinstance(text, str) and (text or ids or entries)):
            return None
        return text, ids, [float(entry["logprob"]) for entry in entries], [str(entry["token"]) for entry in entries]

    def end(self, request: Mapping[str, Any]) -> ConductorEnd:
        """The last item of the stream. Raises ConductorError(down) if the stream was cut short."""
        if self._finish is None:
            raise ConductorError("down", "the conductor hung up before the plan was complete")
        request_bytes = len(json.dumps(request["messages"]).encode())
        usage = billed_usage(self._usage.usage(), request, request_bytes, self._text_bytes)
        return ConductorEnd(self._model, usage, self._prompt_ids, self._finish)


def _uneven(ids: Sequence[int], entries: Sequence[Any]) -> str:
    return f"{len(ids)} token ids and {len(entries)} log-probs"


def _invalid(why: object) -> str:
    return f"the conductor's stream holds an invalid chunk: {why}"


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ConductorError(unparseable) for anything else."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConductorError("unparseable", "the conductor's server sent something that is not a JSON object")
    return value


def json_objects(value: Any) -> list[dict[str, Any]]:
    """A list of JSON objects. Anything else counts as an empty list."""
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else []


def _ints(value: Any) -> tuple[int, ...]:
    """A list of integers. None counts as an empty list. Raises TypeError for anything else."""
    numbers = tuple(value or ())
    if not _INT.issuperset(map(type, numbers)):
        raise TypeError("token ids are not integers")
    return numbers


def _joined(pieces: Sequence[Piece]) -> ConductorChunk:
    """One piece of several in a row."""
    texts, ids, logprobs, tokens = zip(*pieces, strict=True)
    several = chain.from_iterable
    return ConductorChunk("".join(texts), tuple(several(ids)), tuple(several(logprobs)), tuple(several(tokens)))
