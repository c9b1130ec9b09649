"""One tenant never moves another: false outcomes of another organisation's key, over the whole gateway."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest

from tests.security.gateway import Gateway, ask
from tests.security.report import measured

ASKED, FALSE = 25, 10
Arms = Mapping[str, tuple[float, float, float]]  # weight, right, success of each worker


def key_of(gateway: Gateway, org: str) -> str:
    """The secret of a new key of an organisation, which is made where it is not there."""
    _, admin = gateway.key("admin")
    with gateway.client(admin, admin=True) as office:
        assert office.post("/admin/orgs", json={"name": org}).status_code in (200, 201, 409)
    return gateway.key(org=org)[1]


def serve(http: httpx.Client, text: str, model: str = "baton/rule") -> httpx.Response:
    reply = http.post("/v1/chat/completions", json=ask(text, model=model))
    assert reply.status_code == 200, reply.text
    return reply


def judge(http: httpx.Client, reply: httpx.Response, value: float) -> httpx.Response:
    said = {"rollout_id": reply.headers["x-baton-rollout-id"], "value": value}
    return http.post("/v1/outcomes", json=said)


def train(http: httpx.Client, text: str, values: Mapping[str, float], n: int) -> None:
    for number in range(n):
        for worker, value in values.items():
            assert judge(http, serve(http, f"{text} {number}", worker), value).status_code == 201


def planned(http: httpx.Client, text: str) -> list[tuple[str, Arms]]:
    """What the rule knew for each of some requests: the likeliest worker, and the figures of all."""
    found: list[tuple[str, Arms]] = []
    for number in range(ASKED):
        reply = serve(http, f"{text} {number}")
        assert "x-baton-experience" not in reply.headers  # it was fresh
        tree = http.get(f"/v1/rollouts/{reply.headers['x-baton-rollout-id']}").json()
        assert tree["memory"]["state"] == "fresh"
        arms = tree["rounds"][0]["decision"]["arms"]
        likeliest = max(arms, key=lambda arm: arm["propensity"])["worker"]
        found.append((likeliest, {arm["worker"]: (arm["n"], arm["right"], arm["success"]) for arm in arms}))
    return found


@pytest.mark.parametrize(("own", "moved"), [(False, 0), (True, ASKED)])
def test_false_outcomes_of_another_organisation_move_no_request(gateway: Gateway, own: bool, moved: int) -> None:
    """The same attack by a key of the victim's own organisation is seen: the test can fail."""
    org = f"victim-{own}"
    victim, attacker = key_of(gateway, org), key_of(gateway, org if own else f"eve-{own}")
    text = f"Convert to feet, please ({own}), number"
    with gateway.client(victim) as http, gateway.client(attacker) as evil:
        train(http, text, {"alpha": 1.0, "beta": 0.0}, 8)
        before = planned(http, text)
        assert [likeliest for likeliest, _ in before] == ["alpha"] * ASKED
        train(evil, text, {"alpha": 0.0, "beta": 1.0}, FALSE)
        after = planned(http, text)
    changed = sum(was != now for was, now in zip(before, after, strict=True))
    elsewhere = sum(was[0] != now[0] for was, now in zip(before, after, strict=True))
    whose = "a colleague's" if own else "a stranger's"
    measured(
        "tenancy", f"{FALSE} false outcomes of {whose} key moved {elsewhere} of {ASKED} requests, {changed} beliefs"
    )
    assert changed == moved
    assert own or elsewhere == 0


def test_a_key_that_may_not_judge_is_refused_with_the_fix(gateway: Gateway) -> None:
    public_id, secret = gateway.key(judges=False)
    _, admin = gateway.key("admin")
    with gateway.client(secret) as http, gateway.client(admin, admin=True) as office:
        reply = serve(http, "May I judge?")
        refused = judge(http, reply, 1.0)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "key_may_not_judge")
        assert f"baton keys update {public_id} --judges" in error["message"]
        assert office.get(f"/admin/keys/{public_id}").json()["judges"] is False
        assert office.patch(f"/admin/keys/{public_id}", json={"judges": "yes"}).status_code == 400
        assert office.patch(f"/admin/keys/{public_id}", json={"judges": True}).json()["judges"] is True
        assert judge(http, reply, 1.0).status_code == 201


def test_one_rollout_counts_once_however_often_it_is_judged(gateway: Gateway) -> None:
    secret = key_of(gateway, "once")
    text = "Judge me often, number"
    with gateway.client(secret) as http:
        reply = serve(http, f"{text} 0", "alpha")
        for value in (1.0, 0.0, 1.0, 0.0, 1.0):
            assert judge(http, reply, value).status_code == 201
        ((_, arms), *_) = planned(http, text)
    assert arms["alpha"][:2] == (1, 1)
    assert arms["beta"][0] == 0
