"""The errors that Baton raises, and how each looks to an OpenAI client.

BatonError                      status  type                    code
├── BadRequest                  400     invalid_request_error   (given)
│   ├── PlanRefused             400     invalid_request_error   plan_refused        (never reaches a client)
│   ├── Unpriced                400     invalid_request_error   unpriced_worker
│   ├── IdempotencyReused       422     invalid_request_error   idempotency_key_reused  (belongs to another body)
│   ├── ClientLeft              400     invalid_request_error   client_left         (within its body; nobody reads it)
│   ├── VersionRefused          400     invalid_request_error   version_refused     (by an engine; `reason` says why)
│   └── ConfigError             400     invalid_request_error   bad_config          (names file:line and the fix)
├── Unauthorized                401     invalid_request_error   invalid_api_key
├── Forbidden                   403     permission_error        (given)
├── NotFound                    404     invalid_request_error   not_found | model_not_found
├── Conflict                    409     invalid_request_error   (given)
│   ├── ConversationLocked      409     invalid_request_error   conversation_locked (retry; another turn is under way)
│   └── IdempotencyRunning      409     invalid_request_error   idempotency_key_in_use  (retry; carries Retry-After)
├── BodyTooSlow                 408     invalid_request_error   request_timeout     (retry; closes the connection)
├── TooLarge                    413     invalid_request_error   request_too_large
├── RateLimited                 429     rate_limit_error        rate_limit_exceeded (retry; carries Retry-After)
├── BudgetExceeded              429     insufficient_quota      insufficient_quota  (x-should-retry: false)
│   └── BudgetHeld              429     rate_limit_error        budget_held         (retry; carries Retry-After)
├── CapReached                  400     invalid_request_error   cap_reached         (names the cap and how to lift it)
├── DeadlineExceeded            504     timeout_error           deadline_exceeded
├── UpstreamError               502     upstream_error          (the worker failed; `retryable`, `upstream_status`)
│   ├── UpstreamTimeout         504     upstream_error          upstream_timeout
│   ├── UpstreamResting         503     upstream_error          worker_rests        (not asked: it keeps failing)
│   ├── UpstreamRateLimited     429     rate_limit_error        upstream_rate_limited
│   ├── UpstreamRefused         400     invalid_request_error   (the worker rejected the request)
│   ├── UpstreamOverloaded      503     upstream_error          upstream_overloaded (the worker replied 503 or 529)
│   ├── UpstreamInvalid         502     upstream_error          invalid_structured_output (breaks its schema, twice)
│   ├── ContractMissed          502     upstream_error          contract_missed     (a reply misses its step's contract)
│   └── UpstreamProtocol        502     upstream_error          upstream_protocol   (invalid, cut stream, bad JSON)
├── ConductorError              502     upstream_error          conductor_unavailable (never reaches a client)
└── Unavailable                 503     server_error            (given)
    ├── EngineDown              503     server_error            engine_down         (no answer, or it died in a swap)
    ├── MoneyUnavailable        503     server_error            money_unavailable   (no Redis: money fails closed)
    └── SpoolFull               503     server_error            spool_full

Each error carries its `status`, `type` and `code`; only `api/edge/stack.py` turns them into replies.
"""

from __future__ import annotations

import math
from typing import Any


class BatonError(Exception):
    """The base of the tree. `message` is for people; `param` names the invalid field, if there is one."""

    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"
    place: str = ""  # where the worker is and whose its key is: for operators, never for a tenant
    should_retry: bool | None = None  # None: the status decides (SDKs retry 408, 409, 429 and 5xx)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.headers = dict(headers or {})

    @property
    def in_full(self) -> str:
        """The message as operators read it: with the place of the worker."""
        return f"{self.message} ({self.place})" if self.place else self.message

    def reply_headers(self) -> dict[str, str]:
        """The headers of the reply. For OpenAI's SDKs, `x-should-retry` takes precedence over the status."""
        retry = {} if self.should_retry is None else {"x-should-retry": str(self.should_retry).lower()}
        return retry | self.headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, with all four keys."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def retry_headers(wait_s: float) -> dict[str, str]:
    """Headers that say when to try again, in seconds and in milliseconds. SDKs do not retry after more than 120 s."""
    return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}


