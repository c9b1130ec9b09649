"""The weights that training begins with, as a function of the spec: a policy directory, read, checked and prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import read_object
from gateway.core.loop.prompt import Profile
from gateway.core.policies.manifest import CONFIG_FILE, WEIGHTS_FILE, check_prompt
from gateway.errors import ConfigError
from policy.serve.lora import read_config, read_pairs
from policy.serve.shape import Shape, load_shape, tokens_shape
from policy.serve.tokens import Tokens
from policy.train.settings import Settings
from policy.train.spec import TrainSpec
from policy.train.weights.large import LargeWeights
from policy.train.weights.lora import adapt, load_adapter
from policy.train.weights.small import SmallWeights, Weights
from policy.train.weights.start import StartDirectory, open_start

SMALL_BYTES_MAX = 200 << 20  # of model.safetensors: up to here plain torch is quicker


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter that is trained: scale = alpha ÷ rank, on the linear layers named in `targets`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Initial(StartDirectory):
    """The weights, and all that belongs to them."""

    profile: Profile
    weights: Weights
    tokens: Tokens
    lora: Lora | None = None


def initial_weights(spec: TrainSpec) -> Initial:
    """What training begins with. Raises ConfigError without a directory, VersionRefused for a bad one."""
    if spec.init is None:
        raise ConfigError(f"--init DIR: which policy directory should --env {spec.env} begin with?")
    start = open_start(spec.init)
    home, profile = start.home, check_prompt(start.manifest, spec.init)
    config = read_object(home / CONFIG_FILE)
    small = _small(spec, home, config)
    shape = load_shape(home) if small else tokens_shape(config)
    tokens = Tokens(home, shape)  # refused before the weights are read, which takes long
    weights = _loaded(spec, home, shape, small=small)
    lora = _adapted(spec, weights, start)
    parts = (profile, weights, tokens, lora)
    return Initial(start.directory, start.manifest, home, start.sealed, start.base, *parts)


def _adapted(spec: TrainSpec, weights: Weights, start: StartDirectory) -> Lora | None:
    """Put the adapter on that is trained: the given one's, or a new one that changes nothing yet. Raises ConfigError
    for a rank that is not the given one's."""
    settings = spec.settings
    rank = start.rank(settings.lora_rank)
    if start.base is None:
        if not rank:
            return None
        lora = Lora(rank, settings.lora_alpha, settings.lora_targets)
    else:
        pairs, scale = read_pairs(start.directory), read_config(start.directory)[1]
        lora = Lora(rank, scale * rank, tuple(sorted({module.rpartition(".")[2] for module in pairs})))
    adapt(weights.model, lora.rank, lora.alpha, lora.targets, settings.seed)
    if start.base is not None:
        load_adapter(weights.model, pairs)
    return lora


def _loaded(spec: TrainSpec, home: Path, shape: Shape, *, small: bool) -> Weights:
    settings: Settings = spec.settings
    if small:
        return SmallWeights.load(home, shape, settings.device)
    recompute = settings.recompute is not False
    return LargeWeights.load(home, shape.context, settings.dtype, settings.device, recompute=recompute)


def _small(spec: TrainSpec, home: Path, config: Mapping[str, Any]) -> bool:
    """Whether plain torch trains it."""
    if spec.settings.engine != "auto":
        return spec.settings.engine == "small"
    path = home / WEIGHTS_FILE
    untied = config.get("model_type") == "qwen2" and not config.get("tie_word_embeddings", False)
    return untied and path.is_file() and path.stat().st_size <= SMALL_BYTES_MAX
