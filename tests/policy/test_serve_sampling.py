"""Behaviour log-probs are those of what is drawn: after mask, temperature and top-p."""

from __future__ import annotations

import numpy as np
import pytest

from policy.serve.sampling import allowed_tokens, behaviour_logprobs, draw, top_tokens

LOGITS = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)


def test_a_bitmask_is_read_from_its_lowest_bit() -> None:
    assert allowed_tokens(bytes([0b101, 0, 0, 0]), 4).tolist() == [True, False, True, False]
    assert allowed_tokens(bytes([0, 1, 0, 0]), 10).tolist() == [False] * 8 + [True, False]


def test_probabilities_sum_to_one_over_what_is_allowed() -> None:
    allowed = np.array([False, True, True, False])
    for temperature in (0.0, 0.5, 1.0, 2.0):
        logprobs = behaviour_logprobs(LOGITS, allowed, temperature, 1.0)
        assert np.exp(logprobs).sum() == pytest.approx(1.0)
        assert np.isneginf(logprobs[[0, 3]]).all()


def test_temperature_scales_the_odds_and_greedy_reports_temperature_one() -> None:
    for temperature, gap in ((1.0, 1.0), (0.5, 2.0), (0.0, 1.0)):
        logprobs = behaviour_logprobs(LOGITS, None, temperature, 1.0)
        assert logprobs[0] - logprobs[1] == pytest.approx(gap)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_never_nothing() -> None:
    # masses: .644 .237 .087 .032
    for top_p, kept in ((0.6, 1), (0.65, 2), (0.9, 3), (0.99, 4), (1e-9, 1)):
        logprobs = behaviour_logprobs(LOGITS, None, 1.0, top_p)
        assert np.isfinite(logprobs).sum() == kept
        assert np.exp(logprobs).sum() == pytest.approx(1.0)


def test_draws_follow_the_probabilities() -> None:
    random = np.random.default_rng(0)
    allowed = np.array([True, False, True, True])
    logprobs = behaviour_logprobs(LOGITS, allowed, 1.0, 1.0)
    counts = np.bincount([draw(logprobs, 1.0, random) for _ in range(20_000)], minlength=4)
    assert counts[1] == 0
    np.testing.assert_allclose(counts / 20_000, np.exp(logprobs), atol=0.015)


def test_greedy_takes_the_likeliest() -> None:
    logprobs = behaviour_logprobs(LOGITS, np.array([False, True, True, True]), 0.0, 1.0)
    assert draw(logprobs, 0.0, np.random.default_rng(0)) == 1


def test_the_top_list_holds_only_what_can_be_drawn() -> None:
    logprobs = behaviour_logprobs(LOGITS, np.array([False, True, False, True]), 1.0, 1.0)
    assert [token for token, _ in top_tokens(logprobs, 3)] == [1, 3]
