"""Identifiers: shape, order, and that no two are the same, whoever makes them."""

from __future__ import annotations

import os
import uuid

from gateway.core.log.events import random_hex, uuid7


def test_they_are_uuids_of_version_seven_with_their_time_in_front() -> None:
    for unix_ms in (0, 1_700_000_000_000, 2**48 - 1):
        one = uuid.UUID(uuid7(unix_ms))
        assert (one.version, one.variant, one.int >> 80) == (7, uuid.RFC_4122, unix_ms)


def test_none_of_many_is_like_another() -> None:
    assert len({uuid7(7) for _ in range(5_000)}) == 5_000
    found = {random_hex() for _ in range(5_000)}
    assert len(found) == 5_000
    assert {len(one) for one in found} == {32}


def test_every_bit_that_may_vary_does() -> None:
    ones = zeros = 0
    for _ in range(200):
        value = uuid.UUID(uuid7(0)).int
        ones, zeros = ones | value, zeros | ~value
    free = (2**12 - 1) << 64 | (2**62 - 1)
    assert ones & free == free
    assert zeros & free == free


def test_a_forked_process_makes_others() -> None:
    uuid7(0)  # so that there is something left of the randomness fetched before
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, random_hex().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    assert theirs not in {random_hex() for _ in range(300)}
