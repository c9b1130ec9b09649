"""What becomes of each property of a chat request, for docs/api.md: fates are the code's, the sentences are here."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.openai.chat import FIELDS

FATES = {"read": "Baton acts on it", "last": "goes to the worker that answers", "refused": "a 400"}
NOTES = {
    # every property that Baton acts on or refuses, and those for workers that it also sees to itself
    "model": "who plans, over which workers",
    "messages": "checked to the last part; later steps of a plan see what it lets them",
    "stream": "the last step's stream is the reply",
    "stream_options": "`include_usage`; `include_obfuscation` only where it is `true`",
    "metadata": "logged; some names mean something, see above",
    "user": "logged as the end user; not passed on",
    "safety_identifier": "as `user`, and before it",
    "store": "`false`: the rollout trains nobody. What is logged is the key's log mode either way",
    "service_tier": "the reply says which tier the worker used, else `default`; a tier is bought in the pool file",
    "moderation": "no worker could be made to do it, and nobody may believe it was done",
    "n": "or is made of as many calls, where the pool file says the worker takes none; the hold covers them",
    "max_tokens": "under the name that the worker knows; lowered to what the money allows",
    "max_completion_tokens": "as `max_tokens`",
    "response_format": "`json_object`, and `json_schema` with `strict`, are also checked; see "
    "[OpenAI's contract](openai.md#structured-replies)",
    "tool_choice": "must name a tool that is there",
    "parallel_tool_calls": "`false` is kept even where the worker does not heed it: one call a choice",
    "prompt_cache_key": "unless the pool file says that it has no place there",
    "prompt_cache_options": "as `prompt_cache_key`",
    "prompt_cache_retention": "as `prompt_cache_key`",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """(property, a good value, what becomes of it). Raises ValueError where a sentence is missing or about nothing."""
    told = {name for name, (fate, _, _) in FIELDS.items() if fate != "last"}
    if not told <= NOTES.keys() <= FIELDS.keys():
        raise ValueError(f"scripts/chat_table.py: say what becomes of {sorted(told ^ (NOTES.keys() & told))}")
    for name, (fate, _, good) in FIELDS.items():
        note = f": {NOTES[name]}" if name in NOTES else ""
        yield f"`{name}`", good, FATES[fate] + note