class BadRequest(BatonError):
    """A request that Baton does not accept."""

    status, type, code = 400, "invalid_request_error", "invalid_request"


class PlanRefused(BadRequest):
    """A plan that `core.loop.plan.validate` refuses. `reason` is a stable name, used as a metric label."""

    code = "plan_refused"

    def __init__(self, reason: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class Unpriced(BadRequest):
    """A worker without a price."""

    code = "unpriced_worker"


class IdempotencyReused(BadRequest):
    """An Idempotency-Key that belongs to a request with another body or path."""

    status, code = 422, "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used for a request with another body or path; send a new key with a new request.",
            param="Idempotency-Key",
        )


class ClientLeft(BadRequest):
    """The client left before it had sent its body."""

    code = "client_left"

    def __init__(self) -> None:
        super().__init__("the client left before it had sent the body")


class VersionRefused(BadRequest):
    """A policy version that an engine refuses to load or unload. The engine keeps serving what it served. The message
    ends with the fix. `reason`: missing | manifest | checksum | torn | shape | not_finite | prompt | kind | base | rank
    | tied | full | taken | held | probe | engine (a refusal by the engine itself)."""

    code = "version_refused"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(BadRequest):
    """An invalid setting, pool file or policy directory. The message names the place and the fix."""

    code = "bad_config"


class Unauthorized(BatonError):
    """A request without a valid API key."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class Forbidden(BatonError):
    """A request for something that its key may not use."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(BatonError):
    """A request for something that does not exist, or that belongs to another key."""

    status, type, code = 404, "invalid_request_error", "not_found"


class Conflict(BatonError):
    """A request that contradicts the current state."""

    status, type, code = 409, "invalid_request_error", "conflict"
    should_retry = False  # a retry meets the same conflict


class ConversationLocked(Conflict):
    """Another turn of the conversation is being made; once it has ended a retry is served."""

    code = "conversation_locked"
    should_retry = True

    def __init__(self, conversation_id: str) -> None:
        problem = f"Another response of the conversation '{conversation_id}' is being made; retry once it has ended."
        super().__init__(problem, param="conversation", headers={"retry-after": "1"})


class IdempotencyRunning(Conflict):
    """The first request with this Idempotency-Key is still running; a later retry gets its reply."""

    code = "idempotency_key_in_use"
    should_retry = True

    def __init__(self) -> None:
        super().__init__(
            "The first request with this Idempotency-Key is still being served; send it again shortly.",
            param="Idempotency-Key",
            headers={"retry-after": "1", "retry-after-ms": "1000"},
        )


class BodyTooSlow(BatonError):
    """A request whose body came too slowly. The connection is closed with the reply."""

    status, type, code = 408, "invalid_request_error", "request_timeout"

    def __init__(self, received_bytes: int, bytes_per_s_min: int, s_max: float) -> None:
        super().__init__(
            f"The body came too slowly: {received_bytes:,} bytes so far; send at least {bytes_per_s_min:,} bytes a "
            f"second, and all of it within {s_max:g} s.",
            headers={"connection": "close"},
        )


class TooLarge(BatonError):
    """A request or conversation over its size limit."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class RateLimited(BatonError):
    """A request over a limit on requests, tokens or concurrency. One more request fits after `retry_after_s`."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    should_retry = True

    def __init__(self, message: str, *, retry_after_s: float, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, headers=retry_headers(retry_after_s) | (headers or {}))
        self.retry_after_s = retry_after_s


HELD_RETRY_S = "2"  # when requests that hold money may have ended


class BudgetExceeded(BatonError):
    """The hold does not fit one of its scopes, whose money is spent. A retry cannot help, and the reply says so."""

    status, type, code = 429, "insufficient_quota", "insufficient_quota"

    def __init__(
        self, message: str, *, scope: str, left_nano: int = 0, needed_nano: int = 0, param: str | None = None
    ) -> None:
        super().__init__(message, param=param, headers=self._advice())
        self.scope = scope
        self.left_nano = left_nano  # in the scope's unit: of `calls:…` a call
        self.needed_nano = needed_nano

    def _advice(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class BudgetHeld(BudgetExceeded):
    """The hold does not fit a scope now, because requests under way hold its money; most of that comes back."""

    type, code = "rate_limit_error", "budget_held"

    def _advice(self) -> dict[str, str]:
        return {"x-should-retry": "true", "retry-after": HELD_RETRY_S}


class CapReached(BatonError):
    """A cap ended the request before there was any answer. `cap` is its name (`depth`, `cost`, …)."""

    status, type, code = 400, "invalid_request_error", "cap_reached"

    def __init__(self, cap: str, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})
        self.cap = cap


