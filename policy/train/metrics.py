"""The metrics of a step: `metrics.jsonl`, the progress file, and one line on the terminal. Names: docs/training.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from gateway.core.money.amounts import nano_to_usd
from gateway.core.pool.workers import NANO_PER_USD
from gateway.errors import Unavailable
from policy.environments.base import Episode
from policy.reward import is_right

Value = float | int | str | dict[str, float]
PROGRESS = ("step", "steps", "reward", "accuracy", "parse_rate", "usd_per_1k", "dead_share", "entropy", "spent_usd")


def of_episodes(episodes: Sequence[Episode], rewards: Sequence[float]) -> dict[str, Value]:
    """What the policy did: means over episodes. Empty where there are none."""
    if not episodes:
        return {}
    usd = sum(episode.cost_nano for episode in episodes) / NANO_PER_USD
    solved = sum(is_right(episode.outcome) for episode in episodes)
    figures: dict[str, Value] = {
        "episodes": len(episodes),
        "reward": fmean(rewards),
        "accuracy": fmean(episode.outcome for episode in episodes),
        "usd_per_1k": 1000 * usd / len(episodes),
        "parse_rate": fmean(episode.parsed for episode in episodes),
        "steps_mean": fmean(episode.steps for episode in episodes),
        "calls_mean": fmean(episode.calls for episode in episodes),
        "rounds_mean": fmean(len(episode.record.rounds) for episode in episodes),
        "latency_s_mean": fmean(episode.latency_s for episode in episodes),
    }
    if solved:
        figures["usd_per_solved"] = usd / solved
    return figures | _of_verdicts(episodes) | of_workers([name for episode in episodes for name in episode.workers])


def _of_verdicts(episodes: Sequence[Episode]) -> dict[str, Value]:
    """Verdicts on steps by their word, an episode on average. Empty where nothing was checked."""
    words = Counter(one.word for episode in episodes for one in episode.verdicts)
    return {"verdicts": {word: count / len(episodes) for word, count in sorted(words.items())}} if words else {}


def of_workers(workers: Sequence[str]) -> dict[str, Value]:
    """Shares of the calls, and their concentration (Herfindahl and Hirschman's index: 1/n even, 1 all on one)."""
    if not workers:
        return {}
    shares = {name: count / len(workers) for name, count in sorted(Counter(workers).items())}
    return {"worker_share": shares, "worker_hhi": sum(share**2 for share in shares.values())}


def usd(nano: int) -> float:
    """Dollars, for people."""
    return float(nano_to_usd(nano))


def line(figures: Mapping[str, Value]) -> str:
    """A step in one line."""
    pairs = (
        ("reward", "reward", ".3f"),
        ("loss", "loss", ".4f"),
        ("held out before", "held_out_before", ".4f"),
        ("held out", "held_out_loss", ".4f"),
        ("right", "accuracy", ".3f"),
        ("$/1k", "usd_per_1k", ".3f"),
        ("valid", "parse_rate", ".3f"),
        ("dead", "dead_share", ".2f"),
        ("H", "entropy", ".3f"),
        ("ratio", "ratio_max", ".2f"),
        ("sampling", "sampling_s", ".1f"),
        ("update", "update_s", ".1f"),
    )
    shown = [
        f"{label} {figures[name]:{form}}" for label, name, form in pairs if isinstance(figures.get(name), float | int)
    ]
    return f"step {figures['step']}/{figures['steps']} " + " ".join(shown)


class MetricsFile:
    """One JSON object a line. Opened for a run that has done `steps` steps: later lines that are there are dropped."""

    def __init__(self, path: Path, steps: int) -> None:
        lines = []
        if path.is_file() and steps:
            lines = [text for text in path.read_text().splitlines() if _step(text) <= steps]
        with _written(path):
            path.write_text("".join(f"{text}\n" for text in lines))
        self._path = path

    def add(self, figures: Mapping[str, Value]) -> None:
        """Append. Raises Unavailable on a full disk."""
        _append(self._path, figures)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{path}: cannot be written ({error.strerror}); free some space and run again with --resume: the last "
            "checkpoint is complete"
        ) from None


def _append(path: Path, line: Mapping[str, Value]) -> None:
    with _written(path), path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _step(text: str) -> int:
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 60  # a torn line is of the step that was cut off


def progress(path: Path | None, figures: Mapping[str, Value]) -> None:
    """A line for a program that watches. Raises Unavailable on a full disk."""
    if path is not None:
        _append(path, {name: figures[name] for name in PROGRESS if name in figures})
