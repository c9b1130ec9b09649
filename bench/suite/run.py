"""Every part of docs/benchmarks.md, one after the other: `python -m bench [PART …] [--size modest|full]`.

Each part starts what it needs on loopback, ends it, and writes OUT/PART.json with every round. A part whose file is
there, from the same size, is passed over, so an interrupted run goes on where it was; `--again` measures anew. The
figures that the page shows go to docs/benchmarks/PART.json, and the page is written from these files.

    python -m bench                          all parts at the modest size: a few minutes each
    python -m bench gateways plans --again   two parts anew
    python -m bench --size full              the sizes of a release: hours
    python -m bench --rollouts 10000000 rollouts
    python -m bench --page                   the page alone, from the figures that are there
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.suite import page
from bench.suite.machine import commit, load, machine
from bench.suite.parts import console, flat, gateways, memory, overload, plans, processes, training
from bench.suite.rounds import say
from bench.suite.sizes import SIZES, Size
from gateway.files import write_atomic
from policy.recipes.stack import ROOT, RecipeFailed, temporary_directory

OUT = ROOT / "bench" / "out" / "suite"


@dataclass(frozen=True, slots=True)
class Part:
    """One section of the page. `measure` gives every round, `figures` what the page shows of them; `rounds`: the
    number of rounds in Size, if there are any."""

    measure: Callable[[Path, Size], dict[str, Any]]
    figures: Callable[[dict[str, Any]], dict[str, Any]]
    what: str
    rounds: str | None = "rounds"


PARTS = {
    "gateways": Part(gateways.measure, gateways.figures, "LiteLLM, Portkey, vllm-router, TensorZero and Baton"),
    "plans": Part(plans.measure, plans.figures, "three steps and a merge, beside four frameworks"),
    "overload": Part(overload.measure, overload.figures, "five times what a gateway can do", "overload_rounds"),
    "keys": Part(flat.keys, flat.figures, "one key against many"),
    "workers": Part(flat.workers, flat.figures, "five workers against many"),
    "rollouts": Part(flat.rollouts, flat.figures, "1,000 rollouts against many"),
    "console": Part(console.measure, console.figures, "queries of the console, 1,000 rollouts and many", None),
    "memory": Part(memory.requests, memory.figures_of_requests, "memory over many requests", None),
    "streams": Part(memory.streams, memory.figures_of_streams, "memory with many open streams", None),
    "processes": Part(processes.measure, processes.figures, "one process against several"),
    "training": Part(training.measure, training.figures, "episodes where no model plans, and the steps of trainers"),
}


def measured(name: str, size: Size, out: Path, *, again: bool) -> dict[str, Any]:
    """The raw results of a part: those in `out` where they have this size and are not wanted anew, else new ones."""
    path = out / f"{name}.json"
    if not again and (found := _read(path)) is not None and found["about"]["size"] == asdict(size):
        say(f"{name}: there already; --again measures it anew")
        return found
    say(f"{name}: {PARTS[name].what}")
    before, began_s = load(), time.monotonic()
    with temporary_directory() as directory:
        raw = PARTS[name].measure(directory, size)
    about: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "machine": machine(),
        "size": asdict(size),
    }
    about |= {"load": [before, load()], "took_s": round(time.monotonic() - began_s)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"part": name, "about": about, "raw": raw}, indent=1) + "\n")
    say(f"{name}: done in {about['took_s']} s")
    return {"part": name, "about": about, "raw": raw}


def shown(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """What docs/benchmarks keeps of a part."""
    rounds = PARTS[name].rounds
    about = found["about"] | {"size": {"rounds": found["about"]["size"][rounds]} if rounds else {}}
    return {"part": name, "about": about, "figures": PARTS[name].figures(found["raw"])}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a run. `size` is a Size with what was given by name."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--size", choices=SIZES, default="modest", help="default: modest")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of the raw results")
    parser.add_argument("--again", action="store_true", help="measure parts anew that are there")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--no-page", action="store_true", help="measure alone, and leave docs/ as it is")
    for each in fields(Size):
        kind = float if each.name.endswith(("_s", "seconds")) else int
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    given = {each.name: value for each in fields(Size) if (value := getattr(options, each.name)) is not None}
    if low := [name for name, value in given.items() if value <= 0]:
        parser.error(f"--{low[0].replace('_', '-')} must be above 0")
    options.size = replace(SIZES[options.size], **given)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 130 after Ctrl-C, 1 where a part failed (the others are run)."""
    options = options_of(sys.argv[1:] if argv is None else argv)
    failed = []
    try:
        for name in [] if options.page else options.parts or PARTS:
            try:
                found = measured(name, options.size, options.out, again=options.again)
            except (RecipeFailed, SystemExit) as error:
                failed.append(name)
                say(f"{name}: failed: {error}")
                continue
            if not options.no_page:
                text = json.dumps(shown(name, found), indent=1, ensure_ascii=False) + "\n"
                page.FIGURES.mkdir(exist_ok=True)
                write_atomic(page.FIGURES / f"{name}.json", text)
    except KeyboardInterrupt:
        return 130
    if not options.no_page:
        for path, text in page.files():
            write_atomic(path, text)
        say(f"{page.PAGE.relative_to(ROOT)} is written")
    return 1 if failed else 0
