"""The port: prompts, what a policy is shown of one, the episodes its plans give, and the meter of what they spend.

Randomness is derived by hash from (seed, prompt, sample), never drawn from a shared stream, so the order in which
concurrent episodes end changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, Protocol

from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.replies.verdicts import StepVerdict
from gateway.core.loop.shown import PromptInput
from gateway.core.money.amounts import nano_to_usd
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import Unavailable
from gateway.service.loop.state import Planner, Situation


class SpendCapped(Exception):
    """The cap leaves no room for another episode. `episodes` are the finished ones; none is in flight."""

    def __init__(self, spend: Spend, episodes: list[Any] | None = None) -> None:
        spent, cap = nano_to_usd(spend.spent_nano), nano_to_usd(spend.cap_nano or 0)
        room = nano_to_usd(spend.episode_nano_max)
        super().__init__(
            f"spent ${spent} of the cap of ${cap}, and an episode may cost ${room}: raise the cap, or lower what one "
            "episode may cost"
        )
        self.episodes = episodes if episodes is not None else []


class Ungraded(Unavailable):
    """No outcome could be made of an episode, through no fault of its plan: it is left out, never counted as wrong."""


@dataclass(slots=True)
class Bill:
    """Nano-dollars that grading an episode has cost so far."""

    nano: int = 0


@dataclass(slots=True)
class Spend:
    """A meter. An episode takes `episode_nano_max` out before it starts and puts back what it did not spend, so the
    cap holds whatever runs at once. `on_change` hears of the nano-dollars spent and reserved before an episode starts
    and when it has ended; what it raises keeps the episode from starting. Raises ValueError on a cap below what a
    single episode may cost."""

    cap_nano: int | None = None  # None: metered, not capped
    episode_nano_max: int = 2_000_000_000
    spent_nano: int = 0
    episodes: int = 0
    on_change: Callable[[int], None] | None = field(default=None, repr=False)
    _open: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.cap_nano is not None and not self.fits():
            raise ValueError(
                f"a spending cap of ${nano_to_usd(self.cap_nano)} allows no episode, which may cost "
                f"${nano_to_usd(self.episode_nano_max)}: raise the cap, or lower what one episode may cost"
            )

    def fits(self) -> bool:
        """Return whether another episode may start."""
        committed = self.spent_nano + (self._open + 1) * self.episode_nano_max
        return self.cap_nano is None or committed <= self.cap_nano

    def start(self) -> None:
        """Reserve the most that one episode may cost. Raises SpendCapped, and whatever `on_change` raises."""
        if not self.fits():
            raise SpendCapped(self)
        self._tell(self._open + 1)
        self._open += 1

    def end(self, nano: int) -> None:
        """Release the reservation of an episode that cost `nano` nano-dollars."""
        self._open -= 1
        self.spent_nano += nano
        self.episodes += 1
        self._tell(self._open)

    def _tell(self, episodes: int) -> None:
        if self.on_change is not None:
            self.on_change(self.spent_nano + episodes * self.episode_nano_max)


Split = Literal["train", "validation"]
PlanSource = Planner | str  # who plans, or the plan of the only round as it was sampled


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with the workers that may answer it. `truth` is for the environment and its oracle alone."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    pool: tuple[WorkerSpec, ...]  # in the order shown
    reference: str  # the right answer
    category: str | None = None  # for tables and breakdowns; no policy is shown it
    task_type: str | None = None  # as a client would name it in `metadata`
    experience: Mapping[str, WorkerExperience] = field(default_factory=dict)  # by worker name
    truth: object = None
    quality: int | None = None  # the dial, as a request would set it
    params: Mapping[str, Any] = field(default_factory=dict)  # of the request, for the step that answers


@dataclass(frozen=True, slots=True)
class PosedPrompt:
    """A prompt with its pool as drawn, and what a policy is shown of it in round 1, as the server shows it."""

    prompt: Prompt
    situation: Situation
    shown: PromptInput


@dataclass(frozen=True, slots=True)
class Episode:
    """What one plan source did on one prompt. Money in nano-dollars, simulated or real seconds as the adapter says."""

    prompt_id: str
    sample: int  # index among the plan sources of the prompt
    plan: str  # text of the first round's plan, as sampled; JSON of it where a router planned
    parsed: bool  # whether every plan was within its caps
    outcome: float  # in [0, 1]
    cost_nano: int
    latency_s: float
    calls: int  # attempts at workers and tools, child loops included
    steps: int  # of all rounds, child loops included
    workers: tuple[str, ...]  # names, in the order of the steps
    record: RolloutRecord
    children: tuple[RolloutRecord, ...] = ()
    reply: str = ""
    error: str | None = None  # the code of what left it without an answer
    verdicts: tuple[StepVerdict, ...] = ()  # of its steps, child loops included


class Environment(Protocol):
    """Runs plans and judges them. `spend` is its meter: an episode that could pass the cap does not start."""

    name: str
    spend: Spend

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """`n` different prompts of the split, chosen by `seed`. Raises ValueError where the split has fewer."""
        ...

    def situation(
        self, prompt: Prompt, rng: Random, k_of_n: int | None = None, redraw_handles: bool = False
    ) -> PosedPrompt:
        """The prompt with its pool in random order, with only `k_of_n` of its models, and with other handles where
        asked; episodes of it run on `PosedPrompt.prompt`. Raises ValueError on a `k_of_n` below 1."""
        ...

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """Run one plan source on one prompt. Raises SpendCapped where the meter has no room for it, Ungraded where
        nothing could judge its reply."""
        ...

    async def run(self, prompt: Prompt, plans: Sequence[PlanSource]) -> list[Episode]:
        """Run all plan sources and return episodes in order. Raises SpendCapped at the cap, with the finished ones."""
        ...


def rng_for(*key: object) -> Random:
    """Randomness that is a pure function of the key, on every machine."""
    return Random("\x1f".join(map(str, key)))


def fraction(*key: object) -> float:
    """A number in [0, 1) that is a pure function of the key."""
    data = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest()) / 2**56


def split_of(prompt_id: str, validation_share: float) -> Split:
    """The split a recorded prompt is in, by a hash of its id: the same in every run, whatever else is in the file."""
    return "validation" if fraction("split", prompt_id) < validation_share else "train"


def draw_pool(prompt: Prompt, rng: Random, k_of_n: int | None, handles: Sequence[str] | None) -> Prompt:
    """The prompt with a fresh pool: `k_of_n` of its model workers beside every tool and `self`, in random order, the
    models under handles from `handles` where given. Raises ValueError on a `k_of_n` below 1."""
    if k_of_n is not None and k_of_n < 1:
        raise ValueError(f"k_of_n is {k_of_n}: a pool needs at least one model worker")
    models = [spec for spec in prompt.pool if spec.kind in MODEL_KINDS]
    rest = [spec for spec in prompt.pool if spec.kind not in MODEL_KINDS]
    offer = rng.sample(models, min(k_of_n or len(models), len(models)))
    if handles is not None:
        free = [handle for handle in handles if handle not in {spec.handle for spec in rest}]
        names = rng.sample(free, len(offer))
        offer = [spec.model_copy(update={"handle": name}) for spec, name in zip(offer, names, strict=True)]
    pool = [*offer, *rest]
    rng.shuffle(pool)
    return replace(prompt, pool=tuple(pool))
