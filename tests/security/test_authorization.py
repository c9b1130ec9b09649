"""S4: whatever stands in the Authorization header is refused alike, and most of it without a look-up."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

import pytest

from gateway.core.access import keys
from gateway.errors import Unauthorized
from gateway.service.ports.admin import KeyRow
from gateway.service.request.auth import Authenticator
from tests.fakes.store import FakeStore
from tests.kit import TestClock
from tests.security.gateway import Gateway
from tests.security.report import measured

FUZZED = 10_000
SQL = (
    "' OR 1=1 --",
    "'; DROP TABLE keys; --",
    '" OR ""="',
    "%27%20OR%201",
    "\\x00",
    "$1",
    "${jndi:ldap://x}",
    "\u202e",
)
CONTROLS = bytes([*range(32), 127])  # HTTP has no way to send them
ALPHABETS = (string.printable, string.ascii_letters + string.digits, "\x00\x01\x7f", "ÄÖÜ🦀\ud800", "'\"`;-- ")


class CountingStore(FakeStore):
    """Remembers every look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def key_get(self, public_id: str) -> KeyRow | None:
        self.asked.append(public_id)
        return await super().key_get(public_id)


def noise(draw: random.Random) -> str:
    return "".join(draw.choices(draw.choice(ALPHABETS), k=draw.randrange(200)))


def flipped(draw: random.Random) -> str:
    """A good key with one character changed: its checksum is wrong."""
    secret, _ = keys.mint(draw.choice(("data", "admin")))
    place = draw.randrange(len("bt_data_"), len(secret))
    other = draw.choice([char for char in keys.BASE62 if char != secret[place]])
    return f"Bearer {secret[:place]}{other}{secret[place + 1 :]}"


def injected(draw: random.Random) -> str:
    secret, _ = keys.mint("data")
    place = draw.randrange(len(secret))
    return f"Bearer {secret[:place]}{draw.choice(SQL)}{secret[place:]}"


def of_the_other_class(draw: random.Random) -> str:
    return f"Bearer {keys.mint('admin')[0]}"


def unknown(draw: random.Random) -> str:
    """Well-formed, with a right checksum: the only ones that are looked up."""
    return f"Bearer {keys.mint('data')[0]}"


KINDS: tuple[Callable[[random.Random], str], ...] = (
    noise,
    lambda draw: f"Bearer {noise(draw)}",
    lambda draw: f"Basic {noise(draw)}",
    lambda draw: f"Bearer bt_data_{noise(draw)}",
    flipped,
    injected,
    of_the_other_class,
    unknown,
)


async def test_ten_thousand_headers_are_refused_and_only_whole_keys_are_looked_up() -> None:
    draw, store = random.Random(4), CountingStore()
    auth = Authenticator(store, {1: b"p" * 32}, TestClock())
    whole = refused = 0
    for n in range(FUZZED):
        kind = KINDS[n % len(KINDS)]
        header = kind(draw)
        whole += kind is unknown
        with pytest.raises(Unauthorized):
            await auth.authenticate(header, "data")
        refused += 1
    measured("S4", f"{refused} headers, all 401, {len(store.asked)} look-ups for {whole} whole keys")
    assert (refused, len(store.asked)) == (FUZZED, whole)
    assert all(public_id.isascii() and public_id.isalnum() for public_id in store.asked)


@pytest.mark.parametrize("admin", [False, True])
def test_over_the_wire_it_is_always_401(gateway: Gateway, admin: bool) -> None:
    draw = random.Random(5)
    path = "/admin/keys" if admin else "/v1/models"
    with gateway.client(admin=admin) as http:
        for n in range(200):
            kind = KINDS[n % len(KINDS)] if not admin else KINDS[n % 6]
            header = kind(draw).encode("latin-1", "replace").translate(None, CONTROLS).strip()
            assert http.get(path, headers={b"authorization": header}).status_code == 401
