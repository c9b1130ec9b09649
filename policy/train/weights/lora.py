"""Low-rank adapters (LoRA, arXiv:2106.09685) on any model's linear layers, written as PEFT writes them.

vLLM and policy.serve load the files; no PEFT is needed to make them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gateway.errors import ConfigError
from policy.serve.shape import Array
from policy.tensors import file_errors

PEFT_PREFIX = "base_model.model."


class LoraLinear(nn.Module):  # type: ignore[misc]
    """A frozen linear layer plus (alpha ÷ rank)·B·A. B begins at zero, so at first nothing is changed."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        down = torch.randn((rank, base.in_features), generator=generator) * base.in_features**-0.5
        self.lora_A = nn.Parameter(down.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros((base.out_features, rank), device=base.weight.device))

    @property
    def weight(self) -> Tensor:
        """Of the base: what asks for a layer's device or type asks for its weight."""
        return cast(Tensor, self.base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]. The adapter is kept in float32 and added in the base's type."""
        low = (x.to(self.lora_A.dtype) @ self.lora_A.T) @ self.lora_B.T
        return cast(Tensor, self.base(x) + (self.scale * low).to(x.dtype))

    def merged(self) -> Tensor:
        """The weight that does the same alone."""
        added = self.scale * (self.lora_B @ self.lora_A)
        return cast(Tensor, (self.base.weight.float() + added).to(self.base.weight.dtype))


def adapt(model: nn.Module, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Freeze the model and put adapters on its linear layers named in `targets`. Raises ConfigError for no layer."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if name in targets and isinstance(child, nn.Linear)
    ]
    if not found:
        raise ConfigError(f"lora_targets: no linear layer is named {', '.join(targets)}")
    for parent, name, child in found:
        setattr(parent, name, LoraLinear(child, rank, alpha, generator))


def load_adapter(model: nn.Module, pairs: Mapping[str, Mapping[str, Array]]) -> None:
    """Set the adapters that `adapt` made to those of a policy directory. `pairs`: module → A and B. Raises ConfigError
    where the two are not of the same layers."""
    layers = dict(_layers(model))
    if differ := sorted(set(layers) ^ set(pairs)):
        raise ConfigError(f"the adapter and the model differ in {len(differ)} layers ({differ[0]}, …)")
    for name, layer in layers.items():
        with torch.no_grad():
            layer.lora_A.copy_(torch.from_numpy(pairs[name]["A"]))
            layer.lora_B.copy_(torch.from_numpy(pairs[name]["B"]))


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by the names it had before `adapt`, adapters added in."""
    merged = {f"{name}.weight": layer.merged() for name, layer in _layers(model)}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not name.endswith((".lora_A", ".lora_B")):
            plain = name.replace(".base.", ".")
            state[plain] = merged.get(plain, value)
    return {name: value.detach() for name, value in state.items()}


def save_adapter(directory: Path, model: nn.Module, base: str, alpha: float) -> int:
    """Write `adapter_config.json` and `adapter_model.safetensors`; how many numbers the adapter has."""
    tensors: dict[str, Tensor] = {}
    for name, layer in _layers(model):
        for part in ("lora_A", "lora_B"):
            tensors[f"{PEFT_PREFIX}{name}.{part}.weight"] = getattr(layer, part).detach().float().cpu().contiguous()
    rank = next(value.shape[0] for name, value in tensors.items() if ".lora_A." in name)
    targets = sorted({name.rpartition(".")[2] for name, _ in _layers(model)})
    with file_errors():
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.dumps(_config(base, rank, alpha, targets), indent=2, sort_keys=True)
    (directory / "adapter_config.json").write_text(config + "\n")
    return sum(value.numel() for value in tensors.values())


def _config(base: str, rank: int, alpha: float, targets: Sequence[str]) -> Mapping[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _layers(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLinear)]
