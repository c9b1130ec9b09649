"""How vendors say that a prompt is too long for their model, in one table. Pure.

Fields come first, for they are meant for programs. Most vendors have none of their own, so their words follow. A limit
on tokens a minute, on the reply or on the size of a picture is no overflow: a shorter conversation would not help.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

CODE = "context_length_exceeded"  # OpenAI's: clients shorten the conversation on it
STATUSES = (400, 413, 422, 500)  # with which vendors say it
FIELDS: Mapping[str, str] = {  # a `code` or `type`, and who sends it
    CODE: "OpenAI, Azure, Groq, Cerebras, SambaNova, llama-cpp-python",
    "exceed_context_size_error": "llama.cpp",
    "model_context_window_exceeded": "Z.ai",
    "model_max_prompt_tokens_exceeded": "GitHub Copilot",
    "contextwindowexceedederror": "LiteLLM",
    "context_window_exceeded": "gateways",
    "context_too_long": "gateways",
    "prompt_too_long": "gateways",
    "input_too_long": "gateways",
}
_MAX = r"max(?:imum)?(?: allowed)?[ _]"
_WINDOW = r"context[ _-]?(?:length|window|size|limit)"
_OVER = r"(?:exceed\w*|longer than|larger than|greater than|too (?:long|large|many)|beyond|overflow\w*|is full)"
WORDS: Mapping[str, str] = {  # whose, and a pattern of theirs
    "OpenAI, Azure, DeepSeek, Mistral, vLLM, SGLang, xAI, OpenRouter, Fireworks, NVIDIA": (
        rf"{_MAX}(?:(?:context|model|prompt|sequence)[ _](?:length|len)\b(?!`? (?:must|should) be)|input length:? \d)"
    ),
    "OpenAI Responses, vLLM, LM Studio, Anthropic, Ollama, llama.cpp": rf"{_OVER}\b[^.]{{0,60}}\b{_WINDOW}\b",
    "MiniMax, gateways": rf"\b{_WINDOW}\b[^.]{{0,40}}\b{_OVER}",
    "Anthropic, Fireworks, Ollama, Baidu": r"\b(?:prompt|conversation)(?: tokens?)? (?:is |are )?too long",
    "OpenAI, Gemini, Vertex, SGLang, GitHub Copilot, watsonx, Databricks": (
        r"\b(?:input|prompt|messages?|request(?:ed)?)[ _]tokens?\b[^.]{0,60}\b(?:exceed|only supports|longer than)"
    ),
    "DS4, gateways": (
        r"\b(?:prompt|input|request|conversation) (?:has|contains|is|of) [\d,]+ tokens\b[^.]{0,40}"
        r"\b(?:configured|over|above|exceed|only|limit)"
    ),
    "Bedrock, Kimi": (r"(?<!image )(?<!audio )(?<!video )(?<!file )\binput (?:token length )?(?:is )?too long"),
    "Bedrock, Cohere": r"too many (?:input |prompt |total )?tokens",
    "Mistral": r"too large for model with",
    "Kimi": r"exceed\w* (?:the )?model(?:'s)? token limit",
    "DashScope": r"range of input length should be|message token length exceed",
    "Groq, Cerebras": r"reduce the length of (?:the |your )?(?:input )?(?:messages|prompt|conversation)",
    "TGI, TEI, Together": r"`?inputs`?(?: tokens \+ `?max_new_tokens`?)? must (?:be <=|have less than)",
    "SGLang, DeepInfra, Volcengine": r"\binput length \(?[^.)]{0,40}\)? exceeds",
    "Z.ai": r"prompt exceeds max length|prompt ?超长",
    "LiteLLM": r"ContextWindowExceeded",
}
_WORDS = re.compile("|".join(f"(?:{pattern})" for pattern in WORDS.values()), re.IGNORECASE | re.DOTALL)
_ELSE = re.compile(  # what has the same words, and passes with time or money
    r"(?i)\bper[ -](?:minute|hour|day|month|second)|\btp[md]\b|rate[ _-]?limit|quota|throttl|please wait|\bcredits?\b"
)


def is_overflow(text: str, fields: Iterable[object] = ()) -> bool:
    """Whether an error says that the prompt is too long for the model. `text`: its words, at any length; `fields`: its
    `code`, its `type` and what else names its kind."""
    if any(isinstance(field, str) and field.lower().replace("-", "_") in FIELDS for field in fields):
        return True
    return _WORDS.search(text) is not None and _ELSE.search(text) is None


def context_exceeded(limit_tokens: int, tokens: int, who: str, instead: str = "") -> dict[str, Any]:
    """The message, `param` and `code` of a prompt that is too long, in OpenAI's words: clients shorten the
    conversation on this code. `instead`: what else helps, as the end of a sentence."""
    problem = f"The maximum context length of {who} is {limit_tokens} tokens. However, your messages resulted in"
    return {
        "message": f"{problem} about {tokens} tokens. Please reduce the length of the messages{instead}.",
        "param": "messages",
        "code": "context_length_exceeded",
    }
