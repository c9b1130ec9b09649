"""A `ports.MediaSource` over a dictionary. Passes the same contract suite as the one that fetches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from gateway.core.openai.parts import Media, MediaPart, as_media
from gateway.errors import BadRequest


class FakeMedia:
    """`pages`: URL → (content type, bytes); `fetched` holds every URL asked for."""

    def __init__(
        self, pages: Mapping[str, tuple[str, bytes]] | None = None, *, bytes_max: int = 8 << 20, fetches_max: int = 16
    ) -> None:
        self._pages = dict(pages or {})
        self._hosts = {urlsplit(url).netloc for url in self._pages}
        self._bytes_max = bytes_max
        self._fetches_max = fetches_max
        self.fetched: list[str] = []

    def check(self, parts: Sequence[MediaPart]) -> None:
        if len(parts) > self._fetches_max:
            raise BadRequest("too many", param=parts[0].where, code="too_many_urls")
        for part in parts:
            if urlsplit(part.url).netloc not in self._hosts:
                raise BadRequest("BATON_MEDIA_HOSTS", param=part.where, code="media_host_not_allowed")

    async def fetch(self, part: MediaPart) -> Media:
        self.check([part])
        self.fetched.append(part.url)
        if part.url not in self._pages:
            code = "invalid_image_url" if part.kind == "image" else "invalid_media_url"
            raise BadRequest("it answered 404", param=part.where, code=code)
        media_type, data = self._pages[part.url]
        if len(data) > self._bytes_max:
            raise BadRequest("too large", param=part.where, code="media_too_large")
        return as_media(part.kind, media_type, data, part.where)
