"""Train a conductor by GRPO or on plans that won, with checkpoints, metrics, and a policy directory at the end."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from gateway.adapters.engines.sealed import read_document
from gateway.adapters.host.urls import as_url, send_policy
from gateway.core.loop.prompt import Profile
from gateway.core.policies.manifest import MANIFEST_FILE, manifest_of
from gateway.errors import ConfigError
from policy.dataset.cli import URL_CHARS_MAX, add_filters, add_rules, rules_of, selection_of
from policy.dataset.rules import Rules
from policy.dataset.select import Selection
from policy.inputs import FILES, POLICIES, local
from policy.spec import checked, given, read
from policy.train.settings import PROFILES, changes_of
from policy.train.spec import TrainSpec, plain_filters

STOPPED = 143  # 128 + SIGTERM
OUT = "out"  # in the work directory: the result, before it is uploaded


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--env", choices=("arena", "replay", "logged", "live"), help="where rollouts come from")
    parser.add_argument("--method", choices=("grpo", "sft"), help="sft: supervised, on plans that won")
    parser.add_argument("--prompt", choices=get_args(Profile), help="sft: the prompt that the student is taught")
    parser.add_argument("--init", type=Path, metavar="DIR", help="policy directory that training begins with, or a URL")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the new policy directory or URL; must not be there yet"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="checkpoint and metrics (default OUT.work)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work, if there is one")
    parser.add_argument(
        "--engine",
        choices=("small", "large", "trl"),
        help="small: plain torch; large: transformers; trl: many devices, from --export (its --set: docs/engines.md)",
    )
    parser.add_argument("--profile", choices=tuple(PROFILES), help="default by --env and --init")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; may be repeated")
    parser.add_argument(
        "--rollouts", default="", metavar="URL", help="…/v1 of a vLLM that samples the plans and takes each new adapter"
    )
    parser.add_argument(
        "--spec", type=Path, metavar="FILE.json", help="a spec, or a version's manifest.json, instead of arguments"
    )
    parser.add_argument("--name", default="", help="of the new version (default: as --init)")
    parser.add_argument("--version", default="", help="its number (default: one more)")
    parser.add_argument("--progress-file", type=Path, metavar="FILE", help="JSON lines for a program that watches")
    _add_simulated(parser.add_argument_group("arena and replay"))
    _add_real(parser.add_argument_group("logged and live (live takes --pool-file too)"))
    add_filters(parser)
    add_rules(parser)


def _add_simulated(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--staff", choices=("standard", "held_out", "fresh", "untold"), help="arena: workers (default standard)"
    )
    group.add_argument("--data", type=Path, metavar="FILE", help="replay: recorded answers, .jsonl or .jsonl.gz")
    group.add_argument("--prices", type=Path, metavar="FILE", help="replay: JSON, model → dollars per million tokens")
    group.add_argument("--workers", default="", metavar="A,B,…", help="replay: only these models (default all)")
    group.add_argument("--quality-range", metavar="LO-HI", help="dial places drawn for each question")


def _add_real(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--database", default="", metavar="URL", help="postgresql://…, or -: standard input")
    group.add_argument("--export", type=Path, metavar="FILE", help="logged: Parquet of `traces export` instead")
    group.add_argument(
        "--demonstrations", type=Path, metavar="FILE", help="sft: JSON lines: question, plan (takes --pool-file)"
    )
    group.add_argument("--url", default="", help="live: the gateway's API, http://…/v1")
    group.add_argument("--key-file", type=Path, metavar="FILE", help="live: holds an API key")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="live: JSON lines: question, gold, …")
    group.add_argument("--pool-name", default="", metavar="NAME", help="live: which pool of it (default: its default)")
    group.add_argument("--grader", metavar="NAME", help="live: judges the replies; default exact")
    group.add_argument("--judge", default="", metavar="WORKER", help="live: judges what has no reference")
    group.add_argument("--rubric", default="", metavar="TEXT", help="live: by which it does")
    group.add_argument("--usd-max", default="", metavar="USD", help="live: what the whole run may spend")
    group.add_argument("--episode-usd-max", metavar="USD", help="live: and one episode; default 0.05")


def run(options: argparse.Namespace) -> int:
    """0; 143 when asked to stop. Raises BatonError, one line with the fix."""
    if options.out is None:
        raise ConfigError("no --out DIR: where should the new policy directory go?")
    if options.engine == "trl":
        return _on_trl(options)
    spec = spec_of(options)
    if find_spec("torch") is None:
        raise ConfigError("training needs torch: run `make train-env`, or `pip install '.[train,embedded]'`")
    from policy.train.run.loop import Stopped
    from policy.train.run.session import train

    url = as_url(options.out)
    if url is not None and options.work is None:
        raise ConfigError(f"--out {url}: give --work DIR too, a local directory for the checkpoint and the result")
    work = options.work or options.out.with_name(f"{options.out.name}.work")
    out = options.out if url is None else work / OUT
    try:
        if url is None or not (options.resume and out.exists()):
            result = train(_local(spec, work), out, work, options.resume, say, options.progress_file)
            say(f"{result.out}: {result.manifest.name}@{result.manifest.version}, {result.rollouts} rollouts")
    except Stopped as stopped:
        say(stopped.message)
        return STOPPED
    if url is not None:
        send_policy(out, url)  # where this fails, the same command with --resume does only this
        say(f"{url}: uploaded")
    return 0


def _local(spec: TrainSpec, work: Path) -> TrainSpec:
    """The spec with local paths in place of URLs. Raises NotFound, Unavailable, VersionRefused."""
    names = [name for name in (*FILES, *POLICIES) if getattr(spec, name, None) is not None]
    paths, _ = local({name: getattr(spec, name) for name in names}, work / "inputs")
    return spec.model_copy(update={name: Path(path) for name, path in paths.items()})


def _on_trl(options: argparse.Namespace) -> int:
    """The same as `engines trl`, whose settings `--set` then takes. Raises BatonError."""
    if options.env != "logged" or options.export is None or options.init is None:
        raise ConfigError("--engine trl learns from logged rows alone: give --env logged, --export FILE and --init DIR")
    for name in ("spec", "profile", "database", "progress_file"):
        if getattr(options, name):
            raise ConfigError(f"--engine trl takes no --{name.replace('_', '-')}: docs/engines.md says what it takes")
    if find_spec("trl") is None:
        raise ConfigError("--engine trl needs TRL: run `scripts/install trl`, or `pip install '.[trl,embedded]'`")
    from policy.train.engines.cli import TrlRun, run_on_trl

    version = version_of(options.init, options.name, options.version)
    places = (options.export, options.init, options.out, version)
    return run_on_trl(TrlRun(*places, changes=tuple(options.set), work=options.work, resume=options.resume))


def version_of(init: Path, name: str, version: str) -> str:
    """The name of the result, NAME@N, by default the next one of `init`. Raises VersionRefused."""
    from policy.train.weights.start import unsealed

    parent = manifest_of(read_document(init)) if (init / MANIFEST_FILE).is_file() else unsealed(init)
    return f"{name or parent.name}@{version or parent.next_version}"


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def given_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments as a TrainSpec takes them; only those that were given. Raises ConfigError."""
    if options.env is None:
        raise ConfigError("no --env: where do rollouts come from? arena, replay, logged or live")
    changes = changes_of(options.set)
    changes |= changes_of([f"quality={options.quality_range}"] if options.quality_range else [])
    changes |= {"engine": options.engine} if options.engine else {}
    with_pool = options.env == "live" or options.demonstrations is not None
    return given(
        {
            "env": options.env,
            "method": options.method,
            "prompt": options.prompt,
            "init": options.init,
            "profile": options.profile,
            "name": options.name,
            "version": options.version,
            "settings": changes,
            "rollouts": options.rollouts,
            "staff": options.staff,
            "data": options.data,
            "prices": options.prices,
            "workers": tuple(name.strip() for name in options.workers.split(",") if name.strip()),
            "database": _database(options.database),
            "export": options.export,
            "filters": _filters(options) if options.env in ("logged", "live") else {},
            "demonstrations": options.demonstrations,
            "url": options.url,
            "key_file": options.key_file,
            "prompts_file": options.prompts,
            "pool_file": options.pool_file if with_pool else None,
            "pool": options.pool_name,
            "grader": options.grader,
            "judge": options.judge,
            "rubric": options.rubric,
            "usd_max": options.usd_max,
            "episode_usd_max": options.episode_usd_max,
        }
    )


def spec_of(options: argparse.Namespace) -> TrainSpec:
    """The file of --spec, or the arguments, as one value. Raises ConfigError."""
    return read(TrainSpec, options.spec) if options.spec else checked(TrainSpec, given_of(options))


def _database(given: str) -> str:
    """As given, or the first line of standard input, where other users of the machine cannot see it."""
    return given if given != "-" else sys.stdin.readline(URL_CHARS_MAX).strip()


def _filters(options: argparse.Namespace) -> dict[str, Any]:
    """Those that are not as by default."""
    default = plain_filters(Selection(), Rules())
    chosen = plain_filters(selection_of(options), rules_of(options))
    return {name: value for name, value in chosen.items() if value != default.get(name)}
