"""What the tests of models share."""

from collections.abc import Iterator

import pytest
import torch._inductor.config


@pytest.fixture(autouse=True)
def scalar_code() -> Iterator[None]:
    """Graphs are compiled without vector instructions, which takes half of the seconds; the claims are of graphs."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield
