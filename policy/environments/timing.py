"""The virtual clock: simulated seconds are added up along the critical path, and nobody waits for them. Pure.

A step starts when all it sees has ended, a round when all steps of the round before have; planning takes no time here,
and there are places for all calls at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.core.log.rollout import RolloutRecord, StepRecord

Seconds = Mapping[tuple[str, str], float]  # (rollout id, `round.step`) → seconds its calls took


def stamp(record: RolloutRecord, children: Sequence[RolloutRecord], seconds: Seconds) -> float:
    """Write simulated times into a rollout's steps and its children's; returns how many seconds it took."""
    by_id = {child.id: child for child in children}
    end_s = _loop(record, by_id, seconds, record.created_us, 0.0)
    return end_s


def _loop(
    record: RolloutRecord, children: Mapping[str, RolloutRecord], seconds: Seconds, zero_us: int, start_s: float
) -> float:
    now_s = start_s
    record.created_us = _us(zero_us, start_s)
    ended: dict[int, float] = {}
    for planned in record.rounds:
        planned.started_us = planned.finished_us = _us(zero_us, now_s)
        steps = [step for step in record.steps if step.round == planned.round]
        for step in steps:
            begin_s = max([now_s, *(ended[index] for index in step.see)])
            child = children.get(step.child_rollout_id or "")
            took_s = seconds.get((record.id, f"{step.round}.{step.step}"), 0.0)
            end_s = begin_s + took_s if child is None else _loop(child, children, seconds, zero_us, begin_s)
            ended[step.step] = end_s
            _write(step, _us(zero_us, begin_s), _us(zero_us, end_s))
        now_s = max([now_s, *(ended[step.step] for step in steps)])
    record.finished_us = _us(zero_us, now_s)
    return now_s


def _write(step: StepRecord, started_us: int, finished_us: int) -> None:
    step.started_us, step.finished_us = started_us, finished_us
    for attempt in step.attempts:
        attempt.started_us, attempt.finished_us = started_us, finished_us


def _us(zero_us: int, at_s: float) -> int:
    return zero_us + round(at_s * 1_000_000)
