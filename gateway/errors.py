"""Every error Baton raises on purpose, and how each looks to an OpenAI client.

BatonError                      status  type                    code
├── BadRequest                  400     invalid_request_error   (given)
│   ├── PlanRefused             400     invalid_request_error   plan_refused        (never reaches a client)
│   ├── Unpriced                400     invalid_request_error   unpriced_worker
│   ├── IdempotencyReused       422     invalid_request_error   idempotency_key_reused  (the key came with another body)
│   ├── VersionRefused          400     invalid_request_error   version_refused     (an engine refuses it; `reason`)
│   └── ConfigError             400     invalid_request_error   bad_config          (one line: file:line and the fix)
├── Unauthorized                401     invalid_request_error   invalid_api_key
├── Forbidden                   403     permission_error        (given)
├── NotFound                    404     invalid_request_error   not_found | model_not_found
├── Conflict                    409     invalid_request_error   (given)
│   └── IdempotencyRunning      409     invalid_request_error   idempotency_key_in_use  (retry; carries Retry-After)
├── TooLarge                    413     invalid_request_error   request_too_large
├── RateLimited                 429     rate_limit_error        rate_limit_exceeded (retry; carries Retry-After)
├── BudgetExceeded              429     insufficient_quota      insufficient_quota  (x-should-retry: false)
├── CapReached                  400     invalid_request_error   cap_reached         (which cap, and how to lift it)
├── DeadlineExceeded            504     timeout_error           deadline_exceeded
├── UpstreamError               502     upstream_error          (the worker failed; `retryable`, `upstream_status`)
│   ├── UpstreamTimeout         504     upstream_error          upstream_timeout
│   ├── UpstreamRateLimited     429     rate_limit_error        upstream_rate_limited
│   ├── UpstreamRefused         400     invalid_request_error   (the worker called the request bad; passed on)
│   ├── UpstreamOverloaded      503     upstream_error          upstream_overloaded (it said 503 or 529)
│   ├── UpstreamInvalid         502     upstream_error          invalid_structured_output (twice not what was promised)
│   └── UpstreamProtocol        502     upstream_error          upstream_protocol   (nonsense, cut stream, bad JSON)
├── ConductorError              502     upstream_error          conductor_unavailable (never reaches a client either)
└── Unavailable                 503     server_error            (given)
    ├── EngineDown              503     server_error            engine_down         (does not answer, or died of a swap)
    ├── MoneyUnavailable        503     server_error            money_unavailable   (Redis away: money fails closed)
    └── SpoolFull               503     server_error            spool_full

`status`, `type` and `code` travel with the error; `api/edge/stack.py` is the one place that turns them into replies.
"""

from __future__ import annotations

import math
from typing import Any


class BatonError(Exception):
    """Base of the tree. `message` is for people, `param` names the offending field where there is one."""

    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"
    should_retry: bool | None = None  # None: as the status says (408, 409, 429 and 5xx are tried again)

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
        if code is not None:
            self.code = code
        self.headers = dict(headers or {})

    def reply_headers(self) -> dict[str, str]:
        """The headers of the reply. `x-should-retry` overrules what OpenAI's SDKs would do by the status alone."""
        said = {} if self.should_retry is None else {"x-should-retry": str(self.should_retry).lower()}
        return said | self.headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object: all four keys, always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def retry_headers(wait_s: float) -> dict[str, str]:
    """When to try again, in seconds and in milliseconds. SDKs take more than 120 s for "do not"."""
    return {
        "retry-after": str(max(1, math.ceil(wait_s))),
        "retry-after-ms": str(max(1, math.ceil(wait_s * 1000))),
    }


class BadRequest(BatonError):
    status, type, code = 400, "invalid_request_error", "invalid_request"


class PlanRefused(BadRequest):
    """A plan that `core.loop.plan.validate` will not let run. `reason` is a stable name used as a metric label."""

    code = "plan_refused"

    def __init__(self, reason: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class Unpriced(BadRequest):
    code = "unpriced_worker"


class IdempotencyReused(BadRequest):
    """An Idempotency-Key that belongs to a request with another body or path."""

    status, code = 422, "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used for a request with another body or path; send a new key with a new request.",
            param="Idempotency-Key",
        )


