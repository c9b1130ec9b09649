"""Settings of what lies outside: where parts of messages may be fetched from, and which web pages may call. Part of
`config`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, Field, field_validator

_HOST = re.compile(r"(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z][a-z0-9-]*[a-z0-9](:\d{1,5})?")
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|\*")


class Outside(BaseModel):
    """Outside: hosts that images, audio and files may be fetched from, and web pages that may call"""

    media_hosts: str = Field(
        "",
        description="hosts that `https:` parts of messages may be fetched from, comma between, a port other than 443 "
        "behind the host; empty: none, only `data:`",
    )
    media_bytes_max: Annotated[int, Field(ge=1024, le=2**30)] = Field(
        8 * 2**20, description="bytes of one image, audio or file, decoded"
    )
    media_timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(10.0, description="time to fetch one of them")
    media_fetches_max: Annotated[int, Field(ge=1, le=1000)] = Field(16, description="fetches of one request")
    cors_origins: str = Field(
        "",
        description="origins of web pages that may call the public API from a browser, comma between; `*`: any; "
        "empty: none",
    )

    @field_validator("media_hosts")
    @classmethod
    def _are_hosts(cls, text: str) -> str:
        for host in listed(text):
            if not _HOST.fullmatch(host):
                raise ValueError(f"`{host}` is not a host name such as images.example.com; addresses are not taken")
        return text

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        for origin in listed(text):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"`{origin}` is not an origin such as https://app.example.com (no path), or *")
        return text


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas, lower-case, without spaces around it."""
    return tuple(item.strip().lower() for item in text.split(",") if item.strip())
