"""Reduced optimizer states lead as near to fp32's weights as the pages say."""

from __future__ import annotations

import pytest
import state_formats
from state_formats import CASES, Case, train

BOUNDS = {"bf16": 0.01, "compact": 0.10}
SPARSE = {"bf16": 0.01, "compact": 0.20}


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=Case.describe)
def test_the_distance_from_fp32_states_is_bounded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_formats, "COUNT", 2**12)
    exact = train(case, "")
    for reduced, bound in (BOUNDS if case.share == 1 else SPARSE).items():
        found = train(case, reduced)
        assert float((found.master - exact.master).norm()) < bound * float(exact.master.norm()), reduced
        assert float(found.master.abs().max()) < 1.2 * float(exact.master.abs().max())
        assert float(found.square.sum()) == pytest.approx(float(exact.square.sum()), rel=0.1)
