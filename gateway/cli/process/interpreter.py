"""How the interpreter is set for a process in which one thread answers requests while others store what was logged."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0005  # a thread that is wanted back by the answering one gives way after this long, not after 5 ms
YOUNG_OBJECTS = 10_000  # a request makes some thousand; looking for cycles in each one's would find none


def for_latency() -> None:
    """At the start of the process."""
    sys.setswitchinterval(SWITCH_S)


def loaded() -> None:
    """Once everything is loaded: what is there now stays, and is not searched for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
