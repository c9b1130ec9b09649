"""The spec of a job from arguments: those of `baton train submit`, and those of a schedule."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gateway.core.policies.jobs import SET_BY_THE_JOB, JobSpec, check_train
from gateway.errors import ConfigError
from policy.gate import scene as gate
from policy.jobs.pipeline import gate_spec
from policy.spec import checked, plain
from policy.train.run import command as train
from policy.train.spec import TrainSpec

SET_BESIDE = (
    "out",
    "work",
    "resume",
    "progress_file",
)  # places, which are no part of a spec


class Words(argparse.ArgumentParser):
    """A parser that does not end the program."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)


def job_spec(arguments: Sequence[str], gate_arguments: str = "", *, auto: bool = False) -> JobSpec:
    """The spec of a job from the arguments of the trainer and, as one text, those of the gate. Raises ConfigError and
    BadRequest naming the argument that a job cannot have."""
    train_spec = _train_spec(arguments)
    try:
        words = shlex.split(gate_arguments)
    except ValueError as error:
        raise ConfigError(f"--gate: {error}; write its arguments as on a command line") from None
    try:
        spec = JobSpec(train_spec, _gate_spec(words), auto)
        scene = checked(gate.GateScene, {"out": Path("gate.json"), **gate_spec(spec, None)})
        scene.evaluation(gate.BASELINES)  # raises where the parts do not fit together
    except ConfigError as error:
        raise ConfigError(f"--gate: {error.message}") from None
    return spec


def _train_spec(arguments: Sequence[str]) -> dict[str, Any]:
    parser = Words(add_help=False, allow_abbrev=False)
    train.add(parser)
    options = parser.parse_args(arguments)
    for name in (*SET_BESIDE, *SET_BY_THE_JOB):
        if getattr(options, name):
            raise ConfigError(f"a job sets --{name.replace('_', '-')} itself; leave it out")
    if options.spec is not None:
        values = train.spec_of(options).model_dump(exclude_unset=True)
    else:
        values = train.given_of(options)
    spec = plain(TrainSpec, values)
    check_train(spec)
    return spec


def _gate_spec(words: Sequence[str]) -> dict[str, Any]:
    parser = Words(add_help=False, allow_abbrev=False)
    gate.add_spec(parser)
    return plain(gate.GateSpec, gate.given_of(parser.parse_args(words)))
