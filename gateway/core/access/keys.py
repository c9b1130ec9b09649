"""API keys: `bt_<class>_<12-character public id>_<32 random base62><6-character base62 CRC32>` (ADR 0004). Pure.

The public id finds the row. The checksum rejects typing errors and guesses without a look-up. The store holds only an
HMAC-SHA-256 of the whole text under a server-side pepper.
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

KeyClass = Literal["data", "admin"]
Role = Literal["admin", "operator", "auditor"]  # of an admin key; data keys have none
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
PUBLIC_ID_CHARS = 12
RANDOM_CHARS = 32  # 190 bits
CHECKSUM_CHARS = 6  # 62**6 > 2**32
PEPPER_BYTES_MIN = 16
PEPPER_VERSION = 1  # of the single pepper that an installation has

_FORM = re.compile(
    rf"(?P<body>bt_(?P<key_class>data|admin)_(?P<public_id>[0-9A-Za-z]{{{PUBLIC_ID_CHARS}}})"
    rf"_[0-9A-Za-z]{{{RANDOM_CHARS}}})(?P<checksum>[0-9A-Za-z]{{{CHECKSUM_CHARS}}})"
)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key with a valid form and checksum. Only the store knows whether it exists."""

    key_class: KeyClass
    public_id: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The nano-dollars that may be spent over a life, in each calendar month and on each day (UTC). None: no limit."""

    life_nano: int | None = None
    month_nano: int | None = None
    day_nano: int | None = None


@dataclass(frozen=True, slots=True)
class Organisation:
    """The limits that all keys of an organisation share, and the allowance of each end user. None: no limit."""

    allowance: Allowance = Allowance()
    per_user: Allowance = Allowance()
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None

    @property
    def has_rate_limits(self) -> bool:
        """Whether the organisation has a limit on requests, tokens or concurrency."""
        return not (self.rpm is None and self.tpm is None and self.concurrency is None)


@dataclass(frozen=True, slots=True)
class Principal:
    """The key of a request, with its limits and permissions. None: no limit. Empty `workers`: all workers of its pools.
    `budget_nano` is the key's budget for its life; `allowance` also has those of month and day."""

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
    role: Role = "admin"  # of an admin key
    is_operators: bool = False  # whether errors name hosts of workers and references to keys
    judges: bool = True  # whether its outcomes are taken
    worth: Mapping[str, Any] | None = None  # of a right answer: usd, seconds; None: the pool's or the settings'

    @property
    def has_rate_limits(self) -> bool:
        """Whether the key has a limit on requests, tokens or concurrency."""
        return not (self.rpm is None and self.tpm is None and self.concurrency is None)

    @property
    def allowance(self) -> Allowance:
        """The key's budgets over its life, the month and the day."""
        return Allowance(self.budget_nano, self.budget_month_nano, self.budget_day_nano)


def mint(key_class: KeyClass, public_id: str | None = None) -> tuple[str, str]:
    """Make a key, or a new secret for the key `public_id`; return (secret text, public id). Show the text once, and
    never store it."""
    public_id = public_id or _random(PUBLIC_ID_CHARS)
    body = f"bt_{key_class}_{public_id}_{_random(RANDOM_CHARS)}"
    return body + checksum(body), public_id


def parse(text: str) -> ParsedKey:
    """Read the text of a key. Raises ValueError for a wrong form or checksum; the message never repeats the text."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("not of the form bt_data_… or bt_admin_…")
    if checksum(match["body"]) != match["checksum"]:
        raise ValueError("its checksum is wrong: a character was lost or changed")
    return ParsedKey(cast(KeyClass, match["key_class"]), match["public_id"], text)


def checksum(body: str) -> str:
    """The CRC32 of `body`, the text before the checksum, as six base62 digits."""
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(CHECKSUM_CHARS):
        value, digit = divmod(value, len(BASE62))
        digits = BASE62[digit] + digits
    return digits


def digest(text: str, pepper: bytes) -> bytes:
    """The HMAC-SHA-256 of a key, 32 bytes. No slow hash is needed, because nobody can search 190 random bits, and a
    slow one would let attackers stall the gateway. Raises ValueError for a pepper that is too short."""
    if len(pepper) < PEPPER_BYTES_MIN:
        raise ValueError(f"the pepper has {len(pepper)} bytes; at least {PEPPER_BYTES_MIN} are needed")
    return hmac.digest(pepper, text.encode(), "sha256")


def matches(text: str, pepper: bytes, stored: bytes) -> bool:
    """Whether `stored` is the digest of `text`, compared in constant time."""
    return hmac.compare_digest(digest(text, pepper), stored)


def may_change(role: Role) -> bool:
    """Whether the role may do more than read."""
    return role != "auditor"


def may_manage(role: Role, key_class: str) -> bool:
    """Whether the role may make, change, rotate and revoke keys of that class."""
    return role == "admin" or (role == "operator" and key_class == "data")


def _random(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))
