"""What tvr takes of the gguf package: number formats, and the way back from them to fp32.

Imported only here and only when a GGUF file is opened: it is an extra.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tvr.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NumberFormat(NamedTuple):
    """How GGUF stores the numbers of a tensor: row by row, in blocks.

    Attributes:
        number: GGUF's number of the format.
        name: "F32", "Q4_K", ...
        block_len, block_bytes: numbers in a block, and the bytes it takes.
    """

    number: int
    name: str
    block_len: int
    block_bytes: int


def gguf_library() -> ModuleType:
    """Return the gguf package; raise ConfigError if it is not installed."""
    try:
        import gguf
    except ImportError as e:
        raise ConfigError(
            f"a GGUF file needs the gguf package ({e}); install it: pip install 'tvr[gguf]'"
        ) from e
    library: ModuleType = gguf
    return library


def number_format(number: int) -> NumberFormat | None:
    """Return the format that GGUF numbers so; None: the package does not know it."""
    gguf = gguf_library()
    try:
        known = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
    return NumberFormat(number, known.name, *gguf.GGML_QUANT_SIZES[known])


def can_dequantize(fmt: NumberFormat) -> bool:
    """Return whether `dequantize` takes the format (it takes no integers)."""
    try:
        dequantize(np.zeros((1, fmt.block_bytes), np.uint8), fmt)
    except NotImplementedError:
        return False
    return True


def dequantize(rows: NDArray[np.uint8], fmt: NumberFormat) -> Tensor:
    """Return stored rows as numbers.

    Args:
        rows: [num_rows, bytes of a row].

    Returns:
        [num_rows, numbers in a row] fp32.

    Raises:
        NotImplementedError: the package cannot read the format.
    """
    gguf = gguf_library()
    # A block may hold any bytes, so scales may be inf or NaN; what comes of them is shown later.
    with np.errstate(all="ignore"):
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType(fmt.number))
    # fp32 comes back as a view of the read-only file, which torch warns of.
    return torch.from_numpy(np.require(values, np.float32, "W"))
