"""Text parts of larger models compute loss and gradients of these for text alone, whichever names their weights have.

`scripts/check_families` compares all; here are those that differ most in names and positions.
"""

from __future__ import annotations

import pytest
from harness.family_checks import check_text_part

FAMILIES = {
    "gemma3": "its head and embedding are one, two kinds of layers",
    "idefics3": "another name of the text part",
    "qwen3_vl": "positions on three axes",
    "voxtral": "sound; the head is never tied",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_part_by_itself_equals_the_larger_model_bit_by_bit(family: str) -> None:
    assert check_text_part(family) == {"parity": "bit-equal"}
