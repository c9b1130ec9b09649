"""Which requests are refused before anything parses them: those whose bytes can be read in one way only."""

from __future__ import annotations

import pytest

from gateway.api.edge.refusals import is_usual

HEAD_BYTES_MAX = 4096
PATH = "/v1/chat/completions"


def request(*fields: str, line: str = f"POST {PATH} HTTP/1.1", body: bytes = b"{}", length: int | None = None) -> bytes:
    own = f"Content-Length: {len(body) if length is None else length}"
    return "\r\n".join([line, "host: x", *fields, own, "", ""]).encode() + body


@pytest.mark.parametrize(
    "data",
    [
        request(),
        request("connection: keep-alive", "authorization: Bearer bt_data_x"),
        request(line="POST /v1/responses HTTP/1.1"),
        request(body=b""),
        f"POST {PATH} HTTP/1.1\r\ncontent-length:2\r\nhost: x\r\n\r\n[]".encode(),
    ],
)
def test_a_plain_request_is_usual(data: bytes) -> None:
    assert is_usual(data, HEAD_BYTES_MAX)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST ",
        request()[:-1],  # its body is on its way
        request()[:40],
        request() + request(),  # another one behind it
        request() + b"\r\n",
        request(line=f"GET {PATH} HTTP/1.1"),
        request(line=f"POST {PATH} HTTP/1.0"),
        request(line=f"POST {PATH}?x=1 HTTP/1.1"),
        request(line="POST /v1/messages HTTP/1.1"),
        request(line="POST /v1/outcomes HTTP/1.1"),
        request("transfer-encoding: chunked"),
        request("x: y\ntransfer-encoding: chunked"),
        request("connection: close"),
        request("expect: 100-continue"),
        request("upgrade: websocket"),
        request("content-length: 2"),
        request("content-length : 2"),
        request(length=-2),
        f"POST {PATH} HTTP/1.1\r\ncontent-length: +2\r\n\r\n[]".encode(),
        f"POST {PATH} HTTP/1.1\r\ncontent-length: 2, 2\r\n\r\n[]".encode(),
        f"POST {PATH} HTTP/1.1\r\ncontent-length:\r\n 2\r\n\r\n[]".encode(),
        f"POST {PATH} HTTP/1.1\r\nx: y\ncontent-length: 2\r\n\r\n[]".encode(),
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode(),
        request(f"x: {'y' * HEAD_BYTES_MAX}"),
    ],
)
def test_what_could_be_read_in_another_way_is_left_to_the_parser(data: bytes) -> None:
    assert not is_usual(data, HEAD_BYTES_MAX)
