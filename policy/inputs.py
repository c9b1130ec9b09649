"""What a spec names by URL, brought here: files, and the policy directory that training begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.adapters.host.urls import as_url, fetch, fetch_policy

FILES = ("data", "prices", "prompts_file", "pool_file", "export", "rows", "train")  # of a TrainSpec, and of a GateSpec
POLICIES = ("init",)


def local(values: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a spec with local paths in place of URLs, and the URL of each such path. A file that is in
    `directory` already is not fetched again. Raises NotFound, Unavailable, VersionRefused."""
    origins: dict[str, str] = {}
    for name in (*FILES, *POLICIES):
        url = as_url(values.get(name) or "")
        if url is not None:
            path = _place(url, directory, apart=name in FILES)
            bring(url, path)
            origins[str(path)] = url
    paths = {url: path for path, url in origins.items()}
    return {name: paths.get(as_url(value) or "", value) for name, value in values.items()}, origins


def bring(url: str, path: Path) -> None:
    """Fetch one of them, unless it is here. Errors as `local`."""
    if path.parent.name == POLICIES[0]:
        path.parent.mkdir(parents=True, exist_ok=True)
        fetch_policy(url, path)
    elif not path.is_file():
        fetch(url, path)


def _place(url: str, directory: Path, *, apart: bool) -> Path:
    """A file keeps its name, and so its ending, behind a digest of the URL. A policy keeps its name alone: an adapter's
    base must lie beside it under its own."""
    name = url.rstrip("/").rpartition("/")[2]
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    return directory / f"{digest}-{name}" if apart else directory / digest / POLICIES[0] / name
