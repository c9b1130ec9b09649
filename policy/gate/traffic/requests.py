"""What the log holds out for the judges: requests of clients that training must not see, as they can be asked again.

One bound decides (`rules.Bound`): the selection of a job trains on what it does not hold out, and the gate asks what it
does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.core.policies.holdout import HELD_OUT_SHARE, KEY_SHARE_APART, Bound, bound_of
from gateway.errors import ConfigError, NotFound
from gateway.files import write_atomic
from policy.dataset.read import StoredRequest, extent, group_of, requests_of, snapshot
from policy.dataset.select import Selection
from policy.spec import first_of

REQUESTS_MAX = 5_000
FILE_BYTES_MAX = 1 << 30
NOT_PARAMS = ("model", "messages", "response", "stream", "n")
REASONS: Mapping[str, str] = {
    "no_outcome": "neither an outcome nor a grader; post outcomes, or name a grader in their metadata",
    "metadata_only": "log those keys in mode full from now on",
    "redacted": "the words that were asked are not in the log",
    "no_text": "images, audio, files or no message at all",
    "tools": "asked with tools of the client, whose calls nothing answers here",
    "asked_in_training": "the training side has the same question",
    "asked_later": "a later request asks the same",
    "over_limit": "the latest ones are enough; --n asks for more",
    "other_pool": "asked of another pool; --pool names it",
    "no_grader": "they name no grader; --judge WORKER grades them",
    "needs_judge": "their grader is `judge`; --judge WORKER does its work",
    "bad_reference": "their grader cannot use their reference",
    "ungraded": "a reply could not be graded",
}


class HeldOutRequest(BaseModel):
    """A client's request as logged, with what asking it again needs. `pool`: the workers as shown, with what was known
    of them. `grader`: `name@version`, empty where the request named none; replies are graded at today's version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    created_at: datetime
    key_id: str
    pool_name: str
    kind: str
    group: str
    messages: tuple[dict[str, Any], ...]
    params: dict[str, Any]
    pool: tuple[dict[str, Any], ...]
    quality: int | None
    grader: str
    reference: str


class HeldOut(BaseModel):
    """The held-out slice of a log. `left_out`: requests of the slice by reason, keys of REASONS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bound_from: datetime | None
    bound_keys: tuple[str, ...]
    requests: tuple[HeldOutRequest, ...]  # oldest first
    left_out: dict[str, int]

    @property
    def bound(self) -> Bound:
        """Return what decides who is held out."""
        return Bound(self.bound_from, self.bound_keys)


def held_out(
    database_url: str,
    selection: Selection,
    bound: Bound | None = None,
    *,
    share: float = HELD_OUT_SHARE,
    key_share: float = KEY_SHARE_APART,
    seen: Collection[str] = (),
) -> HeldOut:
    """The held-out requests of a selection, as `requests_of` reads it. Without a `bound` one is made of its requests
    that can be judged. `seen`: groups of questions that training sees beside the log. Raises NotFound where no request
    can be judged, and as `read.snapshot`."""
    with snapshot(database_url) as connection:
        every = requests_of(connection, selection)
        marks = [(one.created_at, one.key_id) for one in every if one.judged or "grader" in one.tags]
        if not marks and not extent(connection)[0]:
            raise NotFound("the log is empty: send requests through the gateway first")
        if not marks:
            raise NotFound("no request in the log has an outcome or names a grader: post outcomes (POST /v1/outcomes)")
        return _sliced(requests_of(connection, selection), bound or bound_of(marks, share, key_share), seen)


def _sliced(requests: Iterator[StoredRequest], bound: Bound, seen: Collection[str]) -> HeldOut:
    trained, left_out = set(seen), Counter[str]()
    slice_of: dict[str, HeldOutRequest] = {}
    for request in requests:
        group = group_of(request.body, request.id)
        if not bound.holds_out(request.created_at, request.key_id):
            trained.add(group)
        elif reason := _fault(request):
            left_out[reason] += 1
        else:
            left_out["asked_later"] += slice_of.pop(group, None) is not None
            slice_of[group] = _held_request(request, group)
    fresh = [one for group, one in slice_of.items() if group not in trained]
    left_out["asked_in_training"] = len(slice_of) - len(fresh)
    left_out["over_limit"] = max(0, len(fresh) - REQUESTS_MAX)
    counts = {reason: count for reason, count in left_out.items() if count}
    return HeldOut(bound_from=bound.at, bound_keys=bound.keys, requests=tuple(fresh[-REQUESTS_MAX:]), left_out=counts)


def _fault(request: StoredRequest) -> str | None:
    """Why a request cannot be asked again, a key of REASONS."""
    if not (request.judged or "grader" in request.tags):
        return "no_outcome"
    if request.log_mode != "full":
        return "metadata_only" if request.log_mode == "metadata" else "redacted"
    if request.body.get("tools") or request.body.get("functions"):
        return "tools"
    return None if request.messages and all(map(_is_text, request.messages)) else "no_text"


def _is_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text"}]
    return content is not None and all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def _held_request(request: StoredRequest, group: str) -> HeldOutRequest:
    return HeldOutRequest(
        id=request.id,
        created_at=request.created_at,
        key_id=request.key_id,
        pool_name=request.pool_name,
        kind=request.task_type or request.tags.get("category") or "",
        group=group,
        messages=tuple(dict(message) for message in request.messages),
        params={name: value for name, value in request.body.items() if name not in NOT_PARAMS},
        pool=tuple(dict(entry) for entry in request.pool),
        quality=request.caps.get("quality"),
        grader=request.tags.get("grader", ""),
        reference=request.tags.get("reference", ""),
    )


# ---------------------------------------------------------------- as a file


def write(path: Path, requests: HeldOut) -> None:
    """Replace a file by the slice; no other user of the machine can read it."""
    write_atomic(path, requests.model_dump_json(), mode=0o600)


def read(path: Path) -> HeldOut:
    """Raises ConfigError on a file that is none."""
    try:
        with path.open("rb") as file:
            return HeldOut.model_validate_json(file.read(FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file of held-out requests") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: no held-out requests ({first_of(error)})") from None


def listed(counts: Mapping[str, int]) -> str:
    """One line, the most frequent reason first: `12 tools (what it means); 3 …`; empty for no counts."""
    most: Sequence[tuple[str, int]] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{count} {reason} ({REASONS[reason]})" for reason, count in most)
