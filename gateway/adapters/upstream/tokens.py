"""Counts tokens as a worker's own tokenizer does, for calls whose worker did not say: the only file that imports
tiktoken, and one of those that import `tokenizers` (ADR 0020).

Nothing is ever downloaded: OpenAI's vocabularies are those that LiteLLM's package carries, checked by their hash, and
any other tokenizer is a `tokenizer.json` on this disk. A vocabulary takes a third of a second and up to 75 MiB to load,
which is done when the pool file that names it is read, or when one that nobody named is first needed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import ConfigError

COUNT_S_MAX = 2.0  # a reply is never kept waiting for longer: bytes are counted then
PIECE_CHARS = 8192  # some milliseconds; tiktoken fails on a run of blanks of some 100,000
FILE_BYTES_MAX = 64 << 20
_EXTRA = "pip install 'baton[litellm]'"
_VOCABULARIES = "litellm_core_utils/tokenizers"
_LATIN = r"'(?i:[sdmt]|ll|ve|re)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Encoding → file in LiteLLM's package, its sha256, and the pattern that cuts a text into words (OpenAI, tiktoken).
ENCODINGS = {
    "cl100k_base": (
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        _LATIN + r"|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    ),
    "o200k_base": (
        "fb374d419588a4632f3f557e76b4b70aebbca790",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
_CL100K_MODELS = re.compile(r"gpt-4(?![.o0-9])|gpt-3\.5|gpt-35|text-embedding-(3|ada-002)")
Tokens = Callable[[str], int]
_loaded: dict[str, Tokens] = {}
_loading = threading.Lock()


class Tokenizers:
    """`ports.TokenCounter`. One thread counts, so that many cut streams at once take one processor from the rest."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens")

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        """As `ports.TokenCounter.count`."""
        name = tokenizer_of(worker)
        if name is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COUNT_S_MAX):
                return await loop.run_in_executor(self._thread, _count, name, texts, at_most)
        except (TimeoutError, ConfigError):
            return None

    async def close(self) -> None:
        """Let the thread end; what waits for it is not counted."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def tokenizer_of(worker: WorkerSpec) -> str | None:
    """An encoding's name or a path: what the pool file says, else what OpenAI counts a model of that name with, else
    OpenAI's newest. None where there is none to be had: no model, or LiteLLM's package is not here."""
    if worker.kind not in MODEL_KINDS:
        return None
    if worker.tokenizer is not None:
        return worker.tokenizer
    if _vocabularies() is None:
        return None
    return "cl100k_base" if _CL100K_MODELS.match((worker.model or "").rpartition("/")[2]) else "o200k_base"


def check(name: str | None) -> None:
    """Load what the pool file names, so that no request waits for it. Raises ConfigError where `name` is neither an
    encoding that is here nor the path of a tokenizer."""
    if name is None:
        return
    if name not in ENCODINGS and not name.endswith(".json"):
        known = ", ".join(ENCODINGS)
        raise ConfigError(f"`{name}` is no tokenizer; give {known}, or the path of a tokenizer.json")
    _tokens(name)


def _count(name: str, texts: Sequence[str], at_most: int) -> int:
    """Tokens of all texts; counting stops at `at_most`, which is then the answer. Raises ConfigError."""
    tokens, total = _tokens(name), 0
    for text in texts:
        for piece in _pieces(text):
            total += tokens(piece)
            if total >= at_most:
                return at_most
    return total


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that together have no fewer tokens than the whole: cut in front of single blanks, where every
    tokenizer here begins a word; where there is none, a cut can only part a token in two."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = start + PIECE_CHARS
        cut = text.rfind(" ", start + 1, end)
        while cut > start and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.rfind(" ", start + 1, cut)
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    yield text[start:]


def _tokens(name: str) -> Tokens:
    """What counts with that tokenizer, loaded once in this process. Raises ConfigError."""
    with _loading:
        if name not in _loaded:
            _loaded[name] = _encoding(name) if name in ENCODINGS else _tokenizer_file(Path(name))
        return _loaded[name]


def _encoding(name: str) -> Tokens:
    where, (file, digest, pattern) = _vocabularies(), ENCODINGS[name]
    if where is None:
        raise ConfigError(f"`{name}` comes with the extra litellm; {_EXTRA}, or give the path of a tokenizer.json")
    import tiktoken  # 20 ms that most gateways never need

    raw = (where / file).read_bytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ConfigError(f"the vocabulary of `{name}` is not OpenAI's; install LiteLLM anew")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in raw.splitlines())}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: len(encoding.encode_ordinary(text))


def _tokenizer_file(path: Path) -> Tokens:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"`{path}` is larger than {FILE_BYTES_MAX >> 20} MiB; it is no tokenizer")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read ({error.strerror}); mend the path") from None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("a tokenizer.json needs the extra embedded; pip install 'baton[embedded]'") from None
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception:  # boundary: the library raises bare exceptions for whatever it cannot read
        raise ConfigError(f"`{path}` is no tokenizer.json of Hugging Face's") from None
    return lambda text: len(tokenizer.encode(_whole(text), add_special_tokens=False).ids)


def _whole(text: str) -> str:
    """The text with halves of surrogate pairs replaced, which the library refuses."""
    return text.encode("utf-8", "replace").decode()


def _vocabularies() -> Path | None:
    """Where LiteLLM's package keeps OpenAI's vocabularies, found without importing it."""
    spec = find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / _VOCABULARIES
