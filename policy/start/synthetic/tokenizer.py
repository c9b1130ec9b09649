"""The conductor's own tokenizer: byte-level BPE whose pieces are cut so that what a plan turns on is one token each.

A handle reads the same in the pool (at the start of a line) and in a plan (after a quote). Price tiers, `right0` to
`right10` and the fixed stretches of a plan are single tokens; digits stand alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from policy.start.synthetic.config import ModelConfig

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAN_PIECES = (
    r'\{"steps":\[\{"worker":"',
    r'","task":null,"see":\[',
    r'","task":"',
    r'","see":\[',
    r'\]\},\{"worker":"',
    r"\]\}\]\}",
    r'\{"steps":\[\]\}',
)
PIECES = "|".join(
    (*PLAN_PIECES, r" right(?:10|[0-9])(?![0-9])", r"'[a-z]+", r" ?\p{L}+", r" ?\p{N}", r" ?[^\s\p{L}\p{N}]+", r"\s")
)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A tokenizer of at most `vocab` tokens, the three chat tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prompt_text(content: str) -> str:
    """The chat template's rendering of one user message, ready to be answered."""
    return f"{START}user\n{content}{END}\n{START}assistant\n"


def write_tokenizer(tokenizer: Tokenizer, directory: Path, model: ModelConfig) -> None:
    """`tokenizer.json` and `tokenizer_config.json`. policy.serve reads them as they are. AutoTokenizer of transformers
    5 puts Qwen2's own splitting in place of ours where a qwen2 `config.json` lies beside them (docs/conductor.md)."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
