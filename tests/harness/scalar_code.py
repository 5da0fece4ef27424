"""A fixture for folders whose tests compile graphs: a conftest.py imports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._inductor.config

__all__ = ["scalar_code"]


@pytest.fixture(autouse=True)
def scalar_code() -> Iterator[None]:
    """Graphs are compiled without vector instructions, which takes half of the seconds; the claims are of graphs.

    All folders' graphs then share the headers that are compiled first, too.
    """
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield
