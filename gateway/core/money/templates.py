"""What a worker's chat template adds to a short prompt, as the worker itself reports it. Pure.

A prompt's tokens are those of its template and those of its texts. So the fewest that a worker has ever reported for a
prompt of a shape are a bound of what its template adds to each prompt of that shape: usually a sixth of the constants
that hold for all templates, which are most of what a short prompt is held for. A worker that reports more than the
bound allows is held for by the constants from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.money.amounts import TOKENS_PER_MESSAGE, TOKENS_PER_REQUEST

MESSAGES_MAX = 8  # of a shape; in a longer prompt texts are most of it
SLACK_TOKENS = 4  # a date or a name in a template may have a token more tomorrow
SHAPES_MAX = 10_000
NOT_PLAIN = frozenset({"tools", "functions", "response_format", "modalities", "audio", "tool_choice"})
Shape = tuple[str, ...]


def shape_of_prompt(messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> Shape | None:
    """The roles of a few messages of text; None for anything else."""
    if not 0 < len(messages) <= MESSAGES_MAX or not NOT_PLAIN.isdisjoint(params):
        return None
    plain = all(type(one.get("content")) is str and one.keys() <= {"role", "content"} for one in messages)
    return tuple(str(one["role"]) for one in messages) if plain else None


class Templates:
    """The fewest tokens that each worker has reported, by shape of the prompt. One object serves the whole process."""

    def __init__(self) -> None:
        self._fewest: dict[tuple[str, Shape], int | None] = {}  # None: it has reported more than it may

    def spare(self, worker: str, shape: Shape | None) -> int:
        """The tokens by which the constants are above what the worker's template adds."""
        fewest = None if shape is None else self._fewest.get((worker, shape))
        if shape is None or fewest is None:
            return 0
        return max(0, TOKENS_PER_REQUEST + TOKENS_PER_MESSAGE * len(shape) - fewest - SLACK_TOKENS)

    def learn(self, worker: str, shape: Shape | None, prompt_tokens: int, bound: int) -> None:
        """Note what the worker reported of a prompt that was held for by `bound` tokens."""
        if shape is None or prompt_tokens < len(shape):
            return
        key = worker, shape
        if prompt_tokens > bound:
            self._fewest[key] = None
        elif key not in self._fewest:
            if len(self._fewest) >= SHAPES_MAX:
                self._fewest.clear()
            self._fewest[key] = prompt_tokens
        elif (fewest := self._fewest[key]) is not None and prompt_tokens < fewest:
            self._fewest[key] = prompt_tokens
