"""An OpenID Connect provider, by Authlib: the only file that imports it and its JOSE library (extra `oidc`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic
from typing import Any, NoReturn
from urllib.parse import quote

import httpx

from gateway.errors import ConfigError, Forbidden, Unavailable

log = logging.getLogger("baton.login")
DISCOVERY = "/.well-known/openid-configuration"
TIMEOUT_S = 10.0
FRESH_S = 3600.0  # of the provider's description
LEEWAY_S = 60  # between two clocks
REPLY_BYTES_MAX = 1 << 20
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
NEEDED = ("authorization_endpoint", "token_endpoint", "jwks_uri")
MISSING = "BATON_OIDC_ISSUER needs the extra; pip install '.[oidc]'"


class OidcProvider:
    """`IdentityProvider`. `issuer`: its URL; `secret`: None for a public client. Raises ConfigError without the
    extra."""

    def __init__(self, issuer: str, client_id: str, secret: str | None, redirect_url: str, scopes: str) -> None:
        try:
            import authlib.oauth2.rfc7636 as pkce
            import authlib.oidc.core as core
            import joserfc.jwt as jwt
            from authlib.oauth2.rfc6749 import parameters
            from joserfc import errors, jwk, jws
        except ImportError:
            raise ConfigError(MISSING) from None
        self._pkce, self._core, self._parameters = pkce, core, parameters
        self._jwt, self._jwk, self._jws, self._errors = jwt, jwk, jws, errors
        self._issuer = issuer
        self._client_id = client_id
        self._secret = secret
        self._redirect_url = redirect_url
        self._scopes = scopes
        self._described: Mapping[str, Any] = {}
        self._described_s = 0.0

    async def begin(self, state: str, nonce: str, verifier: str) -> str:
        """See `IdentityProvider.begin`."""
        about = await self._about()
        challenge = self._pkce.create_s256_code_challenge(verifier)
        url = self._parameters.prepare_grant_uri(
            about["authorization_endpoint"],
            self._client_id,
            "code",
            redirect_uri=self._redirect_url,
            scope=self._scopes,
            state=state,
            nonce=nonce,
            code_challenge=challenge,
            code_challenge_method="S256",
        )
        return str(url)

    async def finish(self, code: str, nonce: str, verifier: str) -> Mapping[str, Any]:
        """See `IdentityProvider.finish`."""
        about = await self._about()
        token = await self._redeem(about, code, verifier)
        id_token = token.get("id_token")
        if not isinstance(id_token, str):
            _refuse("the provider gave no ID token")
        return await self._verified(about, id_token, nonce, token.get("access_token"))

    async def end_url(self) -> str | None:
        """See `IdentityProvider.end_url`."""
        try:
            url = (await self._about()).get("end_session_endpoint")
        except Unavailable:
            return None
        return str(httpx.URL(url).copy_merge_params({"client_id": self._client_id})) if isinstance(url, str) else None

    # ------------------------------------------------------------ the provider

    async def _about(self) -> Mapping[str, Any]:
        """The provider's description of itself. Raises Unavailable."""
        if self._described and monotonic() - self._described_s < FRESH_S:
            return self._described
        about = await self._json("GET", self._issuer.rstrip("/") + DISCOVERY)
        if about.get("issuer") != self._issuer:
            _away(f"it calls itself {str(about.get('issuer'))[:200]}")
        for name in NEEDED:
            if not isinstance(about.get(name), str):
                _away(f"its description has no {name}")
        self._described, self._described_s = about, monotonic()
        return about

    async def _redeem(self, about: Mapping[str, Any], code: str, verifier: str) -> Mapping[str, Any]:
        """The reply to a code. Raises Forbidden for a code that the provider refuses, and Unavailable."""
        form = {"grant_type": "authorization_code", "code": code, "code_verifier": verifier}
        form |= {"redirect_uri": self._redirect_url, "client_id": self._client_id}
        ways = about.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if self._secret is None or "client_secret_basic" not in ways:
            form |= {} if self._secret is None else {"client_secret": self._secret}
            return await self._json("POST", about["token_endpoint"], data=form)
        basic = httpx.BasicAuth(quote(self._client_id, safe=""), quote(self._secret, safe=""))
        return await self._json("POST", about["token_endpoint"], data=form, auth=basic)

    async def _json(self, method: str, url: str, **more: Any) -> Mapping[str, Any]:
        """A reply's JSON object. Raises Forbidden for an error of OAuth's, Unavailable for any other failure."""
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                reply = await client.request(method, url, headers={"accept": "application/json"}, **more)
            value = reply.json() if len(reply.content) <= REPLY_BYTES_MAX else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            _away(f"{url} failed ({type(error).__name__})")
        if method == "POST" and isinstance(value, dict) and isinstance(value.get("error"), str):
            _refuse(f"the provider did not take the code ({value['error'][:100]})")
        if not reply.is_success or not isinstance(value, dict):
            _away(f"{url} answered {reply.status_code}")
        return value

    async def _verified(
        self, about: Mapping[str, Any], id_token: str, nonce: str, access_token: object
    ) -> Mapping[str, Any]:
        """The claims of an ID token. Raises Forbidden."""
        offered = about.get("id_token_signing_alg_values_supported") or ["RS256"]
        allowed = [name for name in ALGORITHMS if name in offered]
        keys = await self._json("GET", about["jwks_uri"])
        issuer, audience = ({"essential": True, "value": value} for value in (self._issuer, self._client_id))
        expected = {"nonce": nonce, "client_id": self._client_id, "access_token": access_token}
        try:
            registry = self._jws.JWSRegistry(algorithms=allowed, strict_check_header=False)
            decoded = self._jwt.decode(id_token, key=self._jwk.KeySet.import_key_set(keys), registry=registry)
            options = {"iss": issuer, "aud": audience}
            claims = self._core.CodeIDToken(decoded.claims, decoded.header, options, expected)
            claims.validate(leeway=LEEWAY_S)
        except (self._errors.JoseError, ValueError, KeyError, TypeError) as error:
            _refuse(f"the provider's ID token is not right ({error})")
        if not isinstance(claims["sub"], str) or not claims["sub"]:
            _refuse("the provider's ID token is not right (sub)")
        return dict(claims)


def _refuse(why: str) -> NoReturn:
    log.warning("a login was refused: %s", why)
    raise Forbidden(f"The login was refused: {why}.", code="login_refused")


def _away(why: str) -> NoReturn:
    log.warning("the identity provider cannot be used: %s", why)
    raise Unavailable(f"The identity provider cannot be used now: {why}.", code="provider_unavailable")
