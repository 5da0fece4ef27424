import pytest

from mobius.memory.layout import StageLayout


@pytest.fixture
def layouts() -> dict[int, StageLayout]:
    """Three stages of different sizes: 128 + 256, 256 and 128 + 128 elements with their padding."""
    return {
        0: StageLayout.of({"norm": (7,), "matrix": (5, 40)}),
        2: StageLayout.of({"matrix": (16, 16)}),
        4: StageLayout.of({"matrix": (3, 4), "bias": (128,)}),
    }
