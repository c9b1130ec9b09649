"""AdamW whose steps are taken in float32, whatever type the weights run in.

bfloat16 has 8 bits of precision: a step of less than a 256th of a weight is rounded away, and a learning rate of 1e-6
does nothing at all. So weights of another type are copies, rounded after each step, of weights in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """`AdamW` with float32 copies of the weights that are not float32, four bytes each."""

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        given = list(parameters)
        masters = [one if one.dtype == torch.float32 else nn.Parameter(one.detach().float()) for one in given]
        self._copied = [(one, master) for one, master in zip(given, masters, strict=True) if one is not master]
        super().__init__(masters, **settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the weights too, where the gradients arrive."""
        super().zero_grad(set_to_none)
        for one, _ in self._copied:
            one.grad = None

    def step(self, closure: None = None) -> None:
        """One step, and the weights rounded from it."""
        for one, master in self._copied:
            master.grad = None if one.grad is None else one.grad.float()
        super().step(closure)
        with torch.no_grad():
            for one, master in self._copied:
                one.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """As AdamW, and the copies."""
        return {**super().state_dict(), "masters": [master.detach() for _, master in self._copied]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As AdamW, and the copies; the weights themselves are not set."""
        masters: list[Tensor] = state_dict.get("masters", [])  # none of them in a checkpoint of before
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "masters"})
        with torch.no_grad():
            for (_, master), stored in zip(self._copied, masters, strict=True):
                master.copy_(stored)
