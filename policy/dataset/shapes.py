"""Rows in the shapes of other trainers. The reward is the one of our own training (`rules.reward_of`); the outcome and
the dollars stand beside it, untouched.

verl: https://verl.readthedocs.io/en/latest/preparation/prepare_data.html, and the tensors of its `DataProto`
(`verl/trainer/ppo/ray_trainer.py`). `uid` is the group of equal questions; the reward belongs on the last response
token (`token_level_scores`). ART: `art.Trajectory` (https://art.openpipe.ai, src/art/trajectories.py): messages, then
an OpenAI `Choice` with log-probs and vLLM's token ids, which ART takes as they are instead of tokenising anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from gateway.core.pool.workers import NANO_PER_USD
from policy.dataset.row import Row
from policy.reward import Faults, faults_of


def verl(index: int, row: Row, reward: float) -> dict[str, Any]:
    """A row of verl's data set with what was sampled. `reward_model.ground_truth` is the request's own reference
    (metadata `reference`), empty where it named none: then only the logged reward is there."""
    return {
        "data_source": f"baton/{row.pool_name}",
        "prompt": [{"role": one.get("role"), "content": one.get("content")} for one in row.messages],
        "ability": row.task_type or "general",
        "reward_model": {"style": "rule", "ground_truth": row.tags.get("reference", "")},
        "extra_info": {
            "index": index,
            **{name: getattr(row, name) for name in ("split", "group", "rollout_id", "round", "key_id")},
            **{
                name: getattr(row, name)
                for name in ("policy_version", "prompt_hash", "schema_hash", "outcome", "parsed")
            },
            "cost_usd": row.cost_nano / NANO_PER_USD,
            "latency_s": _seconds(row),
            **_faults(row),
        },
        "uid": row.group,
        "prompts": row.prompt_token_ids,
        "responses": row.plan_token_ids,
        "response_mask": [1] * len(row.plan_token_ids),
        "decision_mask": [int(one) for one in row.decision_mask],
        "rollout_log_probs": row.plan_logprobs,
        "reward": reward,
    }


def art(index: int, row: Row, reward: float) -> dict[str, Any]:
    """One `art.Trajectory`: the prompt and the sampled plan. Metrics and metadata are scalars, as ART wants them;
    trajectories with the same `metadata.group` answer the same question and belong in one `TrajectoryGroup`."""
    tokens: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(row.plan_token_ids, row.plan_logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": row.plan_text or ""},
        "logprobs": {"content": tokens, "refusal": None},
        "prompt_token_ids": list(row.prompt_token_ids),
        "token_ids": list(row.plan_token_ids),
    }
    metrics = {
        "outcome": row.outcome,
        "cost_usd": row.cost_nano / NANO_PER_USD,
        "latency_s": _seconds(row),
        "steps": len(row.steps),
        "parsed": row.parsed,
        **_faults(row),
    }
    columns = (
        "split",
        "group",
        "rollout_id",
        "root_id",
        "round",
        "policy_version",
        "prompt_hash",
        "pool_name",
        "task_type",
    )
    return {
        "messages_and_choices": [*row.messages, choice],
        "tools": None,
        "additional_histories": [],
        "reward": reward,
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "metadata": {"index": index, **{name: getattr(row, name) for name in columns}},
        "logs": [],
    }


def conversation(index: int, row: Row, reward: float) -> dict[str, Any]:
    """The prompt with the plan as the assistant's turn, and what came of it: a row for Hugging Face's `datasets`."""
    names = ("split", "group", "rollout_id", "round", "policy_version", "pool_name", "task_type", "outcome", "parsed")
    about = {name: getattr(row, name) for name in names}
    verdicts = None if row.verdicts is None else [asdict(one) for one in row.verdicts]
    return {"messages": [*_prompt(row), _plan(row)], "index": index, "reward": reward, **about, "verdicts": verdicts}


def lesson(row: Row) -> dict[str, Any]:
    """A conversation to imitate: TRL's conversational format for SFT."""
    return {"messages": [*_prompt(row), _plan(row)]}


def preferences(paid: Iterable[tuple[Row, float]]) -> Iterator[dict[str, Any]]:
    """TRL's conversational format for DPO: of all plans for the very same prompt the best and the worst, where their
    rewards differ. Holds two rows a prompt in memory."""
    ends: dict[str, tuple[tuple[Row, float], tuple[Row, float]]] = {}
    for one in paid:
        prompt = json.dumps(_prompt(one[0]), sort_keys=True)
        best, worst = ends.get(prompt, (one, one))
        ends[prompt] = max(best, one, key=_reward), min(worst, one, key=_reward)
    for (chosen, most), (rejected, least) in ends.values():
        if most > least:
            metadata = {"rollouts": [chosen.rollout_id, rejected.rollout_id], "margin": most - least}
            yield {"prompt": _prompt(chosen), "chosen": [_plan(chosen)], "rejected": [_plan(rejected)], **metadata}


def _reward(paid: tuple[Row, float]) -> float:
    return paid[1]


def _prompt(row: Row) -> list[dict[str, Any]]:
    return [{"role": one.get("role"), "content": one.get("content")} for one in row.messages]


def _plan(row: Row) -> dict[str, Any]:
    """What the planner wrote; the plan alone where it wrote more than JSON, as hosted models do."""
    text = row.plan_text or ""
    try:
        json.loads(text)
    except ValueError:
        text = text if row.plan is None else json.dumps(row.plan, separators=(",", ":"), ensure_ascii=False)
    return {"role": "assistant", "content": text}


def _faults(row: Row) -> dict[str, int | None]:
    """Contracts of the request that were missed, and repaired, and rejected candidates; None where it is not known."""
    return dict.fromkeys(Faults.__slots__) if row.verdicts is None else asdict(faults_of(row.verdicts))


def _seconds(row: Row) -> float | None:
    return None if row.latency_ms is None else row.latency_ms / 1000
