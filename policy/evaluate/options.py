"""The options of an evaluation, checked as far as they can be without reading a file."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from gateway.core.loop.prompt import QUALITY_MAX, Profile
from gateway.errors import ConfigError
from policy.engines.choice import EngineChoice, add_engine
from policy.environments.arena import Staff
from policy.environments.executor import ROUNDS
from policy.statistics.tuning import NEIGHBOURS

STAFF: tuple[Staff, ...] = ("standard", "held_out", "untold", "fresh")
TRAIN_QUESTIONS_MAX = 2_000
ARENA_QUESTIONS = 300
QUESTIONS_MAX = 200_000
PLANNER_CALLS_MAX = 256
PLANNER_TIMEOUT_S_MAX = 3600.0
SECRET_REF = re.compile(r"(env:[A-Z_][A-Z0-9_]*|file:.+)$")


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What is compared, on which questions. Costs are dollars per 1,000 questions."""

    out: Path
    policies: tuple[str, ...]
    env: Literal["replay", "arena", "logged"] = "replay"  # logged: the gate's alone, which brings its own stage
    data: Path | None = None
    prices: Path | None = None
    workers: tuple[str, ...] = ()  # empty: all that the file has
    staff: Staff = "standard"
    split: Literal["all", "validation", "train"] | None = None
    train: Path | None = None
    n: int | None = None
    train_n: int = TRAIN_QUESTIONS_MAX
    seed: int = 0
    usd_weights: tuple[float, ...] = (0.0,)
    qualities: tuple[int, ...] = ()  # empty: each directory's own
    curves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weak: str | None = None
    strong: str | None = None
    cost_range: tuple[float, float] = (0.05, 10.0)
    rounds: int = ROUNDS
    neighbours: int = NEIGHBOURS
    true_experience: bool = False
    threads: int = 2
    engine: str = ""  # of policy directories; empty: what can serve each
    engine_key: str | None = None  # a reference
    planner_key: str | None = None  # a reference, env:NAME or file:PATH
    planner_price: str | None = None  # INPUT,OUTPUT; None: free
    planner_calls: int = 8
    planner_timeout_s: float = 60.0
    planner_prompt: Profile = "guided"
    pool_file: Path | None = None

    @property
    def engine_choice(self) -> EngineChoice:
        """Which engine plans with the weights of policy directories. Raises ConfigError."""
        return EngineChoice(self.engine, self.threads, self.engine_key)

    def __post_init__(self) -> None:
        """Raises ConfigError with the fix."""
        _check(self)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `policy evaluate`."""
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the report; a .md and two .svg go beside it")
    parser.add_argument(
        "--policy",
        dest="policies",
        action="append",
        default=[],
        metavar="NAME",
        help="may be repeated: a policy directory, conductor@shipped, http(s)://HOST:PORT/v1#MODEL (a prompted "
        "planner, or a conductor on any OpenAI-compatible server), worker:NAME (a model of --pool-file plans), "
        "fixed:WORKER, fixed:*, random, random-plan, "
        "cheapest, rule, baton/vote, baton/cascade, oracle; in the arena label and oracle-plan too; and, tuned on "
        "training questions: table, vote, cascade, moa, fallback, knn, knn-words, ranks, each also as NAME:TRAINFILE. "
        "Every fixed worker and the oracle are always in the report",
    )
    parser.add_argument("--env", choices=("replay", "arena"), default="replay", help="default replay")
    _add_questions(parser.add_argument_group("questions"))
    _add_judgement(parser.add_argument_group("policies and figures"))
    _add_planners(parser.add_argument_group("planners behind a URL"))


def _add_questions(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", type=Path, metavar="FILE", help="replay: recorded answers, .jsonl or .jsonl.gz")
    group.add_argument("--prices", type=Path, metavar="FILE", help="replay: JSON, model → dollars per million tokens")
    group.add_argument("--workers", default="", metavar="A,B,…", help="replay: only these models (default all)")
    group.add_argument(
        "--staff",
        choices=STAFF,
        default=STAFF[0],
        help="arena: which workers; untold: without their skills; fresh: others for each question",
    )
    group.add_argument(
        "--split",
        choices=("all", "validation", "train"),
        help="which questions are evaluated (default all where --train is another file, else validation)",
    )
    group.add_argument(
        "--train",
        type=Path,
        metavar="FILE",
        help="what tables, cascades, votes and experience are learnt from (default: the file that a table:FILE names, "
        "else the train split of --data); questions that are evaluated are left out of it",
    )
    group.add_argument("--n", type=int, metavar="N", help=f"number of questions (default all; arena {ARENA_QUESTIONS})")
    group.add_argument(
        "--train-n", type=int, default=TRAIN_QUESTIONS_MAX, metavar="N", help="the most questions to learn from"
    )
    group.add_argument("--seed", type=int, default=0, help="which questions, and in which order workers are shown")


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--usd-weight",
        dest="usd_weights",
        type=float,
        action="append",
        default=[],
        metavar="W",
        help="tuned policies maximise accuracy − W · dollars a question; several give each a curve (default 0)",
    )
    group.add_argument(
        "--quality",
        dest="qualities",
        type=int,
        action="append",
        default=[],
        metavar="Q",
        help=f"place of the dial, 0 to {QUALITY_MAX}, for policy directories that read one; several give each a curve "
        "(default the manifest's)",
    )
    group.add_argument(
        "--curve", dest="curves", action="append", default=[], metavar="NAME=A,B,…", help="policies that are one dial"
    )
    group.add_argument("--weak", metavar="WORKER", help="for APGR and CPT (default the cheapest as measured)")
    group.add_argument("--strong", metavar="WORKER", help="the same (default the dearest as measured)")
    group.add_argument("--cost-range", default="0.05,10", metavar="LO,HI", help="of AIQ, $ per 1,000; default 0.05,10")
    group.add_argument("--rounds", type=int, default=ROUNDS, metavar="R", help=f"plans a question; default {ROUNDS}")
    group.add_argument(
        "--experience",
        dest="neighbours",
        type=int,
        default=NEIGHBOURS,
        metavar="K",
        help=f"training questions behind what is shown of each worker; default {NEIGHBOURS}, 0 shows nothing",
    )
    group.add_argument(
        "--true-experience",
        action="store_true",
        help="arena: show each worker's true success on such questions",
    )
    group.add_argument("--threads", type=int, default=2, metavar="N", help="plans a conductor decodes at once")
    add_engine(group)


def _add_planners(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--planner-key", metavar="REF", help="API key of a planner given by URL: env:NAME or file:PATH, never the key"
    )
    group.add_argument(
        "--planner-price",
        metavar="INPUT,OUTPUT",
        help="dollars per million tokens of a planner given by URL, or of a worker without a price (default 0,0)",
    )
    group.add_argument("--planner-calls", type=int, default=8, metavar="N", help="plans asked at once; default 8")
    group.add_argument(
        "--planner-timeout",
        dest="planner_timeout_s",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for one plan; default 60. A server that stays silent ends the evaluation",
    )
    group.add_argument(
        "--planner-prompt",
        choices=("guided", "full"),
        default="guided",
        help="prompt of a planner without a manifest; default guided, as in serving",
    )
    group.add_argument("--pool-file", type=Path, metavar="FILE", help="pool file that has the worker of worker:NAME")


def read(options: argparse.Namespace) -> EvaluationOptions:
    """Return the arguments as one value. Raises ConfigError with the fix."""
    if options.out is None:
        raise ConfigError("no --out FILE.json: where should the report go?")
    values = vars(options) | {
        "policies": tuple(options.policies),
        "workers": _names("--workers", options.workers),
        "usd_weights": tuple(options.usd_weights) or (0.0,),
        "qualities": tuple(options.qualities),
        "curves": _curves(options.curves),
        "cost_range": _range(options.cost_range),
    }
    return EvaluationOptions(**{one.name: values[one.name] for one in fields(EvaluationOptions)})


def _check(options: EvaluationOptions) -> None:
    if not options.policies:
        raise ConfigError("no policy to evaluate: give one or more --policy (`--help` lists them)")
    counts = {"n": options.n, "train-n": options.train_n, "rounds": options.rounds, "threads": options.threads}
    for name, least, value in (
        *((name, 1, value) for name, value in counts.items()),
        ("experience", 0, options.neighbours),
    ):
        if value is not None and not least <= value <= QUESTIONS_MAX:
            raise ConfigError(f"--{name} {value}: must be between {least} and {QUESTIONS_MAX}")
    _check_keys(options)
    _check_planners(options)
    _check_curves(options)
    recorded = [f"--{name}" for name in ("data", "prices", "workers", "train") if getattr(options, name)]
    if options.env == "arena" and recorded:
        raise ConfigError(f"{recorded[0]} is for --env replay: the arena makes its own questions and workers")
    if options.env == "replay" and options.true_experience:
        raise ConfigError("--true-experience is for --env arena: the true success of recorded workers is not known")
    if options.staff not in STAFF:
        raise ConfigError(f"--staff {options.staff}: there are {', '.join(STAFF)}")
    if options.env == "arena" and options.split == "all":
        raise ConfigError("--split all: the arena never runs out of questions; give validation or train")


def _check_keys(options: EvaluationOptions) -> None:
    for name, ref in (("--planner-key", options.planner_key), ("--engine-key", options.engine_key)):
        if ref is not None and not SECRET_REF.match(ref):  # the key is not repeated
            raise ConfigError(f"{name}: give a reference, env:NAME or file:PATH, never the key itself")
    options.engine_choice  # noqa: B018 raises


def _check_planners(options: EvaluationOptions) -> None:
    if not 1 <= options.planner_calls <= PLANNER_CALLS_MAX:
        raise ConfigError(f"--planner-calls {options.planner_calls}: must be between 1 and {PLANNER_CALLS_MAX}")
    if not 0 < options.planner_timeout_s <= PLANNER_TIMEOUT_S_MAX:
        raise ConfigError(
            f"--planner-timeout {options.planner_timeout_s:g}: must be above 0 and at most {PLANNER_TIMEOUT_S_MAX:g} s"
        )


def _check_curves(options: EvaluationOptions) -> None:
    for weight in options.usd_weights:
        if not 0 <= weight < math.inf:
            raise ConfigError(f"--usd-weight {weight:g}: must be 0 or more, in accuracy per dollar")
    if len(set(options.usd_weights)) < len(options.usd_weights):
        raise ConfigError("--usd-weight: the same weight is given twice")
    for quality in options.qualities:
        if not 0 <= quality <= QUALITY_MAX:
            raise ConfigError(f"--quality {quality}: the dial goes from 0 to {QUALITY_MAX}")
    if len(set(options.qualities)) < len(options.qualities):
        raise ConfigError("--quality: the same place is given twice")


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise ConfigError(f"{option} names nothing; give names between commas")
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise ConfigError(f"{option}: `{twice[0]}` is named twice")
    return names


def _curves(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    curves: dict[str, tuple[str, ...]] = {}
    for each in texts:
        name, equals, members = each.partition("=")
        if not (name and equals) or name in curves:
            raise ConfigError(f"--curve {each}: write NAME=POLICY,POLICY,… and each NAME once")
        curves[name] = _names(f"--curve {name}", members)
    return curves


def _range(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--cost-range {text}: write two numbers, LO,HI, in dollars per 1,000 questions") from None
    if not 0 <= low < high < math.inf:
        raise ConfigError(f"--cost-range {text}: needs 0 ≤ LO < HI")
    return low, high
