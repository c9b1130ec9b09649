"""Settings of what outlives one request: replies kept for their Idempotency-Key, and turns of one conversation."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Turns(BaseModel):
    """Turns: requests that come again, and conversations that go on"""

    idempotency_keep_s: float = Field(
        86_400.0, gt=0, le=7 * 86_400, description="how long a reply is kept for its Idempotency-Key"
    )
    idempotency_reply_bytes_max: int = Field(
        16 * 2**20, ge=1024, le=2**30, description="bytes of a reply that is kept; a larger one is given once"
    )
    sticky_window_s: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="a conversation that goes on within so long goes back to the worker that answered; 0: is planned",
    )
    sticky_tools_s: float = Field(
        86_400.0,
        ge=0,
        le=7 * 86_400,
        description="tool results that come within so long go back to the worker that asked; 0: are planned",
    )
    sticky_timeout_s: float = Field(
        0.25, gt=0, le=60, description="a slower look-up of who asked is done without: the turn is planned"
    )
