"""The gate's spec as a job stores it, the scene in which a candidate is judged, and the evaluation of that scene."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gateway.core.money.amounts import usd_to_nano
from gateway.core.policies.holdout import HELD_OUT_SHARE, Bound
from gateway.errors import ConfigError
from policy.engines.choice import ENGINE_HELP, EngineChoice, add_engine
from policy.environments.arena import Staff
from policy.environments.cached import CALLS_MAX
from policy.environments.executor import ROUNDS
from policy.evaluate.contest import PartialResults
from policy.evaluate.options import TRAIN_QUESTIONS_MAX, EvaluationOptions
from policy.evaluate.stages import digest_of
from policy.gate.checks import Thresholds, thresholds_of
from policy.gate.injection import DRAWS
from policy.gate.logged import RolloutSource
from policy.gate.traffic import requests as heldout
from policy.gate.traffic.stage import RUBRIC, TrafficOptions
from policy.spec import given
from policy.statistics.tuning import NEIGHBOURS

QUESTIONS_ARENA = 600
# a pool of its own for every question leaves no fixed worker to compare with
STANDS_FOR: Mapping[Staff, Staff] = {"fresh": "standard"}
BASELINES = ("random", "cheapest", "rule", "table", "cascade", "vote")
LOGGED_BASELINES = ("rule", "price-cascade")  # of real workers; nothing is bought to tune on
HOME_OF: Mapping[str, str] = {"logged": "logged", "live": "logged"}
_KINDS: dict[str, Any] = {one.name: type(one.default) for one in fields(Thresholds)}  # int or float


class GateSpec(BaseModel):
    """The arguments of `python -m policy gate`, less the candidate and where the report goes, as a job stores them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: Literal["replay", "arena", "logged"] | None = Field(
        None,
        description="Where the held-out questions come from; none: `logged` for what traffic trained, else arena",
    )
    data: Path | None = Field(None, description="replay: recorded answers")
    prices: Path | None = Field(None, description="replay: model → dollars per million tokens")
    workers: tuple[str, ...] = Field((), description="replay: only these models")
    staff: Staff = Field("standard", description="arena: which workers")
    split: Literal["all", "validation", "train"] | None = Field(None, description="Which questions; none: validation")
    train: Path | None = Field(None, description="replay: what tables, cascades and experience are learnt from")
    n: int | None = Field(None, ge=1, description=f"So many questions; none: all, in the arena {QUESTIONS_ARENA}")
    train_n: int = Field(TRAIN_QUESTIONS_MAX, ge=1, description="At most so many questions to learn from")
    neighbours: int = Field(NEIGHBOURS, ge=0, description="Training questions behind the experience that is shown")
    seed: int = Field(0, description="Of questions, orders and resamples")
    draws: int = Field(DRAWS, ge=1, description="Orders of the pool for each attack of the injection set")
    rounds: int | None = Field(None, ge=1, description="Plans a question; none: as the candidate is served")
    threads: int = Field(2, ge=1, description="Plans decoded at once")
    engine: str = Field("", description=f"Policy directories on: {ENGINE_HELP}")
    engine_key: str | None = Field(None, description="API key of that server, `env:NAME` or `file:PATH`")
    requests: Path | None = Field(None, description="logged: held-out requests, as a job's selection writes them")
    url: str = Field("", description="logged: the gateway that reaches the workers, …/v1")
    key_file: Path | None = Field(None, description="logged: a file that holds an API key of it")
    pool_file: Path | None = Field(None, description="logged: the gateway's pool file")
    pool: str = Field("", description="logged: which pool of it; requests of others are left out")
    usd_max: str = Field("", description="logged: what the gate may spend in all, in dollars")
    episode_usd_max: str = Field("0.5", description="logged: what one request may cost")
    judge: str = Field("", description="logged: the worker that grades what names no grader")
    rubric: str = Field(RUBRIC, description="logged: what the judge asks of a good reply")
    replies: Path | None = Field(None, description="logged: stored replies, for other gates too; none: of this one")
    calls_max: int = Field(CALLS_MAX, ge=1, le=256, description="logged: worker calls in flight")
    held_out_share: float = Field(HELD_OUT_SHARE, gt=0, lt=1, description="logged: of the requests, the latest")
    held_out_from: datetime | None = Field(None, description="logged: instead of the share, from this time on")
    rows: Path | None = Field(None, description="An export of `traces export`, for triage; none: no triage")
    thresholds: dict[str, float] = Field(
        {}, description="Bounds of the checks by name", json_schema_extra={"propertyNames": {"enum": list(_KINDS)}}
    )
    everything: bool = Field(False, description="Go on where triage has refused already")

    @field_validator("usd_max", "episode_usd_max")
    @classmethod
    def _dollars(cls, value: str) -> str:
        try:
            if value and usd_to_nano(value) <= 0:
                raise ValueError
        except ValueError:
            raise ValueError(f"{value} dollars allow nothing: give a number above 0") from None
        return value

    @field_validator("held_out_from")
    @classmethod
    def _zoned(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @field_validator("thresholds")
    @classmethod
    def _known(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(set(value) - set(_KINDS)):
            raise ValueError(f"no threshold `{unknown[0]}`; there are {', '.join(sorted(_KINDS))}")
        try:
            _bounds(value)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return value

    @property
    def engine_choice(self) -> EngineChoice:
        """Which engine plans and scores with the weights of policy directories. Raises ConfigError."""
        return EngineChoice(self.engine, self.threads, self.engine_key)

    @property
    def bounds(self) -> Thresholds:
        """The default thresholds with those that are given."""
        return _bounds(self.thresholds)


def _bounds(changes: Mapping[str, float]) -> Thresholds:
    return Thresholds(**{name: _KINDS[name](value) for name, value in changes.items()})


class GateScene(GateSpec):
    """A spec with the place of the JSON report and, where there are any, logged rollouts. Finished work is kept beside
    the report in OUT.partial until it is written."""

    out: Path
    logged: RolloutSource | None = None

    def at_home(self, trained_on: object) -> GateScene:
        """The scene with an environment: what is learnt from traffic is judged on traffic. `trained_on`: the `env` of
        the candidate's training."""
        return self if self.env else self.model_copy(update={"env": HOME_OF.get(str(trained_on), "arena")})

    def evaluation(self, policies: tuple[str, ...]) -> EvaluationOptions:
        """The held-out run as an evaluation. Raises ConfigError."""
        return EvaluationOptions(
            out=self.out,
            policies=policies,
            env=self.env or "arena",
            data=self.data,
            prices=self.prices,
            workers=self.workers,
            staff=STANDS_FOR.get(self.staff, self.staff),
            split=self.split,
            train=self.train,
            n=QUESTIONS_ARENA if self.n is None and self.env in (None, "arena") else self.n,
            train_n=self.train_n,
            seed=self.seed,
            rounds=ROUNDS if self.rounds is None else self.rounds,
            neighbours=self.neighbours,
            threads=self.threads,
            engine=self.engine,
            engine_key=self.engine_key,
        )

    def traffic(self, partial: PartialResults) -> TrafficOptions:
        """What `--env logged` asks. The file of held-out requests is the one that is named, else one selected now, or
        by an earlier attempt with the same words. Raises ConfigError for what is missing, and as `held_out`."""
        source = self.logged if self.logged is not None and self.logged.database_url else None
        values = {"--database-url": self.requests or source, "--url": self.url, "--key-file": self.key_file}
        values |= {"--pool-file": self.pool_file, "--usd-max": self.usd_max}
        if missing := [flag for flag, value in values.items() if not value]:
            raise ConfigError(
                f"what was trained on traffic is judged on the user's own requests: give {', '.join(missing)}; or "
                "--env arena, where the traffic was the arena's"
            )
        path = self.requests
        if path is None and source is not None:
            name = digest_of([str(source.selection), self.held_out_share, str(self.held_out_from)])[:32]
            path = partial.folder / f"requests-{name}.json"
            if not path.exists():
                bound = Bound(self.held_out_from) if self.held_out_from else None
                requests = heldout.held_out(source.database_url, source.selection, bound, share=self.held_out_share)
                heldout.write(path, requests)
        return TrafficOptions(
            requests=path or Path(),
            url=self.url,
            key_file=self.key_file or Path(),
            pool_file=self.pool_file or Path(),
            usd_max=self.usd_max,
            pool=self.pool,
            episode_usd_max=self.episode_usd_max,
            judge=self.judge,
            rubric=self.rubric,
            replies=self.replies,
            calls_max=self.calls_max,
            n=self.n,
        )


_TRAFFIC = {
    "requests": ("FILE", "held-out requests of an earlier selection, instead of --database-url"),
    "url": ("URL", "the gateway that reaches the workers, …/v1"),
    "key_file": ("FILE", "holds an API key of it"),
    "pool_file": ("FILE", "the gateway's pool file"),
    "usd_max": ("USD", "what the gate may spend in all, earlier attempts included"),
    "episode_usd_max": ("USD", "what one request may cost (default 0.5)"),
    "judge": ("WORKER", "grades what names no grader"),
    "rubric": ("TEXT", "what the judge asks of a good reply"),
    "replies": ("FILE", "stored replies, for other gates too (default: beside the report, for this gate)"),
    "calls_max": ("N", f"worker calls in flight (default {CALLS_MAX})"),
    "held_out_share": ("X", f"the latest X of the requests (default {HELD_OUT_SHARE})"),
    "held_out_from": ("TIME", "or: what began from then on"),
}

# ---------------------------------------------------------------- from arguments


def add_spec(parser: argparse.ArgumentParser) -> None:
    """Arguments that become a GateSpec; those that are not given are left out of it."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a threshold; may be repeated")
    parser.add_argument("--everything", action="store_true", help="go on where triage has refused already")
    parser.add_argument("--logged", type=Path, metavar="FILE.parquet", help="an export of `baton traces export`")
    _add_scene(parser.add_argument_group("held-out questions"))
    _add_traffic(parser.add_argument_group("the user's own requests (--env logged)"))


def _add_scene(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--env", choices=("replay", "arena", "logged"), help="default: logged for what was trained on traffic"
    )
    group.add_argument("--data", type=Path, metavar="FILE", help="replay: recorded answers, .jsonl or .jsonl.gz")
    group.add_argument("--prices", type=Path, metavar="FILE", help="replay: JSON, model → dollars per million tokens")
    group.add_argument("--workers", default="", metavar="A,B,…", help="replay: only these models (default all)")
    group.add_argument("--staff", metavar="NAME", help="arena: which workers (default standard)")
    group.add_argument("--split", metavar="NAME", help="validation (default), or all with another --train")
    group.add_argument(
        "--train", type=Path, metavar="FILE", help="what tables, cascades and experience are learnt from"
    )
    group.add_argument("--n", type=int, metavar="N", help=f"so many questions (default all; arena {QUESTIONS_ARENA})")
    group.add_argument("--train-n", type=int, metavar="N", help="at most so many questions to learn from")
    group.add_argument("--experience", type=int, metavar="K", help="training questions behind what is shown of workers")
    group.add_argument("--seed", type=int, help="of questions, orders and resamples")
    group.add_argument("--draws", type=int, metavar="N", help=f"orders of the pool for each attack, default {DRAWS}")
    group.add_argument("--rounds", type=int, metavar="R", help="plans a question (default: as the candidate is served)")
    group.add_argument("--threads", type=int, metavar="N", help="plans decoded at once (default 2)")
    add_engine(group)


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ask-pool", metavar="NAME", help="which pool of the file; requests of others are left out")
    for name, (shown, text) in _TRAFFIC.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=shown, help=text)


def given_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `add_spec` as a GateSpec takes them; only those that were given."""
    changed = asdict(thresholds_of(options.set))
    return given(
        {
            "env": options.env,
            "data": options.data,
            "prices": options.prices,
            "workers": tuple(name.strip() for name in options.workers.split(",") if name.strip()),
            "staff": options.staff,
            "split": options.split,
            "train": options.train,
            "n": options.n,
            "train_n": options.train_n,
            "neighbours": options.experience,
            "seed": options.seed,
            "draws": options.draws,
            "rounds": options.rounds,
            "threads": options.threads,
            "engine": options.engine or None,
            "engine_key": options.engine_key,
            "rows": options.logged,
            "pool": options.ask_pool,
            **{name: getattr(options, name) for name in _TRAFFIC},
            "thresholds": {name: value for name, value in changed.items() if value != getattr(Thresholds(), name)},
            "everything": options.everything,
        }
    )
