"""Counts tokens with a worker's own tokenizer: prompts before a call, and calls whose worker reported no usage (ADR
0020). Only this file imports tiktoken, and it is one of those that import `tokenizers`.

For a worker whose tokenizer is not known, OpenAI's newest encoding counts, and the upper bound follows from its tokens:
`_weight` says how many tokens another tokenizer makes of one of them at most.

Nothing is ever downloaded. OpenAI's vocabularies come from LiteLLM's package, and their hashes are checked; any other
tokenizer is a `tokenizer.json` on this disk. A vocabulary takes a third of a second and up to 75 MiB to load. It is
loaded together with the pool file that names it, or else when it is first needed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import string
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import ConfigError
from gateway.service.ports.request import TokenCount

COUNT_S_MAX = 2.0  # no reply waits longer; then bytes are counted
MEASURE_S_MAX = 1.0  # no request waits longer for the size of its prompt; then bytes are the bound
MARGIN_PARTS = 10  # the bound of a count by the worker's own tokenizer is one part in ten above it
LETTERS_PER_TOKEN = 3  # the fewest of a long token, in the tokenizers that were measured (ADR 0020)
SIZES_MAX = 8192  # texts whose sizes are remembered: a conversation comes back with each of its turns
PIECE_CHARS = 8192  # takes some milliseconds; tiktoken fails on about 100,000 blanks in a row
FILE_BYTES_MAX = 64 << 20
_LETTERS_AND_BLANKS = (string.ascii_letters + string.whitespace).encode()
_EXTRA = "pip install '.[litellm]'"
_VOCABULARIES = "litellm_core_utils/tokenizers"
_LATIN = r"'(?i:[sdmt]|ll|ve|re)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Encoding → file in LiteLLM's package, its SHA-256, and the pattern that splits text into words (OpenAI, tiktoken).
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
_OPENAI_MODELS = re.compile(r"(gpt-(3\.5|35|4|5|oss|audio|realtime)|o[134]|chatgpt|codex|text-embedding)(-|$|[.o])")
_CL100K_MODELS = re.compile(r"gpt-4(?![.o0-9])|gpt-3\.5|gpt-35|text-embedding-(3|ada-002)")
Tokens = Callable[[str], int]
Sizes = Callable[[str], TokenCount]
_loaded: dict[str, Tokens] = {}
_weighed: dict[str, Sizes] = {}
_loading = threading.Lock()


class Tokenizers:
    """`ports.TokenCounter`. Counts in one thread, so that many cut streams at once use at most one processor."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._sizes: OrderedDict[tuple[str, bytes], TokenCount] = OrderedDict()  # the thread alone uses it

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        """See `ports.TokenCounter.count`."""
        name = tokenizer_of(worker)
        if name is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COUNT_S_MAX):
                return await loop.run_in_executor(self._thread, _count, name, texts, at_most)
        except (TimeoutError, ConfigError):
            return None

    async def measure(self, worker: WorkerSpec, texts: Sequence[str]) -> TokenCount | None:
        """See `ports.TokenCounter.measure`."""
        name = tokenizer_of(worker)
        if name is None:
            return None
        loop, own = asyncio.get_running_loop(), is_own(worker)
        try:
            async with asyncio.timeout(MEASURE_S_MAX):
                return await loop.run_in_executor(self._thread, self._measured, name, own, texts)
        except (TimeoutError, ConfigError):
            return None

    def _measured(self, name: str, own: bool, texts: Sequence[str]) -> TokenCount:
        sizes = [self._size(name, text) for text in texts]
        tokens = sum(size.tokens for size in sizes)
        return TokenCount(tokens, tokens - -tokens // MARGIN_PARTS if own else sum(size.tokens_max for size in sizes))

    def _size(self, name: str, text: str) -> TokenCount:
        """The size of one text, computed once while it is remembered. Raises ConfigError."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        size = self._sizes.pop((name, digest), None) or _sizes_of(name)(text)
        self._sizes[name, digest] = size
        if len(self._sizes) > SIZES_MAX:
            self._sizes.popitem(last=False)
        return size

    async def close(self) -> None:
        """End the thread, and drop what waits to be counted."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def tokenizer_of(worker: WorkerSpec) -> str | None:
    """The name of an encoding, or the path of a tokenizer: the one in the pool file, else OpenAI's for a model of that
    name, else OpenAI's newest. None if the worker is not a model, or LiteLLM's package is not installed."""
    if worker.kind not in MODEL_KINDS:
        return None
    if worker.tokenizer is not None:
        return worker.tokenizer
    if _vocabularies() is None:
        return None
    return "cl100k_base" if _CL100K_MODELS.match((worker.model or "").rpartition("/")[2]) else "o200k_base"


def is_own(worker: WorkerSpec) -> bool:
    """Whether `tokenizer_of` is the tokenizer of the worker itself and no stand-in."""
    return worker.tokenizer is not None or bool(_OPENAI_MODELS.match((worker.model or "").rpartition("/")[2]))


def check(name: str | None) -> None:
    """Load a tokenizer that the pool file names, so that no request waits for it. Raises ConfigError if `name` is
    neither an available encoding nor the path of a tokenizer."""
    if name is None:
        return
    if name not in ENCODINGS and not name.endswith(".json"):
        encodings = ", ".join(ENCODINGS)
        raise ConfigError(f"`{name}` is not a tokenizer; give {encodings}, or the path of a tokenizer.json")
    _tokens(name)


def _count(name: str, texts: Sequence[str], at_most: int) -> int:
    """The number of tokens of all texts, or `at_most` if there are more. Raises ConfigError."""
    tokens, total = _tokens(name), 0
    for text in texts:
        for piece in _pieces(text):
            total += tokens(piece)
            if total >= at_most:
                return at_most
    return total


def _pieces(text: str) -> Iterator[str]:
    """Split a text into pieces that together have at least as many tokens as the text. Cuts are in front of single
    blanks, where every tokenizer here begins a word; elsewhere a cut can only split one token into two."""
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
    """The counting function of a tokenizer, which each process loads once. Raises ConfigError."""
    with _loading:
        if name not in _loaded:
            _loaded[name] = _encoding(name) if name in ENCODINGS else _tokenizer_file(Path(name))
        return _loaded[name]


def _sizes_of(name: str) -> Sizes:
    """The measuring function of a tokenizer. One that a pool file names needs no weights. Raises ConfigError."""
    if name not in ENCODINGS:
        tokens = _tokens(name)
        return lambda text: TokenCount(count := sum(map(tokens, _pieces(text))), count)
    _tokens(name)
    return _weighed[name]


def _weight(token: bytes) -> int:
    """The most tokens that another byte-level tokenizer makes of one token: one for each byte that is no ASCII letter
    and no blank; of those together two, or one for each LETTERS_PER_TOKEN."""
    others = len(token.translate(None, _LETTERS_AND_BLANKS))
    shared = len(token) - others
    return others + min(shared, max(2, -(-shared // LETTERS_PER_TOKEN)))


class _Weights(dict[int, int]):
    """`_weight` by token id, computed when a token is first met."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> int:
        self[token_id] = weight = _weight(self._token_bytes(token_id))
        return weight


def _encoding(name: str) -> Tokens:
    directory, (file, digest, pattern) = _vocabularies(), ENCODINGS[name]
    if directory is None:
        raise ConfigError(f"`{name}` needs the extra litellm; {_EXTRA}, or give the path of a tokenizer.json")
    import tiktoken  # takes 20 ms, and most gateways never need it

    raw = (directory / file).read_bytes()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ConfigError(f"the vocabulary of `{name}` is not OpenAI's; reinstall LiteLLM")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in raw.splitlines())}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    weights = _Weights(encoding.decode_single_token_bytes)

    def size(text: str) -> TokenCount:
        tokens = [token for piece in _pieces(text) for token in encoding.encode_ordinary(piece)]
        return TokenCount(len(tokens), sum(map(weights.__getitem__, tokens)))

    _weighed[name] = size
    return lambda text: len(encoding.encode_ordinary(text))


def _tokenizer_file(path: Path) -> Tokens:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(
                f"`{path}` is larger than {FILE_BYTES_MAX >> 20} MiB, so it is not a tokenizer; fix the path"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read ({error.strerror}); fix the path") from None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("a tokenizer.json needs the extra embedded; pip install '.[embedded]'") from None
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception:  # boundary: the library raises plain exceptions for files that it cannot read
        raise ConfigError(f"`{path}` is not a Hugging Face tokenizer.json; fix the path") from None
    return lambda text: len(tokenizer.encode(_encodable(text), add_special_tokens=False).ids)


def _encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which the library refuses."""
    return text.encode("utf-8", "replace").decode()


def _vocabularies() -> Path | None:
    """The directory of OpenAI's vocabularies in LiteLLM's package, or None. Does not import LiteLLM."""
    spec = find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / _VOCABULARIES
