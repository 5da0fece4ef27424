"""Bytes as a reader gets them: in the largest unit of which there is one, so that what is there never reads as zero."""

from collections.abc import Sequence

GIB = 2**30
_UNITS = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))


def bytes_text(num_bytes: float, *, digits: int = 1) -> str:
    """`30.4 GiB`, or `512.0 MiB` where there is less than one GiB; with so many digits behind the point."""
    for name, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {name}"
    return f"{num_bytes:.0f} byte{'s' if num_bytes != 1 else ''}" if num_bytes else f"{0:.{digits}f} GiB"


def bytes_sum(parts: Sequence[tuple[str, int]]) -> str:
    """`weights 3.50 + messages 0.02 = 3.52 GiB`; the sum's unit is every part's, but for those it would make zero."""
    total = sum(num_bytes for _, num_bytes in parts)
    total_text = bytes_text(total, digits=2)
    size = next((size for name, size in _UNITS if total_text.endswith(name)), 1)
    shown = [
        f"{name} {num_bytes / size:.2f}"
        if num_bytes == 0 or _shows(num_bytes / size, 2)
        else f"{name} {bytes_text(num_bytes, digits=2)}"
        for name, num_bytes in parts
    ]
    return f"{' + '.join(shown)} = {total_text}"


def gib_cell(num_bytes: int) -> str:
    """A cell of a table in GiB: two digits behind the point, and `<0.01` for what they would make zero."""
    gib = num_bytes / GIB
    return "<0.01" if num_bytes and not _shows(gib, 2) else f"{gib:.2f}"


def _shows(value: float, digits: int) -> bool:
    """Whether anything is left of a number that is rounded."""
    return round(abs(value), digits) > 0
