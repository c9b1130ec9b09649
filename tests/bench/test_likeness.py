"""The measurement of likeness on a small recording."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bench.recorded.likeness import POOLS, Recording, main, read, scored


def test_neighbours_of_one_type_foretell_its_outcomes() -> None:
    types = np.array(["a", "b"] * 40)
    vectors = np.array([[1.0, 0.0], [0.0, 1.0]] * 40)
    right = np.array([[1.0, 0.0], [0.0, 1.0]] * 40)
    remembered = np.arange(80) < 40
    data = Recording([""] * 80, types, right, np.ones((80, 2)), remembered)
    score = scored(data, vectors)
    assert (score.type.mean(), score.counted_type.mean(), score.right.mean()) == (1.0, 1.0, 1.0)
    assert score.loss.max() < 0.1
    assert (score.usd == 1000.0).all()
    mixed = scored(data, np.roll(vectors, 1, axis=0) * (np.arange(80) >= 40)[:, None] + vectors * remembered[:, None])
    assert mixed.right.mean() == mixed.type.mean() == 0.0


def test_a_table_for_each_recording_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workers = POOLS["rgym"].split()
    with gzip.open(tmp_path / "rgym_dev.jsonl.gz", "wt") as file:
        for n in range(60):
            kind = ("count the letters of a word", "turn a cube around")[n % 2]
            told = {worker: {"correct": (n + i) % 2 == 0, "cost_usd": 0.1} for i, worker in enumerate(workers)}
            file.write(
                json.dumps({"id": f"q{n}", "domain": kind[:5], "question": f"{kind}: {n}", "workers": told}) + "\n"
            )
        file.write(json.dumps({"id": "q", "domain": "x", "question": "?", "workers": {}}) + "\n")
    data = read(tmp_path / "rgym_dev.jsonl.gz", workers)
    assert len(data.texts) == 60
    assert len(read(tmp_path / "rgym_dev.jsonl.gz", workers, 10).texts) == 10
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rgym: 60 questions, 2 types" in printed
    assert [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("|")][2:5] == [
        "base",
        "hashing",
        "minilm-1",
    ]
