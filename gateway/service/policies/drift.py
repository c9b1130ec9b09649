"""Watches workers for drift: feeds their results to the tests of `core/pool/drift.py`, and says what they flag.

Failures, refusals, seconds and tokens come from the requests that this gateway served, since its start. Outcomes come
from the log, so those of all gateways count, also those from before a restart (`SINCE`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from gateway.core.log.rollout import RolloutRecord, StepRecord
from gateway.core.loop.replies.answers import is_refusal
from gateway.core.openai.finish import FILTERED
from gateway.core.pool.drift import SIGNALS, Drift, DriftRules, Judged, Signal, Streams, Witnesses
from gateway.core.pool.identity import Identity
from gateway.core.pool.workers import MODEL_KINDS
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.drift")
FLAGS_MAX = 1_000
IDENTITIES_SEEN_MAX = 10_000  # between two calls of `met`
SINCE = timedelta(days=7)
OUTCOMES: tuple[Signal, ...] = ("outcome",)
NAMELESS: Mapping[str, str] = {}
SERVED: tuple[Signal, ...] = tuple(signal for signal in SIGNALS if signal != "outcome")


class JudgedSteps(Protocol):
    """Reads the outcomes of steps."""

    async def judged(self, after: Mapping[str, datetime], limit: int) -> Sequence[Judged]:
        """Return the outcomes of each worker after its time, at most `limit` each, oldest first. Raises Unavailable."""
        ...


class FlagMetrics(Protocol):
    """Shows flags."""

    def worker_drift(self, flagged: Mapping[tuple[str, Signal], int]) -> None:
        """Set for each (worker, signal) the number of kinds of task on which it is flagged; forget others."""
        ...


class _Release(NamedTuple):
    """The end of a quarantine, up to which outcomes say nothing about the worker of today."""

    version: str
    at: datetime
    anew: bool


class WorkerWatch:
    """Call `finished` with each request, and `read` now and then (`quarantine.py` does)."""

    def __init__(
        self,
        source: JudgedSteps,
        workers: Callable[[], Iterable[str]],
        clock: Clock,
        metrics: FlagMetrics,
        rules: DriftRules,
    ) -> None:
        """`workers`: the names of the pool's workers now."""
        self._source = source
        self._workers = workers
        self._metrics = metrics
        self._streams = Streams(rules)
        self._witnesses = Witnesses()
        self._since = clock.now() - SINCE
        self._after: dict[str, datetime] = {}
        self._clock = clock
        self.flags: deque[tuple[Drift, datetime]] = deque(maxlen=FLAGS_MAX)  # the latest, and when they came
        self.fresh: deque[tuple[Drift, datetime]] = deque(maxlen=FLAGS_MAX)  # those that nobody has acted on yet
        self._releases: dict[str, list[_Release]] = {}  # by worker, of which outcomes have not been reached yet
        self._seen: set[Identity] = set()

    def finished(self, record: RolloutRecord, children: Sequence[RolloutRecord]) -> None:
        """Observe the steps of a request and of the loops inside it."""
        for loop in (record, *children):
            for step in loop.steps:
                if step.kind in MODEL_KINDS and step.status in ("done", "failed"):
                    self._observe(step.worker, step.worker_version, loop.task_type, served_signals(step))
                    if len(self._seen) < IDENTITIES_SEEN_MAX:
                        self._note_identities(step)

    def _note_identities(self, step: StepRecord) -> None:
        """Note who the replies of a step said that they are of."""
        for attempt in step.attempts:
            if attempt.error is None and attempt.worker is None:
                names = attempt.named or NAMELESS
                model, fingerprint = names.get("model", ""), names.get("system_fingerprint", "")
                self._seen.add(Identity(step.worker, step.worker_version, model, fingerprint))

    async def read(self, limit: int = 1_000) -> None:
        """Observe the outcomes that came since the last call, at most `limit` of each worker. Raises Unavailable."""
        self._after = {name: self._after.get(name, self._since) for name in self._workers()}
        began, rows = self._clock.now(), Counter[str]()
        for one in await self._source.judged(self._after, limit):
            rows[one.worker] += 1
            self._after[one.worker] = max(self._after[one.worker], one.at)
            past = self._reach(one.worker, one.at)
            self._witnesses.add(one.worker, one.version, one.task_type or "", one.org, 1.0 - one.success)
            self._observe(one.worker, one.version, one.task_type, {"outcome": 1.0 - one.success}, quiet=past)
        for worker in list(self._releases):
            if rows[worker] < limit:  # everything up to `began` was read
                self._reach(worker, began)
            if not self._releases[worker]:
                del self._releases[worker]

    def flagged(self) -> Collection[str]:
        """The workers with a flag."""
        return {worker for worker, _ in self._streams.flagged()}

    def released(self, worker: str, version: str, at: datetime, *, anew: bool) -> None:
        """Begin the tests of a worker again, whose quarantine ended at a time. Its outcomes up to then raise no flag.
        `anew`: what it does from then on is usual."""
        release = _Release(version, at, anew)
        self._renew(worker, release, SERVED)
        self._releases[worker] = sorted([*self._releases.get(worker, ()), release], key=lambda one: one.at)

    def seen(self) -> Sequence[Identity]:
        """The identities that workers named since `met` was called with them."""
        return sorted(self._seen)

    def met(self, identities: Iterable[Identity]) -> None:
        """Forget these identities: they are stored."""
        self._seen.difference_update(identities)

    def _reach(self, worker: str, at: datetime) -> bool:
        """Begin again at each release that a time comes after. Return whether the time comes before another one."""
        waiting = self._releases.get(worker, [])
        while waiting and waiting[0].at <= at:
            self._renew(worker, waiting.pop(0), OUTCOMES)
        return bool(waiting)

    def _renew(self, worker: str, release: _Release, signals: Sequence[Signal]) -> None:
        if release.anew:
            self._streams.forget(worker, signals)
        else:
            self._streams.renew(worker, release.version, signals)
        self._metrics.worker_drift(self._streams.flagged())

    def _observe(
        self,
        worker: str,
        version: str,
        task_type: str | None,
        signals: Mapping[Signal, float],
        *,
        quiet: bool = False,
    ) -> None:
        flags = list(self._streams.add(worker, version, task_type or "", signals))
        if quiet:
            return
        for flag in flags:
            if flag.signal == "outcome" and self._witnesses.disagree(flag):
                log.warning(
                    "%s; other organisations' outcomes say that it has not, so it is not flagged", drift_line(flag)
                )
                self._streams.renew(worker, version, OUTCOMES)
                continue
            log.warning("%s", drift_line(flag))
            self.flags.append((flag, self._clock.now()))
            self.fresh.append(self.flags[-1])
        if flags:
            self._metrics.worker_drift(self._streams.flagged())


def drift_line(flag: Drift) -> str:
    """One line about a flag."""
    what = f"worker {flag.worker} (version {flag.version}) has drifted on {flag.task_type or 'requests without a type'}"
    return f"{what}: {flag.signal} was at most {flag.usual:.2f}, now {flag.now:.2f}, after {flag.results} results"


def served_signals(step: StepRecord) -> dict[Signal, float]:
    """What a step that ended says: `slow` in seconds, `long` and `short` in tokens, the others 0 or 1."""
    if step.status == "failed":
        return {"failed": 1.0}
    declined = step.finish_reason == FILTERED or (step.reply is not None and is_refusal(step.reply))
    tokens = float(step.completion_tokens)
    seconds = (step.finished_us - step.started_us) / 1e6
    return {"failed": 0.0, "refused": float(declined), "slow": seconds, "long": tokens, "short": tokens}
