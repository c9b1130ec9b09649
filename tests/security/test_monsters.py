"""B5: protocol monsters over real sockets: a 4xx in good time, in bounded memory, and nobody else waits."""

from __future__ import annotations

import resource
import socket
import statistics
import time
from contextlib import suppress

import pytest

from tests.security.gateway import Gateway, ask
from tests.security.monsters import Monster, monsters
from tests.security.report import measured

WAIT_S = 20.0
GROWTH_MIB_MAX = 96  # one process holds the sender's copy of each monster as well as the gateway's
AMPLIFICATION_MAX = 100


def sent(url: str, monster: Monster) -> tuple[int | None, float]:
    """(status, seconds from the last byte that could be sent to the first of the answer); None: closed without one."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as wire:
        with suppress(ConnectionError, TimeoutError):  # refused before it was all there
            wire.sendall(monster.head + monster.body)
        began = time.perf_counter()
        try:
            answer = wire.recv(65_536)
        except ConnectionError:
            return None, time.perf_counter() - began
    return (int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else None), time.perf_counter() - began


def resident_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def test_every_monster_is_answered_and_none_is_felt(gateway: Gateway) -> None:
    _, secret = gateway.key(name="monster")
    every = monsters(secret)
    assert len(every) >= 40
    sent(gateway.public, every[0])  # what is loaded once is not theirs
    before, wrong, took = resident_mib(), {}, []
    for monster in every:
        cpu = time.process_time()
        status, wait_s = sent(gateway.public, monster)
        spent_s = time.process_time() - cpu
        may_close = monster.answers & {431, 505} or monster.head.startswith((b"\x16", b"PRI", b"A" * 10))
        if status not in monster.answers and not (status is None and may_close):
            wrong[monster.name] = status
        took.append((wait_s, spent_s, monster.name))
        del monster
    assert wrong == {}
    slowest = max(took)
    grown = resident_mib() - before
    typical_ms = 1000 * statistics.median(wait for wait, _, _ in took)
    measured(
        "B5",
        f"{len(every)} monsters: answered in {typical_ms:.1f} ms (median), {1000 * slowest[0]:.0f} ms "
        f"(`{slowest[2]}`), {max(spent for _, spent, _ in took):.2f} s of processor at most; {grown:.0f} MiB more",
    )
    assert grown < GROWTH_MIB_MAX
    with gateway.client(secret) as http:
        assert http.post("/v1/chat/completions", json=ask()).status_code == 200


def test_a_client_that_sends_a_byte_a_second_keeps_nobody_waiting(gateway: Gateway) -> None:
    _, secret = gateway.key(name="slow")
    host, port = gateway.public.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(100)]
    try:
        for wire in slow:
            wire.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-a: ")
        with gateway.client(secret) as http:
            assert http.post("/v1/chat/completions", json=ask()).status_code == 200
    finally:
        for wire in slow:
            wire.close()


@pytest.mark.parametrize("path", ["/v1/outcomes", "/v1/responses"])
def test_the_other_routes_read_bodies_as_carefully(gateway: Gateway, path: str) -> None:
    _, secret = gateway.key(name="monster")
    with gateway.client(secret) as http:
        for body in (b"[" * 10_000, b"\xff", b'{"a": NaN}', b'"\\ud800"', b'{"seed": ' + b"9" * 100_000 + b"}"):
            assert http.post(path, content=body).status_code == 400


def test_what_reading_a_monster_costs_is_in_proportion_to_what_it_takes_to_send(gateway: Gateway) -> None:
    """Processor time of the whole process, sender included, against that of writing as many bytes.

    Ten times the promise is allowed, for coverage counts every line here.
    """
    _, secret = gateway.key(name="monster")
    heavy = [one for one in monsters(secret) if len(one.body) > 500_000]
    assert len(heavy) >= 5
    for monster in heavy:
        began = resource.getrusage(resource.RUSAGE_SELF)
        sent(gateway.public, monster)
        ended = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        sending_s = len(monster.body) / 1e9 + 0.01  # a client writes about a gigabyte a second to loopback
        assert spent_s < 10 * AMPLIFICATION_MAX * sending_s, (monster.name, spent_s)
