"""A run on a GPU goes on from a durable step to the bit; with `-m gpu` on a CPU, the same there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.durable_runs import DISKS, fail_after_step_5, leave_alone
from harness.runs import assert_goes_on_exactly
from harness.sessions import resume
from harness.small_run import Run
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
DEVICE = "--device cuda" if HAS_GPU else "--device cpu"
WIDTH = 1024 if HAS_GPU else 64
"""Wide enough that copying a stage takes longer than the host takes to begin the next step's updates."""
VARIANTS = {
    "streamed": "--resident_stages 0",
    "some resident": "--resident_stages 2 --optimizer_states compact",
    "updates in the middle of backward": "--resident_stages 1 --max_grad_norm 0",
    "weights on the disks": "--resident_stages 0 --weights_on_disks --max_grad_norm 0",
    "all resident": "--resident_stages 4",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_goes_on_from_the_last_step_to_the_bit(run: Run, workplace: Path, variant: str) -> None:
    config = AutoConfig.from_pretrained("model", hidden_size=WIDTH, intermediate_size=2 * WIDTH, head_dim=32)
    config.num_attention_heads, config.num_key_value_heads = WIDTH // 32, 2
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("wide")
    for path in (workplace / "model").glob("token*"):
        (workplace / "wide" / path.name).symlink_to(path)
    options = f"{DEVICE} {DISKS} {VARIANTS[variant]} --model_path wide --num_stages 4 --compile off --recompute full"
    leave_alone(run, options)
    fail_after_step_5(run, options)

    resume("true", "--save_dir", "cut", *DEVICE.split())

    assert_goes_on_exactly(Path("whole"), Path("cut"), step=5)
