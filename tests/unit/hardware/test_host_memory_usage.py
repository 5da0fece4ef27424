"""Host memory is told by owner: measured on each rank, summed over all, mapped files once."""

import re

import pytest
from torch import Tensor

from mobius.hardware.host_memory import OWNERS, HostMemoryUsage, mapped_file_bytes
from mobius.units import GIB


def test_growth_belongs_to_the_owner_that_is_marked() -> None:
    sizes = iter([1 * GIB, 3 * GIB, 2 * GIB, 7 * GIB])
    use = HostMemoryUsage(lambda: next(sizes))
    for owner in OWNERS[1:]:
        use.mark(owner)
    assert [num_bytes // GIB for num_bytes in use.num_bytes.values()] == [1, 2, 0, 5]


def test_the_line_has_the_sums_of_all_ranks_and_the_plans() -> None:
    sizes = iter([1 * GIB, 3 * GIB])
    use = HostMemoryUsage(lambda: next(sizes))
    use.mark("stages")

    def two_alike(values: Tensor) -> Tensor:
        return 2 * values

    text = use.describe(two_alike, planned=5 * GIB)
    found = re.fullmatch(
        r"([\d.]+) GiB in 2 process\(es\): Python and its libraries 2.00, stages 4.00, "
        r"files shared by them ([\d.]+); planned 5.00, .*",
        text,
    )
    assert found is not None
    assert float(found[1]) == pytest.approx(6 + float(found[2]), abs=0.011)
    assert float(found[2]) == pytest.approx(mapped_file_bytes() / GIB, abs=0.02)
