"""`make smol` with a tiny random base and made-up recordings: every stage leaves its result, and none is run twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.core.loop.prompt import prompt_hash
from gateway.core.policies.manifest import ADAPTER_WEIGHTS_FILE
from policy.recipes import smol
from policy.recipes.smol import hidden_types, main, only
from policy.recipes.stack import RecipeFailed
from policy.serve.lora import read_pairs
from policy.serve.manifest import read_complete
from policy.start.pretrained.seal import seal
from tests.jobs_kit import LET_GO
from tests.policy.environments import PRICES, lines
from tests.tiny_model import write_tiny_llama


def test_a_share_of_many_types_is_hidden_and_none_of_few() -> None:
    types = [f"type {n}" for n in range(50)]
    hidden = hidden_types(iter([*types, *types]))
    assert len(hidden) == 10
    assert hidden < set(types)
    assert hidden_types(iter(types[:5])) == set()


def test_a_line_keeps_the_answers_of_the_named_workers() -> None:
    row = lines(1)[0]
    assert set(only(row, ("cheap", "dear", "absent"))["workers"]) == {"cheap", "dear"}
    assert set(row["workers"]) == {"cheap", "mid", "dear"}


def test_the_shipped_adapter_reads_todays_prompt_and_is_small() -> None:
    shipped = read_complete(smol.SHIPPED / "smol-1")
    manifest = shipped.manifest
    assert (manifest.name, manifest.version, manifest.kind) == ("smol", "1", "adapter")
    assert manifest.prompt_hash == prompt_hash("ranked"), "other words: teach it anew (make smol)"
    assert (smol.SHIPPED / "smol-1" / ADAPTER_WEIGHTS_FILE).stat().st_size < 16_000_000
    assert "/" not in str(manifest.config["data"])


def test_each_recording_has_its_prices_and_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["--recorded", "a.jsonl", "--prices", "a.json", "--out", str(tmp_path)]) == 1
    assert "give --recorded, --prices and --workers" in capsys.readouterr().err


@pytest.mark.train
@pytest.mark.timeout(600)
def test_every_stage_leaves_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    base = write_tiny_llama(tmp_path / "base")
    seal(base)
    data, prices = tmp_path / "sums.jsonl", tmp_path / "prices.json"
    rows = [{**row, "domain": f"{row['domain']} {n % 6}"} for n, row in enumerate(lines(120))]
    data.write_text("\n".join(map(json.dumps, rows)))
    prices.write_text(json.dumps(PRICES))
    out = tmp_path / "run"
    words = ["--recorded", str(data), "--prices", str(prices), "--workers", "cheap,mid,dear", "--hide-workers", "mid"]
    small = ("steps=1", "threads=1", "lora_rank=4", "k_of_n=none", "candidates=60", "tokens_max=2000")
    words += [w for one in (*small, "prompts=4", "lessons=16") for w in ("--taught", one)]
    words += [w for one in (*small, "prompts=2", "samples=2") for w in ("--practised", one)]
    gate = ["--n", "4", "--draws", "1", *(w for name, value in LET_GO.items() for w in ("--set", f"{name}={value}"))]
    words += ["--base", str(base), "--out", str(out), "--n", "6", "--ship", "smol-0", "--gate", " ".join(gate)]
    monkeypatch.setattr(smol, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    assert main(words) == 0
    hidden = {row["domain"] for row in map(json.loads, (out / "sums-types.jsonl").read_text().splitlines())}
    trained = [json.loads(line) for line in (out / "questions.jsonl").read_text().splitlines()]
    assert hidden
    assert not hidden & {row["domain"] for row in trained}
    assert all(set(row["workers"]) == {"cheap", "dear"} for row in trained)
    reports = {path.stem for path in out.glob("figures-*.json")}
    assert reports == {"figures-sums-seen", "figures-sums-types", "figures-sums-worker"}
    shipped, practised = tmp_path / "shipped" / "smol-0", out / "practised"
    assert 2 * (shipped / ADAPTER_WEIGHTS_FILE).stat().st_size < 1.2 * (practised / ADAPTER_WEIGHTS_FILE).stat().st_size
    manifest = read_complete(shipped).manifest
    assert manifest.base_source == ""
    assert manifest.prompt_version.startswith("ranked-")
    assert read_pairs(shipped)
    assert str(tmp_path) not in (shipped / "manifest.json").read_text()
    monkeypatch.setattr(smol, "run_program", _never)
    assert main(words) == 0


def _never(*words: str, good: object = ()) -> None:
    raise RecipeFailed(f"{words} ran again")
