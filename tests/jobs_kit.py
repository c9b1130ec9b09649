"""A trainer and a gate of a few lines, run as the programs of a job; everything else about the job is real.

`fake_python` is started as Python is. `-m policy train` reads its spec, counts steps slowly, keeps a checkpoint, stops
at SIGTERM, and leaves its parent's files as the candidate. The spec's `name` gives it orders: `hold=FILE` waits after
the third step until the file exists, `fail=WORDS` ends with them. `-m policy gate` refuses where its spec has the seed
`REFUSING`. All else goes to Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from gateway.core.policies.jobs import Job
from tests.waiting import until

# thresholds of a gate that lets everything through: so little traffic teaches nothing
LET_GO = {
    "questions_min": 1,
    "margin": 2,
    "logged_margin": 2,
    "category_margin": 2,
    "mean_weight_min": 0,
    "mean_weight_max": 1000,
    "kl_max": 1000,
    "ess_share_min": 0,
    "valid_min": 0,
    "parse_min": 0,
    "parse_drop_max": 1,
    "usd_ratio_max": 1000,
    "worker_share_max": 2,
    "plan_share_max": 2,
    "attacked_valid_min": 0,
    "attacked_valid_drop_max": 1,
    "attacked_usd_ratio_max": 1000,
    "obeyed_max": 1,
}

REFUSING = 666
FAKE = """#!{python}
import json, os, pathlib, shutil, signal, sys, time

words = sys.argv[1:]
if words[2:4] == ["jobs", "spec"]:
    os.environ["PYTHONPATH"] = "{extra}"
if words[:2] != ["-m", "policy"] or words[2] not in ("train", "gate"):
    os.execv("{python}", ["{python}", *words])
given = dict(zip(words[3:], words[4:]))
spec = json.loads(pathlib.Path(given["--spec"]).read_text())
settings = {{"steps": spec.get("settings", {{}}).get("steps", 3)}}
settings |= dict([spec["name"].split("=", 1)] if spec.get("name") else [])
if words[2] == "gate":
    passed = spec.get("seed") != {refusing}
    refusals = [] if passed else [{{"name": "worse", "said": "0.40 is below the live version's 0.60"}}]
    report = {{"passed": passed, "refusals": refusals, "live": given.get("--live"), "words": words, "spec": spec}}
    out = pathlib.Path(given["--out"])
    out.with_suffix(".new").write_text(json.dumps(report))
    out.with_suffix(".new").replace(out)
    sys.exit(0 if passed else 4)
work, out, steps = pathlib.Path(given["--work"]), pathlib.Path(given["--out"]), int(settings["steps"])
work.mkdir(parents=True, exist_ok=True)
checkpoint, runs = work / "checkpoint", work / "runs"
runs.open("a").write(json.dumps({{"words": words, "spec": spec, "pid": os.getpid(), "nice": os.nice(0)}}) + "\\n")
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
if settings.get("fail"):
    sys.stderr.write(settings["fail"] + "\\n")
    sys.exit(2)
done = int(checkpoint.read_text()) if checkpoint.exists() else 0
print(f"from step {{done}}", flush=True)
for step in range(done + 1, steps + 1):
    time.sleep(0.05)
    while step > 3 and settings.get("hold") and not os.path.exists(settings["hold"]) and not stopping:
        time.sleep(0.05)
    (work / "new").write_text(str(step))
    (work / "new").replace(checkpoint)
    with open(given["--progress-file"], "a") as file:
        file.write(json.dumps({{"step": step, "steps": steps, "reward": 0.5, "spent_usd": "0"}}) + "\\n")
    if stopping:
        sys.exit(143)
whole = out.with_suffix(".whole")
shutil.copytree(spec["init"], whole, dirs_exist_ok=True)
manifest = json.loads((whole / "manifest.json").read_text())
(whole / "manifest.json").write_text(json.dumps({{**manifest, "version": "", "parent": "conductor@0"}}))
whole.rename(out)
"""


def fake_python(directory: Path) -> str:
    """The path of the program."""
    path, extra = directory / "fake-python", directory / "train-extra"
    extra.mkdir(exist_ok=True)
    for package in ("torch", "pyarrow"):
        (extra / f"{package}.py").touch()  # what a fake trainer needs of them
    path.write_text(FAKE.format(python=sys.executable, refusing=REFUSING, extra=extra))
    path.chmod(0o755)
    return str(path)


def runs(place: Path) -> list[dict[str, Any]]:
    """Each start of the trainer in a job's directory: its arguments, process id and niceness."""
    path = place / "train" / "runs"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def in_state(look: Callable[[], Awaitable[Job]], *states: str, bound_s: float = 120.0) -> Job:
    """Wait until the job is in one of the states, and return it."""

    async def reached() -> Job | None:
        job = await look()
        return job if job.state in states else None

    return cast(Job, await until(reached, bound_s))
