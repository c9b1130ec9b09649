"""Images, audio and files inside messages: checks `data:` URLs and finds the parts that point elsewhere. Pure.

This file fetches nothing; `adapters/upstream/media.py` fetches from the hosts that an operator lists.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.core.openai.shapes import bad_value
from gateway.errors import BadRequest

Kind = Literal["image", "audio", "file"]
LINKS: Mapping[str, tuple[Kind, str, str]] = {
    # type of part: (kind, the object inside it, the property of that object that holds the data or its URL)
    "image_url": ("image", "image_url", "url"),
    "input_audio": ("audio", "input_audio", "data"),
    "file": ("file", "file", "file_data"),
}
TEXT_TYPES = ("text/", "application/json")  # of files, what the types of those begin with that hold text
MEDIA_TYPES: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image/png", "image/jpeg", "image/gif", "image/webp"),
    "audio": ("audio/wav", "audio/mpeg"),
    "file": (
        *("application/pdf", "text/*", "application/json", "application/rtf", "application/msword"),
        *("application/vnd.ms-excel", "application/vnd.ms-powerpoint", "application/vnd.oasis.opendocument.text"),
        "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
        "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
        "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ),
}
_ALIASES = {
    "image/jpg": "image/jpeg", "audio/x-wav": "audio/wav", "audio/wave": "audio/wav", "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
}  # fmt: skip
_AUDIO_FORMATS = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_DATA = re.compile(r"data:(?P<type>[a-z0-9.+-]+/[a-z0-9.+-]+)(;[a-z0-9-]+=[\w.+-]*)*;base64,", re.IGNORECASE)
_SHOWN_CHARS_MAX = 256
_PIECE_CHARS = 1 << 20  # of base64, in fours


@dataclass(frozen=True, slots=True)
class Media:
    """Bytes and their media type."""

    media_type: str
    data: bytes

    @property
    def base64(self) -> str:
        """The bytes as base64 text."""
        return base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """The media as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A content part with an image, audio or a file. `where` is the path of its data or URL in the request."""

    where: str
    kind: Kind
    url: str
    format: str | None = None  # of audio, as the request states it


def check_link(kind: Kind, value: str, where: str, bytes_max: int) -> None:
    """Raises BadRequest unless the value is valid data of at most `bytes_max` bytes, or an `https:` URL. The URL is
    checked when it is fetched."""
    if value[:6].lower() == "https:":
        return
    if value[:5].lower() == "data:":
        head = _DATA.match(value)
        if head is None:
            raise bad_value(where, "`data:<type>;base64,<data>`", "invalid_value")
        declared, encoded = head["type"].lower(), value[head.end() :]
    elif kind == "image" or "://" in value[:32] or not value:
        raise bad_value(where, "a `data:` URL, or an `https:` one of a host that this gateway lists", "invalid_value")
    else:
        declared, encoded = "", value
    first = _decoded_head(encoded, where, bytes_max)
    if declared:
        as_media(kind, declared, first, where)


def _decoded_head(encoded: str, where: str, bytes_max: int) -> bytes:
    """The first bytes that base64 stands for. All of it is checked, in pieces, so that other threads get their turn."""
    if len(encoded) * 3 // 4 > bytes_max + 3:
        raise BadRequest(f"`{where}` is over {bytes_max} bytes", param=where, code="media_too_large")
    try:
        head = binascii.a2b_base64(encoded[:_PIECE_CHARS], strict_mode=True)
        for start in range(_PIECE_CHARS, len(encoded), _PIECE_CHARS):
            if encoded[start - 1] == "=":  # the end of it, and not the end of a piece
                raise ValueError
            binascii.a2b_base64(encoded[start : start + _PIECE_CHARS], strict_mode=True)
    except (binascii.Error, ValueError):
        raise bad_value(where, "base64", "invalid_value") from None
    return head


def as_media(kind: Kind, declared: str, data: bytes, where: str) -> Media:
    """Return the bytes as media of the declared type. Raises BadRequest(media_type) if Baton does not accept the type
    or the bytes are of another type."""
    name = declared.split(";")[0].strip().lower()
    name = _ALIASES.get(name, name)
    accepted = MEDIA_TYPES[kind]
    if name not in accepted and not (name.startswith("text/") and "text/*" in accepted):
        problem = f"`{where}` is of type {name[:64]}; send one of {', '.join(accepted)}"
        raise BadRequest(problem, param=where, code="media_type")
    if sniff_type(data) != (None if kind == "file" and name != "application/pdf" else name):
        problem = f"`{where}` is declared as {name}, but its bytes are of another type; declare the type of the bytes"
        raise BadRequest(problem, param=where, code="media_type")
    return Media(name, data)


def sniff_type(data: bytes) -> str | None:
    """The media type that the first bytes prove, or None."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF"):
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(data[8:12])
    if data.startswith(b"ID3") or (data[:1] == b"\xff" and len(data) > 1 and data[1] & 0xE6 == 0xE2):
        return "audio/mpeg"
    return "application/pdf" if data.startswith(b"%PDF-") else None


