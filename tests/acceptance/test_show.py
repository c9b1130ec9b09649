"""`bench.show` as a stranger runs it: real processes, and what each case must have shown."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.core.policies.manifest import Manifest
from policy.serve.graph import write_graph
from policy.serve.manifest import write_manifest
from tests.sizes import SLACK
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SHOW_S = 280.0
CONTEXT_TOKENS = 4096  # the tiny tokenizer spends a token on nearly every letter of a planning prompt


@dataclass(frozen=True)
class Shown:
    """What a run printed and wrote."""

    status: int
    printed: str
    facts: dict[str, Any]


def show(place: Path, *arguments: str) -> Shown:
    out = place / f"{arguments[0]}.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.show", *arguments, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SHOW_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Shown(done.returncode, done.stdout, json.loads(out.read_text()))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-show-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def scripted(place: Path) -> Shown:
    """One gateway for the four cases whose conductor is a script."""
    return show(place, "parallel", "child", "client-leaves", "killed-conductor")


def test_two_steps_overlap_and_the_third_saw_both(scripted: Shown) -> None:
    facts = scripted.facts["parallel"]
    assert facts["overlap_ms"] > 0
    assert [(row["one"], row["other"]) for row in facts["sql"]] == [(0, 1)]
    assert float(facts["sql"][0]["together_ms"]) == pytest.approx(facts["overlap_ms"], abs=1)
    assert facts["early_ms"] > 0
    assert '<step n=\\"0\\" worker=\\"quill\\">' in scripted.printed
    assert '<step n=\\"1\\" worker=\\"maple\\">' in scripted.printed


@pytest.mark.parametrize("depth", [1, 2])
def test_a_child_loop_is_stopped_by_the_depth_cap(scripted: Shown, depth: int) -> None:
    facts = scripted.facts["child"][str(depth)]
    assert facts["status"] == 200
    assert facts["headers"]["x-baton-capped"] == "depth"
    assert facts["headers"]["x-baton-fallback"] == "conductor_depth_cap"
    assert [loop["depth"] for loop in facts["loops"]] == list(range(depth + 1))
    assert [loop["refusal"] for loop in facts["loops"]] == [*[None] * depth, "depth_cap"]


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_a_client_that_leaves_cancels_every_call(scripted: Shown, way: str) -> None:
    facts = scripted.facts["client-leaves"][way]
    assert facts["workers"] == {"done": 0, "cancelled": 3}
    assert facts["planning"] == {"done": 0, "cancelled": 1}
    assert facts["took_ms"] < 1000 * SLACK
    assert set(facts["steps"]) == {"cancelled"}


def test_a_killed_conductor_costs_no_request(scripted: Shown) -> None:
    facts = scripted.facts["killed-conductor"]
    assert facts["statuses"] == {"200": 50}
    assert sum(facts["fallbacks"].values()) == 50
    assert set(facts["fallbacks"]) == {"(planned by the conductor)", "conductor_down"}


def servable_model(directory: Path) -> Path:
    """Random weights behind a true manifest: what a gateway takes for its conductor."""
    model = write_tiny_model(directory)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": CONTEXT_TOKENS}
    (model / "config.json").write_text(json.dumps(config))
    write_graph(model)
    prompt = (f"compact-{PROMPT_VERSION}", prompt_hash("compact"))
    write_manifest(model, Manifest("tiny", "0", *prompt, 0, "random", "tests/tiny_model.py", "2026-01-01", 1))
    return model


def test_sampled_tokens_are_listed_from_postgres(place: Path) -> None:
    shown = show(place, "tokens", "--conductor", str(servable_model(place / "model")))
    assert shown.facts["tokens"]["tokens"] > 10
    assert shown.facts["tokens"]["steps"] >= 1
    assert "unnest(r.plan_token_ids, r.plan_logprobs, r.decision_mask)" in shown.printed
