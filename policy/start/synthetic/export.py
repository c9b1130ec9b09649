"""A trained model as a policy directory: what policy.serve, vLLM and transformers load, sealed by a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from gateway.core.loop.prompt import PROMPT_VERSION, Profile, prompt_hash
from gateway.core.policies.manifest import Manifest
from policy.serve.graph import write_graph
from policy.serve.manifest import write_manifest
from policy.serve.shape import Array
from policy.start.synthetic.config import ModelConfig
from policy.start.synthetic.samples import PROFILE
from policy.start.synthetic.tokenizer import END_ID, PAD_ID, write_tokenizer
from policy.tensors import file_errors

GENERATION = {"do_sample": False, "eos_token_id": END_ID, "pad_token_id": PAD_ID}


@dataclass(frozen=True, slots=True)
class About:
    """What the manifest says beside hashes and sizes."""

    name: str
    version: str
    seed: int
    data: str
    command: str
    created: str  # ISO 8601, UTC
    profile: Profile = PROFILE
    rounds: int = 1
    quality: int | None = None
    parent: str = ""
    rollouts: int = 0
    pools: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


def hf_config(model: ModelConfig, vocab: int) -> dict[str, Any]:
    """`config.json` of a Qwen2ForCausalLM."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads_kv,
        "head_dim": model.head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": model.context,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }


def export(
    directory: Path, weights: Mapping[str, Array], tokenizer: Tokenizer, model: ModelConfig, about: About
) -> None:
    """Write every file of the policy directory; the manifest last, over what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    config = hf_config(model, tokenizer.get_vocab_size())
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION, sort_keys=True) + "\n")
    write_tokenizer(tokenizer, directory, model)
    tensors = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in weights.items()}
    with file_errors():
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_graph(directory)
    write_manifest(
        directory,
        Manifest(
            name=about.name,
            version=about.version,
            prompt_version=f"{about.profile}-{PROMPT_VERSION}",
            prompt_hash=prompt_hash(about.profile),
            seed=about.seed,
            data=about.data,
            command=about.command,
            created=about.created,
            pools=about.pools,
            params=sum(int(array.size) for array in tensors.values()),
            rounds=about.rounds,
            quality=about.quality,
            parent=about.parent,
            rollouts=about.rollouts,
            config=about.config,
        ),
    )
