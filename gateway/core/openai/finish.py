"""Why a reply ended, in the words of every vendor: one table into OpenAI's words, and two out of them. Pure."""

from __future__ import annotations

from typing import Any

FILTERED = "content_filter"
CUT = ("length", FILTERED)  # of a reply that was cut short
FINISH_REASONS = ("stop", "tool_calls", "function_call", *CUT)
_WORDS = {  # any other word is a natural end: `end_turn`, `eos`, `COMPLETE`, …
    "length": (
        *("max_tokens", "max_output_tokens", "max_length", "max_output", "token_limit", "token_limit_reached", "limit"),
        *("model_length", "model_context_window_exceeded", "context_length_exceeded", "error_limit"),
        # broken off by the vendor: the reply is not whole, and no other word of OpenAI's says so
        *("error", "abort", "aborted", "cancelled", "user_cancel", "timeout", "time_limit", "not_finished"),
        *("network_error", "insufficient_system_resource", "repetition", "malformed_model_output"),
    ),
    "tool_calls": ("tool_use", "tool_call", "function_calls", "malformed_tool_use"),
    FILTERED: (
        *("safety", "language", "recitation", "blocklist", "prohibited_content", "spii", "model_armor"),  # Gemini
        *("image_safety", "image_prohibited_content", "image_recitation"),
        *("refusal", "guardrail_intervened", "content_filtered", "error_toxic", "sensitive"),
    ),
}
_REASONS = {word: reason for reason, words in _WORDS.items() for word in words}
_REASONS |= {reason: reason for reason in FINISH_REASONS}
_PREFIXES = ("finishreason.", "finish_reason.", "finish_reason_")  # of the names of an enumeration
# Anthropic's words, and those of OpenAI's Responses. A reason that a table lacks is a natural end.
STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use", FILTERED: "refusal"}
INCOMPLETE = {"length": "max_output_tokens", FILTERED: FILTERED}


def finish_reason(word: Any) -> str | None:
    """OpenAI's word for a vendor's; None while a reply goes on. A word that no row has counts as `stop`."""
    if word is None or word in FINISH_REASONS:
        return word  # type: ignore[no-any-return]
    text = str(word).strip().lower().partition(":")[0].replace("-", "_").replace(" ", "_")
    if not text or text in ("null", "none"):  # DashScope's text while a reply goes on
        return None
    text = next((text.removeprefix(prefix) for prefix in _PREFIXES if text.startswith(prefix)), text)
    return _REASONS.get(text, "stop")
