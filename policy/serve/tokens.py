"""Text to tokens and back: the tokenizer, the chat template, and grammars that mask tokens."""

from __future__ import annotations

import codecs
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.errors import VersionRefused
from policy.serve.shape import Shape

GRAMMARS_KEPT = 64
# Compact JSON, no free white space: what vLLM 0.32 makes with `disable_any_whitespace`, so both mask the same tokens.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class BadSchema(Exception):
    """A JSON schema that no grammar can be made of."""


class Tokens:
    """Tokenizer, chat template and grammars of one model directory. Safe to use from several threads."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.vocab = shape.vocab
        self.eos_ids = shape.eos_ids
        path = directory / "tokenizer.json"
        try:
            serialised = path.read_text()
            self._tokenizer = Tokenizer.from_str(serialised)
            self._guide = LLTokenizer(serialised, n_vocab=shape.vocab, eos_token=list(shape.eos_ids))
        except Exception as error:  # boundary: tokenizers and llguidance raise bare exceptions for a bad file
            raise VersionRefused("engine", f"{path}: {error}") from error
        if self._tokenizer.get_vocab_size() > shape.vocab:
            size = self._tokenizer.get_vocab_size()
            raise VersionRefused("engine", f"{path}: {size} tokens, the model has {shape.vocab}")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        self._template, self._names = chat_template(directory)
        self._grammars: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the rendered conversation, ready for the model to answer. Raises ValueError."""
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._names)
        except TemplateError as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that the model writes."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text: none for a special one."""
        return b"" if token in self._special else bytes(self._guide.decode_bytes([token]))

    def token_text(self, token: int) -> str:
        """A token shown alone: its special name, or its bytes with U+FFFD for a torn character."""
        return self._special.get(token) or self.token_bytes(token).decode(errors="replace")

    def matcher(self, schema: Mapping[str, Any]) -> LLMatcher:
        """A fresh matcher of that schema's grammar; compiled grammars are kept. Raises BadSchema."""
        key = json.dumps(schema, sort_keys=False)
        with self._lock:
            if key not in self._grammars:
                self._grammars[key] = self._compile(key)
                if len(self._grammars) > GRAMMARS_KEPT:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(key)
            return self._grammars[key].deep_copy()

    def _compile(self, schema: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self._guide, LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE))
        except ValueError as error:
            raise BadSchema(str(error)) from error
        if matcher.is_error():
            raise BadSchema(matcher.get_error().splitlines()[0])
        return matcher


class TextStream:
    """Bytes of successive tokens in, whole characters out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes, final: bool = False) -> str:
        """The text that is complete now; with `final`, a torn character becomes U+FFFD."""
        return self._decoder.decode(data, final)


class StopText:
    """The text of a reply up to the first of its stop texts. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, text: str, final: bool = False) -> str:
        """The text that is certain now; with `final`, all that is left."""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = self.stopped or bool(places)
        certain = min(places) if places else len(self._held) - (0 if final else self._beginning())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _beginning(self) -> int:
        """The length of the longest end of the held text that begins a stop text."""
        sizes = range(1, max(map(len, self._stops), default=0))
        return max((size for size in sizes if self._held[-size:] in {s[:size] for s in self._stops}), default=0)


def chat_template(directory: Path) -> tuple[Any, dict[str, str]]:
    """The compiled template and the token names it may mention, as Hugging Face and vLLM read them. Raises
    VersionRefused(engine) without one."""
    place = directory / "tokenizer_config.json"
    try:
        config = json.loads(place.read_text())
        path = directory / "chat_template.jinja"
        source = path.read_text() if path.is_file() else config["chat_template"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = {name: _content(config[name]) for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
        return environment.from_string(source), names
    except (OSError, ValueError, KeyError, TypeError, TemplateError) as error:
        raise VersionRefused("engine", f"{place}: no usable chat template: {error}") from error


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
