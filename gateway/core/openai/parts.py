"""Images, audio and files inside messages: what a `data:` URL may hold, which parts point elsewhere. Pure.

Nothing is fetched here; `adapters/upstream/media.py` does that for the hosts an operator lists.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.core.openai.shapes import bad
from gateway.errors import BadRequest

Kind = Literal["image", "audio", "file"]
LINKS: Mapping[str, tuple[Kind, str, str]] = {
    # type of part: (kind, the object inside it, its property that holds the data or says where they are)
    "image_url": ("image", "image_url", "url"),
    "input_audio": ("audio", "input_audio", "data"),
    "file": ("file", "file", "file_data"),
}
MEDIA_TYPES: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image/png", "image/jpeg", "image/gif", "image/webp"),
    "audio": ("audio/wav", "audio/mpeg"),
    "file": ("application/pdf", "text/plain", "text/markdown", "text/csv", "text/html", "application/json"),
}
_ALIASES = {
    "image/jpg": "image/jpeg", "audio/x-wav": "audio/wav", "audio/wave": "audio/wav", "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
}  # fmt: skip
_AUDIO_FORMATS = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_DATA = re.compile(r"data:(?P<type>[a-z0-9.+-]+/[a-z0-9.+-]+)(;[a-z0-9-]+=[\w.+-]*)*;base64,", re.IGNORECASE)
_SHOWN_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Media:
    """Bytes of a known type."""

    media_type: str
    data: bytes

    @property
    def base64(self) -> str:
        """The bytes as text."""
        return base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """As a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


@dataclass(frozen=True, slots=True)
class Part:
    """A part that is no text; `where` is the path in the request of what it holds or points at."""

    where: str
    kind: Kind
    url: str
    format: str | None = None  # of audio, as the request says it


def check_link(kind: Kind, value: str, where: str, bytes_max: int) -> None:
    """Raises BadRequest unless the value is good data, or an `https:` URL (which is looked at when it is fetched)."""
    if value[:6].lower() == "https:":
        return
    if value[:5].lower() == "data:":
        head = _DATA.match(value)
        if head is None:
            raise bad(where, "`data:<type>;base64,<data>`", "invalid_value")
        declared, encoded = head["type"].lower(), value[head.end() :]
    elif kind == "image" or "://" in value[:32] or not value:
        raise bad(where, "a `data:` URL, or an `https:` one of a host that this gateway lists", "invalid_value")
    else:
        declared, encoded = "", value
    data = _decoded(encoded, where, bytes_max)
    if declared:
        as_media(kind, declared, data, where)


def _decoded(encoded: str, where: str, bytes_max: int) -> bytes:
    if len(encoded) * 3 // 4 > bytes_max + 3:
        raise BadRequest(f"`{where}` is over {bytes_max} bytes", param=where, code="media_too_large")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise bad(where, "base64", "invalid_value") from None


def as_media(kind: Kind, declared: str, data: bytes, where: str) -> Media:
    """The bytes as media of the declared type. Raises BadRequest where the type is not taken, or the bytes are of
    another one."""
    name = declared.split(";")[0].strip().lower()
    name = _ALIASES.get(name, name)
    taken = MEDIA_TYPES[kind]
    if name not in taken:
        raise BadRequest(f"`{where}` is of type {name[:64]}; taken: {', '.join(taken)}", param=where, code="media_type")
    found = sniffed(data)
    if found != (None if name.startswith("text/") or name == "application/json" else name):
        raise BadRequest(f"`{where}` says it is {name}, and its bytes say otherwise", param=where, code="media_type")
    return Media(name, data)


def sniffed(data: bytes) -> str | None:
    """The type that the first bytes prove; None for anything else."""
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
    """(message, part, kind, object, property, value) of every part that is no text."""
    for at, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind, holder, name = LINKS.get(part.get("type") or "", ("image", "", ""))
            value = (part.get(holder) or {}).get(name) if holder else None
            if isinstance(value, str):
                yield at, number, kind, holder, name, value


def media_kinds(messages: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Which of `image`, `audio` and `file` a conversation holds."""
    return frozenset(kind for _, _, kind, *_ in _links(messages))


def media_parts(messages: Sequence[Mapping[str, Any]]) -> tuple[Part, ...]:
    """The parts that are no text."""
    return tuple(
        Part(
            f"messages[{at}].content[{number}].{holder}.{name}",
            kind,
            value,
            messages[at]["content"][number][holder].get("format") if kind == "audio" else None,
        )
        for at, number, kind, holder, name, value in _links(messages)
    )


def remote_parts(messages: Sequence[Mapping[str, Any]]) -> tuple[Part, ...]:
    """Those of them whose bytes lie elsewhere."""
    return tuple(part for part in media_parts(messages) if part.url[:6].lower() == "https:")


def with_media(
    messages: Sequence[Mapping[str, Any]], fetched: Mapping[tuple[Kind, str], Media]
) -> tuple[Mapping[str, Any], ...]:
    """The conversation with what was fetched, by kind and URL, in place of its URLs."""

    def inline(kind: Kind, value: str) -> str:
        media = fetched.get((kind, value))
        return value if media is None else media.base64 if kind == "audio" else media.url

    return _replaced(messages, inline)


def without_media(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The conversation with long data replaced by what they are: type, size and digest. For logs."""

    def tell(kind: Kind, value: str) -> str:
        if len(value) <= _SHOWN_CHARS_MAX:
            return value
        head, _, encoded = value.rpartition(",")
        digest = hashlib.sha256(encoded.encode()).hexdigest()
        return f"{head[:_SHOWN_CHARS_MAX]},[{len(encoded)} characters, sha256 {digest}]"

    return _replaced(messages, tell)


def _replaced(messages: Sequence[Mapping[str, Any]], change: Any) -> tuple[Mapping[str, Any], ...]:
    made = list(messages)
    for at, number, kind, holder, name, value in _links(messages):
        if (new := change(kind, value)) == value:
            continue
        content = list(made[at]["content"])
        content[number] = {**content[number], holder: {**content[number][holder], name: new}}
        made[at] = {**made[at], "content": content}
    return tuple(made)
