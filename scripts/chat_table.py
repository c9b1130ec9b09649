"""The table of chat request properties in docs/api.md: their fates come from the code, the sentences from here."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.openai.chat import FIELDS

FATES = {"read": "Baton acts on it", "last": "goes to the worker that answers", "refused": "a 400"}
NOTES = {
    # every property that Baton uses or refuses, and those for workers that it uses too
    "model": "the policy, or one worker",
    "messages": "checked to the last part; a plan says which steps see them",
    "stream": "the last step's stream is the reply",
    "stream_options": "`include_usage`; `include_obfuscation` only where it is `true`",
    "metadata": "logged; some names mean something, see above",
    "user": "logged as the end user; not passed on",
    "safety_identifier": "as `user`, and before it",
    "store": "`false`: no training with the rollout; the key's log mode decides what is logged",
    "service_tier": "the reply names the tier; only a worker whose entry takes it is asked for one",
    "moderation": "no worker moderates, and no client may believe that it did",
    "n": "or becomes as many calls, which the hold covers",
    "max_tokens": "under its name there; lowered to what money, caps and context allow",
    "max_completion_tokens": "as `max_tokens`",
    "response_format": "and is checked",
    "tool_choice": "must name a tool that is there",
    "parallel_tool_calls": "`false` holds where the worker ignores it",
    "prompt_cache_key": "unless the pool file says that it has no place there",
    "prompt_cache_options": "as `prompt_cache_key`",
    "prompt_cache_retention": "as `prompt_cache_key`",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Return rows of (property, good value, fate). Raises ValueError if a sentence is missing or has no property."""
    needed = {name for name, (fate, _, _) in FIELDS.items() if fate != "last"}
    if not needed <= NOTES.keys() <= FIELDS.keys():
        raise ValueError(f"scripts/chat_table.py: say what becomes of {sorted(needed ^ (NOTES.keys() & needed))}")
    for name, (fate, _, good) in FIELDS.items():
        note = f": {NOTES[name]}" if name in NOTES else ""
        yield f"`{name}`", good, FATES[fate] + note
