"""A run on disk: weights, optimizer, step, curriculum, spend. Written aside and moved into place, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.errors import ConfigError, Unavailable
from gateway.files import replacing, write_atomic

CHECKPOINT = "checkpoint"
SPENT = "spent_nano"  # real money: on disk before and after each episode, whatever becomes of the step


@dataclass(slots=True)
class Progress:
    """How far a run is. All randomness is a hash of (seed, step, …), so there is no other state."""

    step: int = 0
    rollouts: int = 0  # learnt from
    spent_nano: int = 0
    curriculum: dict[str, Any] = field(default_factory=dict)


def save(work: Path, digest: str, progress: Progress, weights: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
    """Replace the checkpoint. Raises Unavailable on a full disk; the checkpoint before it stays."""
    state = {
        "digest": digest,
        "step": progress.step,
        "rollouts": progress.rollouts,
        "spent_nano": progress.spent_nano,
        "curriculum": progress.curriculum,
        "weights": weights,
        "optimizer": optimizer,
    }
    try:
        with replacing(work / CHECKPOINT) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError for a disk that is full
        raise Unavailable(
            f"{work / CHECKPOINT}: cannot be written ({_reason(error)}); free some space and run again with "
            "--resume: the checkpoint before it is complete"
        ) from None


def _reason(error: BaseException) -> str:
    """What the system said; torch's writer reports that it cannot end its file, on top of why."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return str(error).splitlines()[0] if found is None else found.strerror or str(found)


def load(work: Path, digest: str) -> tuple[Progress, dict[str, Tensor], dict[str, Any]] | None:
    """The run in `work`; None where there is none. Raises ConfigError for another run's, or a torn file."""
    path = work / CHECKPOINT
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        progress = Progress(state["step"], state["rollouts"], state["spent_nano"], state["curriculum"])
        found = progress, state["weights"], state["optimizer"]
    except Exception as error:  # boundary: unpickling raises anything for a torn file
        raise ConfigError(f"{path}: cannot be read ({str(error).splitlines()[0]}); remove it to start anew") from None
    if state["digest"] != digest:
        raise ConfigError(f"{path}: belongs to a run with other settings; give another --work, or the same settings")
    return found


def note_spent(work: Path, nano: int) -> None:
    """Store the nano-dollars spent and reserved. Raises Unavailable if it cannot: then nothing more may be spent."""
    try:
        write_atomic(work / SPENT, str(nano), durable=False)
    except OSError as error:
        raise Unavailable(f"{work / SPENT}: cannot be written ({error.strerror}); free some space") from None


def spent_nano(work: Path) -> int:
    """Nano-dollars that `note_spent` stored, 0 without a file. Raises ConfigError on a damaged file."""
    try:
        return int((work / SPENT).read_text())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):
        raise ConfigError(f"{work / SPENT}: cannot be read; write into it what was spent, in nano-dollars") from None
