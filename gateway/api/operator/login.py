"""The routes of a login at an identity provider, and the actor of admin requests that come with its session.

Cookies are HttpOnly, and Secure where the console is served over https. That of a session is SameSite=Strict, and
counts only beside the header `baton-console`, which no other site's page can send: so no other site acts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from gateway.api.edge.access import note_error
from gateway.api.edge.bodies import Actor
from gateway.api.edge.stack import Router
from gateway.api.operator.pages import HEADERS
from gateway.core.access.audit import Act
from gateway.errors import BatonError, NotFound, Unauthorized
from gateway.service.admin.logins import PENDING, Logins, refused

SESSION, BROWSER = "baton_session", "baton_login"
CONSOLE_HEADER = "baton-console"
PARAM_CHARS_MAX = 4_096
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Login · Baton</title></head><body>
<h1>Not logged in</h1><p role="alert">{message}</p>
<p><a href="../login">Try again</a> or <a href="../ui/">use an admin key</a>.</p></body></html>
"""


@dataclass(frozen=True, slots=True)
class LoginApi:
    """What the routes need. `logins`: None where no provider is set. `secure`: whether browsers see https."""

    logins: Logins | None
    secure: bool = True

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/login")
        router.add("GET", "/ways", self.ways, include_in_schema=False)
        router.add("GET", "", self.begin, include_in_schema=False)
        router.add("GET", "/callback", self.callback, include_in_schema=False)
        router.add("POST", "/out", self.out, include_in_schema=False)
        return router

    async def ways(self) -> Response:
        """The ways to log in: by key always."""
        return JSONResponse({"oidc": self.logins is not None}, headers=HEADERS)

    async def begin(self, request: Request) -> Response:
        """Send the browser to the provider."""
        try:
            url, browser = await self._open().begin()
        except BatonError as error:
            return _page(request, error)
        reply = RedirectResponse(url, 303, headers=HEADERS)
        seconds = int(PENDING.total_seconds())
        # Lax: it must come back with the provider's redirect
        reply.set_cookie(BROWSER, browser, seconds, path="/login", secure=self.secure, httponly=True, samesite="lax")
        return reply

    async def callback(self, request: Request) -> Response:
        """Take the provider's answer, and open the console."""
        query = {name: value[:PARAM_CHARS_MAX] for name, value in request.query_params.items()}
        try:
            if "error" in query:
                raise refused(f"the provider says `{query['error'][:100]}`")
            code, state, browser = query.get("code"), query.get("state"), request.cookies.get(BROWSER)
            if not code or not state or not browser:
                raise refused("this is no answer to a login of this browser")
            token = await self._open().finish(state, code, browser)
        except BatonError as error:
            return _page(request, error)
        reply = RedirectResponse("../ui/", 303, headers=HEADERS)
        reply.delete_cookie(BROWSER, path="/login", secure=self.secure, httponly=True, samesite="lax")
        seconds = int(self._open().session_s)
        reply.set_cookie(SESSION, token, seconds, path="/", secure=self.secure, httponly=True, samesite="strict")
        return reply

    async def out(self, request: Request) -> Response:
        """End the session of this browser; `url`: where the provider's own ends."""
        token = _token(request)
        if token is None:
            return JSONResponse({"url": None}, headers=HEADERS)
        reply = JSONResponse({"url": await self._open().end(token)}, headers=HEADERS)
        reply.delete_cookie(SESSION, path="/", secure=self.secure, httponly=True, samesite="strict")
        return reply

    def _open(self) -> Logins:
        """The logins. Raises NotFound where no provider is set."""
        if self.logins is None:
            raise NotFound("No identity provider is set here; use an admin key.", code="no_provider")
        return self.logins


def by_session(logins: Logins | None, by_key: Actor) -> Actor:
    """The actor of a request: its key's where it has one, else its session's. Raises as `by_key`."""

    async def actor(request: Request) -> Act:
        token = _token(request)
        if logins is None or token is None or "authorization" in request.headers:
            return await by_key(request)
        act = await logins.act(token)
        if act is None:
            raise Unauthorized("You are not logged in any more. Log in again.", code="session_ended")
        return act

    return actor


def _token(request: Request) -> str | None:
    """The token of the session, where the request is of the console's own page."""
    return request.cookies.get(SESSION) if CONSOLE_HEADER in request.headers else None


def _page(request: Request, error: BatonError) -> Response:
    note_error(request.scope, error)
    return HTMLResponse(PAGE.format(message=escape(error.message)), error.status, headers=HEADERS)
