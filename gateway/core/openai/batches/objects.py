"""Files, batches and their lines, as OpenAI's API shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")  # `…_at`
INPUT, OUTPUT = "batch", "batch_output"  # purposes


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file of one key: an upload, or the output of a batch. `expires_s`: when it is deleted; None: never."""

    id: str
    key_id: str
    name: str
    purpose: str
    size_bytes: int
    created_s: int
    expires_s: int | None = None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's object `file`."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a client asks of a batch. `options`: headers of Baton's that hold for each line. `budget_nano`: what all
    lines together may cost, in nano-dollars. `output_keep_s`: how long its output is kept; None: the setting."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str]
    options: Mapping[str, str]
    budget_nano: int
    output_keep_s: int | None = None

    @property
    def window_s(self) -> int:
        """The time within which the batch ends."""
        return int(self.completion_window.removesuffix("h")) * 3600


class LineTokens(NamedTuple):
    """Input and output tokens, and what of them came from a cache or was hidden thinking."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


NO_TOKENS = LineTokens()


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch and its state. `times`: seconds since the epoch, by the name of the state that began then. `counts`:
    total, completed and failed lines. `tokens`: of its replies."""

    id: str
    key_id: str
    order: BatchOrder
    status: Status
    created_s: int
    expires_s: int
    times: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[Mapping[str, Any], ...] = ()
    counts: tuple[int, int, int] = (0, 0, 0)
    tokens: LineTokens = NO_TOKENS
    output_file_id: str | None = None
    error_file_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        """OpenAI's object `batch`."""
        order, (total, completed, failed) = self.order, self.counts
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": order.endpoint,
            "input_file_id": order.input_file_id,
            "completion_window": order.completion_window,
            "status": self.status,
            "errors": {"object": "list", "data": [dict(error) for error in self.errors]} if self.errors else None,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{name}_at": self.times.get(name) for name in TIMES},
            "request_counts": {"total": total, "completed": completed, "failed": failed},
            "metadata": dict(order.metadata) or None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        prompt, completion, cached, reasoning = self.tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + completion,
        }


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that a runner has claimed. `request`: the line of the file. `attempts`: how often it was sent before."""

    batch_id: str
    n: int
    custom_id: str
    request: bytes
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line of the output (or, with `failed`, of the error file), and the tokens of its reply."""

    text: bytes
    failed: bool
    tokens: LineTokens = NO_TOKENS
