"""The arena: a simulator of generated tasks and of workers with real, different skills (docs/arena.md).

Nothing measured in here says anything about a real model; it is a world whose truth is known.
"""

from __future__ import annotations
