"""Which planning calls of the log are wanted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from gateway.core.log.outcome import LABELS
from gateway.errors import ConfigError

PLANNERS = ("conductor",)  # routers sample no tokens
LEARNT = (*PLANNERS, "rule")  # whose plans train: the rule logs the propensity of each
STANDARD = "standard"


@dataclass(frozen=True, slots=True)
class Selection:
    """Every filter must match; an empty one matches all. Rollouts logged with `train: false`, and those of a key that
    is now `train: false`, are never selected, whatever this says. Raises ConfigError on values that match nothing."""

    since: datetime | None = None  # the rollout began at this time or later
    until: datetime | None = None  # and before this one
    policy_versions: tuple[str, ...] = ()  # `conductor@7`
    pools: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # public ids
    tags: tuple[tuple[str, str], ...] = ()  # all of them
    planners: tuple[str, ...] = PLANNERS
    outcome_sources: tuple[str, ...] = ()  # only their outcomes count, the first that judged decides
    min_outcomes: int = 1  # judgements behind the value of the outcome
    labels: tuple[tuple[str, float], ...] = ()  # the value that an outcome with this label counts as, in [0, 1]

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            at = getattr(self, name)
            if at is not None and at.tzinfo is None:
                raise ConfigError(f"`{name}` has no time zone; add one, UTC for instance", param=name)
        if self.since and self.until and self.since >= self.until:
            raise ConfigError(f"since {self.since} is not before until {self.until}: swap them", param="since")
        if self.min_outcomes < 0:
            raise ConfigError(f"min_outcomes is {self.min_outcomes}; give 0 or more", param="min_outcomes")
        for label, value in self.labels:
            if not 0 <= value <= 1:
                raise ConfigError(f"label `{label}` is worth {value}; give 0 to 1", param="labels")
        if not self.planners:
            raise ConfigError("planners is empty; name at least one, `conductor` for instance", param="planners")

    def __str__(self) -> str:
        """The filters that are set, for a message."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return ", ".join(f"{name}={_shown(value)}" for name, value in values.items() if value) or "everything"


def _shown(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return ",".join("=".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value)
    return str(value)


def parse_time(text: str, flag: str) -> datetime:
    """An ISO 8601 date or time, UTC unless it says otherwise. Raises ConfigError naming the flag."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{flag} `{text}` is not a time; write 2026-01-31 or 2026-01-31T12:00:00Z", param=flag
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def parse_tags(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """`key=value` each. Raises ConfigError on one without a key."""
    pairs = [text.partition("=") for text in texts]
    for key, equals, value in pairs:
        if not (key and equals):
            raise ConfigError(f"--tag `{key}{equals}{value}` is not key=value; write --tag team=blue", param="--tag")
    return tuple((key, value) for key, _, value in pairs)


def parse_labels(texts: Iterable[str]) -> tuple[tuple[str, float], ...]:
    """`label=value` each, or `standard` for LABELS; the last value of a label holds. Raises ConfigError."""
    values: dict[str, float] = {}
    for text in texts:
        if text == STANDARD:
            values |= LABELS
            continue
        label, _, number = text.rpartition("=")
        try:
            values[label] = float(number)
        except ValueError:
            label = ""
        if not label:
            raise ConfigError(f"--label `{text}` is not label=value; write --label accepted=1", param="--label")
    return tuple(values.items())
