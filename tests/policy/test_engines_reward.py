"""One reward: our own trainer, TRL and an export give the same to the same requests, verdicts and dial included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from gateway.core.loop.plan import PlanLimits, plan_schema, schema_hash
from gateway.core.loop.prompt import DIAL
from gateway.core.loop.replies.verdicts import StepVerdict
from gateway.errors import BadRequest, ConfigError
from policy.dataset import export
from policy.dataset.cli import reward_given
from policy.dataset.curate import Curated
from policy.dataset.row import Row
from policy.dataset.rules import Report
from policy.engines.directory import read_conductors
from policy.reward import RewardSettings
from policy.serve.tokens import Tokens
from policy.train.engines import cli
from policy.train.engines.rows import of_training, read_rows
from policy.train.sources.logged import of_dataset
from policy.train.weights.start import StartDirectory, open_start
from tests.policy.dataset_rows import a_row

pq = pytest.importorskip("pyarrow.parquet", reason="the train extra is not installed")
pytestmark = pytest.mark.train
SHIPPED = Path(__file__).resolve().parents[2] / "policy" / "shipped" / "arena-3"
PAIRS = ("cost_per_usd=50", "missed_penalty=0.03", "repaired_penalty=0.01", "rejected_penalty=0.02")
SIZES = ("rows_per_step=4", "rows_per_device=2", "baseline=batch")
MISSED = StepVerdict("r", 1, 0, "contract", accept=False)
REPAIRED = StepVerdict("r", 1, 0, "contract", accept=True, repaired=True)
REJECTED = StepVerdict("r", 1, 1, "verify", accept=False, checker="check")
CASES: tuple[dict[str, Any], ...] = (
    {"outcome": 1.0, "verdicts": ()},
    {"outcome": 1.0, "verdicts": (MISSED,)},
    {"outcome": 1.0, "verdicts": (REPAIRED, REJECTED)},
    {"outcome": 1.0, "verdicts": (MISSED,) * 9},
    {"outcome": 0.5, "verdicts": (REJECTED,), "quality": None, "latency_ms": 9_000.0},
    {"outcome": 0.0, "verdicts": (MISSED, MISSED)},
    {"outcome": 0.25, "verdicts": (), "cost_nano": 900_000_000},
    {"outcome": 1.0, "verdicts": (), "refusal": "no_steps"},
)


@pytest.fixture(scope="module")
def start() -> StartDirectory:
    return open_start(SHIPPED)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return read_conductors([SHIPPED])[SHIPPED].tokens()


@pytest.fixture
def rows(start: StartDirectory, tokens: Tokens) -> list[Row]:
    allowed = PlanLimits(("quill",), 3)
    plan = (*tokens.encode_text('{"steps":[{"worker":"quill","task":null,"see":[]}]}'), tokens.eos_ids[0])
    sampled: dict[str, Any] = {
        "prompt_hash": start.manifest.prompt_hash, "prompt_version": start.manifest.prompt_version,
        "allowed": allowed.as_json(), "schema_hash": schema_hash(plan_schema(allowed)), "plan_token_ids": list(plan),
        "plan_logprobs": [-0.5] * len(plan), "decision_mask": [True] * len(plan), "split": "train",
        "cost_nano": 3_000_000,
    }  # fmt: skip
    names = [f"r{number}" for number in range(len(CASES))]
    return [
        a_row(rollout_id=name, root_id=name, group=name, **(sampled | case))
        for name, case in zip(names, CASES, strict=True)
    ]


def written(path: Path, form: export.Format, rows: list[Row], weights: RewardSettings) -> Path:
    refused: Any = frozenset(row.root_id for row in rows if not row.parsed)
    found = Curated(*((None,) * 2), {}, Report(), refused)  # type: ignore[arg-type]
    with path.open("wb") as file:
        export._write(file, form, iter(rows), found, weights)
    return path


def test_trainers_and_an_export_give_the_same_reward_to_the_same_requests(
    start: StartDirectory, rows: list[Row], tmp_path: Path
) -> None:
    weights = reward_given(PAIRS)
    settings = cli.settings_of(None, [*SIZES, *(f"reward.{pair}" for pair in PAIRS)])
    ours = {row.episode: row.reward for row in of_dataset(rows, start.manifest.prompt_hash, weights).rows}
    bare = {row.episode: row.reward for row in of_dataset(rows, start.manifest.prompt_hash, RewardSettings()).rows}
    assert [name for name in ours if ours[name] < bare[name]] == ["r1", "r2", "r3", "r4", "r5"]
    assert (len(ours), ours["r0"], ours["r7"]) == (len(CASES), bare["r0"], 0.0)

    on_trl = cli._rows(written(tmp_path / "own.parquet", "parquet", rows, weights), start, settings)
    assert {row.name.partition("/")[0]: row.reward for row in on_trl} == ours

    shaped = written(tmp_path / "verl.parquet", "verl", rows, weights)
    default = cli.settings_of(None, list(SIZES))
    assert {row.name.partition("/")[0]: row.reward for row in read_rows(shaped, default)} == ours


def test_rewards_that_an_export_has_fixed_are_not_asked_for_anew(rows: list[Row], tmp_path: Path) -> None:
    shaped = written(tmp_path / "verl.parquet", "verl", rows, RewardSettings())
    settings = cli.settings_of(None, ["reward.missed_penalty=0.03"])
    with pytest.raises(BadRequest, match=r"were computed when it was written; .*--reward NAME=VALUE"):
        read_rows(shaped, settings)


def test_the_dial_is_the_policys_own_unless_it_is_given(
    start: StartDirectory, rows: list[Row], tokens: Tokens, tmp_path: Path
) -> None:
    dial = [500.0, *DIAL[1:]]
    path = written(tmp_path / "own.parquet", "parquet", rows, RewardSettings())
    known = of_dataset(rows, start.manifest.prompt_hash, RewardSettings(dial=tuple(dial))).rows
    given = cli._rows(path, start, cli.settings_of(None, [f"reward.dial={dial}"]))
    assert [row.reward for row in given] == [
        row.reward for row in of_training(known, tokens, cli.settings_of(None, []))
    ]


@pytest.mark.parametrize(
    "pair", ["missed=1", "missed_penalty", "missed_penalty=-1", "missed_penalty=x", "cost_per_usd=["]
)
def test_a_bad_weight_is_named(pair: str) -> None:
    with pytest.raises(ConfigError, match="--reward"):
        reward_given([pair])
    with pytest.raises(BadRequest, match="setting"):
        cli.settings_of(None, [f"reward.{pair}" if "=" in pair else f"reward={pair}"])
