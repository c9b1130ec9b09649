"""Login at an identity provider: the authorization-code flow with PKCE, state and nonce, and the session after it.

A login that has begun is bound to one browser by a cookie and used once. A session is a random token in a cookie, of
which the store has the digest, so that logging out ends it on every gateway.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from datetime import timedelta

from gateway.core.access.audit import Act
from gateway.core.access.login import RoleRules, person_of
from gateway.errors import Forbidden
from gateway.service.ports.login import IdentityProvider, LoginStore, PendingLogin
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.login")
PENDING = timedelta(minutes=10)  # from the begin of a login to its end
TOKEN_BYTES = 32


class Logins:
    """The use cases of `/login`."""

    def __init__(
        self, provider: IdentityProvider, store: LoginStore, clock: Clock, roles: RoleRules, *, session_s: float
    ) -> None:
        self._provider = provider
        self._store = store
        self._clock = clock
        self._roles = roles
        self.session_s = session_s

    async def begin(self) -> tuple[str, str]:
        """Begin a login: the provider's URL, and the token that its browser must have. Raises Unavailable."""
        state, browser, nonce, verifier = (secrets.token_urlsafe(TOKEN_BYTES) for _ in range(4))
        url = await self._provider.begin(state, nonce, verifier)
        login = PendingLogin(digest(browser), nonce, verifier)
        await self._store.begin(digest(state), login, self._clock.now() + PENDING)
        return url, browser

    async def finish(self, state: str, code: str, browser: str) -> str:
        """End a login: the token of the new session. Raises Forbidden, which says why, and Unavailable."""
        now = self._clock.now()
        login = await self._store.take(digest(state), now)
        if login is None or not hmac.compare_digest(login.browser, digest(browser)):
            raise refused("this login was not begun in this browser, or is older than ten minutes")
        claims = await self._provider.finish(code, login.nonce, login.verifier)
        role = self._roles.role_of(claims)
        if role is None:
            log.warning("no role for %s: claim %s gives none", str(claims["sub"])[:200], self._roles.claim)
            raise refused(f"you have no role here: no value of `{self._roles.claim}` gives one; ask your operator")
        token, person = secrets.token_urlsafe(TOKEN_BYTES), person_of(claims, role)
        await self._store.open(digest(token), person, now, now + timedelta(seconds=self.session_s))
        log.info("%s (%s) logged in as %s", person.actor.replace(":", " "), person.name, person.role)
        return token

    async def act(self, token: str) -> Act | None:
        """Who acts in a session; None where it has ended. Raises Unavailable."""
        person = await self._store.find(digest(token), self._clock.now())
        return None if person is None else Act(person.actor, role=person.role)

    async def end(self, token: str) -> str | None:
        """Log out; the URL where the provider's own session ends, if it has one. Raises Unavailable."""
        await self._store.close(digest(token))
        return await self._provider.end_url()


def refused(why: str) -> Forbidden:
    """The error of a login that came to nothing."""
    return Forbidden(f"The login was refused: {why}.", code="login_refused")


def digest(token: str) -> bytes:
    """SHA-256 of a random token, which needs no slower hash."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
