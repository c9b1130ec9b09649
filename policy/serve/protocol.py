"""The OpenAI chat protocol with vLLM's extensions, as far as a conductor and a small local worker need it: requests in,
bodies out. Pure.

Fields that would change the answer and are not supported are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from policy.serve.engine import SequenceScore, TokenSample
from policy.serve.tokens import Tokens

TOP_LOGPROBS_MAX = 20
LOGPROB_MIN = -9999.0  # JSON has no −inf; vLLM writes this
NAME_CHARS_MAX = 200
N_MAX = 8  # replies to one request
STOPS_MAX = 4
STOP_CHARS_MAX = 200
REFUSED = {
    "tools": "this model calls no tools; ask without them, or ask another worker",
    "functions": "this model calls no functions; ask without them, or ask another worker",
    "logit_bias": "this server does not shift logits",
}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class ApiError(Exception):
    """An error as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class TextPart(_Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One chat message; text only, in one piece or in parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]], Field(min_length=1, max_length=STOPS_MAX)
]


class NamedSchema(_Strict):
    """OpenAI's wrapper of a schema; `strict` is always kept."""

    name: str = "schema"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(_Strict):
    """vLLM's way to ask for JSON. White space between tokens of the JSON is never free here."""

    json_: dict[str, Any] = Field(alias="json")
    disable_any_whitespace: bool = True


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class ChatCompletionRequest(_Strict):
    """POST /v1/chat/completions. Defaults are OpenAI's."""

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Literal[-1, 0] = -1  # these three are accepted as far as they change nothing
    min_p: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=TOP_LOGPROBS_MAX)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    n: int = Field(default=1, ge=1, le=N_MAX)
    stop: Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)] | Stops | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        """Raises ApiError naming a field that asks for what no small model here can do."""
        for name, why in REFUSED.items():
            if isinstance(body, dict) and body.get(name):
                raise ApiError(400, f"{name}: {why}", code="unsupported_parameter", param=name)
        return body if not isinstance(body, dict) else {key: body[key] for key in body if key not in REFUSED}

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which a reply ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def tokens_max(self, room: int) -> int:
        """How many tokens may be decoded when `room` are left in the context. Raises ApiError as vLLM does."""
        limit = self.max_completion_tokens or self.max_tokens
        if room < 1 or (limit or 1) > room:
            message = f"the prompt leaves room for {max(room, 0)} tokens in the context; {limit or 1} were asked for"
            raise ApiError(400, message, code="context_length_exceeded", param="messages")
        return limit or room

    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema the answer must follow, or None for free text. Raises ApiError."""
        if self.structured_outputs is not None:
            return self.structured_outputs.json_
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.type == "json_object":
            return ANY_OBJECT
        if self.response_format.json_schema is None:
            raise ApiError(400, "response_format json_schema needs a json_schema", param="response_format")
        return self.response_format.json_schema.json_schema


class CompletionRequest(_Strict):
    """POST /v1/completions, as far as it scores token ids, in vLLM's way: the sequence itself (`prompt_logprobs`), or
    the next token under a mask (`allowed_token_ids`)."""

    model: str
    prompt: list[int] = Field(min_length=2)
    prompt_logprobs: Literal[0] | None = None
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1)
    logprobs: int = Field(default=0, ge=0, le=TOP_LOGPROBS_MAX)
    max_tokens: Literal[1] = 1
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    top_p: Literal[1] = 1
    top_k: Literal[-1, 0] = -1  # these three are accepted as far as they change nothing
    min_p: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> CompletionRequest:
        masked = self.allowed_token_ids is not None
        if masked == (self.prompt_logprobs is not None):
            raise ValueError("give one of prompt_logprobs and allowed_token_ids")
        if masked != self.return_tokens_as_token_ids:
            raise ValueError("return_tokens_as_token_ids belongs to allowed_token_ids")
        return self


class LoadRequest(_Strict):
    """POST /v1/load_policy. `directory`: absolute."""

    name: str = Field(min_length=1, max_length=NAME_CHARS_MAX)
    directory: str = Field(pattern="^/")


class UnloadRequest(_Strict):
    """POST /v1/unload_policy."""

    name: str = Field(min_length=1, max_length=NAME_CHARS_MAX)


def scored_body(
    request: CompletionRequest, scored: SequenceScore, tokens: Tokens, id_: str, created: int
) -> dict[str, Any]:
    """The body of a scored sequence: per prompt token its log-prob and rank, none for the first."""
    entries: list[dict[str, Any] | None] = [None]
    for token, logprob, rank in zip(request.prompt[1:], scored.logprobs, scored.ranks, strict=True):
        entries.append({str(token): {"logprob": logprob, "rank": rank, "decoded_token": tokens.token_text(token)}})
    return _completion_body(request, scored.next_token, {"prompt_logprobs": entries}, tokens, id_, created)


def masked_body(
    request: CompletionRequest, sampled: TokenSample, tokens: Tokens, id_: str, created: int
) -> dict[str, Any]:
    """The body of one token that was sampled under a mask: its log-prob, and those of the likeliest, named by id."""
    name, pair = f"token_id:{sampled.token}", (sampled.token, sampled.logprob)
    top = {f"token_id:{token}": max(logprob, LOGPROB_MIN) for token, logprob in (pair, *sampled.top)}
    logprobs = {"tokens": [name], "token_logprobs": [sampled.logprob], "top_logprobs": [top], "text_offset": [0]}
    return _completion_body(request, sampled.token, {"logprobs": logprobs}, tokens, id_, created)


def _completion_body(
    request: CompletionRequest, token: int, more: dict[str, Any], tokens: Tokens, id_: str, created: int
) -> dict[str, Any]:
    text = tokens.token_bytes(token).decode(errors="replace")
    finish = "stop" if token in tokens.eos_ids else "length"
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, **more}
    count = len(request.prompt)
    usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
    common = {"id": id_, "object": "text_completion", "created": created, "model": request.model}
    return {**common, "choices": [choice], "usage": usage}


def logprobs_body(sampled: Sequence[TokenSample], tokens: Tokens) -> dict[str, Any]:
    """OpenAI's log-prob list: one entry a token, the end-of-sequence token included."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokens.token_bytes(token) or tokens.token_text(token).encode()
        return {"token": tokens.token_text(token), "logprob": logprob, "bytes": list(raw)}

    content = [
        {**entry(s.token, s.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in s.top]}
        for s in sampled
    ]
    return {"content": content}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text and tokens of the reply at `index`, as they come. The text may lag behind the tokens."""

    index: int
    text: str
    sampled: Sequence[TokenSample]


class Replies:
    """Bodies of one completion: what stays the same in all of its chunks is said once, here."""

    def __init__(
        self, request: ChatCompletionRequest, tokens: Tokens, prompt_ids: Sequence[int], id_: str, created: int
    ) -> None:
        self._request = request
        self._tokens = tokens
        self._prompt_ids = list(prompt_ids)
        self._common = {"id": id_, "created": created, "model": request.model}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a reply: the role, and the prompt's token ids where they were asked for."""
        chunk = self._chunk({"role": "assistant", "content": ""}, [], index)
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        return chunk

    def piece(self, piece: TextPiece) -> dict[str, Any]:
        """A chunk of one or more tokens; it says so when it is the last."""
        return self._chunk({"content": piece.text}, piece.sampled, piece.index)

    def _chunk(self, delta: dict[str, str], sampled: Sequence[TokenSample], index: int) -> dict[str, Any]:
        choice = self._choice(sampled, index) | {"delta": delta}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, sampled: Sequence[TokenSample], index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": sampled[-1].finish if sampled else None}
        wants = self._request.logprobs and bool(sampled)
        choice["logprobs"] = logprobs_body(sampled, self._tokens) if wants else None
        if self._request.return_token_ids and sampled:
            choice["token_ids"] = [s.token for s in sampled]
        return choice

    def usage(self, count: int) -> dict[str, int]:
        """Tokens of the call, the end-of-sequence token included."""
        prompt = len(self._prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def usage_chunk(self, count: int) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": self.usage(count)}

    def body(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """The body of a completion that was not streamed."""
        choices = []
        for index in range(self._request.n):
            own = [piece for piece in pieces if piece.index == index]
            sampled = [one for piece in own for one in piece.sampled]
            message = {"role": "assistant", "content": "".join(piece.text for piece in own)}
            choices.append(self._choice(sampled, index) | {"message": message})
        body = {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": self.usage(sum(len(piece.sampled) for piece in pieces)),
        }
        return body | ({"prompt_token_ids": self._prompt_ids} if self._request.return_token_ids else {})
