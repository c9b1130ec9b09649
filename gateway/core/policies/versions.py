"""Policy versions: what may become one, their states, the moves between them, and which one plans a request. Pure.

candidate → shadow → canary (1, 5, 25, 100 % of requests) → live → retired. A candidate, a shadow and a canary can be
retired; a live version leaves by a rollback only, and then the one it replaced is live again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from gateway.core.loop.plan import Plan
from gateway.core.loop.prompt import QUALITY_MAX, Profile
from gateway.core.policies.manifest import known_profile, manifest_of
from gateway.errors import BadRequest, Conflict

State = Literal["candidate", "shadow", "canary", "live", "retired"]
SERVED: tuple[State, ...] = ("shadow", "canary", "live")  # held by every engine
PERCENTS = (1, 5, 25, 100)
MOVES: Mapping[State, tuple[State, ...]] = {
    "candidate": ("shadow", "retired"),
    "shadow": ("canary", "retired"),
    "canary": ("canary", "live", "retired"),
    "live": (),
    "retired": (),
}
INSTEAD: Mapping[State, str] = {
    "candidate": "a candidate is shadowed or retired",
    "shadow": "a shadow becomes the canary or is retired",
    "canary": "a canary is promoted or retired",
    "live": "the live version leaves by `rollback`, or when another is promoted",
    "retired": "a retired version comes back only as the previous one of a rollback; publish its directory again",
}
NAME = re.compile(r"([a-z][a-z0-9_.-]{0,62})@(0|[1-9][0-9]{0,8})")
PLAIN_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
BUCKETS = 10_000  # a share is kept to a hundredth of a percent
WHY_CHARS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Version:
    """One version as the registry knows it. `previous`: the number it replaced when it became live. `percent`: of a
    canary. `directory`: relative to the policies directory."""

    name: str
    number: int
    state: State
    parent: str | None
    previous: int | None
    percent: int | None
    directory: str
    manifest: Mapping[str, Any]
    gate: Mapping[str, Any] | None
    created_at: datetime
    changed_at: datetime

    @property
    def id(self) -> str:
        """Such as `conductor@7`: the model name under which it is served and logged."""
        return f"{self.name}@{self.number}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A running gateway. `held`: version → empty where it can serve it, else the reason why it cannot."""

    id: str
    host: str
    held: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pick:
    """The version a request is planned by, and how that one is asked."""

    version: str
    profile: Profile
    quality: int | None = None  # its dial where the request sets none
    rounds: int = 1  # plans a request may take where neither it nor a setting says more
    by_name: bool = True  # False: the engine holds one version at a time, and answers for that one
    trained: bool = True  # on prompts of this profile: it is shown no other


@dataclass(frozen=True, slots=True)
class Standing:
    """Who serves, of one policy name. `previous`: what a rollback of the live one brings back."""

    live: Version | None = None
    previous: Version | None = None
    canary: Version | None = None
    shadow: Version | None = None

    @property
    def held(self) -> tuple[Version, ...]:
        """What every engine must hold, the live one first."""
        every = (self.live, self.canary, self.previous, self.shadow)
        return tuple(version for version in every if version is not None)

    @property
    def asked_for(self) -> tuple[Version, ...]:
        """What a client may ask for by number: all that plans or has planned for everybody."""
        return tuple(version for version in (self.live, self.canary, self.previous) if version is not None)


def parse(text: str) -> tuple[str, int]:
    """`conductor@7` → its name and number. Raises BadRequest."""
    match = NAME.fullmatch(text)
    if match is None:
        raise BadRequest(f"`{text[:64]}` is no policy version; write NAME@NUMBER, such as conductor@7", param="version")
    return match[1], int(match[2])


def standing(versions: Iterable[Version]) -> Standing:
    """Who serves, from all versions of one name."""
    by_number = {version.number: version for version in versions}
    by_state = {version.state: version for version in by_number.values() if version.state in SERVED}
    live = by_state.get("live")
    previous = by_number.get(live.previous) if live and live.previous is not None else None
    return Standing(live, previous, by_state.get("canary"), by_state.get("shadow"))


def check_move(version: Version, to: State, others: Sequence[Version]) -> None:
    """Raises Conflict(illegal_move) naming why `version` cannot become `to` now; `others`: of the same name."""
    if to not in MOVES[version.state]:
        raise Conflict(f"{version.id} is {version.state}, not to be made {to}; {INSTEAD[version.state]}", code=CODE)
    if to in ("shadow", "canary") and version.state != to:
        taken = next((other for other in others if other.state == to), None)
        if taken is not None:
            raise Conflict(f"{taken.id} is the {to} now; retire or promote it first", code=CODE)


CODE = "illegal_move"


def check_percent(percent: int) -> None:
    """Raises BadRequest for a share of a canary other than PERCENTS."""
    if percent not in PERCENTS:
        raise BadRequest(f"a canary takes {', '.join(map(str, PERCENTS))} % of requests", param="percent")


