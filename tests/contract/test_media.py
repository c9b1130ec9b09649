"""The media port: the same suite on the fake and on the one that fetches, from a real server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.adapters.upstream.media import WebMedia
from gateway.core.openai.parts import Media, MediaPart
from gateway.errors import BadRequest
from gateway.service.ports.request import MediaSource
from tests.fakes.media import FakeMedia

PNG = b"\x89PNG\r\n\x1a\n" + b"\x00" * 40
WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "
PDF = b"%PDF-1.7 and so on"
Page = tuple[str, bytes]
PAGES: Mapping[str, Page] = {
    "/a.png": ("image/png", PNG),
    "/typed.png": ("image/png; charset=binary", PNG),
    "/a.wav": ("audio/x-wav", WAV),
    "/a.pdf": ("application/pdf", PDF),
    "/a.txt": ("text/plain; charset=utf-8", b"hello"),
    "/a.svg": ("image/svg+xml", b"<svg/>"),
    "/lies.png": ("image/png", b"<html>"),
    "/untyped": ("", PNG),
    "/large.png": ("image/png", PNG + b"\x00" * 4096),
}


class Files:
    """An HTTP server of fixed pages, one request a connection; `requests` holds the head of each."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self.pages = dict(pages)
        self.raw: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.connections = 0
        self.port = 0
        self.hang = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            path = head.split(" ")[1]
            if path == "/hangs":
                await self.hang.wait()
            writer.write(self.raw.get(path) or self._page(path))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _page(self, path: str) -> bytes:
        if path not in self.pages:
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        kind, data = self.pages[path]
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        return head.encode() + data


@asynccontextmanager
async def files(pages: Mapping[str, Page] = PAGES) -> AsyncIterator[Files]:
    served = Files(pages)
    server = await asyncio.start_server(served.answer, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        served.hang.set()
        server.close()


class Names:
    """A name server: answers one after the other, the last for ever; counts the questions."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers[min(len(self.asked), len(self._answers)) - 1]


def web(served: Files, names: Names | None = None, **options: object) -> WebMedia:
    """The real one, let through to loopback: its server has no certificate and no public address."""
    given: dict[str, object] = {"admits": lambda address: address == "127.0.0.1", "scheme": "http", **options}
    return WebMedia([f"files.example:{served.port}"], resolve=names or Names(["127.0.0.1"]), **given)  # type: ignore[arg-type]


Make = Callable[[str], MediaPart]


@pytest.fixture(params=["fake", "web"])
async def source(request: pytest.FixtureRequest) -> AsyncIterator[tuple[MediaSource, str]]:
    """(the port, the start of its URLs)"""
    if request.param == "fake":
        base = "https://files.example"
        pages = {base + path: page for path, page in PAGES.items()}
        yield FakeMedia(pages, bytes_max=2048, fetches_max=4), base
        return
    async with files() as served:
        yield web(served, bytes_max=2048, fetches_max=4), f"http://files.example:{served.port}"


def part(url: str, kind: str = "image", format: str | None = None) -> MediaPart:
    return MediaPart("messages[0].content[0].image_url.url", kind, url, format)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "kind", "found"),
    [
        ("/a.png", "image", Media("image/png", PNG)),
        ("/typed.png", "image", Media("image/png", PNG)),
        ("/a.wav", "audio", Media("audio/wav", WAV)),
        ("/a.pdf", "file", Media("application/pdf", PDF)),
        ("/a.txt", "file", Media("text/plain", b"hello")),
    ],
)
async def test_bytes_come_with_their_type(source: tuple[MediaSource, str], path: str, kind: str, found: Media) -> None:
    port, base = source
    port.check([part(base + path, kind)])
    assert await port.fetch(part(base + path, kind)) == found


@pytest.mark.parametrize(
    ("path", "kind", "code"),
    [
        ("/none.png", "image", "invalid_image_url"),
        ("/none.pdf", "file", "invalid_media_url"),
        ("/a.svg", "image", "media_type"),
        ("/a.pdf", "image", "media_type"),
        ("/lies.png", "image", "media_type"),
        ("/untyped", "image", "media_type"),
        ("/large.png", "image", "media_too_large"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused_by_name(
    source: tuple[MediaSource, str], path: str, kind: str, code: str
) -> None:
    port, base = source
    with pytest.raises(BadRequest) as refused:
        await port.fetch(part(base + path, kind))
    assert (refused.value.code, refused.value.param) == (code, "messages[0].content[0].image_url.url")


async def test_other_hosts_are_refused_before_anything_else(source: tuple[MediaSource, str]) -> None:
    port, base = source
    other = part(base.replace("files.example", "other.example") + "/a.png")
    with pytest.raises(BadRequest, match="BATON_MEDIA_HOSTS") as refused:
        port.check([part(base + "/a.png"), other])
    assert refused.value.code == "media_host_not_allowed"
    with pytest.raises(BadRequest):
        await port.fetch(other)


async def test_a_request_may_fetch_so_many_and_no_more(source: tuple[MediaSource, str]) -> None:
    port, base = source
    port.check([part(base + "/a.png")] * 4)
    with pytest.raises(BadRequest) as refused:
        port.check([part(base + "/a.png")] * 5)
    assert refused.value.code == "too_many_urls"
