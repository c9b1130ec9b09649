"""What is saved of a request while it runs, and how another gateway goes on from it (docs/adr/0032).

Each plan and each step that has ended is a record, under its place in the tree of loops. Before a call leaves, the
state is saved: what was spent, what the open calls may cost, and which steps they are of. Whoever goes on runs the same
loop: plans and steps with a record are restored, not repeated. What the calls cost that were open at the crash is
unknown, so they are charged their worst case; a step that they are of runs again, unless one of them may have had side
effects.
Every save checks the claim, so that a gateway that lost a request to another one sends nothing more for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from gateway import errors
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord, as_payload
from gateway.core.loop.contract import Ruling
from gateway.core.loop.plan import Plan, limits_from_json, validate
from gateway.core.money.ledger import Hold, Scope
from gateway.core.pool.workers import BUILTINS, WorkerSpec
from gateway.errors import BatonError, ConductorError, Conflict, PlanRefused, Unavailable, UpstreamError
from gateway.service.loop.calls import step_id
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.background import BackgroundRequest, BackgroundStore
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.background")
CANCELLED = "cancelled"
UNCERTAIN = "uncertain"  # error code of what was under way when its gateway died
SAVE_TRIES, SAVE_PAUSE_S = 10, 0.5
ENDED = ("done", "failed", "refused")


class Checkpoints:
    """The port `Checkpoints` of one request, in the gateway that has claimed it. Call `begin` first."""

    def __init__(self, store: BackgroundStore, runner: str, request: BackgroundRequest, clock: Clock) -> None:
        self._store = store
        self._runner = runner
        self._request = request
        self._clock = clock
        self._saved: dict[str, Mapping[str, Any]] = dict(request.records)
        self._state: Mapping[str, Any] = request.state or {}
        self._lost = _lost(self._state, self._saved)
        self._left_before = {place: one[2] for place, one in self._state.get("open", {}).items()}
        self._open: dict[str, list[Any]] = {}  # place → nano-dollars, whether it may run again, calls
        self._new: dict[str, Mapping[str, Any]] = {}  # records that are not saved yet
        self._saving = asyncio.Lock()
        self._began_s = 0.0
        self._loop: Loop | None = None
        self._held: tuple[Hold, Hold | None] | None = None
        self._refused: BatonError | None = None
        self._abandoned = False
        self.suspending = False  # whether a cancellation means that another gateway goes on

    @property
    def abandoned(self) -> bool:
        """Whether this gateway has left the request to another one: it must neither settle nor log it."""
        return self._abandoned

    @property
    def rollout_id(self) -> str:
        """The id of the rollout."""
        return self._request.rollout_id

    @property
    def created_us(self) -> int:
        """When the client asked, in microseconds since the epoch."""
        return self._request.created_us

    def abandon(self) -> None:
        """Leave the request to another gateway from now on."""
        self._abandoned = True

    def refuse(self) -> None:
        """Let no further call leave: the client has cancelled the request."""
        self._refused = self._refused or Unavailable("the response was cancelled", code=CANCELLED)

    def terms(self, most: int, least: int, scopes: Sequence[Scope]) -> tuple[int, int, Sequence[Scope]]:
        """The hold of the request: what a gateway before this one was granted, else these bounds and scopes."""
        saved = self._state.get("hold")
        if saved is None:
            return most, least, scopes
        kept = [Scope(name, limit) for name, limit in saved["scopes"] if not name.startswith("session:")]
        return saved["granted"], max(1, min(least, saved["granted"])), kept

    async def begin(self, loop: Loop, money: Hold, calls: Hold | None) -> None:
        """Let `loop` go on from what was saved. Raises Conflict where its workers are gone, Unavailable."""
        self._loop, self._held, self._began_s = loop, (money, calls), self._clock.monotonic_s()
        loop.tree.checkpoints = self
        if self._state:
            _restore_workers(loop, self._state["workers"])
            meter, saved = loop.tree.meter, self._state["meter"]
            meter.spent_nano, meter.calls = saved["spent"] + saved["drawn"], saved["calls"]
            meter.tokens = saved["tokens"] + saved["drawn_tokens"]
        left_s = self._request.expires_us / 1e6 - self._clock.now_us() / 1e6
        loop.tree.deadline_s = self._began_s + min(loop.caps.wall_s - self._state.get("used_s", 0.0), left_s)
        await self._save()

    # ------------------------------------------------------------ plans

    async def planned(self, loop: Loop, record: RoundRecord, plan: Callable[[], Awaitable[Plan]]) -> Plan:
        """The plan that was saved, else the one that `plan` returns. Raises as `plan`."""
        place, open_place = f"{loop.path}p{record.round}", f"{loop.path}plan."
        saved = self._saved.pop(place, None)
        if saved is not None:
            _fill(record, saved["record"])
            if record.refusal is not None:
                raise PlanRefused(record.refusal, "the plan was refused")
            return _plan_of(record)
        lost = [self._lost.pop(name)[0] for name in list(self._lost) if name.startswith(open_place)]
        try:
            made = await plan()
            record.plan = made.as_json()
            return made
        except (ConductorError, PlanRefused) as refused:
            record.refusal = refused.reason
            raise
        finally:
            record.cost_nano += sum(lost)
            if record.plan is not None or record.refusal is not None:
                record.finished_us = self._clock.now_us()
                for name in [name for name in self._open if name.startswith(open_place)]:
                    del self._open[name]
                await self._note(place, {"record": _plain(record)})

    # ------------------------------------------------------------ steps

    async def step(self, loop: Loop, run: StepRun, work: Callable[[], Awaitable[None]]) -> None:
        """Restore a step that has ended; run any other by `work`, unless it may have done what must not be done
        twice."""
        place = loop.path + step_id(run)
        saved = self._saved.pop(place, None)
        if saved is not None:
            _restore(loop, run, saved)
            run.ended.set()
            return
        lost_nano, repeats = self._lost.pop(place, (None, True))
        if lost_nano is not None:
            self._charge(run, lost_nano)
        if repeats:
            await work()
        else:
            self._end_uncertain(run)
        if run.record.status in ENDED:
            self._open.pop(place, None)
            await self._note(place, _step_record(loop, run))
        if not repeats:
            run.ended.set()

    async def leaving(self, loop: Loop, step_id: str, worker: str, bound_nano: int) -> int:
        """Return once it is saved that a call is about to leave, with the number of calls that left for this step from
        gateways that died. Raises Unavailable for a cancelled request, and while
        the store is away, Conflict where another gateway has the request."""
        spec = next((one for one in (*loop.workers, *loop.pool_workers) if one.name == worker), None)
        place = loop.path + step_id
        left_before: int = self._left_before.get(place, 0)
        bound = self._open.setdefault(place, [0, True, left_before])
        bound[0] += bound_nano
        bound[1] = bound[1] and (spec is None or is_repeatable(spec))
        bound[2] += 1
        await self._save()
        if self._refused is not None:
            raise self._refused
        return left_before

    def _charge(self, run: StepRun, nano: int) -> None:
        """Note what the calls may have cost that were under way when the gateway before this one died."""
        now_us = self._clock.now_us()
        run.record.attempts.append(AttemptRecord(now_us, now_us, UNCERTAIN, counted_by="bound"))
        run.record.cost_nano += nano
        run.record.usage_estimated = True

    def _end_uncertain(self, run: StepRun) -> None:
        problem = f"the gateway died while worker {run.spec.name} worked"
        run.error = UpstreamError(f"{problem}; it may have had side effects and is not asked again", code=UNCERTAIN)
        run.record.status, run.record.error = "failed", UNCERTAIN
        run.record.started_us = run.record.finished_us = self._clock.now_us()

    # ------------------------------------------------------------ the store

    async def _note(self, place: str, record: Mapping[str, Any]) -> None:
        """Save a record. Where that fails it is saved before the next call leaves, or none leaves."""
        self._new[place] = record
        try:
            await self._save()
        except BatonError as error:
            log.warning("%s of %s is not saved yet: %s", place, self._request.id, error.message)

    async def _save(self) -> None:
        """Save the state and the new records. Raises Conflict where the claim is lost, Unavailable."""
        async with self._saving:
            if self._abandoned:
                raise _taken()
            state, records, self._new = self._as_state(), self._new, {}  # as of one moment
            try:
                status = await self._insist(state, records)
            except BaseException:  # boundary: whatever kept them from the store, they are saved the next time
                self._new = records | self._new
                raise
        if status is None:
            self._abandoned = True
            raise _taken()
        if status == "cancelling":
            self.refuse()

    async def _insist(self, state: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> str | None:
        for left in reversed(range(SAVE_TRIES)):
            try:
                return await self._store.save(self._request.id, self._runner, state, records)
            except Unavailable:
                if not left:
                    raise
            await asyncio.sleep(SAVE_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def _as_state(self) -> dict[str, Any]:
        assert self._loop is not None and self._held is not None  # noqa: S101, PT018 - set by `begin`
        loop, (money, _) = self._loop, self._held
        meter = loop.tree.meter
        numbers = {"spent": meter.spent_nano, "drawn": meter.drawn_nano, "calls": meter.calls}
        numbers |= {"tokens": meter.tokens, "drawn_tokens": meter.drawn_tokens}
        return {
            "hold": {"granted": meter.granted_nano, "scopes": [[one.name, one.limit_nano] for one in money.scopes]},
            "workers": [[spec.name, spec.handle] for spec in loop.workers],
            "meter": numbers,
            "open": {place: list(bound) for place, bound in self._open.items()},
            "used_s": self._state.get("used_s", 0.0) + self._clock.monotonic_s() - self._began_s,
        }


def is_repeatable(spec: WorkerSpec) -> bool:
    """Whether a call of the worker may be made again when nobody knows what became of the first: a model's costs money
    and does nothing else, tools of Baton's own only compute, and the pool file may say of an MCP server that each of
    its tools only reads, or may be repeated."""
    if spec.kind == "mcp":
        return all(tool.idempotent or tool.side_effects is False for tool in spec.tools.values())
    return spec.kind in ("openai", "litellm", "self") or spec.url in BUILTINS


def _taken() -> BatonError:
    return Conflict("another gateway has taken this request over", code="taken_over")


def _lost(state: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, bool]]:
    """The open places of a state: what may have been spent there beside the saved records, and whether each may run
    again."""
    if not state:
        return {}
    known = sum(one["record"]["cost_nano"] for one in saved.values() if one["record"].get("kind") != "self")
    left = max(0, state["meter"]["spent"] + state["meter"]["drawn"] - known)
    lost: dict[str, tuple[int, bool]] = {}
    for at, (place, (bound_nano, repeats, _)) in enumerate(state["open"].items(), 1):
        nano = left if at == len(state["open"]) else min(left, bound_nano)
        lost[place] = nano, repeats
        left -= nano
    return lost


def _restore_workers(loop: Loop, saved: Sequence[Sequence[str]]) -> None:
    """Give a loop the workers that it had, in their order. Raises Conflict where one of them is gone."""
    known = {(spec.name, spec.handle): spec for spec in (*loop.pool_workers, *loop.reserve, *loop.workers)}
    gone = [name for name, handle in saved if (name, handle) not in known]
    if gone:
        raise Conflict(f"worker {gone[0]} left the pool while the response was being made", code="pool_changed")
    loop.workers = tuple(known[name, handle] for name, handle in saved)
    loop.reserve = tuple(spec for spec in loop.reserve if spec not in loop.workers)


def _plan_of(record: RoundRecord) -> Plan:
    """The plan of a record that was restored."""
    steps = (record.plan or {}).get("steps", ())
    allowed = limits_from_json(record.allowed or {})
    return validate(record.plan, replace(allowed, steps_max=max(allowed.steps_max, len(steps))))


def _step_record(loop: Loop, run: StepRun) -> dict[str, Any]:
    children = [as_payload(one) for one in _children(loop, run.record.child_rollout_id)]
    verdict = None if run.verdict is None else [run.verdict.accept, run.verdict.why, run.verdict.pairwise]
    more = {"children": children, "verdict": verdict, "taken": run.taken}
    record = _plain(run.record) | {"attempts": [_plain(one) for one in run.record.attempts]}
    return {"record": record, "body": run.body, "error": _error_record(run.error), **more}


def _restore(loop: Loop, run: StepRun, saved: Mapping[str, Any]) -> None:
    """Make a step what it was when it had ended."""
    attempts = [AttemptRecord(**one) for one in saved["record"]["attempts"]]
    _fill(run.record, {**saved["record"], "attempts": attempts})
    run.spec = next((spec for spec in loop.workers if spec.name == run.record.worker), run.spec)
    run.body, run.error, run.taken = saved["body"], _error_of(saved["error"]), saved["taken"]
    run.verdict = None if saved["verdict"] is None else Ruling(*saved["verdict"])
    loop.tree.children += [_rollout_of(one) for one in saved["children"]]


def _children(loop: Loop, rollout_id: str | None) -> list[RolloutRecord]:
    """A child loop and all loops below it."""
    child = next((one for one in loop.tree.children if one.id == rollout_id), None)
    if child is None:
        return []
    return [child, *(below for step in child.steps for below in _children(loop, step.child_rollout_id))]


def _rollout_of(saved: Mapping[str, Any]) -> RolloutRecord:
    """The inverse of `as_payload`."""
    rounds = [RoundRecord(**one) for one in saved["rounds"]]
    steps = [
        StepRecord(**{**one, "attempts": [AttemptRecord(**each) for each in one["attempts"]]}) for one in saved["steps"]
    ]
    return RolloutRecord(**{**saved, "rounds": rounds, "steps": steps})


def _error_record(error: BatonError | None) -> dict[str, Any] | None:
    """An error as JSON data: its class, and what it says."""
    if error is None:
        return None
    plain = (str, int, float, bool, dict, type(None))
    values = {name: value for name, value in vars(error).items() if isinstance(value, plain)}
    return {"class": type(error).__name__, "values": values}


def _error_of(saved: Mapping[str, Any] | None) -> BatonError | None:
    """The inverse of `_error_record`."""
    if saved is None:
        return None
    kind = getattr(errors, saved["class"], BatonError)
    error: BatonError = kind.__new__(kind)
    error.args = (saved["values"].get("message", ""),)
    vars(error).update({"tokens": None, **saved["values"]})
    return error


def _fill(record: RoundRecord | StepRecord, saved: Mapping[str, Any]) -> None:
    for one in fields(record):
        setattr(record, one.name, saved[one.name])


def _plain(record: RoundRecord | StepRecord | AttemptRecord) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record)}
