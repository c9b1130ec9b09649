"""Small recordings, and plan texts, for the tests of the environments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policy.environments.base import Prompt
from policy.environments.replay import ReplayEnvironment

RECORDED = Path(__file__).resolve().parents[3] / ("shar" + "ed") / "replay"
ABSENT = "the recorded answers of real models are not beside the repository"
PRICES = {
    "cheap": {"input_usd_per_mtok": "0.1", "output_usd_per_mtok": "0.4"},
    "mid": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "4"},
    "dear": {"input_usd_per_mtok": "10", "output_usd_per_mtok": "40"},
}
SUMS, WORDS = "sums", "words"


def answer(text: str, correct: bool | None, tokens: int = 100) -> dict[str, Any]:
    return {"output": f"Well.\nAnswer: {text}", "output_tokens": tokens, "correct": correct}


def line(index: int, domain: str, said: dict[str, str], gold: str) -> dict[str, Any]:
    question = {SUMS: f"What is {index} + {index}?", WORDS: f"Spell the {index}. colour of the rainbow, please."}[
        domain
    ]
    workers = {model: answer(text, text == gold) for model, text in said.items()}
    return {"id": f"{domain}-{index}", "domain": domain, "question": question, "gold": gold, "input_tokens": 50,
            "workers": workers}  # fmt: skip


def lines(n: int = 40) -> list[dict[str, Any]]:
    """Sums: `cheap` and `mid` are both right on even ones and differ on odd ones, where only `dear` is right.
    Words: `mid` alone is right."""
    sums = [
        line(i, SUMS, {"cheap": "7" if i % 2 else str(2 * i), "mid": "8" if i % 2 else str(2 * i), "dear": str(2 * i)},
             str(2 * i))
        for i in range(10, 10 + n)
    ]  # fmt: skip
    words = [line(i, WORDS, {"cheap": "x", "mid": f"word{i}", "dear": "y"}, f"word{i}") for i in range(10, 10 + n)]
    return [*sums, *words]


def recorded(path: Path, rows: Sequence[dict[str, Any]], **more: Any) -> ReplayEnvironment:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ReplayEnvironment.open(path, PRICES, **more)


def handle(prompt: Prompt, name: str) -> str:
    return next(spec.handle for spec in prompt.pool if spec.name == name)


def text(prompt: Prompt, *steps: tuple[str, str | None, list[int] | str]) -> str:
    """Plan text from (worker name, task, see)."""
    found = [{"worker": handle(prompt, name), "task": task, "see": see} for name, task, see in steps]
    return json.dumps({"steps": found}, separators=(",", ":"))
