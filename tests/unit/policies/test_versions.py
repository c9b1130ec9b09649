"""States, legal moves, who serves, and which requests a share holds."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.plan import Plan, Step
from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.core.policies.versions import (
    MOVES,
    PERCENTS,
    Pick,
    Standing,
    State,
    Version,
    check_move,
    in_share,
    parse,
    pick,
    picked,
    same_route,
    standing,
)
from gateway.errors import BadRequest, Conflict

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATES: tuple[State, ...] = get_args(State)
IDS = [f"request-{n}" for n in range(20_000)]
MANIFEST = {"prompt_version": f"compact-{PROMPT_VERSION}", "prompt_hash": prompt_hash("compact")}


def version(number: int, state: State = "candidate", **more: Any) -> Version:
    place = f"conductor@{number}"
    made = Version("conductor", number, state, None, None, None, place, MANIFEST, None, NOW, NOW)
    return replace(made, **more)


def usable(*versions: Version) -> dict[str, Pick]:
    return {one.id: Pick(one.id, "compact") for one in versions}


@given(st.sampled_from(STATES), st.sampled_from(STATES))
def test_a_move_is_legal_or_refused_by_name(was: State, to: State) -> None:
    moving = version(2, was)
    if to in MOVES[was]:
        check_move(moving, to, [moving])
        return
    with pytest.raises(Conflict, match=f"conductor@2 is {was}, not to be made {to}; ") as refused:
        check_move(moving, to, [moving])
    assert refused.value.code == "illegal_move"


@given(st.lists(st.sampled_from([*STATES, "percent"]), max_size=12))
def test_no_order_of_moves_gives_two_of_a_kind(moves: list[Any]) -> None:
    """Three versions, moved at random as the registry moves them: never two live, two canaries or two shadows."""
    versions = {number: version(number) for number in (1, 2, 3)}
    for turn, wanted in enumerate(moves):
        number = turn % 3 + 1
        to: State = "canary" if wanted == "percent" else wanted
        try:
            check_move(versions[number], to, list(versions.values()))
        except Conflict:
            continue
        if to == "live":
            versions |= {n: replace(one, state="retired") for n, one in versions.items() if one.state == "live"}
        versions[number] = replace(versions[number], state=to)
        states = [one.state for one in versions.values()]
        assert all(states.count(kind) <= 1 for kind in ("shadow", "canary", "live"))


def test_a_share_holds_its_share_of_requests_and_grows() -> None:
    held = {percent: {one for one in IDS if in_share(one, "conductor@2", percent)} for percent in (0, *PERCENTS)}
    assert held[0] == set()
    assert held[100] == set(IDS)
    assert held[1] < held[5] < held[25] < held[100]
    for percent in (1, 5, 25):
        spread = 4 * (percent / 100 * (1 - percent / 100) * len(IDS)) ** 0.5
        assert abs(len(held[percent]) - percent / 100 * len(IDS)) < spread


def test_shares_of_different_canaries_are_independent() -> None:
    one = {name for name in IDS if in_share(name, "conductor@2", 25)}
    both = {name for name in one if in_share(name, "conductor@3", 25)}
    assert abs(len(both) / len(one) - 0.25) < 0.03


@given(st.text(), st.text(), st.sampled_from(PERCENTS))
def test_a_request_always_falls_on_the_same_side(request_id: str, salt: str, percent: int) -> None:
    salt, request_id = (text.encode(errors="ignore").decode() for text in (salt, request_id))
    assert in_share(request_id, salt, percent) == in_share(request_id, salt, percent)


def test_standing_names_the_version_of_each_state() -> None:
    one, two = version(1, "retired"), version(2, "live", previous=1)
    three, four = version(3, "canary", percent=5), version(4, "shadow")
    now = standing([one, two, three, four, version(5)])
    assert now == Standing(live=two, previous=one, canary=three, shadow=four)
    assert [held.number for held in now.held] == [2, 3, 1, 4]
    assert [held.number for held in now.asked_for] == [2, 3, 1]
    assert standing([]) == Standing()


def test_every_request_has_one_version_and_the_canary_its_share() -> None:
    live, canary = version(1, "live"), version(2, "canary", percent=25)
    now, held = Standing(live=live, canary=canary), usable(live, canary)
    chosen = [pick(now, held, one) for one in IDS]
    assert {one.version for one in chosen if one} == {"conductor@1", "conductor@2"}
    assert None not in chosen
    on_canary = {name for name, one in zip(IDS, chosen, strict=True) if one and one.version == "conductor@2"}
    assert on_canary == {name for name in IDS if in_share(name, "conductor@2", 25)}


def test_only_what_the_engines_hold_is_picked() -> None:
    before, live = version(1, "retired"), version(2, "live", previous=1)
    canary = version(3, "canary", percent=100)
    now = standing([before, live, canary])
    assert pick(now, usable(live, canary), "r") == Pick("conductor@3", "compact")
    assert pick(now, usable(live), "r") == Pick("conductor@2", "compact")
    assert pick(now, usable(before), "r") == Pick("conductor@1", "compact")
    assert pick(now, {}, "r") is None


@pytest.mark.parametrize(
    ("manifest", "wanted"),
    [
        ({}, Pick("conductor@7", "compact")),
        ({"quality": 4}, Pick("conductor@7", "compact", 4)),
        ({"quality": 99}, Pick("conductor@7", "compact")),
        ({"quality": True}, Pick("conductor@7", "compact")),
        ({"prompt_hash": "other"}, None),
        ({"prompt_version": "compact-0"}, None),
        ({"prompt_version": f"full-{PROMPT_VERSION}"}, None),
    ],
)
def test_how_a_version_is_asked_is_in_its_manifest(manifest: dict[str, Any], wanted: Pick | None) -> None:
    assert picked(version(7, manifest={**MANIFEST, **manifest})) == wanted


def test_a_base_reads_any_prompt_and_trained_weights_their_own() -> None:
    known = {"prompt_version": f"guided-{PROMPT_VERSION}", "prompt_hash": prompt_hash("guided")}
    for kind, trained in (("base", False), ("adapter", True), ("sealed", True)):
        asked = picked(version(7, manifest={"kind": kind, **known}))
        assert asked == Pick("conductor@7", "guided", trained=trained)


@pytest.mark.parametrize("profile", ["compact", "dial", "full"])
def test_every_prompt_this_code_renders_is_served(profile: Any) -> None:
    manifest = {"prompt_version": f"{profile}-{PROMPT_VERSION}", "prompt_hash": prompt_hash(profile)}
    assert picked(version(7, manifest=manifest)) == Pick("conductor@7", profile)


def test_names() -> None:
    assert parse("conductor@7") == ("conductor", 7)
    assert parse("a.b_c-d@0") == ("a.b_c-d", 0)
    for wrong in ("conductor", "@1", "conductor@-1", "conductor@1.5", "Conductor@1", "a/b@1", "conductor@9999999999"):
        with pytest.raises(BadRequest, match="write NAME@NUMBER"):
            parse(wrong)


def test_a_route_is_workers_and_links_not_words() -> None:
    plan = Plan((Step("atlas", "solve it"), Step("quill", "check it", (0,))))
    assert same_route(plan, Plan((Step("atlas", None), Step("quill", "judge it", (0,)))))
    assert not same_route(plan, Plan((Step("atlas", None), Step("quill", "judge it"))))
    assert not same_route(plan, Plan((Step("atlas", None),)))
