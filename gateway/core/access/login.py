"""Who may use the console after a login at an identity provider: claims and roles. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.access.keys import Role

SUBJECT_CHARS_MAX = 200
ROLES: tuple[Role, ...] = ("admin", "operator", "auditor")  # the first that fits counts


@dataclass(frozen=True, slots=True)
class Person:
    """Who logged in: `subject` as the provider names them for ever, `name` for people to read."""

    subject: str
    name: str
    role: Role

    @property
    def actor(self) -> str:
        """As the audit names them."""
        return f"oidc:{self.subject}"


@dataclass(frozen=True, slots=True)
class RoleRules:
    """`claim`: where the ID token says what a person is; dots lead into objects. `values`: those of each role; a person
    with none of them may do nothing."""

    claim: str
    values: Mapping[Role, Collection[str]]

    def role_of(self, claims: Mapping[str, Any]) -> Role | None:
        """The role that has the most rights of those that the claims give; None for nobody."""
        groups = _texts(_at(claims, self.claim))
        return next((role for role in ROLES if groups & set(self.values.get(role, ()))), None)


def person_of(claims: Mapping[str, Any], role: Role) -> Person:
    """The person that verified claims are of."""
    subject = str(claims["sub"])[:SUBJECT_CHARS_MAX]
    names = (claims.get(name) for name in ("email", "preferred_username", "name"))
    return Person(subject, next((str(name)[:SUBJECT_CHARS_MAX] for name in names if name), subject), role)


def _at(claims: Mapping[str, Any], path: str) -> Any:
    """The claim of that whole name, else what its parts lead to; None where there is nothing."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _texts(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    return {one for one in value if isinstance(one, str)} if isinstance(value, list) else set()
