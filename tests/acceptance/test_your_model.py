"""docs/your-model.md, command for command, on a tiny random model: what each prints is what the page says.

Names of what is the reader's own (the first block) are set to small things, and the gate's bounds are let go: so small
a model learns nothing. All other commands are run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from policy.recipes.stack import Gateway, gateway, output_of, program, temporary_directory
from tests.jobs_kit import LET_GO
from tests.policy.environments import PRICES, lines
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.train, pytest.mark.timeout(1520)]
pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "your-model.md"
BLOCK = re.compile(r"^```(sh|python|)\n(.*?)^```$", re.M | re.S)
COMMAND_S = 600.0
SERVE = "baton serve"
SMALL = "--set steps=1 --set threads=1 --set lora_rank=4"
SETTINGS = {
    "BATON_DEFAULT_POLICY": "auto",
    "BATON_CONDUCTOR_TIMEOUT_S": "60",
    "BATON_PLAN_TOKENS_MAX": "192",
    "BATON_EXPLORE_SHARE": "0.9",  # so few requests hold few that explore
    "BATON_CONDUCTOR_OUTCOMES_MIN": "0",
    "BATON_WATCH_REQUESTS_MIN": "1000000",
    "BATON_TRAIN_PYTHON": sys.executable,
}


@dataclass(frozen=True)
class Block:
    """A fenced block of the page: `sh`, `python`, or what was printed."""

    language: str
    text: str


def blocks() -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Reader:
    """Who follows the page: a directory to work in, and the values of the first block."""

    place: Path
    values: Mapping[str, str]

    def run(self, script: str, more: Mapping[str, str] | None = None) -> str:
        """What the commands print. All must end well."""
        binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, **self.values, "PATH": binaries, **(more or {})}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self.place, env=environment, capture_output=True, text=True,
            timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr


def prints(output: str, wanted: str) -> None:
    """Every line of the page is among the lines that were printed, in this order; `…` stands for anything."""
    printed, at = output.splitlines(), 0
    for line in wanted.splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        found = next((n for n in range(at, len(printed)) if pattern.fullmatch(printed[n].strip())), None)
        assert found is not None, f"the page says\n{line}\nand this was printed:\n{output[-3000:]}"
        at = found + 1


@pytest.fixture
def reader() -> Iterator[Reader]:
    with temporary_directory() as place:
        rows = lines(60)
        (place / "recorded.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (place / "prices.json").write_text(json.dumps(PRICES))
        asked = [{name: row[name] for name in ("id", "question", "gold", "domain")} for row in rows]
        (place / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
        loose = " ".join(f"--set {name}={value}" for name, value in LET_GO.items())
        yield Reader(
            place,
            {
                "MODEL": str(write_tiny_llama(place / "Tiny-Llama")),
                "POOL": str(place / "pool.yaml"),
                "QUESTIONS": str(place / "questions.jsonl"),
                "PRICES": "answers.prices.json",
                "TEACH": f"{SMALL} --set prompts=4 --set lessons=16",
                "LEARN": f"{SMALL} --set requests_min=20",
                "GATE": f"--n 8 --draws 1 {loose}",
                "BATON_DATA_DIR": str(place / "data"),
            },
        )


def test_the_page_sets_what_the_test_sets(reader: Reader) -> None:
    """The first block names all that the other blocks use, and nothing else."""
    first, *others = blocks()
    names = re.findall(r"^export (\w+)=", first.text, re.M)
    assert [*names, "BATON_DATA_DIR"] == list(reader.values)
    used = {
        name for block in others for name in re.findall(r"\$\{?(\w+)|environ\[\"(\w+)\"\]", block.text) for name in name
    }
    assert used - {""} == set(names)


def test_the_page_from_seal_to_a_version_that_learnt_from_traffic(reader: Reader) -> None:
    _, *page = blocks()
    seal, sealed = page.pop(0), page.pop(0)
    prints(reader.run(seal.text), sealed.text)
    serve = page.pop(0)
    assert serve.text.strip() == f"{SERVE} --conductor $MODEL --pool $POOL"
    assert "vllm" in page.pop(0).text, "the block that only a GPU can run"
    place = reader.place
    with program("replay", place, "policy.simulators.replay", "serve", str(place / "recorded.jsonl")) as replayed:
        priced = ["pool", str(place / "recorded.jsonl"), "--base-url", replayed.url, "--prices"]
        (place / "pool.yaml").write_text(output_of("policy.simulators.replay", *priced, str(place / "prices.json")))
        conductor = reader.values["MODEL"]
        with gateway(place, conductor=conductor, pool=place / "pool.yaml", settings=SETTINGS) as served:
            follow(reader, served, page)


def follow(reader: Reader, served: Gateway, page: list[Block]) -> None:
    """Run what is left of the page against the running gateway."""
    output, shown = "", os.environ.get("SHOW")
    keys = {"OPENAI_BASE_URL": served.base_url, "OPENAI_API_KEY": served.data_key}
    for block in page:
        if block.language == "sh":
            output = reader.run(block.text)
        elif block.language == "python":
            (reader.place / "ask.py").write_text(block.text)
            output = reader.run(f"{sys.executable} ask.py && sleep 20", keys)  # the worker grades the last of them
        else:
            prints(output, block.text)
        if shown:
            sys.stderr.write(f"\n=== {block.language} {block.text}\n{output}\n")
