"""Requests that no client sends and every server gets: malformed, huge, slow to read, or well-formed and absurd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TEXT = [{"role": "user", "content": "hello"}]
TEXT_PARTS = [{"type": "text", "text": ""}] * 4_000
UNKNOWN = {f"u{n}": 1 for n in range(90_000)}
MODEL = "baton/conductor"
BIG = 10**9


@dataclass(frozen=True)
class Monster:
    """One request as bytes. `cut`: the sender stops there and waits. `answers`: statuses that are right; none: the
    connection may just be closed."""

    name: str
    head: bytes
    body: bytes = b""
    answers: frozenset[int] = frozenset({400})
    hangs: bool = False


def _head(secret: str, *more: str, length: int | None = None, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: gateway", f"authorization: Bearer {secret}", "connection: close"]
    lines += ["content-type: application/json", *([] if length is None else [f"content-length: {length}"]), *more]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _sent(secret: str, name: str, body: bytes, *answers: int, path: str = "/v1/chat/completions") -> Monster:
    head = _head(secret, length=len(body), path=path)
    return Monster(name, head, body, frozenset(answers or (400,)))


def _chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": TEXT, **fields}).encode()


def _raw(fields: str) -> bytes:
    return f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hello"}}]{fields}}}'.encode()


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def _said(text: str) -> bytes:
    return _chat(messages=[{"role": "user", "content": text}])


def json_monsters(secret: str) -> Iterator[Monster]:
    """Bodies that are no JSON, or JSON of the kind that kills readers."""
    bodies = {
        "arrays 10,000 deep": b"[" * 10_000 + b"]" * 10_000,
        "objects 10,000 deep": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        "deep inside metadata": _raw(', "metadata": {"a": ' + "[" * 500 + "]" * 500 + "}"),
        "arrays a million deep, never closed": b"[" * 1_000_000,
        "NaN": _raw(', "temperature": NaN'),
        "Infinity": _raw(', "temperature": Infinity'),
        "-Infinity": _raw(', "top_p": -Infinity'),
        "1e999": _raw(', "temperature": 1e999'),
        "a lone surrogate": b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        "a reversed pair": b'{"model": "m", "messages": [{"role": "user", "content": "\\udc00\\ud800"}]}',
        "a surrogate in a name": b'{"model": "m", "messages": [], "\\udfff": 1}',
        "bytes that are no UTF-8": b'{"model": "\xff\xfe", "messages": []}',
        "overlong UTF-8": b'{"model": "\xc0\xaf", "messages": []}',
        "UTF-16": _chat().decode().encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + _chat(),
        "NUL bytes": b"\x00" * 1000,
        "a number of a million digits": _raw(', "seed": ' + "9" * 1_000_000),
        "a number of a million digits, negative": _raw(', "n": -' + "1" * 1_000_000),
        "nothing": b"",
        "null": b"null",
        "a text": b'"hello"',
        "an array": b"[]",
        "two objects": _chat() + _chat(),
        "a comment": b"/* hi */" + _chat(),
        "single quotes": b"{'model': 'm'}",
        "an unclosed text": b'{"model": "' + b"a" * 100_000,
    }
    for name, body in bodies.items():
        yield _sent(secret, name, body)


def field_monsters(secret: str) -> Iterator[Monster]:
    """Good JSON with absurd contents."""
    many = [{"role": "user", "content": ""}] * 1_000_000
    deep = {"type": "object", "properties": {}}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    regex = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a+)+$"}}}
    yield _sent(secret, "a million messages", _chat(messages=many), 400, 413)
    yield _sent(secret, "n = 10^9", _chat(n=BIG))
    yield _sent(secret, "n = -1", _chat(n=-1))
    yield _sent(secret, "max_tokens = 10^18", _chat(max_tokens=10**18), 200, 400)
    yield _sent(secret, "max_tokens = -1", _chat(max_tokens=-1))
    yield _sent(secret, "temperature = 10^300", _chat(temperature=1e300))
    yield _sent(secret, "stop of 100,000 words", _chat(stop=["x"] * 100_000))
    yield _sent(secret, "logit_bias of 100,000", _chat(logit_bias={str(n): 1 for n in range(100_000)}), 200, 400)
    yield _sent(
        secret, "100,000 tools", _chat(tools=[{"type": "function", "function": {"name": "f"}}] * 100_000), 200, 400
    )
    yield _sent(
        secret,
        "a schema 40 deep",
        _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}),
        200,
        400,
    )
    yield _sent(secret, "a schema with a catastrophic pattern", _chat(response_format=regex), 200, 400, 502)
    yield _sent(
        secret,
        "100,000 content parts",
        _chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}]),
        200,
        400,
    )
    yield _sent(secret, "4,000 content parts", _chat(messages=[{"role": "user", "content": TEXT_PARTS}]), 200, 400)
    yield _sent(secret, "2,000 messages", _chat(messages=TEXT * 2_000), 200, 400)
    yield _sent(secret, "40,000 objects in a schema", _chat(tools=[_tool({"a": [{}] * 40_000})]), 200, 400)
    yield _sent(secret, "90,000 unknown names", _raw("".join(f', "u{n}": 1' for n in range(90_000))), 200, 400)
    yield _sent(secret, "90,000 unknown names in a message", _chat(messages=[TEXT[0] | UNKNOWN]), 200, 400)
    yield _sent(secret, "400,000 numbers", _chat(prediction={"type": "content", "content": [1] * 400_000}), 400)
    yield _sent(secret, "3,000,000 empty texts", b"[" + b'"",' * 3_000_000 + b'""]')
    yield _sent(secret, "300,000 objects", b"[" + b"{}," * 300_000 + b"{}]")
    yield _sent(
        secret, "a text of 8 MB of braces", _chat(messages=[{"role": "user", "content": "{,:[" * 2_000_000}]), 400
    )
    yield _sent(
        secret, "a text of 4 MB of quotes", _chat(messages=[{"role": "user", "content": '"{' * 1_500_000}]), 400
    )
    yield _sent(secret, "10,000 metadata", _chat(metadata={f"k{n}": "v" for n in range(10_000)}))
    yield _sent(secret, "a model of a megabyte", _chat(model="m" * 1_000_000), 400, 404)
    yield _sent(secret, "a user of a megabyte", _chat(user="u" * 1_000_000), 200, 400)
    yield _sent(secret, "the same name twice", _raw(', "n": 1, "n": 1000000000'))
    yield _sent(secret, "the same refused name twice", _raw(', "api_base": null, "api_base": "http://evil/"'))
    yield _sent(secret, "20 MiB", b'{"model": "' + b"a" * (20 << 20) + b'"}', 413)


def wire_monsters(secret: str) -> Iterator[Monster]:
    """What is wrong is the HTTP."""
    closed = frozenset({400, 404, 405, 413, 414, 431, 505})
    body = _chat()
    yield Monster("a header of 64 KiB", _head(secret, f"x-long: {'a' * 66_000}"), b"", frozenset({431}))
    yield Monster("10,000 headers", _head(secret, *(f"x-{n}: {'b' * 8}" for n in range(10_000))), b"", frozenset({431}))
    yield Monster("a path of 100 KiB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: g\r\n\r\n", b"", closed)
    yield Monster("a length of 10^18", _head(secret, length=10**18), b"{", frozenset({413}))
    yield Monster("a negative length", _head(secret, "content-length: -1"), body, closed)
    yield Monster("two lengths", _head(secret, "content-length: 5", f"content-length: {len(body)}"), body, closed)
    both = _head(secret, f"content-length: {len(body)}", "transfer-encoding: chunked")
    yield Monster("length and chunks", both, body, closed)
    yield Monster("a chunk of 2^64", _head(secret, "transfer-encoding: chunked"), b"FFFFFFFFFFFFFFFFF\r\n{", closed)
    yield Monster("chunks that are none", _head(secret, "transfer-encoding: chunked"), b"zz\r\n{\r\n", closed)
    yield Monster("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300, b"", closed)
    yield Monster("HTTP/9.9", b"POST / HTTP/9.9\r\nhost: g\r\n\r\n", b"", closed)
    yield Monster("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", closed)
    yield Monster("a method of 10,000 letters", b"A" * 10_000 + b" / HTTP/1.1\r\n\r\n", b"", closed)
    yield Monster("a header folded over lines", _head(secret, "x-a: b\r\n c"), b"", closed)
    yield Monster("a NUL in a header", _head(secret, "x-a: b\x00c"), b"", closed)
    yield Monster(
        "a cap that is no number", _head(secret, "x-baton-max-tokens: " + "9" * 5_000, length=len(body)), body
    )
    yield Monster("a cap that is infinite", _head(secret, "x-baton-timeout-s: inf", length=len(body)), body)
    empty = b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"
    yield Monster("200,000 chunks of one byte", _head(secret, "transfer-encoding: chunked"), empty)
    endless = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    yield Monster("chunks without end", _head(secret, "transfer-encoding: chunked"), endless * 200, frozenset({413}))


def monsters(secret: str) -> list[Monster]:
    """All of them."""
    return [*json_monsters(secret), *field_monsters(secret), *wire_monsters(secret)]
