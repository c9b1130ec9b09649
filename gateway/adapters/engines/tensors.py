"""A safetensors file without any library for it: its header, whether it is whole, whether every number is one.

The format: eight bytes with the header's length (little-endian), a JSON object {name: {dtype, shape, data_offsets}},
then the tensors' bytes (https://huggingface.co/docs/safetensors). Read here because a broken file kills an engine that
is shown it, and the gateway brings no numerical library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gateway.core.policies.manifest import FIX
from gateway.errors import VersionRefused

HEADER_BYTES_MAX = 64 << 20
BLOCK_BYTES = 4 << 20  # a multiple of every item's size
# dtype: (bytes an item, how the item's last byte and the one before it show an exponent of all ones)
FLOATS = {"F64": (8, 0x7F, 0xF0), "F32": (4, 0x7F, 0x80), "BF16": (2, 0x7F, 0x80), "F16": (2, 0x7C, 0x00)}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: floats of `dtype`, `shape`, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    at_bytes: int

    @property
    def size_bytes(self) -> int:
        """Length of its bytes."""
        return math.prod(self.shape) * FLOATS[self.dtype][0]


def read_header(path: Path) -> dict[str, Tensor]:
    """Every tensor by name. Raises VersionRefused(missing | torn)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_BYTES_MAX:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        tensors = {name: _tensor(entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
        size = path.stat().st_size
    except FileNotFoundError:
        raise VersionRefused("missing", f"{path}: there is no such file; {FIX}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VersionRefused("torn", f"{path}: no readable safetensors file ({error}); {FIX}") from None
    _contiguous(path, tensors, 8 + length, size)
    return tensors


def _tensor(entry: Mapping[str, object], data_at: int) -> Tensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in FLOATS or not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(f"dtype {dtype!r}, shape {shape!r}")
    if not all(isinstance(size, int) and size >= 0 for size in [*shape, *offsets]) or len(offsets) != 2:
        raise ValueError(f"shape {shape}, offsets {offsets}")
    tensor = Tensor(str(dtype), tuple(shape), data_at + offsets[0])
    if tensor.size_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{offsets[1] - offsets[0]} bytes for {dtype} {shape}")
    return tensor


def _contiguous(path: Path, tensors: Mapping[str, Tensor], data_at: int, size: int) -> None:
    end = data_at
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.at_bytes):
        if tensor.at_bytes != end:
            raise VersionRefused("torn", f"{path}: its tensors overlap or leave gaps; {FIX}")
        end += tensor.size_bytes
    if end != size:
        raise VersionRefused("torn", f"{path}: {size} bytes long, its header says {end}; {FIX}")


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises VersionRefused(not_finite) naming the first tensor that holds a NaN or an infinity."""
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            file.seek(tensor.at_bytes)
            if any(_not_finite(block, tensor.dtype) for block in _blocks(file, tensor.size_bytes)):
                raise VersionRefused("not_finite", f"{path}: {name} holds a NaN or an infinity; {FIX}")


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    for at in range(0, size, BLOCK_BYTES):
        yield file.read(min(BLOCK_BYTES, size - at))


def _not_finite(block: bytes, dtype: str) -> bool:
    """Whether some item's exponent is all ones. Both bytes of all items at once: each becomes 0 or 1, and two such
    strings are one AND of big integers."""
    width, last, before = FLOATS[dtype]
    high = block[width - 1 :: width].translate(_marks(last))
    low = block[width - 2 :: width].translate(_marks(before))
    return bool(int.from_bytes(high, "little") & int.from_bytes(low, "little"))


def _marks(mask: int) -> bytes:
    return bytes(value & mask == mask for value in range(256))
