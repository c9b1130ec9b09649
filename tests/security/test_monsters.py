"""B5: protocol monsters over real sockets: a 4xx in good time, in bounded memory, and nobody else waits."""

from __future__ import annotations

import base64
import gc
import socket
import statistics
import time
from pathlib import Path

import pytest

from tests.security.gateway import Gateway, ask
from tests.security.monsters import monsters
from tests.security.report import measured
from tests.security.sender import WAIT_S, sender
from tests.sizes import SLACK

PROMISED_S, PROMISED_MIB = 0.05, 32  # of processor, for one that is refused; of memory, for any
KEPT_MIB_MAX = 64  # of all monsters together; what the tests remember of the log is in it
AMPLIFICATION_MAX = 100


def mib(what: str) -> float:
    """VmRSS, or VmHWM: the most there was since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def test_every_monster_is_answered_and_none_is_felt(gateway: Gateway) -> None:
    """Each is sent by another process; what this one spends is the gateway's."""
    _, secret = gateway.key(name="monster")
    every = [(one.name, one.answers, one.head[:10], len(one.head) + len(one.body)) for one in monsters(secret)]
    assert len(every) >= 40
    wrong, waits, spent, peaks, amplified = {}, [], [], [], []
    long = {"messages": [{"role": "user", "content": "word " * 2_000}]}
    with gateway.client(secret) as http:  # what is loaded once is not theirs: the tokens of an encoding, 70 MiB
        assert http.post("/v1/chat/completions", json=ask() | long).status_code == 200
    with sender(gateway.public, secret) as sending:
        sending.send(0)
        gc.collect()
        before = mib("VmRSS")
        for number, (name, answers, head, size) in enumerate(every):
            forget_peak()
            resident, began = mib("VmRSS"), time.process_time()
            status, wait_s = sending.send(number)
            spent_s = time.process_time() - began
            may_close = answers & {431, 505} or head.startswith((b"\x16", b"PRI", b"A" * 10))
            if status not in answers and not (status is None and may_close):
                wrong[name] = status
            refused = status is not None and 400 <= status < 500
            waits += [(wait_s, name)] if refused else []
            spent += [(spent_s, name)] if refused else []
            peaks.append((mib("VmHWM") - resident, name))
            amplified.append((spent_s / (size / 1e9 + 0.001), name))  # it writes a gigabyte a second
        kept = mib("VmRSS") - before
    assert wrong == {}
    typical_ms = 1000 * statistics.median(wait for wait, _ in waits)
    measured(
        "B5",
        f"{len(every)} monsters: refused in {typical_ms:.1f} ms (median), {1000 * max(waits)[0]:.0f} ms "
        f"(`{max(waits)[1]}`); at most {1000 * max(spent)[0]:.0f} ms of processor (`{max(spent)[1]}`) and "
        f"{max(peaks)[0]:.0f} MiB (`{max(peaks)[1]}`); {kept:.0f} MiB kept of all; "
        f"{max(amplified)[0]:.0f} times the sender's processor (`{max(amplified)[1]}`)",
    )
    assert max(spent)[0] < PROMISED_S * SLACK, max(spent)
    assert max(peaks)[0] < PROMISED_MIB, max(peaks)
    assert max(amplified)[0] < AMPLIFICATION_MAX * SLACK, max(amplified)
    assert kept < KEPT_MIB_MAX
    with gateway.client(secret) as http:
        assert http.post("/v1/chat/completions", json=ask()).status_code == 200


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # of aiohttp, above a mebibyte
def test_large_honest_requests_pass(gateway: Gateway) -> None:
    """Pictures, pages of code, long conversations, half a million tokens: far below every bound but that of bytes."""
    _, secret = gateway.key(name="large")
    picture = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(5 << 20)).decode()
    code = 'def f(x: dict[str, int]) -> list[int]:\n    return [x["a"], x["b"], {"c": [1, 2]}["c"][0]]\n' * 20
    turns = [{"role": role, "content": "a turn"} for _ in range(900) for role in ("user", "assistant")]
    tool = {"type": "object", "properties": {f"p{n}": {"type": "string", "enum": ["a", "b"]} for n in range(100)}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": tool}} for n in range(20)]
    shown = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": picture}}]
    bodies = {
        "a picture of 5 MiB": ask() | {"messages": [{"role": "user", "content": shown}]},
        "code": ask(code),
        "1,800 turns": ask() | {"messages": [*turns, {"role": "user", "content": "and?"}]},
        "2,000 properties in 20 tools": ask(tools=tools),
    }
    took = {}
    with gateway.client(secret) as http:
        for name, body in bodies.items():
            began = time.process_time()
            answer = http.post("/v1/chat/completions", json=body)
            took[name] = time.process_time() - began
            assert answer.status_code == 200, (name, answer.text)
    said = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in took.items())
    measured("B5", f"large and honest, processor of the gateway, the worker and the client together: {said}")


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
