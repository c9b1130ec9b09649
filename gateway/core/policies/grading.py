"""What a request asks of the graders: `metadata: {"grader": "numeric", "reference": "18.90"}`. Pure.

The graders themselves are `policy.graders`, which the gateway does not import; their names and versions stand here, and
a test holds the two together. Whether a reference can be graded against is for the grader to say, after the reply.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.errors import BadRequest

GRADERS: Mapping[str, str] = {
    "exact": "1",
    "numeric": "2",
    "choice": "1",
    "regex": "1",
    "json_schema": "1",
    "python": "1",
    "judge": "1",
}
SOURCE = "grader"  # of the outcomes that come of it


def asked(metadata: Mapping[str, str]) -> tuple[str, str] | None:
    """(`name@version`, reference) of a request's metadata, None where it names no grader. A name without a version
    means today's. Raises BadRequest for a grader that is not there, or one without a reference."""
    grader = metadata.get("grader")
    if grader is None:
        return None
    name, _, version = grader.partition("@")
    if name not in GRADERS:
        raise _refused(f"no grader `{name[:64]}`; use one of {', '.join(GRADERS)}")
    if version not in ("", GRADERS[name]):
        raise _refused(f"grader `{name}` is at version {GRADERS[name]}, not {version[:16]}; name that or none")
    reference = metadata.get("reference", "")
    if not reference.strip():
        raise _refused("`grader` needs `reference` beside it: what a right reply is compared with")
    return f"{name}@{GRADERS[name]}", reference


def asked_then(tags: Mapping[str, str]) -> tuple[str, str] | None:
    """As `asked`, of a request that was let in already, by an earlier release perhaps: at today's version."""
    return asked({**tags, "grader": tags["grader"].partition("@")[0]} if "grader" in tags else tags)


def check(metadata: Mapping[str, str], log_mode: str) -> None:
    """Raises BadRequest for a request whose reply could not be graded: as `asked`, or a key that logs no reply."""
    if asked(metadata) and log_mode == "metadata":
        raise _refused("this key's log mode `metadata` keeps no reply to grade; use a key that logs, or no `grader`")


def _refused(message: str) -> BadRequest:
    return BadRequest(f"metadata: {message}", param="metadata", code="bad_grader")
