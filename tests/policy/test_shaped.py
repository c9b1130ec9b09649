"""A model of a large one's shape, with random weights, plans under the grammar without writing tasks for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.engines import shaped  # noqa: E402
from gateway.core.loop.plan import PlanLimits, plan_schema  # noqa: E402
from policy.engines.directory import read_conductors  # noqa: E402
from policy.environments.base import rng_for  # noqa: E402
from policy.start.pretrained.seal import seal  # noqa: E402
from policy.train.sources.conductor import Decoded, Sampler  # noqa: E402
from policy.train.step.masks import Masks  # noqa: E402
from policy.train.weights.large import LargeWeights  # noqa: E402

SHIPPED = Path(__file__).parents[2] / "policy" / "shipped" / "arena-3"
ROWS, TOKENS = 32, 96


def test_its_plans_end(tmp_path: Path) -> None:
    assert shaped.main(["--like", "tiny", "--tokenizer", str(SHIPPED), "--out", str(tmp_path / "tiny")]) == 0
    seal(tmp_path / "tiny", profile="ranked")
    directory = read_conductors([tmp_path / "tiny"])[tmp_path / "tiny"]
    weights, tokens = LargeWeights.load(tmp_path / "tiny", 512, "float32", "cpu"), directory.tokens()
    masks = Masks(tokens)
    root = masks.root(plan_schema(PlanLimits(("maple", "quill"), 5)))
    prompt = tuple(tokens.encode_chat([{"role": "user", "content": "?"}]))
    rows = [Decoded(prompt, root, 1.0, TOKENS, rng_for("shaped", number)) for number in range(ROWS)]
    Sampler(weights, tokens, masks, 16_384).decode(rows)
    ended = [row for row in rows if row.finish == "stop"]
    assert len(ended) > ROWS / 2
    assert min(len(row.ids) for row in ended) < TOKENS / 2
