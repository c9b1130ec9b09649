"""Rows as verl and ART want them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from openai.types.chat.chat_completion import Choice

from policy.dataset import parquet
from policy.dataset.shapes import art, conversation, lesson, preferences, verl
from tests.policy.dataset_rows import a_row, a_verdict


def test_verl_gets_its_five_fields_and_what_was_sampled() -> None:
    row = a_row(tags={"reference": "4"}, split="validation")
    shaped = verl(7, row, 0.25)
    assert shaped["prompt"] == [{"role": "user", "content": "plan this"}]
    assert shaped["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert (shaped["data_source"], shaped["ability"]) == ("baton/default", "arithmetic")
    assert (shaped["extra_info"]["index"], shaped["extra_info"]["split"]) == (7, "validation")
    assert shaped["extra_info"]["cost_usd"] == pytest.approx(805e-9)
    sampled = [shaped[name] for name in ("responses", "response_mask", "decision_mask", "rollout_log_probs")]
    assert sampled == [[10, 11], [1, 1], [1, 0], [-0.5, -1.25]]
    assert shaped["prompts"] == [1, 2, 3]
    assert shaped["reward"] == 0.25
    assert verl(0, a_row(task_type=None), 0.0)["ability"] == "general"


def test_art_gets_messages_and_a_choice_with_log_probs_and_token_ids() -> None:
    trajectory = json.loads(json.dumps(art(3, a_row(latency_ms=None), 0.0)))
    assert set(trajectory) == {
        *("messages_and_choices", "tools", "additional_histories", "reward", "metrics", "metadata", "logs")
    }
    message, sampled = trajectory["messages_and_choices"]
    assert message == {"role": "user", "content": "plan this"}
    choice = Choice.model_validate(sampled)
    assert choice.message.content == '{"steps":[]}'
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert [(one.token, one.logprob) for one in tokens] == [("token_id:10", -0.5), ("token_id:11", -1.25)]
    assert choice.model_extra == {"prompt_token_ids": [1, 2, 3], "token_ids": [10, 11]}
    assert trajectory["metrics"] == {"outcome": 1.0, "cost_usd": pytest.approx(805e-9), "steps": 1, "parsed": True}
    assert all(isinstance(one, int | float) and math.isfinite(one) for one in trajectory["metrics"].values())
    assert all(one is None or isinstance(one, str | int) for one in trajectory["metadata"].values())
    assert (trajectory["metadata"]["index"], trajectory["metadata"]["group"]) == (3, "g1")


def test_verdicts_go_with_a_row_in_every_shape() -> None:
    missed, rejected = a_verdict(), a_verdict("verify", step=2, checker="check")
    row = a_row(verdicts=(missed, a_verdict(accept=True, repaired=True), missed, rejected))
    counts = {"missed": 2, "repaired": 1, "rejected": 1}
    assert counts.items() <= verl(0, row, 0.0)["extra_info"].items()
    assert counts.items() <= art(0, row, 0.0)["metrics"].items()
    told = json.loads(json.dumps(conversation(0, row, 0.0)))["verdicts"]
    assert told[0] == {"rollout_id": "r1", "round": 1, "step": 0, "by": "contract", "accept": False, "repaired": False,
                       "checker": None}  # fmt: skip
    assert (len(told), told[3]["by"], told[3]["checker"]) == (4, "verify", "check")
    assert conversation(0, a_row(), 0.0)["verdicts"] is None
    assert verl(0, a_row(), 0.0)["extra_info"]["missed"] is None
    assert "missed" not in art(0, a_row(), 0.0)["metrics"]


def test_a_file_of_an_older_release_is_read_without_verdicts(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="the train extra is not installed")
    row, checked = a_row(), a_row(verdicts=(a_verdict(), a_verdict("verify", None, checker="check")))
    path, old = tmp_path / "rows.parquet", tmp_path / "old.parquet"
    with path.open("wb") as file:
        records = map(parquet.row_record, (checked, a_row(verdicts=())))
        parquet.write(file, parquet.row_schema(), records, {"shape": "parquet"})
    assert [one.verdicts for one in parquet.read(path)] == [checked.verdicts, ()]
    table = pq.read_table(path).drop_columns(["verdicts"])
    named = {"baton.traces.version": "3", "baton.traces.shape": "parquet"}
    pq.write_table(table.replace_schema_metadata(named), old)
    assert [(one.call, one.verdicts, one.steps) for one in parquet.read(old)] == [(row.call, None, row.steps)] * 2


def test_conversations_end_with_the_plan() -> None:
    told = [{"role": "user", "content": "plan this"}, {"role": "assistant", "content": '{"steps":[]}'}]
    assert lesson(a_row()) == {"messages": told}
    shaped = conversation(2, a_row(), 0.75)
    assert (shaped["messages"], shaped["index"], shaped["reward"], shaped["outcome"]) == (told, 2, 0.75, 1.0)


def test_pairs_are_the_best_and_the_worst_plan_for_the_very_same_prompt() -> None:
    paid = [(a_row(plan_text=text, rollout_id=text), reward) for text, reward in (("2", 0.5), ("3", 0.0), ("1", 1.0))]
    alone = (a_row(messages=[{"role": "user", "content": "another"}]), 1.0)
    (pair,) = preferences([*paid, alone])
    assert pair["prompt"] == [{"role": "user", "content": "plan this"}]
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("1", "3")
    assert (pair["margin"], pair["rollouts"]) == (1.0, ["1", "3"])
    assert list(preferences([(a_row(), 0.5), (a_row(), 0.5)])) == []
