"""The program's own log, on standard error: no line of it holds a secret, tracebacks and crashes included."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from types import TracebackType

from gateway.core.log.redact import Redactor

FORM = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
QUIET = ("alembic", "httpx", "httpcore", "uvicorn")
log = logging.getLogger("gateway")


class Scrubbed(logging.Formatter):
    """Secrets go by their shape, and by value where they are known."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__(FORM)
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        """The whole text of the record, with its traceback."""
        return self.redactor.scrub_text(super().format(record))


def to_stderr(level: str) -> None:
    """Begin to log; an exception that nobody caught is logged too, before the process ends of it."""
    handler = logging.StreamHandler()
    handler.setFormatter(Scrubbed(Redactor()))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = _crashed


def know(secrets: Iterable[str]) -> None:
    """From now on these values too are taken out of every line."""
    values = list(secrets)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Scrubbed):
            handler.formatter.redactor.learn(values)


def _crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    log.critical("the process ends", exc_info=(kind, error, trace))
