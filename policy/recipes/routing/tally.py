"""Who answered what, how often it was right and what it cost: the demo's table, its log, and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from policy.recipes.routing.world import CHEAP, DEAR, KINDS, Kind, usd

LAST = 60  # requests that the verdict is about
TRAIL = 40  # latest requests of a kind in the picture
RIGHT_MIN = 0.9  # of the last requests
USD_MAX = 0.6  # of what the dear worker alone would have cost on them, if the cheap one is any good
EXAMPLES = {"sum": "sums", "product": "products"}
BOLD, DIM, GREEN, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """One request: the kind of its question, who answered, whether that was right, and its dollars."""

    kind: Kind
    worker: str
    right: bool
    usd: Decimal


@dataclass(slots=True)
class RoutingTally:
    """All answers so far, in the order in which they came."""

    total: int
    answers: list[RoutedAnswer] = field(default_factory=list)
    failed: int = 0

    def of(self, kind: Kind, worker: str = "") -> list[RoutedAnswer]:
        """Answers to this kind of question, of one worker if that is given."""
        return [one for one in self.answers if one.kind == kind and worker in ("", one.worker)]

    def table(self, seconds: float, *, colour: bool = False) -> str:
        """The whole table, as it is redrawn on a terminal."""
        bold, dim, reset = (BOLD, DIM, RESET) if colour else ("", "", "")
        head = f"{'question':<10}{'asked':>6}{CHEAP:>8}{DEAR:>8}{'right':>8}   who answered the latest"
        lines = [f"{bold}model: baton{reset}, {len(self.answers)} of {self.total} requests, {seconds:.0f} s", "", head]
        for kind in KINDS:
            mine = self.of(kind)
            counts = "".join(f"{len(self.of(kind, worker)):>8}" for worker in (CHEAP, DEAR))
            trail = "".join(_mark(one, colour) for one in mine[-TRAIL:])
            lines.append(f"{EXAMPLES[kind]:<10}{len(mine):>6}{counts}{_share(mine):>8}   {trail}")
        lines += ["", f"all       {_summary(self.answers)}", f"last {LAST:<5}{_summary(self.answers[-LAST:])}"]
        legend = (
            "c: cheap answered, D: dear did; red: wrong"
            if colour
            else "c: cheap answered, D: dear did; x: cheap, wrong"
        )
        return "\n".join([*lines, f"{dim}{legend}{reset}"])

    def line(self) -> str:
        """The table in one line, for a log."""
        last = self.answers[-LAST:]
        shares = []
        for kind in KINDS:
            mine = [one for one in last if one.kind == kind]
            dear = sum(one.worker == DEAR for one in mine)
            shares.append(f"{EXAMPLES[kind]}: {len(mine) - dear} {CHEAP}, {dear} {DEAR}")
        return f"{len(self.answers):>4} of {self.total}; last {len(last)}: {'; '.join(shares)}; {_summary(last)}"

    def verdict(self, *, cheap_never_right: bool = False) -> tuple[bool, str]:
        """Whether it learnt, and the sentence that says so."""
        last = self.answers[-LAST:]
        if self.failed or len(last) < LAST:
            return False, f"It cannot be told: {len(self.answers)} answers, {self.failed} failed; {LAST} are needed."
        right, spent = sum(one.right for one in last) / len(last), sum(one.usd for one in last) / usd(DEAR, len(last))
        learnt = right >= RIGHT_MIN and (cheap_never_right or spent <= USD_MAX)
        wanted = f"at least {RIGHT_MIN:.0%} right" + ("" if cheap_never_right else f" for at most {USD_MAX:.0%}")
        said = f"of the last {len(last)} requests {right:.0%} were right, for {spent:.0%} of what {DEAR} alone costs"
        return learnt, f"It {'learnt' if learnt else 'did not learn'}: {said} (wanted: {wanted})."


def _mark(one: RoutedAnswer, colour: bool) -> str:
    if not colour:
        return "D" if one.worker == DEAR else "c" if one.right else "x"
    return f"{GREEN if one.right else RED}{'D' if one.worker == DEAR else 'c'}{RESET}"


def _share(answers: Sequence[RoutedAnswer]) -> str:
    return f"{sum(one.right for one in answers) / len(answers):.0%}" if answers else "–"


def _summary(answers: Sequence[RoutedAnswer]) -> str:
    """Share right, dollars, and dollars saved against the dear worker alone."""
    spent, alone = sum((one.usd for one in answers), Decimal(0)), usd(DEAR, len(answers))
    saved = f"{float(1 - spent / alone):.0%} saved" if answers else "nothing yet"
    return f"{_share(answers)} right, ${spent:.6f} of ${alone:.6f} for {DEAR} alone: {saved}"
