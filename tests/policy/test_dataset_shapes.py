"""Rows as verl and ART want them."""

from __future__ import annotations

import json
import math

import pytest
from openai.types.chat.chat_completion import Choice

from policy.dataset.shapes import art, verl
from tests.policy.dataset_rows import a_row


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
