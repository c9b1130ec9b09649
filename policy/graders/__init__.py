"""Graders: is a reply right? One entry, `grade`; every grader is versioned, and its version goes with each outcome."""

from __future__ import annotations

from policy.graders.base import BadReference, Grade, GraderError, GraderFailed, Tools, UnknownGrader
from policy.graders.registry import check_reference, grade, versions

__all__ = [
    "BadReference",
    "Grade",
    "GraderError",
    "GraderFailed",
    "Tools",
    "UnknownGrader",
    "check_reference",
    "grade",
    "versions",
]
