"""Requests that are no conversation and go to one worker of their task: moderation, rerank, images, speech,
transcription. Pure.

Each API has a table of its properties, as chat has: with fate `read` Baton acts on a property, with `last` it goes to
the worker. Others are dropped and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.openai.chat import FIELDS as CHAT_FIELDS
from gateway.core.openai.chat import ChatRequest, Endpoint
from gateway.core.openai.shapes import FLAG, Check, any_of, array, bad_value, integer, number, one_of, text
from gateway.core.openai.texts import Fields, read_properties
from gateway.errors import BadRequest

TEXTS_MAX = 1000
DOCUMENTS_MAX = 1000
SPEECH_CHARS_MAX = 4096
PROMPT_CHARS_MAX = 32_000
SOUND_BYTES_MAX = 25 * 2**20
SOUNDS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
TRANSCRIPTS = ("json", "text", "srt", "verbose_json", "vtt", "diarized_json")
_ONE_TEXT = text(2**24)
_SHARED = {name: CHAT_FIELDS[name] for name in ("model", "user", "metadata")}


@dataclass(frozen=True, slots=True)
class Sound:
    """An uploaded recording. Its bytes are in no log and no text."""

    name: str
    kind: str  # media type
    data: bytes = field(repr=False)


def _documents(value: Any) -> str | None:
    code = array(1, DOCUMENTS_MAX, (str, dict))(value)
    return code or next((code for item in value if isinstance(item, str) and (code := _ONE_TEXT(item))), None)


def _texts(value: Any) -> str | None:
    return array(1, TEXTS_MAX, (str, dict))(value)


def _one_or_object(chars_max: int) -> Check:
    return any_of(text(chars_max), lambda value: None if isinstance(value, dict) else "invalid_type")


def _is_sound(value: Any) -> str | None:
    return None if isinstance(value, Sound) else "invalid_type"


_DECODING: Fields = {
    **_SHARED,
    "file": ("last", _is_sound, "a recording, as a file of the form"),
    "prompt": ("last", _ONE_TEXT, "a string"),
    "response_format": (
        "last", one_of(*TRANSCRIPTS), f"one of {', '.join(TRANSCRIPTS)}"
    ),
    "temperature": ("last", number(0, 1), "a number from 0 to 1"),
}  # fmt: skip
FIELDS: Mapping[Endpoint, Fields] = {
    "moderations": {**_SHARED, "input": ("last", any_of(_ONE_TEXT, _texts), "a string, or a list of texts or parts")},
    "rerank": {
        **_SHARED,
        "query": ("last", _ONE_TEXT, "a string"),
        "documents": ("last", _documents, f"1 to {DOCUMENTS_MAX} strings or objects"),
        "top_n": ("last", integer(1, DOCUMENTS_MAX), f"an integer from 1 to {DOCUMENTS_MAX}"),
        "rank_fields": ("last", array(1, 64, str), "a list of names"),
        "return_documents": ("last", *FLAG),
        "max_chunks_per_doc": ("last", integer(1, 10_000), "an integer above 0"),
        "max_tokens_per_doc": ("last", integer(1, 10_000_000), "an integer above 0"),
    },
    "images": {
        **_SHARED,
        "prompt": ("last", text(PROMPT_CHARS_MAX), f"a string of at most {PROMPT_CHARS_MAX} characters"),
        "n": ("last", integer(1, 10), "an integer from 1 to 10"),
        "size": ("last", text(32, r"auto|\d{2,5}x\d{2,5}"), "auto, or width x height such as 1024x1024"),
        "quality": ("last", text(32, r"[a-z]+"), "auto, low, medium, high, hd or standard"),
        "style": ("last", one_of("vivid", "natural"), "vivid or natural"),
        "background": ("last", one_of("transparent", "opaque", "auto"), "transparent, opaque or auto"),
        "moderation": ("last", one_of("low", "auto"), "low or auto"),
        "output_format": ("last", one_of("png", "jpeg", "webp"), "png, jpeg or webp"),
        "output_compression": ("last", integer(0, 100), "an integer from 0 to 100"),
        "response_format": ("last", one_of("url", "b64_json"), "url or b64_json"),
    },
    "speech": {
        **_SHARED,
        "input": ("last", text(SPEECH_CHARS_MAX), f"a string of at most {SPEECH_CHARS_MAX} characters"),
        "voice": ("last", _one_or_object(128), "a voice"),
        "instructions": ("last", text(4096), "a string"),
        "response_format": ("last", one_of(*SOUNDS), f"one of {', '.join(SOUNDS)}"),
        "speed": ("last", number(0.25, 4), "a number from 0.25 to 4"),
    },
    "transcriptions": {
        **_DECODING,
        "language": ("last", text(16), "a code such as en"),
        "timestamp_granularities": ("last", array(1, 2, str), "a list of word and segment"),
        "include": ("last", array(1, 8, str), 'a list such as ["logprobs"]'),
        "chunking_strategy": (
            "last",
            _one_or_object(16),
            "auto",
        ),
    },
    "translations": _DECODING,
}
REQUIRED: Mapping[Endpoint, tuple[str, ...]] = {
    "moderations": ("model", "input"),
    "rerank": ("model", "query", "documents"),
    "images": ("model", "prompt"),
    "speech": ("model", "input", "voice"),
    "transcriptions": ("model", "file"),
    "translations": ("model", "file"),
}
STREAMS = (
    "stream",
    "stream_format",
    "partial_images",
)  # properties that ask for a stream, which Baton does not pass on


def parse_task(endpoint: Endpoint, body: object, *, strict: bool = False) -> ChatRequest:
    """Read a request of one of these APIs. Raises BadRequest, which names the field."""
    if isinstance(body, dict):
        for name in STREAMS:
            if body.get(name) not in (None, False, 0, "audio"):
                raise BadRequest(
                    f"`{name}`: this API is not streamed here; leave it out", param=name, code="unsupported_parameter"
                )
        body = {name: value for name, value in body.items() if name not in STREAMS}
    properties, dropped = read_properties(body, FIELDS[endpoint], REQUIRED[endpoint], strict)
    if endpoint == "speech" and not properties["input"]:
        raise bad_value("input", "a text that is not empty", "invalid_value")
    return ChatRequest(
        model=properties["model"],
        messages=(),
        params={name: value for name, value in properties.items() if FIELDS[endpoint][name][0] == "last"},
        metadata=properties.get("metadata", {}),
        end_user=properties.get("user") or None,
        dropped=dropped,
        endpoint=endpoint,
    )
