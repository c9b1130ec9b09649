"""The reward training uses, computed from outcome, cost, latency and format (DESIGN §7). Never stored as an outcome.

    unparsed                 0
    well-formed and wrong    f
    right                    1 − min(λ·dollars + μ·seconds, cap)
    in between (outcome o)   f + o · (right − f)
    of each but the first    less min(m·missed + r·repaired + v·rejected, w)

Cost counts only as far as the answer is right (ToolOrchestra, arXiv:2511.21689; xRouter, 2510.08439; Router-R1,
2506.09033 all gate it so) and is capped below one half, with f below 1 − cap: right-and-dear beats wrong-and-free
whatever λ and μ are, so no setting can teach a policy to prefer the cheapest wrong answer. The same term splits the
ties that would leave a group of rollouts without any gradient.

The last line counts the verdicts on the replies of the request (`Faults`): contracts that no reply kept, contracts
that took a repair or another worker, candidates that a checker rejected. m, r and v are 0 by default. With w at most
f, and below 1 − cap − f, the outcome decides all the same: right with every contract missed beats wrong with all of
them kept, and a plan that ran is never below one that was refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.loop.prompt import DIAL, PENALTY_MAX, QUALITY_MAX, USD_WEIGHT
from gateway.core.loop.replies.verdicts import StepVerdict
from gateway.core.pool.workers import NANO_PER_USD

RIGHT_FROM = 0.5


def is_right(outcome: float) -> bool:
    """Whether an outcome from 0 to 1 counts as right where only right or wrong can be said: half of it is."""
    return outcome >= RIGHT_FROM


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Weights of the reward. Raises ValueError where right-and-dear could lose to wrong-and-free.

    The defaults take 0.05 off for a request of $0.0025 and the whole cap for one of $0.015 or of 150 s.
    """

    cost_per_usd: float = USD_WEIGHT  # λ, reward lost per dollar
    latency_per_s: float = 0.002  # μ, reward lost per second (ToolOrchestra's 1/500)
    penalty_max: float = PENALTY_MAX  # the cap
    format_reward: float = 0.1  # f, for a plan that ran and was wrong
    dial: tuple[float, ...] = DIAL  # λ at each place of the dial, dearest dollar first
    missed_penalty: float = 0.0  # m, for each contract that no reply kept
    repaired_penalty: float = 0.0  # r, for each that was kept after a repair, or by another worker
    rejected_penalty: float = 0.0  # v, for each candidate that a checker rejected
    verdict_penalty_max: float = 0.05  # w, the cap on the three together

    def __post_init__(self) -> None:
        for name in ("cost_per_usd", "latency_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` is {value}: give a number ≥ 0")
        if not 0 <= self.penalty_max < 0.5:
            raise ValueError(f"`penalty_max` is {self.penalty_max}: keep it in [0, 0.5), or cost outweighs being right")
        if not 0 <= self.format_reward < 1 - self.penalty_max:
            raise ValueError(f"`format_reward` is {self.format_reward}: keep it in [0, 1 − penalty_max)")
        falling = all(high >= low for high, low in zip(self.dial, (*self.dial[1:], 0.0), strict=True))
        if len(self.dial) != QUALITY_MAX + 1 or not falling or not all(map(math.isfinite, self.dial)):
            raise ValueError(f"`dial` is {self.dial}: give {QUALITY_MAX + 1} falling numbers ≥ 0, one a place")
        self._check_verdicts()

    def _check_verdicts(self) -> None:
        for name in ("missed_penalty", "repaired_penalty", "rejected_penalty", "verdict_penalty_max"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` is {value}: give a number ≥ 0")
        if self.repaired_penalty > self.missed_penalty:
            bound = f"keep it at most `missed_penalty`, {self.missed_penalty}"
            raise ValueError(f"`repaired_penalty` is {self.repaired_penalty}: {bound}")
        room = 1 - self.penalty_max - self.format_reward
        fits = self.verdict_penalty_max <= self.format_reward and self.verdict_penalty_max < room
        if self.counts_verdicts and not fits:
            raise ValueError(
                f"`verdict_penalty_max` is {self.verdict_penalty_max}: keep it at most `format_reward`, "
                f"{self.format_reward}, and below {room:.3g}, or a verdict outweighs the outcome"
            )

    @property
    def counts_verdicts(self) -> bool:
        """Whether verdicts change any reward."""
        return max(self.missed_penalty, self.repaired_penalty, self.rejected_penalty) > 0


@dataclass(frozen=True, slots=True)
class Faults:
    """What checks found in the replies of a request, child loops included."""

    missed: int = 0  # contracts that no reply kept
    repaired: int = 0  # contracts that the first reply missed and a later one kept
    rejected: int = 0  # candidates of verify steps that a checker rejected


NO_FAULTS = Faults()


def faults_of(verdicts: Iterable[StepVerdict]) -> Faults:
    """The verdicts that stand on the steps of a request, counted. A check that nobody could make counts for nothing."""
    words = Counter("repaired" if one.repaired else one.word for one in verdicts)
    return Faults(words["missed"], words["repaired"], words["rejected"])


def at_quality(settings: RewardSettings, quality: int | None) -> RewardSettings:
    """The settings at a place of the dial (gateway.core.loop.prompt): a dollar is dear at 0 and cheaper at each place
    above, and at the dial's end money does not count. None: as they are.

    With `DIAL` the whole default penalty is reached at $0.75 per 1,000 questions at 0, at $96 at 7. Where workers cost
    something else, a conductor has a dial of its own (`taught_dial`).
    """
    if quality is None:
        return settings
    return replace(settings, cost_per_usd=settings.dial[min(quality, QUALITY_MAX)], latency_per_s=0.0)


def taught_dial(config: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The dial in a manifest's training settings, as the conductor knows it; None: it knows none of its own."""
    dial = (config.get("settings") or {}).get("dial")
    return tuple(map(float, dial)) if dial else None


def penalty(cost_nano: int, latency_s: float, settings: RewardSettings) -> float:
    """What cost and time take off a right answer, in [0, penalty_max]. Raises ValueError on negative or non-finite."""
    if cost_nano < 0 or not (math.isfinite(latency_s) and latency_s >= 0):
        raise ValueError(f"cost {cost_nano} nano-dollars and latency {latency_s} s must both be finite and ≥ 0")
    lost = settings.cost_per_usd * (cost_nano / NANO_PER_USD) + settings.latency_per_s * latency_s
    return min(lost, settings.penalty_max)


def verdict_penalty(faults: Faults, settings: RewardSettings) -> float:
    """What verdicts take off a plan that ran, in [0, verdict_penalty_max]."""
    missed, repaired = settings.missed_penalty * faults.missed, settings.repaired_penalty * faults.repaired
    return min(missed + repaired + settings.rejected_penalty * faults.rejected, settings.verdict_penalty_max)


def reward(
    parsed: bool,
    outcome: float,
    cost_nano: int,
    latency_s: float,
    settings: RewardSettings,
    faults: Faults = NO_FAULTS,
) -> float:
    """Reward in [0, 1] of one rollout: was its plan well-formed, how right was it ([0, 1]), nano-dollars, seconds, and
    what checks found in its replies.

    Raises ValueError on an outcome outside [0, 1] (a rollout without one cannot be trained on: leave it out).
    """
    if not 0 <= outcome <= 1:
        raise ValueError(f"outcome {outcome} is outside [0, 1]")
    right = 1.0 - penalty(cost_nano, latency_s, settings)
    if not parsed:
        return 0.0
    return settings.format_reward + outcome * (right - settings.format_reward) - verdict_penalty(faults, settings)
