"""`python -m policy.start.synthetic --out DIR`: train the small conductor from nothing and export it as a policy
directory.

Every number of `TrainConfig` and `ModelConfig` is a flag (`--steps 3000 --lr 0.001`). The same flags on the same
torch build give the same weights. `--resume` goes on where a killed run was and ends as it would have ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from policy.start.synthetic.config import ModelConfig, TrainConfig
from policy.start.synthetic.export import About, export
from policy.start.synthetic.samples import make_sample
from policy.start.synthetic.tokenizer import prompt_text, train_tokenizer

DEFAULTS = {
    name: value
    for name, value in (asdict(TrainConfig()) | asdict(ModelConfig())).items()
    if not isinstance(value, tuple)
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m policy.start.synthetic", description="Train and export a conductor."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="policy directory to write")
    parser.add_argument("--work", type=Path, metavar="DIR", help="checkpoints; default: DIR.work, beside --out")
    parser.add_argument("--name", default="arena")
    parser.add_argument("--version", default="1")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --work")
    for name, value in DEFAULTS.items():
        parser.add_argument(_flag(name), type=type(value), default=value, metavar="N", help=f"default {value}")
    return parser.parse_args(arguments)


def tokenizer_for(config: TrainConfig, path: Path, resume: bool) -> Tokenizer:
    """Trained on rendered samples, kept beside the checkpoints."""
    if resume:
        return Tokenizer.from_file(str(path))
    samples = (make_sample(config.seed, index) for index in range(config.tokenizer_samples))
    tokenizer = train_tokenizer((text for s in samples for text in (prompt_text(s.prompt), s.label)), config.vocab)
    tokenizer.save(str(path))
    return tokenizer


def main(arguments: Sequence[str]) -> int:
    """Train, export; 0."""
    options = parse(arguments)
    from policy.start.synthetic.sft import train  # here, so that neither --help nor the drawing process loads torch

    shape = ModelConfig(**_given(options, ModelConfig))
    config = TrainConfig(**_given(options, TrainConfig))
    work: Path = options.work or options.out.with_name(options.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(config, work / "tokenizer.json", options.resume)
    model = train(tokenizer, shape, config, work, options.resume)
    about = About(
        name=options.name,
        version=options.version,
        seed=config.seed,
        data=f"{config.steps * config.batch} lessons of policy.start.synthetic.feed: drills, then plans of arena tasks "
        "(split train)",
        command=command(options),
        pools=("arena",),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    export(options.out, {name: p.numpy() for name, p in model.state_dict().items()}, tokenizer, shape, about)
    sys.stdout.write(f"wrote {options.out}\n")
    return 0


def command(options: argparse.Namespace) -> str:
    """What rebuilds these weights: the flags that differ from their defaults, and always steps and seed."""
    names = [name for name in DEFAULTS if name in ("steps", "seed") or getattr(options, name) != DEFAULTS[name]]
    flags = [f"--name {options.name}", f"--version {options.version}"]
    flags += [f"{_flag(name)} {getattr(options, name)}" for name in names]
    return " ".join(["python -m policy.start.synthetic --out DIR", *flags])


def _given(options: argparse.Namespace, kind: type[ModelConfig] | type[TrainConfig]) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(kind) if field.name in DEFAULTS}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
