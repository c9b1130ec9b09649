"""An outcome: one judgement of a rollout. This is the only place that decides what a valid one is. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

from gateway.core.openai.shapes import check_names, string_pairs
from gateway.errors import BadRequest

Kind = Literal["number", "boolean", "label", "comment", "demonstration"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VALUED = ("number", "boolean")  # kinds with a `value`
TEXTS = ("label", "comment", "demonstration")  # kinds whose judgement is the field of that name
FIELDS = frozenset({"rollout_id", "completion_id", "step", "value", *TEXTS, "source", "grader_version", "metadata"})
TARGET_CHARS_MAX = 128
STEP_MAX = 32_767
IDEMPOTENCY_CHARS_MAX = 255
TEXT_CHARS_MAX = {"label": 128, "comment": 20_000, "demonstration": 20_000, "source": 128, "grader_version": 128}
LABEL = "label"  # the source of a label that counts, where its client names none
RESERVED = ("judge:", "signal:", "failure")  # beginnings of sources that are Baton's own
LABELS: Mapping[str, float] = {
    **dict.fromkeys(("good", "up", "thumbs_up", "accepted", "like", "liked", "\N{THUMBS UP SIGN}"), 1.0),
    "edited": 0.5,
    **dict.fromkeys(("bad", "down", "thumbs_down", "rejected", "dislike", "disliked", "\N{THUMBS DOWN SIGN}"), 0.0),
}
_SHADES = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")  # of a sign's skin, and that it is shown as a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What somebody says of a rollout, or of its step number `step`. `value` in [0, 1] belongs to the kinds number and
    boolean (1.0 is true); each other kind has the text of its own name instead. A label that counts is a number with
    the label beside it. Raises BadRequest naming the field that does not fit the kind."""

    kind: Kind
    value: float | None = None
    label: str | None = None
    comment: str | None = None
    demonstration: str | None = None
    source: str = "client"
    grader_version: str | None = None
    metadata: Mapping[str, str] | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadRequest(f"kind must be one of {', '.join(KINDS)}", param="kind", code="invalid_value")
        if self.kind in VALUED:
            _check_value(self.value)
        elif self.value is not None:
            raise BadRequest(f"an outcome of kind {self.kind} has no value; send kind number", param="value")
        elif getattr(self, self.kind) is None:
            raise BadRequest(f"an outcome of kind {self.kind} needs `{self.kind}`", param=self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A judgement of one rollout, by one key. `idempotency_key`: the store keeps the first outcome under it."""

    id: str
    rollout_id: str
    key_id: str
    created_at: datetime
    judgement: Judgement
    idempotency_key: str | None = None


def parse_labels(text: str) -> dict[str, float]:
    """LABELS and the pairs `label=value`, comma-separated, on top of them. Raises ValueError naming the pair."""
    labels = dict(LABELS)
    for pair in filter(None, map(str.strip, text.split(","))):
        label, _, number = pair.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not label.strip() or not 0 <= value <= 1:
            raise ValueError(f"`{pair}` is not label=value with a value from 0 to 1")
        labels[_plain(label)] = value
    return labels


def requested(body: object, labels: Mapping[str, float] = LABELS) -> tuple[str, Judgement]:
    """(rollout id or completion id, judgement) of a request's body. `labels`: what labels count as. Raises BadRequest
    naming the field."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    check_names(body, FIELDS)
    target = body.get("rollout_id") or body.get("completion_id")
    if not isinstance(target, str) or not target or len(target) > TARGET_CHARS_MAX:
        raise BadRequest("give `rollout_id` or `completion_id`, as the reply carried it", param="rollout_id")
    return target, _judgement(body, labels)


def check_idempotency_key(key: str | None) -> str | None:
    """The header's value. Raises BadRequest where it is empty or too long."""
    if key is not None and not 0 < len(key) <= IDEMPOTENCY_CHARS_MAX:
        rule = f"`Idempotency-Key` must have 1 to {IDEMPOTENCY_CHARS_MAX} characters"
        raise BadRequest(rule, param="Idempotency-Key")
    return key


def counting(judgement: Judgement, labels: Iterable[str] = LABELS) -> dict[str, Any]:
    """Whether an outcome is evidence, as fields of the reply: `counts`, and `value` or the sentence `note`."""
    if judgement.value is not None:
        return {"counts": True, "value": judgement.value}
    if judgement.kind == "label":
        known = ", ".join(f"`{label}`" for label in labels)
        note = f"`{judgement.label}` has no value, so it is stored and is no evidence; send `value`, or one of {known}"
    else:
        note = f"a {judgement.kind} is stored and is no evidence by itself; send `value` or a label in another outcome"
    return {"counts": False, "note": note}


def _plain(label: str) -> str:
    return _SHADES.sub("", label.strip()).casefold()


def _judgement(body: Mapping[str, Any], labels: Mapping[str, float]) -> Judgement:
    fields = [name for name in ("value", *TEXTS) if body.get(name) is not None]
    if len(fields) != 1:
        names = ", ".join(f"`{name}`" for name in ("value", *TEXTS))
        raise BadRequest(f"give exactly one of {names}", param=(fields or ["value"])[-1])
    for name, chars_max in TEXT_CHARS_MAX.items():
        _check_text(name, body.get(name), chars_max)
    if body.get("metadata") is not None and (code := string_pairs(body["metadata"])):
        rule = "`metadata` must be up to 16 pairs of strings (64 / 512 characters)"
        raise BadRequest(rule, param="metadata", code=code)
    step = body.get("step")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= STEP_MAX):
        raise BadRequest(
            "`step` must be the number of a step, as the rollout shows it", param="step", code="invalid_type"
        )
    texts = {name: body[name] for name in (*TEXT_CHARS_MAX, "metadata", "step") if body.get(name) is not None}
    if str(body.get("source")).startswith(RESERVED):
        rule = f"sources that begin with {' or '.join(RESERVED)} are the gateway's own; name another"
        raise BadRequest(rule, param="source", code="reserved_source")
    if fields == ["label"] and (worth := labels.get(_plain(body["label"]))) is not None:
        return Judgement(kind="number", value=worth, **{"source": LABEL, **texts})
    if fields != ["value"]:
        kind: Any = fields[0]
        return Judgement(kind=kind, **texts)
    value = body["value"]
    kind = "boolean" if isinstance(value, bool) else "number"
    return Judgement(kind=kind, value=float(value) if isinstance(value, bool) else value, **texts)


def _check_value(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:  # type: ignore[operator]
        raise BadRequest("`value` must be true, false or a number from 0 to 1", param="value", code="invalid_type")


def _check_text(name: str, text: object, chars_max: int) -> None:
    if text is not None and (not isinstance(text, str) or not 0 < len(text) <= chars_max):
        raise BadRequest(f"`{name}` must be a string of 1 to {chars_max} characters", param=name, code="invalid_type")
