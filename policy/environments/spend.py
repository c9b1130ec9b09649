"""The spend meter: what episodes have cost, what those in flight may still cost, and the cap on both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import nano_to_usd


class SpendCapped(Exception):
    """The cap leaves no room for another episode. `episodes` are those that were finished, none is left in flight."""

    def __init__(self, spend: Spend, episodes: list[Any] | None = None) -> None:
        spent, cap = nano_to_usd(spend.spent_nano), nano_to_usd(spend.cap_nano or 0)
        room = nano_to_usd(spend.episode_nano_max)
        super().__init__(
            f"spent ${spent} of the cap of ${cap}, and an episode may cost ${room}: raise the cap, or lower what one "
            "episode may cost"
        )
        self.episodes = episodes if episodes is not None else []


@dataclass(slots=True)
class Spend:
    """A meter. An episode takes `episode_nano_max` out before it starts and puts back what it did not spend, so the
    cap holds whatever runs at once. Raises ValueError on a cap below what a single episode may cost."""

    cap_nano: int | None = None  # None: metered, not capped
    episode_nano_max: int = 2_000_000_000
    spent_nano: int = 0
    episodes: int = 0
    _open: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.cap_nano is not None and not self.fits():
            raise ValueError(
                f"a spending cap of ${nano_to_usd(self.cap_nano)} allows no episode, which may cost "
                f"${nano_to_usd(self.episode_nano_max)}: raise the cap, or lower what one episode may cost"
            )

    def fits(self) -> bool:
        """Whether another episode may start."""
        committed = self.spent_nano + (self._open + 1) * self.episode_nano_max
        return self.cap_nano is None or committed <= self.cap_nano

    def start(self) -> None:
        """Take one episode's most. Raises SpendCapped."""
        if not self.fits():
            raise SpendCapped(self)
        self._open += 1

    def end(self, nano: int) -> None:
        """An episode that had started cost so much."""
        self._open -= 1
        self.spent_nano += nano
        self.episodes += 1
