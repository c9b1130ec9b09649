"""The weights that training begins with, as a function of the spec: a policy directory, read, checked and prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import SealedPolicy, file_sha256, read_object
from gateway.core.loop.prompt import PROMPT_VERSION, Profile, prompt_hash
from gateway.core.policies.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    check_prompt,
    weights_digest,
)
from gateway.errors import ConfigError
from policy.serve.lora import base_of, read_config, read_pairs
from policy.serve.manifest import read_complete
from policy.serve.shape import Shape, load_shape
from policy.serve.tokens import Tokens
from policy.train.settings import Settings
from policy.train.spec import TrainSpec
from policy.train.weights.large import LargeWeights
from policy.train.weights.lora import adapt, load_adapter
from policy.train.weights.small import SmallWeights, Weights

SMALL_BYTES_MAX = 200 << 20  # of model.safetensors: up to here plain torch is quicker


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter that is trained: scale = alpha ÷ rank, on the linear layers named in `targets`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Initial:
    """The weights, and all that belongs to them. `home`: where config, tokenizer and full weights lie. `sealed`: a
    policy directory of ours, with a manifest of its own. `base`: of an adapter, the policy that it changes."""

    directory: Path
    manifest: Manifest
    profile: Profile
    weights: Weights
    tokens: Tokens
    sealed: bool
    home: Path
    lora: Lora | None = None
    base: SealedPolicy | None = None

    @property
    def version(self) -> str:
        """As the registry names it."""
        return self.manifest.id

    @property
    def lineage(self) -> Mapping[str, Any]:
        """The manifest's fields of an adapter that is trained from here: which weights it changes."""
        if self.base is not None:
            source, manifest = self.base.directory, self.base.manifest
        else:
            source, manifest = self.directory, self.manifest
        digest = manifest.weights_sha256 or weights_digest(
            {path.name: file_sha256(path) for path in self.home.glob("*.safetensors")}
        )
        return {"base": manifest.id, "base_sha256": digest, "base_source": str(source.resolve())}


def initial_weights(spec: TrainSpec) -> Initial:
    """What training begins with. Raises ConfigError without a directory, VersionRefused for a bad one."""
    if spec.init is None:
        raise ConfigError(f"--init DIR: which policy directory should --env {spec.env} begin with?")
    policy = read_complete(spec.init) if (spec.init / MANIFEST_FILE).is_file() else None
    manifest = policy.manifest if policy else _unsealed(spec.init)
    base = base_of(policy, ()) if policy and manifest.kind == "adapter" else None
    home = (base or policy).files if policy else spec.init
    profile = check_prompt(manifest, spec.init)
    config = read_object(home / CONFIG_FILE)
    small = _small(spec, home, config)
    shape = load_shape(home) if small else _shape(config)
    weights = _loaded(spec, home, shape, small=small)
    lora = _adapted(spec, weights, policy if base else None)
    return Initial(spec.init, manifest, profile, weights, Tokens(home, shape), policy is not None, home, lora, base)


def _adapted(spec: TrainSpec, weights: Weights, adapter: SealedPolicy | None) -> Lora | None:
    """Put the adapter on that is trained: the given one's, or a new one that changes nothing yet. Raises ConfigError
    for a rank that is not the given one's."""
    settings = spec.settings
    if adapter is None:
        if not settings.lora_rank:
            return None
        lora = Lora(settings.lora_rank, settings.lora_alpha, settings.lora_targets)
    else:
        rank, scale = read_config(adapter.directory)
        if settings.lora_rank not in (0, rank):
            raise ConfigError(f"--set lora_rank={settings.lora_rank}: {adapter.directory} goes on at its rank, {rank}")
        pairs = read_pairs(adapter.directory)
        lora = Lora(rank, scale * rank, tuple(sorted({module.rpartition(".")[2] for module in pairs})))
    adapt(weights.model, lora.rank, lora.alpha, lora.targets, settings.seed)
    if adapter is not None:
        load_adapter(weights.model, pairs)
    return lora


def _loaded(spec: TrainSpec, home: Path, shape: Shape, *, small: bool) -> Weights:
    settings: Settings = spec.settings
    if small:
        return SmallWeights.load(home, shape, settings.device)
    return LargeWeights.load(home, shape.context, settings.dtype, settings.device)


def _small(spec: TrainSpec, home: Path, config: Mapping[str, Any]) -> bool:
    """Whether plain torch trains it."""
    if spec.settings.engine != "auto":
        return spec.settings.engine == "small"
    path = home / WEIGHTS_FILE
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
