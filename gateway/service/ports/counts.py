"""Port of counts that the processes of one gateway share."""

from __future__ import annotations

from typing import Protocol


class Count(Protocol):
    """A count that the processes of one gateway share. Each changes its own part."""

    @property
    def total(self) -> int:
        """The count of all processes."""
        ...

    def put(self, number: int) -> None:
        """Set the part of this process."""
        ...

    def add(self, number: int) -> None:
        """Change the part of this process."""
        ...

    def try_add(self, limit: int) -> bool:
        """Add one unless the total would be over `limit`; return whether it was added."""
        ...
