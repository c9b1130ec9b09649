"""Claims and roles of a login at an identity provider."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.access.login import Person, RoleRules, person_of

RULES = RoleRules("realm.roles", {"admin": ("chiefs",), "operator": ("ops",), "auditor": ("audit", "all")})


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        ({"realm": {"roles": ["all", "ops"]}}, "operator"),
        ({"realm": {"roles": "chiefs"}}, "admin"),
        ({"realm.roles": ["audit"], "realm": {"roles": ["chiefs"]}}, "auditor"),
        ({"realm": {"roles": ["Chiefs", 7, None]}}, None),
        ({"realm": {"roles": {"chiefs": True}}}, None),
        ({"realm": ["chiefs"]}, None),
        ({}, None),
    ],
)
def test_the_role_with_the_most_rights_counts_and_nobody_has_one_by_default(
    claims: dict[str, Any], role: str | None
) -> None:
    assert RULES.role_of(claims) == role
    assert RoleRules("realm.roles", {}).role_of(claims) is None


def test_a_person_has_a_lasting_subject_and_a_name_to_read() -> None:
    person = person_of({"sub": "u-17", "email": "", "preferred_username": "ann"}, "operator")
    assert (person, person.actor) == (Person("u-17", "ann", "operator"), "oidc:u-17")
    assert person_of({"sub": "u" * 500}, "auditor").name == "u" * 200
