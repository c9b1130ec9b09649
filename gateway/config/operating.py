"""Settings of those who run a gateway: what follows when a worker becomes worse, and who may use the console."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

from gateway.config.serving import Seconds, Usd, listed
from gateway.core.access.keys import Role
from gateway.core.money.amounts import usd_to_nano
from gateway.core.pool.drift import SIGNALS
from gateway.core.pool.workers import SecretRef


class DriftSettings(BaseModel):
    """Drift: when a worker counts as worse, and what follows"""

    drift_reference: int = Field(
        200, ge=20, le=100_000, description="Results of a worker on a kind of task that say what is usual; see drift.md"
    )
    drift_run_length: int = Field(
        20_000, ge=100, le=1_000_000_000, description="Results of an unchanged worker between two false flags, at least"
    )
    drift_quarantine: Literal["off", "flagged"] = Field(
        "off", description="`flagged`: a worker that is flagged is kept out of plans until it is released"
    )
    drift_quarantine_signals: str = Field(
        "outcome,failed,refused", description="The signals whose flags do that, comma-separated"
    )
    drift_probe_usd_per_day: Usd = Field(
        "0", description="Dollars a day (UTC) for questions to workers in quarantine, which release them; 0: none"
    )

    @field_validator("drift_quarantine_signals")
    @classmethod
    def _are_signals(cls, text: str) -> str:
        for signal in listed(text):
            if signal not in SIGNALS:
                raise ValueError(f"`{signal}` is no signal; there are {', '.join(SIGNALS)}")
        return text

    @property
    def drift_probe_nano_per_day(self) -> int:
        """`drift_probe_usd_per_day` in nano-dollars."""
        return usd_to_nano(self.drift_probe_usd_per_day)


class ReachSettings(BaseModel):
    """Reach: whether workers are looked for at the start, and who reads where they are"""

    worker_probes: bool = Field(
        True, description="Ask each model worker at the start whether it is there and takes its key; costs no tokens"
    )
    operator_keys: str = Field(
        "",
        description="Ids of data keys to which errors name the host of a worker and the reference to its key, "
        "comma-separated; the first data key of a data directory is one",
    )

    @property
    def operators(self) -> frozenset[str]:
        """The ids in `operator_keys`."""
        return frozenset(filter(None, map(str.strip, self.operator_keys.split(","))))


class LoginSettings(BaseModel):
    """Login: an OpenID Connect provider for the console, beside keys"""

    oidc_issuer: str = Field("", description="Provider of the console's login, `https://…`; empty: keys only")
    oidc_client_id: str = Field("", description="The client's id there")
    oidc_client_secret: SecretRef | None = Field(
        None, description="Its secret, `env:NAME` or `file:PATH`; unset: a public client, by PKCE alone"
    )
    oidc_redirect_url: str = Field(
        "", description="Where the console is, as browsers see it: `https://…/login/callback`"
    )
    oidc_scopes: str = Field("openid email profile", description="Scopes that are asked for, `openid` among them")
    oidc_role_claim: str = Field(
        "groups", description="Claim of the ID token that gives a role; dots lead into objects: `realm_access.roles`"
    )
    oidc_admins: str = Field("", description="Values of it that make an admin, comma-separated; empty: nobody")
    oidc_operators: str = Field("", description="Values that make an operator; empty: nobody")
    oidc_auditors: str = Field("", description="Values that make an auditor, who only reads; empty: nobody")
    oidc_session_s: Seconds = Field(14_400.0, description="Length of a session; then the provider is asked again")

    @model_validator(mode="after")
    def _is_whole(self) -> LoginSettings:
        if not self.oidc_issuer:
            return self
        if not self.oidc_client_id:
            raise ValueError("BATON_OIDC_ISSUER needs BATON_OIDC_CLIENT_ID")
        if not urlsplit(self.oidc_redirect_url).path.endswith("/login/callback"):
            raise ValueError("BATON_OIDC_ISSUER needs BATON_OIDC_REDIRECT_URL, which ends with /login/callback")
        for name, url in (("ISSUER", self.oidc_issuer), ("REDIRECT_URL", self.oidc_redirect_url)):
            if not _is_safe(url):
                raise ValueError(f"BATON_OIDC_{name} must be https://… (http:// only on this machine)")
        if "openid" not in self.oidc_scopes.split():
            raise ValueError("BATON_OIDC_SCOPES must have `openid`: without it there is no ID token")
        return self

    @property
    def oidc_roles(self) -> dict[Role, tuple[str, ...]]:
        """The values of the claim by role."""
        given: dict[Role, str] = {
            "admin": self.oidc_admins,
            "operator": self.oidc_operators,
            "auditor": self.oidc_auditors,
        }
        return {role: tuple(filter(None, map(str.strip, text.split(",")))) for role, text in given.items()}


def _is_safe(url: str) -> bool:
    """Whether nobody on the way reads what is sent there."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1"))
    )