class DeadlineExceeded(BatonError):
    """The request has used up its wall-clock time."""

    status, type, code = 504, "timeout_error", "deadline_exceeded"
    should_retry = False  # a retry has no more time than the request had


class UpstreamError(BatonError):
    """A worker failed. `retryable` says whether the same call may be tried again."""

    status, type, code = 502, "upstream_error", "upstream_error"
    retryable: bool = False
    kind = "failed"  # Baton's name of the failure; `code` may be the worker's

    def __init__(
        self,
        message: str,
        *,
        retryable: bool | None = None,
        upstream_status: int | None = None,
        retry_after_s: float | None = None,
        param: str | None = None,
        code: str | None = None,
        dispatched: bool = True,
    ) -> None:
        super().__init__(message, param=param, code=code)
        if retryable is not None:
            self.retryable = retryable
        self.upstream_status = upstream_status
        self.retry_after_s = retry_after_s
        self.should_retry = self.retryable if self.status >= 429 else None
        if retry_after_s is not None:
            self.headers |= retry_headers(retry_after_s)
        self.dispatched = dispatched  # False: the request never left (refused connection, DNS), so it costs nothing
        self.tokens: tuple[int, int] | None = None  # prompt and reply of a call that ended with no reply; None: unknown


class UpstreamTimeout(UpstreamError):
    """A worker did not answer in time. `hasty`: the call had less time than the worker may take."""

    status, code, retryable, hasty = 504, "upstream_timeout", True, False
    kind = "timeout"


class UpstreamResting(UpstreamError):
    """A worker that keeps failing was not asked."""

    status, code, kind = 503, "worker_rests", "rests"


class UpstreamRateLimited(UpstreamError):
    """A worker is over its rate limit."""

    status, type, code, retryable = 429, "rate_limit_error", "upstream_rate_limited", True
    kind = "rate_limited"


class UpstreamRefused(UpstreamError):
    """A worker rejected the request; the client gets its message."""

    status, type, code = 400, "invalid_request_error", "upstream_refused"
    kind = "refused"


class UpstreamOverloaded(UpstreamError):
    """A worker replied that it is overloaded (503 or 529)."""

    status, code, retryable = 503, "upstream_overloaded", True
    kind = "overloaded"


class UpstreamInvalid(UpstreamError):
    """A reply without the structure that its request promises the client, even on a second attempt."""

    code = "invalid_structured_output"
    kind = "invalid"


class ContractMissed(UpstreamError):
    """A reply that misses the contract of its step, after a repair and another worker."""

    code = "contract_missed"
    kind = "missed"


class UpstreamProtocol(UpstreamError):
    """A reply that is not valid: not the API's format, a cut stream, or bad JSON."""

    code, retryable = "upstream_protocol", True
    kind = "protocol"


class ConductorError(BatonError):
    """The conductor made no plan. `reason`: down | slow | unparseable | refused | cost. `billable`: whether the call
    may have cost money: not if it never left, or got an error status. `upstream_status`: that status."""

    status, type, code = 502, "upstream_error", "conductor_unavailable"

    def __init__(self, reason: str, message: str, *, billable: bool = True, upstream_status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.billable = billable
        self.upstream_status = upstream_status


class Unavailable(BatonError):
    """Something that Baton depends on does not work now."""

    status, type, code = 503, "server_error", "unavailable"
    should_retry = True


class EngineDown(Unavailable):
    """An engine does not answer, or died while it swapped versions."""

    code = "engine_down"


class MoneyUnavailable(Unavailable):
    """Baton cannot reserve money, so it accepts no request."""

    code = "money_unavailable"


class SpoolFull(Unavailable):
    """The journal has no room on its disk."""

    code = "spool_full"
