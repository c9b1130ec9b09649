"""When a worker rests: what its calls say of its health, and for how long it is left alone. Pure.

A breaker is *closed* while calls succeed. It opens when enough calls in a row have failed by the worker's own fault:
the worker *rests*. When the rest is over it is *due*: one call tries it, and that call closes the breaker or begins the
next rest, which is twice as long, up to a bound. Some faults speak for every call (a rate limit, an unpaid bill, a
refused key, silence for the whole of the worker's time), so one of them is enough.

A refused key or an unpaid bill is a fault of the account: all workers with the same key at the same host rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from gateway.errors import (
    ContractMissed,
    UpstreamError,
    UpstreamInvalid,
    UpstreamProtocol,
    UpstreamRefused,
    UpstreamTimeout,
)

Fault = Literal[
    "failed", "overloaded", "broken", "unreachable", "forbidden", "missing", "slow", "silent", "rate_limited",
    "unpaid", "key",
]  # fmt: skip
State = Literal["closed", "resting", "due"]
TOLD_S_MIN = 1.0  # the shortest rest: a vendor may ask for none at all
LONGEST, DOUBLED_MAX = 6, 16
TRY_S = 60.0  # a try that has not ended after this time is forgotten: its process may be gone
_STATUSES: Mapping[int, Fault] = {
    401: "key",
    402: "unpaid",
    403: "forbidden",
    404: "missing",
    407: "failed",
    408: "failed",
    429: "rate_limited",
    503: "overloaded",
    529: "overloaded",
}


class Terms(NamedTuple):
    """How a fault counts. `at_once`: one is enough. `rests`: the first rest, in units of `RestRules.rest_s`.
    `lasting`: rests may grow to `RestRules.rest_s_max`; else they grow to LONGEST of those units, for a try costs
    little and a worker that recovers is wanted back."""

    at_once: bool = False
    rests: int = 1
    lasting: bool = False
    account: bool = False


TERMS: Mapping[Fault, Terms] = {
    "failed": Terms(),
    "overloaded": Terms(),
    "broken": Terms(),
    "unreachable": Terms(),
    "forbidden": Terms(),  # of one request it may be the vendor's moderation
    "missing": Terms(),
    "slow": Terms(rests=6),
    "silent": Terms(at_once=True, rests=6),
    "rate_limited": Terms(at_once=True, lasting=True),
    "unpaid": Terms(at_once=True, rests=6, lasting=True, account=True),
    "key": Terms(at_once=True, rests=6, lasting=True, account=True),
}


class RestRules(NamedTuple):
    """`failures_max`: failures in a row that open a breaker; 0: none ever opens. `rest_s`: the first rest after
    failures; each further one is twice as long, up to a bound, or as long as the vendor says."""

    failures_max: int = 3
    rest_s: float = 10.0
    rest_s_max: float = 600.0


class Health(NamedTuple):
    """One breaker. Times are seconds of one clock. `rests`: in a row, without a success between them; 0: it is
    closed. `told_s`: until when the vendor itself wants no calls. `try_s`: when the call left that tries it; 0: none is
    on its way. `at_s`: when a rest began or ended, or a try left or ended; of two copies the later one counts."""

    failures: int = 0
    rests: int = 0
    fault: Fault | None = None
    began_s: float = 0.0
    until_s: float = 0.0
    told_s: float = 0.0
    try_s: float = 0.0
    at_s: float = 0.0

    def state(self, now_s: float) -> State:
        """Whether calls may leave: `due` is for one call at a time."""
        if not self.rests:
            return "closed"
        return "resting" if now_s < self.until_s else "due"

    def holds(self, now_s: float) -> bool:
        """Whether no call should leave now: it rests, or another call tries it."""
        return self.rests > 0 and (now_s < self.until_s or 0.0 < self.try_s > now_s - TRY_S)

    def left_s(self, now_s: float) -> float:
        """The seconds that are left of the rest."""
        return max(0.0, self.until_s - now_s) if self.rests else 0.0


HEALTHY = Health()


def fault_of(error: UpstreamError, *, alive: bool) -> Fault | None:
    """What a failed call says against its worker; None: nothing. `alive`: while it waited, a part of its reply or of
    another one came. What the request itself caused (its content, its own short time, a lack of places here) is no
    fault of the worker."""
    status = error.upstream_status
    if isinstance(error, UpstreamRefused):
        return "missing" if status == 404 else None  # vendors refuse long prompts with 500, too
    if status is not None:
        return _STATUSES.get(status) or (None if 400 <= status < 500 else "failed")  # 200: with an error inside
    if not error.dispatched:
        return "unreachable" if type(error) is UpstreamError and error.retryable else None
    if isinstance(error, UpstreamTimeout):
        return None if error.hasty else "slow" if alive else "silent"
    if isinstance(error, UpstreamProtocol):
        return "broken"
    return "failed" if error.retryable and not isinstance(error, UpstreamInvalid | ContractMissed) else None


def tried(health: Health, now_s: float) -> Health:
    """The breaker once a call has left that tries a worker whose rest is over."""
    return health._replace(try_s=now_s, at_s=now_s)


def abandoned(health: Health, now_s: float) -> Health:
    """The breaker once that call has ended without saying anything."""
    return health._replace(try_s=0.0, at_s=now_s)


def succeeded(health: Health, left_s: float, now_s: float) -> Health:
    """The breaker after a call that left at `left_s` and got its reply. A call that left before a rest began says
    nothing of a rate limit, a bill or a key; that others get replies shows that the worker is there."""
    if health.rests and left_s < health.began_s and health.fault in ("rate_limited", "unpaid", "key"):
        return health
    return Health(at_s=now_s if health.rests else health.at_s)


def failed(
    health: Health,
    fault: Fault,
    left_s: float,
    now_s: float,
    rules: RestRules,
    retry_after_s: float | None = None,
) -> Health:
    """The breaker after a call that left at `left_s` and failed so. `retry_after_s`: when the vendor wants to be asked
    again, which is the whole first rest and the least of any further one. Calls that left before the rest was over
    prolong it at most to that."""
    if not rules.failures_max:
        return health
    told_s = 0.0 if retry_after_s is None else now_s + max(TOLD_S_MIN, retry_after_s)
    if health.rests and left_s < health.until_s:
        later = told_s > health.until_s
        return health._replace(until_s=told_s, told_s=told_s, at_s=now_s) if later else health
    terms, failures = TERMS[fault], health.failures + 1
    if not (terms.at_once or health.rests or failures >= rules.failures_max):
        return health._replace(failures=failures)
    growing = terms.rests * 2.0 ** min(health.rests, DOUBLED_MAX)
    own_s = min(rules.rest_s_max, rules.rest_s * (growing if terms.lasting else min(LONGEST, growing)))
    until_s = max(told_s, now_s + own_s) if health.rests or not told_s else told_s
    return Health(failures, health.rests + 1, fault, began_s=now_s, until_s=until_s, told_s=told_s, at_s=now_s)


def newer(one: Health, other: Health) -> Health:
    """Of two copies of one breaker, the one that changed last."""
    return other if other.at_s > one.at_s else one
