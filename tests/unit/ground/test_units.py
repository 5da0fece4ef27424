"""Bytes are told in a unit in which something does not look like nothing."""

from __future__ import annotations

import pytest

from mobius.units import format_bytes, format_bytes_sum

GIB, MIB, KIB = 2**30, 2**20, 2**10


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 GiB"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (KIB, "1.0 KiB"),
        (3 * KIB, "3.0 KiB"),
        (12 * MIB + MIB // 2, "12.5 MiB"),
        (GIB // 2, "512.0 MiB"),
        (GIB - 1, "1024.0 MiB"),
        (GIB, "1.0 GiB"),
        (int(30.37 * GIB), "30.4 GiB"),
        (2000 * GIB, "2000.0 GiB"),
    ],
)
def test_a_number_is_told_in_the_largest_unit_that_shows_it(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_sum_has_one_unit_and_parts_that_it_would_make_zero_have_their_own() -> None:
    large = format_bytes_sum((("weights", 3 * GIB + GIB // 2), ("kept", 0), ("messages", 3 * KIB), ("work", GIB // 50)))
    assert large == "weights 3.50 + kept 0.00 + messages 3.00 KiB + work 0.02 = 3.52 GiB"
    assert format_bytes_sum((("weights", MIB), ("messages", 5 * KIB))) == "weights 1.00 + messages 5.00 KiB = 1.00 MiB"
    assert format_bytes_sum((("weights", 3), ("messages", 1))) == "weights 3.00 + messages 1.00 = 4 bytes"
