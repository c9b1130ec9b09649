"""Record what the workers of a pool answer to questions, as a replay file: under a dollar cap, and resumable."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.adapters.host import poolfile
from gateway.adapters.upstream.pooled import pooled_workers
from gateway.config.settings import environment
from gateway.core.money.amounts import usd_to_nano
from gateway.core.pool.workers import MODEL_KINDS, PoolFile, WorkerSpec
from gateway.errors import ConfigError
from policy.dataset.cli import add_filters, database_url_of, selection_of
from policy.graders.judge import RUBRIC
from policy.record import journal as journals
from policy.record import replayfile
from policy.record.questions import RecordQuestion, of_file, of_log
from policy.record.recorder import Recorder, RecordProgress, RecordSettings
from policy.simulators.recordings import QUESTIONS_MAX

SAMPLES_MAX, CONCURRENCY_MAX = 64, 512
PROGRESS_S, PROGRESS_LINE_S = 0.5, 10.0  # on a terminal, and elsewhere
INTERRUPTED, STOPPED = 130, 143


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the replay file, .jsonl or .jsonl.gz")
    parser.add_argument("--pool-file", type=Path, metavar="FILE", required=True, help="the workers, as for `serve`")
    parser.add_argument("--pool-name", default="", metavar="NAME", help="which pool of it (default: its default)")
    parser.add_argument("--workers", default="", metavar="A,B,…", help="only these of its model workers")
    parser.add_argument("--usd-max", metavar="USD", required=True, help="what FILE may cost, all runs together")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers of each worker to each question")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="calls at once; default 16")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the worker's own")
    parser.add_argument("--output-tokens", type=int, metavar="N", help="of an answer (default: the pool file's)")
    parser.add_argument("--grader", default="", metavar="NAME", help="of questions that name none; default exact")
    parser.add_argument("--judge", default="", metavar="WORKER", help="judges what has no gold and no grader")
    parser.add_argument("--rubric", default=RUBRIC, metavar="TEXT", help="by which it does")
    parser.add_argument("--json", action="store_true", help="print the report for programs")
    group = parser.add_argument_group("questions")
    group.add_argument("--questions", type=Path, metavar="FILE.jsonl", help="a line a question (docs/recorded.md)")
    group.add_argument("--traffic", type=float, metavar="SHARE", help="or this share of the logged requests")
    group.add_argument("--database-url", default="-", metavar="URL", help="of the log; - reads it from standard input")
    group.add_argument("--seed", type=int, default=0, help="draws the requests")
    group.add_argument("--questions-max", type=int, default=QUESTIONS_MAX, metavar="N", help="of the log, at most")
    add_filters(parser)


def run(options: argparse.Namespace) -> int:
    """0, also at the cap; 130 or 143 when asked to stop. Raises ConfigError, Unavailable."""
    settings = _settings(options)
    env = environment()
    pool = poolfile.load(options.pool_file, env)
    specs, judge = _specs(options, pool), _judge(options, pool)
    questions = _questions(options)
    if judge is None and any((one.grader or "").startswith("judge@") for one in questions):
        raise ConfigError("a question has the grader `judge`: name the worker that judges with --judge")
    journal = journals.opened(options.out.with_name(f"{options.out.name}.calls"))
    began_nano = journal.spent_nano
    try:
        secrets = poolfile.secrets(pool, env)
        progress, signalled = asyncio.run(_recorded(specs, judge, questions, journal, settings, pool, secrets))
        written, too_long = replayfile.write(journal, options.out)
        replayfile.write_prices(specs, _prices_path(options.out))
    finally:
        journal.close()
    report = _report(options, journal, progress, written, too_long, journal.spent_nano - began_nano)
    _say(options, report, settings)
    return signalled


def _prices_path(out: Path) -> Path:
    return out.with_name(f"{out.name.removesuffix('.gz').removesuffix('.jsonl')}.prices.json")


async def _recorded(
    specs: list[WorkerSpec],
    judge: WorkerSpec | None,
    questions: list[RecordQuestion],
    journal: journals.RecordJournal,
    settings: RecordSettings,
    pool: PoolFile,
    secrets: dict[str, str],
) -> tuple[RecordProgress, int]:
    """(what was done, the exit status)."""
    workers = pooled_workers(pool, secrets, b"")
    recorder = Recorder(workers, specs, journal, settings, judge=judge, on_progress=_shown(journal, settings))
    status = 0

    def stop(number: int) -> None:
        nonlocal status
        status = INTERRUPTED if number == signal.SIGINT else STOPPED
        recorder.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await recorder.run(questions), status
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await workers.close()


# ---------------------------------------------------------------- arguments


def _settings(options: argparse.Namespace) -> RecordSettings:
    try:
        cap_nano = usd_to_nano(options.usd_max)
    except ValueError as error:
        raise ConfigError(f"--usd-max: {error}", param="--usd-max") from None
    if not cap_nano:
        raise ConfigError("--usd-max 0 allows no call; give an amount above 0", param="--usd-max")
    for name, most in (("samples", SAMPLES_MAX), ("concurrency", CONCURRENCY_MAX)):
        if not 1 <= getattr(options, name) <= most:
            raise ConfigError(f"--{name}: give 1 to {most}", param=f"--{name}")
    if options.output_tokens is not None and options.output_tokens < 1:
        raise ConfigError("--output-tokens: give 1 or more", param="--output-tokens")
    if (options.questions is None) == (options.traffic is None):
        raise ConfigError("give --questions FILE, or --traffic SHARE of the log", param="--questions")
    if options.traffic is not None and not 0 < options.traffic <= 1:
        raise ConfigError(f"--traffic {options.traffic} is outside (0, 1]; 0.1 is a tenth", param="--traffic")
    return RecordSettings(cap_nano, options.samples, options.concurrency, options.temperature, options.output_tokens)


def _specs(options: argparse.Namespace, pool: PoolFile) -> list[WorkerSpec]:
    name = options.pool_name or pool.default
    try:
        models = [spec for spec in pool.pool(name) if spec.kind in MODEL_KINDS and spec.name != options.judge]
    except KeyError:
        raise ConfigError(f"--pool-name {name}: not in {options.pool_file}") from None
    names = [one.strip() for one in options.workers.split(",") if one.strip()]
    by_name = {spec.name: spec for spec in pool.workers if spec.kind in MODEL_KINDS and spec.task == "chat"}
    if missing := [one for one in names if one not in by_name]:
        raise ConfigError(
            f"--workers {missing[0]}: no model worker of {options.pool_file}; it has {', '.join(by_name)}"
        )
    specs = [by_name[one] for one in names] or models
    _check_priced(specs)
    if not specs:
        raise ConfigError(f"pool `{name}` of {options.pool_file} has no model worker to record")
    return specs


def _check_priced(specs: list[WorkerSpec]) -> None:
    unpriced = next((spec.name for spec in specs if spec.price is None), None)
    if unpriced is not None:
        raise ConfigError(f"worker {unpriced} has no price: give it `price` in the pool file")


def _judge(options: argparse.Namespace, pool: PoolFile) -> WorkerSpec | None:
    if not options.judge:
        return None
    try:
        spec = pool.worker(options.judge)
    except KeyError:
        raise ConfigError(f"--judge {options.judge}: no such worker in {options.pool_file}") from None
    if spec.kind not in MODEL_KINDS or spec.task != "chat":
        raise ConfigError(f"--judge {options.judge}: not a chat model")
    _check_priced([spec])
    return spec


def _questions(options: argparse.Namespace) -> list[RecordQuestion]:
    rubric = options.rubric if options.judge else None
    if options.questions is not None:
        questions, repeated = of_file(options.questions, options.grader, rubric)
        left_out = {"asked in an earlier line": repeated}
    else:
        url, selection = database_url_of(options), selection_of(options)
        questions, reasons = of_log(url, selection, options.traffic, options.seed, rubric, options.questions_max)
        left_out = dict(reasons)
    omissions = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)
    sys.stderr.write(f"{len(questions)} questions" + (f"; left out: {omissions}" if omissions else "") + "\n")
    return questions


# ---------------------------------------------------------------- what is said


def _shown(journal: journals.RecordJournal, settings: RecordSettings) -> Callable[[RecordProgress], None]:
    terminal = sys.stderr.isatty()
    every_s, end = (PROGRESS_S, "\r") if terminal else (PROGRESS_LINE_S, "\n")
    last_s = time.monotonic()

    def show(progress: RecordProgress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s < every_s:
            return
        last_s = time.monotonic()
        spent, cap = journals.dollars(journal.spent_nano), journals.dollars(settings.cap_nano)
        sys.stderr.write(f"{progress.done:,} of {progress.total:,} answers, {spent} of {cap}{end}")
        sys.stderr.flush()

    return show


def _report(
    options: argparse.Namespace,
    journal: journals.RecordJournal,
    progress: RecordProgress,
    written: int,
    too_long: int,
    run_nano: int,
) -> dict[str, Any]:
    return {
        "out": str(options.out),
        "questions": written,
        "too_long": too_long,
        "answers": progress.done,
        "wanted": progress.total,
        "failed": progress.failed,
        "ungraded": progress.ungraded,
        "away": progress.away,
        "capped": progress.capped,
        "calls_lost": journal.abandoned,
        "spent_usd": journals.dollars(journal.spent_nano)[1:],
        "spent_now_usd": journals.dollars(run_nano)[1:],
    }


def _say(options: argparse.Namespace, report: dict[str, Any], settings: RecordSettings) -> None:
    for worker, why in report["away"].items():
        sys.stderr.write(f"warning: `{worker}` was not asked: {why}; mend that and run this again\n")
    if report["capped"]:
        cap = journals.dollars(settings.cap_nano)
        sys.stderr.write(f"the cap of {cap} leaves no room for the next call: raise --usd-max and run this again\n")
    if report["calls_lost"]:
        sys.stderr.write(f"{report['calls_lost']} calls were cut off by a kill; they count with their worst case\n")
    if report["ungraded"]:
        sys.stderr.write(f"{report['ungraded']} answers could not be graded; run this again to try once more\n")
    if options.json:
        sys.stdout.write(f"{json.dumps(report)}\n")
        return
    sys.stdout.write(
        f"{options.out}: {report['questions']} questions, {report['answers']} of {report['wanted']} answers "
        f"({report['failed']} errors), ${report['spent_usd']}; prices: {_prices_path(options.out)}\n"
    )
