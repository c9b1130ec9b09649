"""What verl runs where it would sample: an agent loop that hands out the plans that were sampled when they were served,
and a rollout without a server, since nothing is ever asked of one.

The only file that imports verl. Every process of a run imports it first (`VERL_USE_EXTERNAL_MODULES` in `run.sh`): that
puts the rollout `logged` beside verl's `vllm` and `sglang`. The agent loop is made by the name in `agent_loop.yaml`.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout import base, replica

from policy.train.engines.verl_run import ROLLOUT


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


class LoggedRollout(base.BaseRollout):  # type: ignore[misc]
    """The worker's side: there is no server to wake, to send weights to, or to put to sleep. No process gathers the
    weights for it, since nobody reads the generator that would."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any) -> None:
        """Nothing samples with them."""

    async def release(self) -> None:
        """Nothing is held."""


class LoggedReplica(replica.RolloutReplica):  # type: ignore[misc]
    """The trainer's side: a replica without servers."""

    async def launch_servers(self) -> None:
        """An address for the load balancer's table, behind which there is nothing."""
        self._server_address = f"none:{self.replica_rank}"


base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = f"{__name__}.{LoggedRollout.__name__}"
replica.RolloutReplicaRegistry.register(ROLLOUT, lambda: LoggedReplica)
