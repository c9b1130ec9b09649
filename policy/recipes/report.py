"""The report of a learning run: a table of rounds beside the baselines, notes, and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gateway.files import write_atomic
from policy.evaluate import plot
from policy.recipes.operator import LearningRound
from policy.recipes.traffic import PolicyScore

FILES = ("report.json", "report.md", "report.svg")


@dataclass(slots=True)
class LearningReport:
    """The results of a run so far."""

    about: dict[str, Any]
    source: str  # one sentence: what the figures speak of
    rounds: list[LearningRound] = field(default_factory=list)
    baselines: dict[str, PolicyScore] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    rollback: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of the run's own parts, such as what recording cost
    seconds: float = 0.0

    @property
    def gain(self) -> float:
        """Accuracy of the last version over the cold start's."""
        return self.rounds[-1].held_out.accuracy - self.rounds[0].held_out.accuracy

    def shown(self) -> dict[str, PolicyScore]:
        """The baselines worth a line in the picture: of fixed workers the best alone."""
        fixed = {name: score for name, score in self.baselines.items() if name.startswith("fixed:")}
        best = max(fixed, key=lambda name: (fixed[name].accuracy, -fixed[name].usd_per_1k), default=None)
        return {name: score for name, score in self.baselines.items() if name not in fixed or name == best}

    def table(self) -> str:
        """The rounds and the baselines, as Markdown."""
        lines = ["| | version | held out, right | 95 % | $ per 1,000 | traffic, right | job | train + gate, s |"]
        lines.append("|---|---|---:|---:|---:|---:|---|---:|")
        for each in self.rounds:
            name = each.name or ("cold start" if each.round == 0 else f"round {each.round}")
            traffic = f"{each.traffic.accuracy:.1%}" if each.traffic else "–"
            lines.append(
                f"| {name} | {each.version} {_cells(each.held_out)} | {traffic} | {each.job} | {each.train_s:.0f} |"
            )
        for name, score in sorted(self.baselines.items(), key=lambda item: -item[1].accuracy):
            lines.append(f"| {name} | {_cells(score)} | | | |")
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Sentences under the table."""
        notes = [self.source, f"Held-out questions: {self.rounds[0].held_out.n}. Gain: {self.gain:+.3f} right."]
        notes += [f"Round {each.round} was refused by the gate: {each.refusal}" for each in self.rounds if each.refusal]
        if self.requests:
            notes.append(f"Requests: {self.requests['sent']}, failed: {self.requests['failed']}, tried again: ")
            notes[-1] += f"{self.requests['retried']}, planned by the fallback: {self.requests['fallbacks']}."
        if self.rollback:
            notes.append(f"Rolled back from {self.rollback['from']} to {self.rollback['to']} ")
            notes[-1] += f"in {self.rollback['seconds']:.2f} s under traffic."
        return [*notes, f"The whole run took {self.seconds:.0f} s."]

    def write(self, out: Path) -> None:
        """The three files."""
        out.mkdir(parents=True, exist_ok=True)
        names = ("about", "source", "requests", "rollback", "facts", "seconds")
        body = {name: getattr(self, name) for name in names}
        body |= {"rounds": [asdict(each) for each in self.rounds], "gain": self.gain}
        body |= {"baselines": {name: asdict(score) for name, score in self.baselines.items()}}
        curve, jobs = [each.held_out for each in self.rounds], [each.job for each in self.rounds[1:]]
        title = "What the live version does with held-out questions"
        texts = [json.dumps(body, indent=2) + "\n", self.page(), plot.rounds(curve, self.shown(), title, jobs)]
        for name, text in zip(FILES, texts, strict=True):
            write_atomic(out / name, text)

    def page(self) -> str:
        """As a person reads it."""
        return "\n\n".join(["# Learning under traffic", f"![over rounds]({FILES[2]})", self.table(), *self.notes(), ""])


def write_block(page: Path, command: str, text: str) -> None:
    """Put `text` between the page's two comments about `command`. Raises ValueError if the page has none."""
    begin, end = f"<!-- written by `{command}` -->\n", f"\n<!-- end of `{command}` -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no block of `{command}`")
    write_atomic(page, before + begin + text + end + after)


def _cells(score: PolicyScore) -> str:
    return f"| {score.accuracy:.1%} | {score.low:.1%}–{score.high:.1%} | {score.usd_per_1k:.3f}"
