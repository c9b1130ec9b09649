"""API keys: `bt_<class>_<12-character public id>_<32 random base62><6-character base62 CRC32>` (ADR 0004). Pure.

The public id finds the row, the checksum turns typing errors and guesses away without a look-up, and only an
HMAC-SHA-256 of the whole text under a server-side pepper is ever stored.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

KeyClass = Literal["data", "admin"]
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
PUBLIC_ID_CHARS = 12
RANDOM_CHARS = 32  # 190 bits
CHECKSUM_CHARS = 6  # 62**6 > 2**32
PEPPER_BYTES_MIN = 16
PEPPER_VERSION = 1  # of the one pepper that an installation has today

_FORM = re.compile(
    rf"(?P<body>bt_(?P<key_class>data|admin)_(?P<public_id>[0-9A-Za-z]{{{PUBLIC_ID_CHARS}}})"
    rf"_[0-9A-Za-z]{{{RANDOM_CHARS}}})(?P<checksum>[0-9A-Za-z]{{{CHECKSUM_CHARS}}})"
)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key whose form and checksum are right; whether it exists is for the store to say."""

    key_class: KeyClass
    public_id: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Nano-dollars that something may spend in all, in each calendar month and on each day (UTC). None: not limited."""

    life_nano: int | None = None
    month_nano: int | None = None
    day_nano: int | None = None


@dataclass(frozen=True, slots=True)
class Organisation:
    """What all keys of an organisation share, and what each of their end users may spend. None: not limited."""

    allowance: Allowance = Allowance()
    per_user: Allowance = Allowance()
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None

    @property
    def rated(self) -> bool:
        """Whether it has a limit on requests or tokens."""
        return not (self.rpm is None and self.tpm is None and self.concurrency is None)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request is made by and what it may do. None: not limited. `workers` empty: all of its pools. `budget_nano`
    is the key's for its life; `allowance` has those of month and day too."""

    public_id: str
    key_class: KeyClass
    name: str
    org: str
    pools: tuple[str, ...]
    workers: tuple[str, ...] = ()
    budget_nano: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    caps: Mapping[str, Any] = field(default_factory=dict)
    log_mode: str = "full"
    train: bool = True
    budget_month_nano: int | None = None
    budget_day_nano: int | None = None
    per_user: Allowance = Allowance()
    organisation: Organisation = Organisation()

    @property
    def allowance(self) -> Allowance:
        """What the key may spend."""
        return Allowance(self.budget_nano, self.budget_month_nano, self.budget_day_nano)


def mint(key_class: KeyClass, public_id: str | None = None) -> tuple[str, str]:
    """A new key as (secret text, public id), or a new secret for a public id. The text is shown once and kept by
    nobody."""
    public_id = public_id or _random(PUBLIC_ID_CHARS)
    body = f"bt_{key_class}_{public_id}_{_random(RANDOM_CHARS)}"
    return body + checksum(body), public_id


def parse(text: str) -> ParsedKey:
    """Raises ValueError, which never repeats the text, when form or checksum is wrong."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("not of the form bt_data_… or bt_admin_…")
    if checksum(match["body"]) != match["checksum"]:
        raise ValueError("its checksum is wrong: a character was lost or changed")
    return ParsedKey(cast(KeyClass, match["key_class"]), match["public_id"], text)


def checksum(body: str) -> str:
    """CRC32 of everything before it, as six base62 digits."""
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(CHECKSUM_CHARS):
        value, digit = divmod(value, len(BASE62))
        digits = BASE62[digit] + digits
    return digits


def digest(text: str, pepper: bytes) -> bytes:
    """HMAC-SHA-256, 32 bytes. No slow hash: 190 random bits cannot be searched, and a slow one is a way to stall us."""
    if len(pepper) < PEPPER_BYTES_MIN:
        raise ValueError(f"the pepper has {len(pepper)} bytes; at least {PEPPER_BYTES_MIN} are needed")
    return hmac.new(pepper, text.encode(), hashlib.sha256).digest()


def matches(text: str, pepper: bytes, stored: bytes) -> bool:
    """Whether `stored` is the digest of `text`, in constant time."""
    return hmac.compare_digest(digest(text, pepper), stored)


def _random(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))
