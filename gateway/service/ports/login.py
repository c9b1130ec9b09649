"""The ports of a login at an identity provider: the provider, and the store of logins that are open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from gateway.core.access.login import Person


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """A login that has begun: what only its browser (`browser`, a digest) and this gateway know."""

    browser: bytes
    nonce: str
    verifier: str


class IdentityProvider(Protocol):
    """An OpenID Connect provider."""

    async def begin(self, state: str, nonce: str, verifier: str) -> str:
        """The URL where a person logs in, for the authorization-code flow with PKCE. Raises Unavailable where the
        provider does not answer, or is none."""
        ...

    async def finish(self, code: str, nonce: str, verifier: str) -> Mapping[str, Any]:
        """Redeem a code, and return the claims of its ID token, whose signature, issuer, audience, times and nonce are
        right. Raises Forbidden(login_refused), which says what was wrong, and Unavailable."""
        ...

    async def end_url(self) -> str | None:
        """Where a person logs out of the provider too; None where it says none, or does not answer."""
        ...


class LoginStore(Protocol):
    """Logins that are open, for all gateways over one database; tokens are stored as digests. Every call raises
    Unavailable when the store is away."""

    async def begin(self, state: bytes, login: PendingLogin, until: datetime) -> None:
        """Store a login that has begun, under the digest of its state."""
        ...

    async def take(self, state: bytes, now: datetime) -> PendingLogin | None:
        """Remove and return a login that has begun; None for an unknown or old one. Each is returned once."""
        ...

    async def open(self, token: bytes, person: Person, now: datetime, until: datetime) -> None:
        """Store a session under the digest of its token, and audit it (`console.login`)."""
        ...

    async def find(self, token: bytes, now: datetime) -> Person | None:
        """Whose session it is; None for an unknown or old one."""
        ...

    async def close(self, token: bytes) -> Person | None:
        """End a session and audit it (`console.logout`). Return whose it was, None for an unknown one."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete what is over its time, at most `limit`. Return the number."""
        ...
