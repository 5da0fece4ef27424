"""The zlib.crc32 of consecutive bytes from those of their parts: who writes parts need not read the whole again.

A checksum is a polynomial over GF(2), the first coefficient in the highest bit, modulo that of CRC-32. Bytes that
follow multiply it by x^8 each; see `crc32_combine` of zlib.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31


def combined_checksum(parts: Iterable[tuple[int, int]]) -> int:
    """Return the zlib.crc32 of bytes from length and checksum of each of their parts."""
    value = 0
    for length, checksum in parts:
        value = _product(_power(length), value) ^ checksum
    return value


@lru_cache(maxsize=4096)  # most parts have the length of a request
def _power(num_bytes: int) -> int:
    """Return x to the power of 8 * `num_bytes`."""
    result, square, exponent = _ONE, _ONE >> 1, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square, exponent = _product(square, square), exponent >> 1
    return result


def _product(one: int, other: int) -> int:
    result, factor = 0, other
    while factor:
        if factor & _ONE:
            result ^= one
        one, factor = one >> 1 ^ (_POLYNOMIAL if one & 1 else 0), factor << 1 & 0xFFFFFFFF
    return result
