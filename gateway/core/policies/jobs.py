"""Jobs of the learning loop: what one is, its states, and what may be asked for. Pure.

queued → running → done | refused (by the gate) | failed | cancelled. A failed or cancelled job may be resumed: it is
queued again and goes on from its checkpoint. Of one policy, one job is queued or running at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from gateway.core.policies.versions import PLAIN_NAME
from gateway.errors import BadRequest

JobState = Literal["queued", "running", "done", "refused", "failed", "cancelled"]
Stage = Literal["select", "train", "gate", "publish", "shadow"]
ACTIVE: tuple[JobState, ...] = ("queued", "running")
RESUMABLE: tuple[JobState, ...] = ("failed", "cancelled")
ENVIRONMENTS = ("arena", "replay", "logged", "live")
ARGUMENTS_MAX = 256
ARGUMENT_CHARS_MAX = 4_096
OURS = ("--out", "--work", "--resume", "--progress-file", "--spec", "--database-url", "--database", "--export")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to do: `arguments` of `baton train` (without where the result goes), those of `baton gate`, and whether a
    version that passes the gate becomes a canary of 1 % by itself."""

    arguments: tuple[str, ...]
    gate: tuple[str, ...] = ()
    auto: bool = False

    def as_json(self) -> dict[str, Any]:
        """As stored."""
        return {"arguments": list(self.arguments), "gate": list(self.gate), "auto": self.auto}


@dataclass(frozen=True, slots=True)
class Job:
    """One job as stored. `attempts`: how often a worker took it up; `progress`: what the trainer last said, with
    `eta_s`; `report`: where the gate's report lies on the worker's disk."""

    id: str
    policy: str
    spec: Mapping[str, Any]
    by: str
    state: JobState
    stage: Stage | None
    progress: Mapping[str, Any]
    version: str | None
    report: str | None
    error: str | None
    attempts: int
    cancel: bool
    created_at: datetime
    changed_at: datetime
    heartbeat_at: datetime | None
    ended_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """As the admin API shows it."""
        shown: dict[str, Any] = {"id": self.id, "object": "baton.job"}
        for name in self.__slots__[1:]:
            value = getattr(self, name)
            shown[name] = value.isoformat() if isinstance(value, datetime) else value
        return shown


def read_policy(value: object) -> str:
    """The name of a policy. Raises BadRequest."""
    if not isinstance(value, str) or PLAIN_NAME.fullmatch(value) is None:
        raise BadRequest("policy: give a name of a-z, 0-9, _ . - that starts with a letter", param="policy")
    return value


def read_spec(value: object) -> JobSpec:
    """A spec from JSON. Raises BadRequest for one that could not be carried out, naming the field and the fix."""
    if not isinstance(value, Mapping):
        raise BadRequest('spec: give an object such as {"arguments": ["--env", "logged"]}', param="spec")
    unknown = sorted(str(name) for name in value if name not in JobSpec.__slots__)
    if unknown:
        raise BadRequest(f"spec: unknown field `{unknown[0]}`; known are arguments, gate, auto", param="spec")
    auto = value.get("auto", False)
    if not isinstance(auto, bool):
        raise BadRequest("spec.auto: give true or false", param="spec")
    arguments = _texts(value.get("arguments", ()), "arguments")
    _check(arguments)
    return JobSpec(arguments, _texts(value.get("gate", ()), "gate"), auto)


def _texts(value: object, field: str) -> tuple[str, ...]:
    shaped = isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= ARGUMENTS_MAX
    if not shaped or not all(isinstance(text, str) and len(text) <= ARGUMENT_CHARS_MAX for text in value):  # type: ignore[attr-defined]
        raise BadRequest(f"spec.{field}: give a list of at most {ARGUMENTS_MAX} texts", param="spec")
    return tuple(value)  # type: ignore[arg-type]


def _check(arguments: Sequence[str]) -> None:
    """What is wrong whatever the trainer is; the rest is for the trainer to say."""
    for argument in arguments:
        if argument.partition("=")[0] in OURS:
            raise BadRequest(f"spec: a job sets {argument.partition('=')[0]} itself; leave it out", param="spec")
    environment = option(arguments, "--env")
    if environment not in ENVIRONMENTS:
        said = "is missing" if environment is None else f"is `{environment[:64]}`"
        raise BadRequest(f"spec: --env {said}; give one of {', '.join(ENVIRONMENTS)}", param="spec")
    dollars = option(arguments, "--usd-max")
    if environment == "live" and dollars is None:
        raise BadRequest("spec: real workers cost real money; give --usd-max", param="spec")
    if dollars is not None and not _positive(dollars):
        raise BadRequest(f"spec: --usd-max {dollars[:64]} buys nothing; give dollars above 0", param="spec")


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one as argparse has it."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found


def _positive(dollars: str) -> bool:
    whole, _, parts = dollars.partition(".")
    digits = whole + parts
    return digits.isascii() and digits.isdigit() and int(digits) > 0
