"""The name of an engine, as `--engine` gives it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from gateway.errors import ConfigError

EMBEDDED, TORCH = "embedded", "torch"
ENGINE_HELP = (
    "what plans and scores with the weights: embedded, torch (any model that transformers loads; a GPU where there is "
    "one), or http(s)://HOST/v1, a vLLM that serves them or their base (default: embedded, else torch)"
)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`name`: embedded, torch or http(s)://HOST/v1; empty: what can serve the directory. `threads`: of the embedded
    runtime. `key`: of a server, as a reference, env:NAME or file:PATH. Raises ConfigError."""

    name: str = ""
    threads: int = 2
    key: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ("", EMBEDDED, TORCH) and not self.remote:
            raise ConfigError(f"--engine {self.name}: give embedded, torch or http(s)://HOST:PORT/v1")

    @property
    def remote(self) -> bool:
        """Whether it is a server."""
        return self.name.startswith(("http://", "https://"))


def add_engine(group: argparse._ArgumentGroup) -> None:
    """The arguments `--engine` and `--engine-key`."""
    group.add_argument("--engine", default="", metavar="NAME", help=ENGINE_HELP)
    group.add_argument("--engine-key", metavar="REF", help="API key of that server: env:NAME or file:PATH")
