"""What a valid outcome is: one place decides, for clients and graders alike."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.log.outcome import LABELS, Judgement, check_idempotency_key, counting, parse_labels, requested
from gateway.errors import BadRequest

BODY = {"rollout_id": "r1", "value": 1}


@pytest.mark.parametrize(
    ("body", "kind", "value"),
    [
        ({"value": 0.25}, "number", 0.25),
        ({"value": 1}, "number", 1.0),
        ({"value": True}, "boolean", 1.0),
        ({"value": False}, "boolean", 0.0),
        ({"label": "polite"}, "label", None),
        ({"comment": "too long"}, "comment", None),
        ({"demonstration": "Five."}, "demonstration", None),
    ],
)
def test_a_body_states_one_judgement(body: dict[str, Any], kind: str, value: float | None) -> None:
    target, judgement = requested({"completion_id": "chatcmpl-1", **body})
    assert (target, judgement.kind, judgement.value, judgement.source) == ("chatcmpl-1", kind, value, "client")
    assert [getattr(judgement, name) for name in body if name != "value"] == [body[n] for n in body if n != "value"]


def test_source_grader_version_and_metadata_are_read() -> None:
    _, judgement = requested({**BODY, "source": "person", "grader_version": "g2", "metadata": {"page": "7"}})
    assert (judgement.source, judgement.grader_version, judgement.metadata) == ("person", "g2", {"page": "7"})


@pytest.mark.parametrize(
    ("label", "value"),
    [("good", 1.0), (" Thumbs_Up", 1.0), ("👍", 1.0), ("👍🏽", 1.0), ("👎\ufe0f", 0.0), ("edited", 0.5), ("DOWN", 0.0)],
)
def test_a_common_label_counts_as_its_value(label: str, value: float) -> None:
    _, judgement = requested({"rollout_id": "r1", "label": label})
    assert (judgement.kind, judgement.value, judgement.label) == ("number", value, label)
    assert judgement.source == "label"
    assert counting(judgement) == {"counts": True, "value": value}


def test_a_label_of_a_person_is_that_persons() -> None:
    assert requested({"rollout_id": "r1", "label": "good", "source": "person"})[1].source == "person"


def test_an_unknown_label_or_a_comment_says_that_it_does_not_count() -> None:
    unknown = counting(requested({"rollout_id": "r1", "label": "polite"})[1])
    assert unknown["counts"] is False
    assert "`polite` has no value" in unknown["note"]
    assert "`good`" in unknown["note"]
    comment = counting(requested({"rollout_id": "r1", "comment": "too long"})[1])
    assert comment == {"counts": False, "note": comment["note"]}


def test_labels_of_the_settings_come_on_top_of_the_standard_ones() -> None:
    labels = parse_labels("Escalated=0, polite = 0.75 ,good=0.9")
    assert labels == {**LABELS, "escalated": 0.0, "polite": 0.75, "good": 0.9}
    assert requested({"rollout_id": "r1", "label": "ESCALATED"}, labels)[1].value == 0.0
    assert parse_labels("") == LABELS


@pytest.mark.parametrize("text", ["good", "good=2", "=1", "good=nan", "good=x"])
def test_labels_of_the_settings_that_cannot_be_read_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"`{text}` is not label=value"):
        parse_labels(text)


@pytest.mark.parametrize("source", ["judge:wise", "signal:repeat"])
def test_no_client_speaks_in_the_name_of_a_source_of_the_gateway(source: str) -> None:
    with pytest.raises(BadRequest) as refused:
        requested({**BODY, "source": source})
    assert (refused.value.param, refused.value.code) == ("source", "reserved_source")


def test_a_step_is_named_by_its_number() -> None:
    assert requested({**BODY, "step": 0})[1].step == 0
    assert requested(BODY)[1].step is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**BODY, "step": -1}, "step"),
        ({**BODY, "step": True}, "step"),
        ({**BODY, "step": "0"}, "step"),
        ({**BODY, "step": 40_000}, "step"),
        ([], None),
        ({**BODY, "stars": 5}, "stars"),
        ({"value": 1}, "rollout_id"),
        ({"rollout_id": "r" * 129, "value": 1}, "rollout_id"),
        ({"rollout_id": "r1"}, "value"),
        ({**BODY, "label": "x"}, "label"),
        ({"rollout_id": "r1", "value": 1.01}, "value"),
        ({"rollout_id": "r1", "value": -0.01}, "value"),
        ({"rollout_id": "r1", "value": float("nan")}, "value"),
        ({"rollout_id": "r1", "value": "1"}, "value"),
        ({"rollout_id": "r1", "label": ""}, "label"),
        ({"rollout_id": "r1", "label": "x" * 129}, "label"),
        ({"rollout_id": "r1", "comment": 5}, "comment"),
        ({"rollout_id": "r1", "demonstration": {"content": "five"}}, "demonstration"),
        ({**BODY, "source": "s" * 129}, "source"),
        ({**BODY, "grader_version": ""}, "grader_version"),
        ({**BODY, "metadata": "x"}, "metadata"),
        ({**BODY, "metadata": {"page": 7}}, "metadata"),
        ({**BODY, "metadata": {"p" * 65: "7"}}, "metadata"),
        ({**BODY, "metadata": {"page": "7" * 513}}, "metadata"),
        ({**BODY, "metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ],
)
def test_a_bad_body_is_refused_by_the_field_at_fault(body: object, param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        requested(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"kind": "stars", "value": 1.0}, "kind"),
        ({"kind": "number"}, "value"),
        ({"kind": "number", "value": 1.5}, "value"),
        ({"kind": "boolean", "value": float("inf")}, "value"),
        ({"kind": "number", "value": True}, "value"),
        ({"kind": "label", "label": "x", "value": 1.0}, "value"),
        ({"kind": "label"}, "label"),
    ],
)
def test_no_judgement_contradicts_its_kind(given: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Judgement(**given)
    assert refused.value.param == param


@pytest.mark.parametrize("key", [None, "k", "k" * 201, "k" * 255])
def test_idempotency_keys_of_up_to_255_characters_are_good(key: str | None) -> None:
    assert check_idempotency_key(key) == key


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_an_idempotency_key_has_a_length(key: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_idempotency_key(key)
    assert refused.value.param == "Idempotency-Key"