def audio_type(format_: str) -> str:
    """The media type of an `input_audio.format`."""
    return _AUDIO_FORMATS[format_]


# ---------------------------------------------------------------- parts of a conversation


def _links(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, Kind, str, str, str]]:
    """Yield (message index, part index, kind, object name, property name, value) of every media part."""
    for message_at, message in enumerate(messages):
        content = message.get("content")
        for part_at, part in enumerate(content if isinstance(content, list) else ()):
            kind, holder, name = LINKS.get(part.get("type") or "", ("image", "", ""))
            value = (part.get(holder) or {}).get(name) if holder else None
            if isinstance(value, str):
                yield message_at, part_at, kind, holder, name, value


def caches_an_hour(body: Mapping[str, Any]) -> bool:
    """Whether the prompt in a body, or a part of it, is to be cached for an hour and not for five minutes."""
    items = [item for name in ("messages", "tools") for item in body.get(name) or ()]
    lists = (item.get(name) for item in items for name in ("content", "blocks"))  # the latter: core/anthropic/native.py
    parts = (part for content in lists if isinstance(content, list) for part in content)
    marks = (item.get("cache_control") for item in (body, body.get("anthropic") or {}, *items, *parts))
    return any(isinstance(mark, Mapping) and mark.get("ttl") not in (None, "5m") for mark in marks)


def with_results_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the media of tool results in a user message behind the results of that turn, for workers that
    take only text as a result."""
    changed: list[Mapping[str, Any]] = []
    apart: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") != "tool" and apart:
            changed.append({"role": "user", "content": apart})
            apart = []
        changed.append(_result_as_text(message, apart) if message.get("role") == "tool" else message)
    return [*changed, {"role": "user", "content": apart}] if apart else changed


def _result_as_text(message: Mapping[str, Any], apart: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A tool message whose media have moved to `apart`, each announced there by the id of the call."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    media = [part for part in parts if part.get("type") in LINKS]
    if not media:
        return message
    apart.append({"type": "text", "text": f"Attached to the result of tool call {message.get('tool_call_id')}:"})
    apart.extend(media)
    texts = [part for part in parts if part.get("type") not in LINKS]
    return {**message, "content": [*texts, {"type": "text", "text": "(attached in the next user message)"}]}


def media_kinds(messages: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The kinds of media (`image`, `audio`, `file`) that a conversation holds."""
    return frozenset(kind for _, _, kind, *_ in _links(messages))


def parts_of_kinds(messages: Sequence[Mapping[str, Any]], kinds: Collection[str]) -> list[Mapping[str, Any]]:
    """The content parts of a conversation that hold media of these kinds, in order."""
    return [messages[at]["content"][part_at] for at, part_at, kind, *_ in _links(messages) if kind in kinds]


def media_parts(messages: Sequence[Mapping[str, Any]]) -> tuple[MediaPart, ...]:
    """The media parts of a conversation, in order."""
    return tuple(
        MediaPart(
            f"messages[{message_at}].content[{part_at}].{holder}.{name}",
            kind,
            value,
            messages[message_at]["content"][part_at][holder].get("format") if kind == "audio" else None,
        )
        for message_at, part_at, kind, holder, name, value in _links(messages)
    )


def remote_parts(messages: Sequence[Mapping[str, Any]]) -> tuple[MediaPart, ...]:
    """The media parts that are `https:` URLs, in order."""
    return tuple(part for part in media_parts(messages) if part.url[:6].lower() == "https:")


def with_media(
    messages: Sequence[Mapping[str, Any]], fetched: Mapping[tuple[Kind, str], Media]
) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation with fetched media in place of URLs. `fetched` maps (kind, URL) to media."""

    def inline(kind: Kind, value: str) -> str:
        media = fetched.get((kind, value))
        return value if media is None else media.base64 if kind == "audio" else media.url

    return _replace_links(messages, inline)


def without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the conversation with long data replaced by their type, size and digest, for logs."""

    def summarise(kind: Kind, value: str) -> str:
        if len(value) <= _SHOWN_CHARS_MAX:
            return value
        head, _, encoded = value.rpartition(",")
        digest = hashlib.sha256(encoded.encode()).hexdigest()
        return f"{head[:_SHOWN_CHARS_MAX]},[{len(encoded)} characters, sha256 {digest}]"

    return _replace_links(messages, summarise)


def _replace_links(messages: Sequence[Mapping[str, Any]], change: Any) -> tuple[Mapping[str, Any], ...]:
    changed = list(messages)
    for message_at, part_at, kind, holder, name, value in _links(messages):
        if (new := change(kind, value)) == value:
            continue
        content = list(changed[message_at]["content"])
        content[part_at] = {**content[part_at], holder: {**content[part_at][holder], name: new}}
        changed[message_at] = {**changed[message_at], "content": content}
    return tuple(changed)
