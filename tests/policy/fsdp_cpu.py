"""accelerate's FSDP2 on processors: run as `policy` is run, under `accelerate launch` with two CPU processes.

accelerate shards for accelerators alone: processes on a CPU stay MULTI_CPU, which is DDP. Here they count as FSDP, so
that what wraps, shards, gathers and saves over gloo is torch's and accelerate's own code. Each process ends with a line
on standard error: how many parameters it held in shards.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from policy.__main__ import main
from policy.train.engines.trl_trainer import LoggedGRPOTrainer

_init = AcceleratorState.__init__
_train = LoggedGRPOTrainer.train


def _sharded(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
    first = not AcceleratorState._shared_state
    _init(self, *given, fsdp_plugin=fsdp_plugin, **named)
    if first and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _counted(self: Any, *given: Any, **named: Any) -> Any:
    result = _train(self, *given, **named)
    shards = [isinstance(one, DTensor) and one.to_local().numel() < one.numel() for one in self.model.parameters()]
    sys.stderr.write(f"shards: {sum(shards)} of {len(shards)} parameters\n")
    return result


if __name__ == "__main__":
    AcceleratorState.__init__ = _sharded
    LoggedGRPOTrainer.train = _counted
    sys.exit(main(sys.argv[1:]))
