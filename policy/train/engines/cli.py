"""Train on an engine that runs on many devices: `engines trl`, under accelerate."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from gateway.adapters.engines.sealed import read_object
from gateway.core.loop.prompt import DIAL
from gateway.core.policies.manifest import CONFIG_FILE, MANIFEST_FILE, check_prompt
from gateway.errors import BadRequest
from policy.dataset.refusals import listed
from policy.reward import taught_dial
from policy.serve.shape import tokens_shape
from policy.serve.tokens import Tokens
from policy.train.engines.memory import GIB, check, memory
from policy.train.engines.rows import PROFILES, EngineRow, EngineSettings, of_training, read_rows
from policy.train.sources.logged import exported, of_dataset
from policy.train.step.rows import MissingLogprobs
from policy.train.weights.start import StartDirectory, open_start

STOPPED = 143
EXAMPLES: Mapping[str, str] = {"loss": "clip_high=0.3", "reward": "missed_penalty=0.02"}  # settings that are mappings


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="engine", metavar="ENGINE", required=True)
    trl = actions.add_parser("trl", help="train now, in this process or in each one that accelerate launches")
    trl.add_argument("--data", type=Path, required=True, metavar="FILE", help="of `traces export`")
    trl.add_argument("--out", type=Path, required=True, metavar="DIR", help="written whole, or not at all")
    _add_settings(trl)
    trl.add_argument("--init", type=Path, required=True, metavar="DIR", help="the policy directory to start from")
    trl.add_argument("--version", required=True, metavar="NAME@N", help="what the result is called in its manifest")
    trl.add_argument("--work", type=Path, metavar="DIR", help="checkpoints and metrics.jsonl (default: OUT.work)")
    trl.add_argument("--resume", action="store_true", help="go on from the last checkpoint in WORK")
    room = actions.add_parser(
        "memory", help="print what `engines trl` would take of each device; refuse what is too much"
    )
    room.add_argument(
        "--init", type=Path, required=True, metavar="DIR", help="a policy, or a directory with config.json"
    )
    _add_settings(room)
    room.add_argument(
        "--prompt-tokens", type=int, default=2048, metavar="N", help="of the longest prompt, default 2048"
    )
    room.add_argument("--plan-tokens", type=int, default=512, metavar="N", help="of the longest plan, default 512")
    room.add_argument("--devices", type=int, default=1, metavar="N", help="that FSDP splits over, default 1")
    room.add_argument("--device-gib", type=float, default=80.0, metavar="N", help="memory of each, default 80")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", choices=tuple(PROFILES), help="the paper's run of 7B, an adapter or all weights")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="YAML or JSON of the settings in docs/engines.md")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one of them; loss.clip_high=0.3 reaches inside"
    )


@dataclass(frozen=True, slots=True)
class TrlRun:
    """One run on TRL: the rows `data`, the policy directory `init` to begin with, `out` to write, NAME@N of the result.
    `settings` (a file) and `changes` (KEY=VALUE) are of EngineSettings; `work`: checkpoints, by default OUT.work."""

    data: Path
    init: Path
    out: Path
    version: str
    settings: Path | None = None
    profile: str = ""
    changes: tuple[str, ...] = ()
    work: Path | None = None
    resume: bool = False

    @property
    def command(self) -> str:
        """What made the result, for its manifest."""
        named = {name: getattr(self, name) for name in ("data", "init", "version", "profile", "settings", "out")}
        words = [word for name, value in named.items() if value for word in (f"--{name}", str(value))]
        changes = (word for change in self.changes for word in ("--set", change))
        return shlex.join(["python", "-m", "policy", "engines", "trl", *words, *changes])


def run(options: argparse.Namespace) -> int:
    """0 done, 143 asked to stop (a checkpoint is written). Raises BadRequest and ConfigError."""
    if options.engine == "memory":
        return _memory(options, settings_of(options.settings, options.set, options.profile or ""))
    places = (options.data, options.init, options.out, options.version, options.settings, options.profile or "")
    return run_on_trl(TrlRun(*places, tuple(options.set), options.work, options.resume))


def settings_of(file: Path | None, pairs: list[str], profile: str = "") -> EngineSettings:
    """The profile, the file over it, then each KEY=VALUE. Raises BadRequest naming the setting."""
    given: dict[str, Any] = dict(PROFILES[profile]) if profile else {}
    if file is not None:
        try:
            given |= yaml.safe_load(file.read_text()) or {}
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise BadRequest(f"--settings {file}: {str(error).splitlines()[0]}") from None
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise BadRequest(f"--set {pair}: write KEY=VALUE")
        *outer, last = key.split(".")
        inside = given
        for name in outer:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise BadRequest(f"--set {pair}: {name} has a value already")
        try:
            inside[last] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise BadRequest(f"setting {key}: not a value in YAML; got {value[:80]!r}") from None
    try:
        _known(given)
        return TypeAdapter(EngineSettings).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"setting {'.'.join(map(str, first['loc'])) or 'values'}: {first['msg']}") from None


def _known(given: Mapping[str, Any]) -> None:
    defaults = asdict(EngineSettings())
    inside = {name: given.get(name, {}) for name in EXAMPLES}
    for name, values in inside.items():
        if not isinstance(values, Mapping):
            raise BadRequest(f"setting {name}: a mapping, as in --set {name}.{EXAMPLES[name]}")
    if not isinstance(given.get("trl", {}), Mapping):
        raise BadRequest("setting trl: a mapping, as in --set trl.use_vllm=true")
    unknown = [*(set(given) - set(defaults))]
    unknown += [f"{name}.{x}" for name, values in inside.items() for x in set(values) - set(defaults[name])]
    if unknown:
        raise BadRequest(f"no such setting: {', '.join(sorted(unknown))}; docs/engines.md lists them")


def run_on_trl(run: TrlRun) -> int:
    """0 done, 143 asked to stop (a checkpoint is written). Raises BadRequest and ConfigError."""
    settings = settings_of(run.settings, list(run.changes), run.profile)
    try:
        return _trained(run, settings)
    except MissingLogprobs as error:
        raise BadRequest(f"{run.data}: {error}") from None


def _trained(run: TrlRun, settings: EngineSettings) -> int:
    from policy.train.engines.seal import sealer
    from policy.train.engines.trl_trainer import Stopping, train_with_trl

    start = open_start(run.init)
    check_prompt(start.manifest, run.init)
    rows = _rows(run.data, start, settings)
    finish = sealer(start, run.version, settings, len(rows), run.data.name, run.command)
    stopping = Stopping()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        stopping.asked = True

    signal.signal(signal.SIGTERM, stop)
    work = run.work or run.out.with_name(f"{run.out.name}.work")
    trained = train_with_trl(
        rows,
        start.home,
        run.out,
        settings,
        work=work,
        adapter=start.directory if start.base else None,
        resume=run.resume,
        finish=finish,
        callbacks=[stopping],
        say=_say,
    )
    if trained is None:
        return STOPPED
    if not trained.first:
        return 0
    result = {
        "out": str(trained.directory),
        "steps": trained.steps,
        "rows": trained.rows,
        "rows_read": trained.rows_read,
        "processes": trained.processes,
    }
    sys.stdout.write(f"{json.dumps(result)}\n")
    return 0


def _rows(data: Path, start: StartDirectory, settings: EngineSettings) -> list[EngineRow]:
    """An export in either shape. Ours names the schema of each plan, and so its grammar masks; verl's does not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        ours = "plan_token_ids" in pq.read_schema(data).names
    except (OSError, pa.ArrowException):
        ours = False
    if not ours:
        return read_rows(data, settings)
    manifest, tokens = start.manifest, Tokens(start.home, tokens_shape(read_object(start.home / CONFIG_FILE)))
    taught = taught_dial(manifest.config) if settings.reward.dial == DIAL else None
    weights = replace(settings.reward, dial=taught or settings.reward.dial)
    found = of_dataset(exported(data), manifest.prompt_hash, weights)
    if not found.rows:
        raise BadRequest(f"{data}: no rollout can be trained on: {listed(Counter(found.refused)) or 'none is there'}")
    return of_training(found.rows, tokens, settings)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _memory(options: argparse.Namespace, settings: EngineSettings) -> int:
    """0; raises ConfigError where a device of that size has less."""
    home = options.init
    rank = settings.lora_rank
    if (home / MANIFEST_FILE).is_file():
        start = open_start(home)
        home, rank = start.home, start.rank(rank)
    lengths = (options.prompt_tokens, options.plan_tokens)
    found = memory(home, settings, *lengths, shards=options.devices, rank=rank)
    sys.stdout.write(f"{found.line()}\n")
    check(found, int(options.device_gib * GIB), "the device")
    return 0
