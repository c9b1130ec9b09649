"""The agent loop that verl runs where it would sample: it hands out the plan that was sampled when it was served.

Imported by verl's own workers, by the name that `agent_loop.yaml` gives; the only file that imports verl.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class LoggedAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """One row of `rows.parquet` in, the trajectory it holds out. The inference server is never asked."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """The logged trajectory, its advantage as the score (see `policy.train.engines.verl_run`). Raises ValueError
        on a row longer than the configuration has room for: cut tokens would train on something nobody sampled."""
        logged = kwargs["extra_info"]["logged"]
        room = self.rollout_config
        if len(logged["prompt_ids"]) > room.prompt_length or len(logged["response_ids"]) > room.response_length:
            raise ValueError(
                f"row {kwargs['extra_info']['name']} is longer than data.max_prompt_length or max_response_length"
            )
        step = kwargs.get("global_steps")
        return AgentLoopOutput(
            prompt_ids=list(logged["prompt_ids"]),
            response_ids=list(logged["response_ids"]),
            response_mask=list(logged["response_mask"]),
            response_logprobs=list(logged["logprobs"]),
            reward_score=float(logged["advantage"]),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {"logged_reward": float(logged["reward"])},
                "min_global_steps": step,
                "max_global_steps": step,
            },
        )
