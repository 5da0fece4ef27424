"""Formatting of columns, and of byte counts in the largest unit that gives at least 1, so that none becomes 0."""

import math
from collections.abc import Sequence

GIB = 2**30
_UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(num_bytes: float, *, digits: int = 1) -> str:
    """`30.4 GiB`, or `512.0 MiB` below one GiB; `digits` is the number of decimals."""
    for name, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {name}"
    return f"{num_bytes:.0f} byte{'s' if num_bytes != 1 else ''}" if num_bytes else f"{0:.{digits}f} GiB"


def format_rounded(number: float) -> str:
    """`0.819`, `22.8` or `8,200`: three significant digits of a positive number that is not known more exactly."""
    return f"{float(f'{number:.3g}'):,.{max(0, 2 - math.floor(math.log10(number)))}f}"


def format_bytes_sum(parts: Sequence[tuple[str, int]]) -> str:
    """`weights 3.50 + messages 0.02 = 3.52 GiB`; parts use the sum's unit, or a smaller one if that would show 0."""
    total = format_bytes(sum(num_bytes for _, num_bytes in parts), digits=2)
    size = next((size for name, size in _UNITS if total.endswith(name)), 1)

    def shown(num_bytes: int) -> str:
        in_unit = f"{num_bytes / size:.2f}"
        return format_bytes(num_bytes, digits=2) if num_bytes and float(in_unit) == 0 else in_unit

    return f"{' + '.join(f'{name} {shown(num_bytes)}' for name, num_bytes in parts)} = {total}"


def format_gib(num_bytes: int) -> str:
    """Table cell in GiB: two decimals, and `<0.01` for smaller positive values."""
    text = f"{num_bytes / GIB:.2f}"
    return "<0.01" if num_bytes and float(text) == 0 else text


def format_columns(rows: Sequence[Sequence[str]], *, num_left: int = 1, indent: str = "  ") -> str:
    """Columns as wide as their widest cell; the first `num_left` are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:num_left] = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)