def in_share(request_id: str, salt: str, percent: float) -> bool:
    """Whether this request belongs to that share. The same for ever for one request, independent between salts, and
    growing: what is in at 1 % is in at 5 %."""
    digest = hashlib.sha256(f"{salt}\x1f{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS < percent * BUCKETS / 100


def pick(now: Standing, usable: Mapping[str, Pick], request_id: str) -> Pick | None:
    """Which version plans this request: the canary on its share, else the live one, else the one before it; of those
    that the engines hold. None: none of them."""
    canary = now.canary
    if canary is not None and canary.id in usable and in_share(request_id, canary.id, canary.percent or 0):
        return usable[canary.id]
    return next((usable[one.id] for one in (now.live, now.previous) if one is not None and one.id in usable), None)


def picked(version: Version) -> Pick | None:
    """How a version is asked; None where this code does not render the prompt it was trained on."""
    manifest = manifest_of(version.manifest)
    profile = known_profile(manifest)
    if profile is None:
        return None
    quality = manifest.quality
    in_range = quality is not None and 0 <= quality <= QUALITY_MAX
    trained = manifest.kind != "base"
    return Pick(version.id, profile, quality if in_range else None, manifest.rounds, trained=trained)


def same_route(one: Plan, other: Plan) -> bool:
    """Whether two plans call the same workers in the same order over the same links, whatever the task texts say."""
    return [(step.worker, step.see) for step in one.steps] == [(step.worker, step.see) for step in other.steps]


def check_words(name: str, why: str) -> None:
    """Raises BadRequest for a policy name that is none, or a reason too long to keep."""
    if PLAIN_NAME.fullmatch(name) is None:
        raise BadRequest(f"`{name[:64]}` is no policy name; a-z, 0-9, _ . - and a letter first", param="name")
    if len(why) > WHY_CHARS_MAX:
        raise BadRequest(f"`why` is over {WHY_CHARS_MAX} characters", param="why")


def check_gate(gate: Mapping[str, Any] | None, forced: bool, why: str) -> None:
    """Raises Conflict(gate_refused) for what the gate did not let through and nobody vouches for."""
    if forced and not why.strip():
        raise BadRequest("say why it is forced; it is kept in the audit", param="why")
    if forced or (gate is not None and gate.get("passed") is True):
        return
    refusals = gate.get("refusals", []) if gate is not None else []
    names = ", ".join(str(one.get("name", one)) if isinstance(one, dict) else str(one) for one in refusals)
    message = f"the gate refused it ({names or 'no reason given'})" if gate is not None else "it has no gate report"
    raise Conflict(f"{message}; mend it, or force it and say why", code="gate_refused")


def check_report(gate: Mapping[str, Any] | None, manifest: Mapping[str, Any], forced: bool) -> None:
    """Raises Conflict(gate_refused) where the report says that it judged other weights."""
    digest = (gate or {}).get("candidate_sha256")
    if digest is not None and not forced and digest not in manifest["sha256"].values():
        message = f"the gate report is of other weights ({str(digest)[:12]}…); gate this directory"
        raise Conflict(f"{message}, or force it and say why", code="gate_refused")


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two manifests are of the same directory: the same files under the same number."""
    return one.get("sha256") == other.get("sha256") and str(one.get("version")) == str(other.get("version"))


def number_for(manifest: Mapping[str, Any], versions: Sequence[Version]) -> int:
    """The manifest's own number where it is free, else one more than any."""
    numbers = {version.number for version in versions}
    number = str(manifest.get("version", ""))
    if re.fullmatch("[0-9]{1,8}", number) and int(number) not in numbers:
        return int(number)
    return max(numbers, default=0) + 1


def parent_of(manifest: Mapping[str, Any]) -> str | None:
    """The version it was trained from."""
    return str(manifest.get("parent") or "") or None


def base_under(version: Version, versions: Iterable[Version]) -> Version | None:
    """The version with the weights that an adapter changes; None where it is no adapter, or its base no version."""
    manifest = manifest_of(version.manifest)
    if manifest.kind != "adapter" or not manifest.base_sha256:
        return None
    of_base = ((one, manifest_of(one.manifest)) for one in versions)
    return next((o for o, m in of_base if m.kind != "adapter" and m.weights_sha256 == manifest.base_sha256), None)


def files_needed(versions: Sequence[Version]) -> set[str]:
    """The sha256 of every file that a gateway may still load: of versions that are not retired, of those that a
    rollback brings back, and of the bases under them."""
    restored = {(one.name, one.previous) for one in versions if one.state == "live"}
    needed = [one for one in versions if one.state != "retired" or (one.name, one.number) in restored]
    bases = [base for base in (base_under(one, versions) for one in needed) if base is not None]
    return {digest for one in (*needed, *bases) for digest in manifest_of(one.manifest).sha256.values()}
