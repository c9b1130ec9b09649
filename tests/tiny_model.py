"""A random Qwen2 of a few hundred thousand weights with a real byte-level tokenizer: built in a second, without torch.

Its plans are nonsense that follows the schema, which is all that the runtime's tests need. vLLM serves it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.core.policies.manifest import Manifest
from policy.serve.graph import write_graph
from policy.serve.manifest import write_manifest
from policy.serve.shape import Shape

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
QUOTE_SCALE = 4.0  # random weights that end their strings at times, so that some of their plans run
CORPUS = [
    '{"steps": [{"worker": "quill", "task": null, "see": []}, {"worker": "atlas", "task": "Check it.", "see": [0]}]}',
    "Plan for this request. Workers: atlas, quill, forge. Each is good for something: sums, dates, tables, lists.",
    "What is the total of the numbers in the table, and how many days lie between the two dates?",
] * 4


def write_tiny_model(directory: Path, *, heads: int = 4, heads_kv: int = 2, layers: int = 2, seed: int = 0) -> Path:
    """Write a servable model directory, manifest included; head size 32, which vLLM's CPU kernels accept."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(_write_tokenizer(directory), heads, heads_kv, layers)
    (directory / "config.json").write_text(json.dumps(config))
    weights = _random_weights(config, seed)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_graph(directory)
    params = sum(w.size for w in weights.values())
    prompt, digest = f"compact-{PROMPT_VERSION}", prompt_hash("compact")  # else a gateway would refuse it
    about = Manifest("tiny", "0", prompt, digest, seed, "random", "tests/tiny_model.py", "2026-01-01", params)
    write_manifest(directory, about)
    return directory


def write_tiny_llama(directory: Path, *, seed: int = 0) -> Path:
    """Write what a model hub gives: a Llama with tied embeddings and a context for the full prompt, no manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(_write_tokenizer(directory), 2, 1, 2) | LLAMA
    (directory / "config.json").write_text(json.dumps(config))
    weights = _random_weights(config, seed)
    quotes = [token for text, token in _words(directory).items() if text.startswith('"')]
    weights["model.embed_tokens.weight"][quotes] *= QUOTE_SCALE
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _words(directory: Path) -> dict[str, int]:
    return dict(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        name: (
            np.ones(dims) if name.endswith("norm.weight") else random.normal(0, 1 if "embed" in name else 0.1, dims)
        ).astype(np.float32)
        for name, dims in Shape.from_config(config).tensors()
    }


def _config(vocab: int, heads: int, heads_kv: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 32 * heads,
        "intermediate_size": 64 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _write_tokenizer(directory: Path) -> int:
    """A byte-level BPE tokenizer with Qwen's chat tokens; returns its vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())
