"""What tests/gpu/test_families.py does on a GPU, for one family on a CPU with fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.tiny_families import losses_beside_transformers

OPTIONS = """--device cpu --num_stages 4 --resident_stages 0 --num_chunks 2 --batch_size 4 --seq_length 128
    --num_iterations 5 --learning_rate 3e-3"""


@pytest.mark.extended  # half a minute
def test_five_steps_in_bf16_lose_what_transformers_loses(tmp_path: Path) -> None:
    losses = losses_beside_transformers(tmp_path, "granite", OPTIONS, width=64)

    assert len(losses.run) == 5
    assert losses.plain[-1] < 0.98 * losses.plain[0], "nothing was learned that could differ"
    assert losses.run == pytest.approx(losses.plain, rel=1e-3)
