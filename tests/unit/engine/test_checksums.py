"""A checksum from those of parts is the one that zlib computes of the whole."""

from __future__ import annotations

import os
import random
import zlib
from itertools import pairwise

import pytest

from mobius.engine.checksums import combined_checksum


@pytest.mark.parametrize("seed", range(20))
def test_it_is_that_of_the_whole(seed: int) -> None:
    draw, content = random.Random(seed), os.urandom(seed * 997)
    cuts = sorted(draw.choices(range(len(content) + 1), k=seed))

    parts = [content[start:stop] for start, stop in pairwise([0, *cuts, len(content)])]

    assert combined_checksum((len(part), zlib.crc32(part)) for part in parts) == zlib.crc32(content)
