"""The weights that training begins with, as a function of the spec: a policy directory, read, checked and prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import read_object
from gateway.core.loop.prompt import PROMPT_VERSION, Profile, prompt_hash
from gateway.core.policies.manifest import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, Manifest, check_prompt
from gateway.errors import ConfigError
from policy.serve.manifest import read_complete
from policy.serve.shape import Shape, load_shape
from policy.serve.tokens import Tokens
from policy.train.settings import Settings
from policy.train.spec import TrainSpec
from policy.train.weights.large import LargeWeights
from policy.train.weights.lora import adapt
from policy.train.weights.small import SmallWeights, Weights

SMALL_BYTES_MAX = 200 << 20  # of model.safetensors: up to here plain torch is quicker


@dataclass(frozen=True, slots=True)
class Initial:
    """The weights, and all that belongs to them. `sealed`: a policy directory of ours, with a manifest of its own."""

    directory: Path
    manifest: Manifest
    profile: Profile
    weights: Weights
    tokens: Tokens
    sealed: bool

    @property
    def version(self) -> str:
        """As the registry names it."""
        return self.manifest.id


def initial_weights(spec: TrainSpec) -> Initial:
    """What training begins with. Raises ConfigError without a directory, VersionRefused for a bad one."""
    if spec.init is None:
        raise ConfigError(f"--init DIR: which policy directory should --env {spec.env} begin with?")
    sealed = (spec.init / MANIFEST_FILE).is_file()
    config = read_object(spec.init / CONFIG_FILE)
    small = _small(spec, config)
    shape = load_shape(spec.init) if small else _shape(config)
    manifest = read_complete(spec.init).manifest if sealed else _unsealed(spec.init)
    profile = check_prompt(manifest, spec.init)
    tokens = Tokens(spec.init, shape)
    weights = _loaded(spec, shape, small=small)
    settings = spec.settings
    if settings.lora_rank:
        adapt(weights.model, settings.lora_rank, settings.lora_alpha, settings.lora_targets, settings.seed)
    return Initial(spec.init, manifest, profile, weights, tokens, sealed)


def _loaded(spec: TrainSpec, shape: Shape, *, small: bool) -> Weights:
    settings: Settings = spec.settings
    directory = spec.init or Path()
    if small:
        return SmallWeights.load(directory, shape, settings.device)
    return LargeWeights.load(directory, shape.context, settings.dtype, settings.device)


def _small(spec: TrainSpec, config: Mapping[str, Any]) -> bool:
    """Whether plain torch trains it."""
    if spec.settings.engine != "auto":
        return spec.settings.engine == "small"
    path = (spec.init or Path()) / WEIGHTS_FILE
    untied = config.get("model_type") == "qwen2" and not config.get("tie_word_embeddings", False)
    return untied and path.is_file() and path.stat().st_size <= SMALL_BYTES_MAX


def _shape(config: Mapping[str, Any]) -> Shape:
    """Of any decoder: only its vocabulary, context and ends are used, and those have the same names everywhere."""
    plain = {"rms_norm_eps": 1e-6, **config, "model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}
    return Shape.from_config({**plain, "rope_scaling": None, "rope_parameters": None, "num_key_value_heads": 1})


def _unsealed(directory: Path) -> Manifest:
    """Of a model from elsewhere, an instruct model for instance: it reads the `full` prompt, as it would read any."""
    return Manifest(
        name="conductor",
        version="0",
        prompt_version=f"full-{PROMPT_VERSION}",
        prompt_hash=prompt_hash("full"),
        seed=0,
        data="",
        command="",
        created="",
        params=0,
        parent=directory.name,
    )
