"""Jobs of the learning loop: what one is, its states, and what may be asked for. Pure.

queued → running → done | refused (by the gate) | failed | cancelled. A failed or cancelled job may be resumed: it is
queued again and goes on from its checkpoint. Of one policy, one job is queued or running at a time.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from gateway.core.money.amounts import usd_to_nano
from gateway.core.policies.versions import PLAIN_NAME
from gateway.errors import BadRequest

JobState = Literal["queued", "running", "done", "refused", "failed", "cancelled"]
Stage = Literal["select", "train", "gate", "publish", "shadow"]
ACTIVE: tuple[JobState, ...] = ("queued", "running")
RESUMABLE: tuple[JobState, ...] = ("failed", "cancelled")
NO_ARGUMENTS = "jobs store specs and no longer arguments; submit it again, which makes a spec of them"
TRAFFIC = ("logged", "live")  # of `train.env`: judged on the user's own requests
SET_BY_THE_JOB = ("database", "export")  # of `train`


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to do, as stored: `train` and `gate` are the specs of `policy.train.spec.TrainSpec` and
    `policy.gate.scene.GateSpec` as JSON, without values that were not given; `auto`: a version that passes the gate
    becomes a canary of 1 %."""

    train: Mapping[str, Any]
    gate: Mapping[str, Any] = field(default_factory=dict)
    auto: bool = False

    def as_json(self) -> dict[str, Any]:
        """As stored."""
        return {"train": dict(self.train), "gate": dict(self.gate), "auto": self.auto}


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
        body: dict[str, Any] = {"id": self.id, "object": "baton.job"}
        for name in self.__slots__[1:]:
            value = getattr(self, name)
            body[name] = value.isoformat() if isinstance(value, datetime) else value
        return body


def read_policy(value: object) -> str:
    """The name of a policy. Raises BadRequest."""
    if not isinstance(value, str) or PLAIN_NAME.fullmatch(value) is None:
        raise BadRequest("policy: give a name of a-z, 0-9, _ . - that starts with a letter", param="policy")
    return value


def check_train(train: object) -> None:
    """Raises BadRequest for a training spec that is not an object, or that a job cannot carry out."""
    if not isinstance(train, Mapping):
        raise BadRequest('train: give an object such as {"env": "logged"}', param="train")
    for name in SET_BY_THE_JOB:
        if train.get(name):
            raise BadRequest(f"train.{name}: a job sets it itself; leave it out", param=f"train.{name}")
    if train.get("env") == "live" and not train.get("usd_max"):
        raise BadRequest("train.usd_max: real workers cost real money; give a limit in dollars", param="train.usd_max")


def with_gate_cap(spec: Mapping[str, Any], usd_max: str) -> dict[str, Any]:
    """The stored spec with another cap of its gate, in dollars. Raises BadRequest for no number above 0, and for a job
    whose gate asks no real workers."""
    gate, train = spec.get("gate") or {}, spec.get("train") or {}
    if not gate.get("usd_max") and train.get("env") not in TRAFFIC:
        raise BadRequest("gate_usd_max: the gate of this job has no cap to raise", param="gate_usd_max")
    try:
        allows = usd_to_nano(usd_max) > 0
    except ValueError:
        allows = False
    if not allows:
        raise BadRequest("gate_usd_max: give dollars above 0, such as 5.00", param="gate_usd_max")
    return {**spec, "gate": {**gate, "usd_max": usd_max}}


def stored_spec(spec: Mapping[str, Any]) -> JobSpec:
    """The spec in a job's row. Raises BadRequest for one of an older release, which stored arguments."""
    if "arguments" in spec:
        words = shlex.join(map(str, spec["arguments"]))
        gate = f"--gate {shlex.quote(shlex.join(map(str, spec['gate'])))} " if spec.get("gate") else ""
        auto = "--auto " if spec.get("auto") else ""
        raise BadRequest(f"{NO_ARGUMENTS}: `baton train submit {auto}{gate}{words}`")
    return JobSpec(spec["train"], spec["gate"], spec["auto"])