class VersionRefused(BadRequest):
    """A policy version that an engine will not load or unload; what it serves is as before. `reason`: missing |
    manifest | checksum | torn | shape | not_finite | prompt | kind | base | rank | tied | full | taken | held | probe |
    engine (the engine itself said no). The message ends with the fix."""

    code = "version_refused"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(BadRequest):
    """A setting, pool file or policy directory that cannot be used. The message names the place and the fix."""

    code = "bad_config"


class Unauthorized(BatonError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class Forbidden(BatonError):
    status, type, code = 403, "permission_error", "forbidden"


class NotFound(BatonError):
    status, type, code = 404, "invalid_request_error", "not_found"


class Conflict(BatonError):
    status, type, code = 409, "invalid_request_error", "conflict"
    should_retry = False  # it clashes the same way again


class IdempotencyRunning(Conflict):
    """The request that brought this Idempotency-Key first has not ended; who asks again is given its reply."""

    code = "idempotency_key_in_use"
    should_retry = True

    def __init__(self) -> None:
        super().__init__(
            "The request that brought this Idempotency-Key first is still being served; send it again shortly.",
            param="Idempotency-Key",
            headers={"retry-after": "1", "retry-after-ms": "1000"},
        )


class TooLarge(BatonError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class RateLimited(BatonError):
    """Over RPM, TPM or concurrency. `retry_after_s` is when one more request would fit."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    should_retry = True

    def __init__(self, message: str, *, retry_after_s: float, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, headers=retry_headers(retry_after_s) | (headers or {}))
        self.retry_after_s = retry_after_s


class BudgetExceeded(BatonError):
    """The hold does not fit one of its scopes; retrying cannot help, so clients are told not to."""

    status, type, code = 429, "insufficient_quota", "insufficient_quota"

    def __init__(self, message: str, *, scope: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})
        self.scope = scope


class CapReached(BatonError):
    """A cap of the request ended it before there was any answer. `cap` names it (`depth`, `cost`, …)."""

    status, type, code = 400, "invalid_request_error", "cap_reached"

    def __init__(self, cap: str, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})
        self.cap = cap


class DeadlineExceeded(BatonError):
    status, type, code = 504, "timeout_error", "deadline_exceeded"
    should_retry = False  # the request's own time was too short, and it was spent


class UpstreamError(BatonError):
    """A worker failed. `retryable` says whether the same call may be tried again; `billable` whether it may cost."""

    status, type, code = 502, "upstream_error", "upstream_error"
    retryable: bool = False
    kind = "failed"  # a name of ours; `code` may be the worker's own word

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
        self.dispatched = dispatched  # False: the request never left (refused connection, DNS): costs nothing


class UpstreamTimeout(UpstreamError):
    status, code, retryable = 504, "upstream_timeout", True
    kind = "timeout"


class UpstreamRateLimited(UpstreamError):
    status, type, code, retryable = 429, "rate_limit_error", "upstream_rate_limited", True
    kind = "rate_limited"


class UpstreamRefused(UpstreamError):
    status, type, code = 400, "invalid_request_error", "upstream_refused"
    kind = "refused"


class UpstreamOverloaded(UpstreamError):
    status, code, retryable = 503, "upstream_overloaded", True
    kind = "overloaded"


class UpstreamInvalid(UpstreamError):
    """A reply that is not of the shape its request promised the client, even when asked for again."""

    code = "invalid_structured_output"
    kind = "invalid"


class UpstreamProtocol(UpstreamError):
    code, retryable = "upstream_protocol", True
    kind = "protocol"


class ConductorError(BatonError):
    """The conductor is down, slow, or spoke nonsense. `reason`: down | slow | unparseable | refused. `billable` says
    whether it may have cost: not when it was never reached, or answered with an error status."""

    status, type, code = 502, "upstream_error", "conductor_unavailable"

    def __init__(self, reason: str, message: str, *, billable: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.billable = billable


class Unavailable(BatonError):
    status, type, code = 503, "server_error", "unavailable"
    should_retry = True


class EngineDown(Unavailable):
    code = "engine_down"


class MoneyUnavailable(Unavailable):
    code = "money_unavailable"


class SpoolFull(Unavailable):
    code = "spool_full"
