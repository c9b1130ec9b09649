"""How far a log is from a retraining, and what a job lacks, on logs of every length."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.adapters.host.supervisor import PROGRAMS_ROOT
from gateway.cli.learn.train import countdown
from gateway.core.policies.holdout import HELD_OUT_SHARE, bound_of
from gateway.core.policies.jobs import JobSpec
from gateway.core.policies.readiness import (
    QUESTIONS_MIN,
    REQUESTS_MIN,
    JudgedRequest,
    Needs,
    Readiness,
    needs_of,
    readiness,
)
from gateway.errors import BadRequest
from policy.gate.checks import Thresholds
from policy.train.settings import settings_of

NOW = datetime(2026, 1, 31, tzinfo=UTC)
LOGGED = needs_of(JobSpec({"env": "logged"}), simulated=False)


def log_of(count: int, explored: float, *, drawn: float = 0.0, askable: float = 1.0, days: float = 2.0) -> Any:
    """Judged requests spread evenly over the last days, with the same shares of each kind in each hundred."""
    places = [37 * index % 100 for index in range(count)]
    return [
        JudgedRequest(
            at=NOW - timedelta(days=days) * ((count - index) / count),
            key="key",
            sampled=place < 100 * explored,
            drawn=100 * explored <= place < 100 * (explored + drawn),
            askable=place < 100 * askable,
            group=f"question {index}",
        )
        for index, place in enumerate(places)
    ]


def of(judged: Any, needs: Needs = LOGGED, **more: Any) -> Readiness:
    return readiness(judged, needs, NOW, **more)


def test_the_needs_are_those_of_the_trainer_and_of_the_gate() -> None:
    assert (LOGGED.requests, LOGGED.questions) == (REQUESTS_MIN, QUESTIONS_MIN)
    assert settings_of("logged", ()).requests_min == REQUESTS_MIN
    assert Thresholds().questions_min == QUESTIONS_MIN


def test_a_new_log_needs_five_hundred_requests() -> None:
    """A hundred questions for the gate are a fifth of them; each teaches where the rule logs its propensity."""
    found = of([])
    assert (found.more, found.at, found.per_day) == (500, None, 0.0)
    assert [line.split(":")[0] for line in found.missing] == ["requests to train on", "questions for the gate"]
    assert found.countdown == "about 500 more judged requests are needed (0 so far)"


def test_where_a_tenth_explores_twice_the_questions_are_waited_for() -> None:
    assert of([], share=0.1).more == 2500
    assert of([], share=0.3).more == 834


def test_everything_that_is_missing_is_said_at_once() -> None:
    found = of(log_of(200, 0.1), weights=False)
    assert len(found.missing) == 3
    assert found.missing[0].startswith("weights to begin with: no version is live")
    assert "16 of 200 (16 sampled by the conductor with log-probs, 0 drawn by the rule)" in found.missing[1]
    assert "40 of 100 that training has not seen, of the latest 20% of the judged requests" in found.missing[2]


def test_the_date_follows_from_the_log_s_own_shares_and_rate() -> None:
    found = of(log_of(200, 0.1, days=2.0))
    assert found.more == 2300, "184 more of 8 % of the judged requests"
    assert round(found.per_day) == 100
    assert found.at == NOW + timedelta(days=found.more / found.per_day)
    assert found.countdown.endswith("at 100 a day on 2026-02-23")


def test_what_the_rule_drew_counts_as_what_the_conductor_sampled() -> None:
    found = of(log_of(500, 0.1, drawn=0.9))
    assert (found.requests, found.sampled, found.drawn, found.questions) == (400, 40, 360, 100)
    assert found.missing == ()
    assert (found.more, found.countdown) == (0, "")


def test_a_question_that_training_has_seen_is_none_for_the_gate() -> None:
    judged = log_of(500, 1.0)
    again = [*judged[:-1], JudgedRequest(judged[-1].at, "key", True, False, True, judged[0].group)]
    assert (of(judged).questions, of(again).questions) == (100, 99)


def test_what_cannot_be_asked_again_is_no_question() -> None:
    found = of(log_of(1000, 1.0, askable=0.25))
    assert (found.questions, found.missing) == (50, (found.missing[0],))


def test_a_log_of_which_nothing_trains_says_so_and_names_no_date() -> None:
    found = of(log_of(300, 0.0))
    assert (found.more, found.at) == (None, None)
    assert "none of this log can be" in found.missing[0]
    assert "nothing of them says how many more are needed" in found.countdown


def test_the_sides_are_those_of_the_selection() -> None:
    judged = log_of(100, 1.0)
    bound = bound_of([(one.at, one.key) for one in judged], HELD_OUT_SHARE)
    assert of(judged).requests == sum(not bound.holds_out(one.at, one.key) for one in judged) == 80


@pytest.mark.parametrize(
    ("train", "gate", "wanted"),
    [
        ({"env": "arena"}, {}, (0, 0)),
        ({"env": "replay"}, {}, (0, 0)),
        ({"env": "live", "usd_max": "1"}, {}, (0, 100)),
        ({"env": "logged", "settings": {"requests_min": 50}}, {"n": 30}, (50, 30)),
        ({"env": "logged", "profile": "small"}, {"thresholds": {"questions_min": 60}}, (0, 60)),
        ({"env": "logged", "method": "sft"}, {"env": "arena"}, (1, 0)),
        ({"env": "logged"}, {"env": "replay"}, (200, 0)),
    ],
)
def test_a_job_needs_what_its_spec_says(train: dict[str, Any], gate: dict[str, Any], wanted: tuple[int, int]) -> None:
    needs = needs_of(JobSpec(train, gate), simulated=False)
    assert (needs.requests, needs.questions) == wanted


def test_the_traffic_of_simulated_workers_is_judged_in_the_arena() -> None:
    needs = needs_of(JobSpec({"env": "logged"}), simulated=True)
    assert (needs.requests, needs.questions, needs.held_out_share) == (200, 0, 0.0)
    assert of(log_of(250, 0.8), needs).missing == ()


def test_a_time_that_splits_the_log_is_the_bound() -> None:
    judged = log_of(400, 1.0, days=4.0)
    filters = {"split_at": (NOW - timedelta(days=1)).isoformat(), "pools": ["a"]}
    needs = needs_of(JobSpec({"env": "logged", "filters": filters}), simulated=False)
    assert needs.filters == {"pools": ["a"]}
    assert (of(judged, needs).requests, of(judged, needs).questions) == (300, 100)
    with pytest.raises(BadRequest, match="`soon` is no time"):
        needs_of(JobSpec({"env": "logged", "filters": {"split_at": "soon"}}), simulated=False)


@pytest.mark.parametrize(
    ("share", "cells"),
    [
        ((0.0, 1.0), ["0 of 200, 0 of 100: about 500 more", "400 of 200, 100 of 100: queued", "queued"]),
        ((0.1, 0.0), [
            "0 of 200, 0 of 100: about 2,500 more",
            "40 of 200, 100 of 100: about 2,000 more",
            "160 of 200, 400 of 100: about 500 more",
        ]),
        ((0.3, 0.0), ["0 of 200, 0 of 100: about 834 more", "120 of 200, 100 of 100: about 334 more", "queued"]),
    ],
)  # fmt: skip
def test_the_page_of_jobs_says_what_a_fresh_gateway_says(share: tuple[float, float], cells: list[str]) -> None:
    """At 0, 500 and 2,000 judged requests, in a column of its table."""
    page = (PROGRAMS_ROOT / "docs" / "jobs.md").read_text()
    for count, cell in zip((0, 500, 2000), cells, strict=True):
        found = of(log_of(count, share[0], drawn=share[1]), share=sum(share))
        said = f"{found.requests} of 200, {found.questions} of 100: "
        said += f"about {found.more:,} more" if found.missing else "queued"
        assert said.endswith(cell), (count, said)
        row = next(line for line in page.splitlines() if line.startswith(f"| {count:,} |"))
        assert cell in row.split(" | ")[1:] or f"{cell} |" in row


def test_status_prints_the_countdown() -> None:
    shown = countdown(of(log_of(200, 0.1), weights=False).as_json()).splitlines()
    assert shown[0] == "judged requests    200"
    assert shown[1] == "to train on        16 of 200   (16 sampled by the conductor, 0 drawn by the rule)"
    assert shown[2] == "gate questions     40 of 100"
    assert shown[3] == "about 2,300 more judged requests are needed (200 so far), at 100 a day on 2026-02-23"
    assert shown[4].startswith("weights to begin with: no version is live")
    ready = countdown(of(log_of(500, 1.0)).as_json())
    assert ready.endswith("trainable: `baton train submit --env logged` queues a job")
