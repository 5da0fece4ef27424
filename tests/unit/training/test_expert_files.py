"""A mixture of experts is trained from a folder of transformers to one, and goes on from a checkpoint to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from convert_checkpoint import main as convert
from harness.run_setups import make_run_setup
from harness.runs import EXPERTS, assert_equal_tensors, assert_goes_on_exactly, make_checkpoint, tensors_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from mobius.config.cli import given_options, parse_args
from mobius.engine.stage_state import StageState
from mobius.models.families import load_model_config
from mobius.models.family_support import CheckedFamilies
from mobius.process.ranks import Ranks
from mobius.training.run import run_training
from mobius.training.session import open_session

Run = Callable[..., None]
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
OPTIONS = """--model_path experts --dtype bf16 --num_iterations 4 --save_steps 2 --save_total_limit 0
    --learning_rate 1e-3 --save_params none"""


@pytest.fixture
def trained(run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a run of four steps with checkpoints behind two and four of them."""
    monkeypatch.setattr(CheckedFamilies, "unsupported_reason", lambda *_: None)
    make_checkpoint(workplace / "experts", family="qwen3_moe", decoder_sparse_step=2, **EXPERTS, **LOSS)
    run(*OPTIONS.split())
    return Path("out")


def test_what_a_run_saves_of_experts_is_what_transformers_would(trained: Path, tmp_path: Path) -> None:
    before = tensors_of(Path("experts"))
    for folder in (trained, trained / "checkpoint-2", trained / "checkpoint-4"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / folder.name)
        stored = {name: value for name, value in tensors_of(folder).items() if name in before}
        assert stored.keys() == before.keys() == tensors_of(tmp_path / folder.name).keys()
        for name, value in tensors_of(tmp_path / folder.name).items():
            assert torch.equal(value, stored[name]), name
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert name in before
    assert not torch.equal(tensors_of(trained)[name], before[name].bfloat16()), "experts are trained"
    saved = tensors_of(trained / "checkpoint-4")
    assert all(torch.equal(value, saved[name]) for name, value in tensors_of(trained).items())
    assert LOSS.items() <= json.loads((trained / "config.json").read_text()).items()
    losses = [json.loads(line)["aux_loss"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    # Of 2 experts of a token the times chosen sum up to 2, so evenly used ones have a loss of 2.
    assert all(1.9 < loss < 4 for loss in losses)
    # The optimizer has one state for all experts of a layer.
    assert "model.layers.1.mlp.experts.down_proj.exp_avg" in saved


def test_a_stage_takes_experts_one_by_one_each_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(CheckedFamilies, "unsupported_reason", lambda *_: None)
    model = make_checkpoint(tmp_path, family="qwen3_moe", **EXPERTS)
    taken: list[int] = []
    set_parameter = StageState.set_parameter

    def note(state: StageState, name: str, value: Tensor, *, offset: int = 0) -> None:
        taken.extend([value.numel()] * name.endswith("experts.gate_up_proj"))
        set_parameter(state, name, value, offset=offset)

    monkeypatch.setattr(StageState, "set_parameter", note)
    config = parse_args(f"--model_path {tmp_path} --device cpu --bf16 --num_stages 2 --batch_size 4".split())
    run_setup = make_run_setup(config, Ranks(0, 1, 0), load_model_config(tmp_path, config.model))
    session = open_session(run_setup, tmp_path)
    # 4 layers of 6 experts with two matrices [16, 32] each.
    assert taken == [16 * 32] * (4 * 6 * 2)
    for stage in session.stages.memory.values():
        for name, view in stage.state.layout.views(stage.state.weights).items():
            assert torch.equal(view, model.get_parameter(name).bfloat16()), name
    session.close()


def test_a_run_of_experts_goes_on_to_the_bit_also_from_a_converted_checkpoint(trained: Path) -> None:
    checkpoint = trained / "checkpoint-2"
    assert convert(["to-dcp", str(checkpoint), "dcp"]) == 0
    assert convert(["from-dcp", "dcp", "back/checkpoint-2", "--trust-dcp-metadata"]) == 0
    assert_equal_tensors(checkpoint, Path("back/checkpoint-2"))
    name = "model.safetensors.index.json"
    totals = [json.loads((folder / name).read_text())["metadata"] for folder in (checkpoint, Path("back/checkpoint-2"))]
    assert totals[0] == totals[1]

    words = ["--device", "cpu", "--resume_from_checkpoint", "back/checkpoint-2", "--save_dir", "resumed"]
    words += ["--save_params", "none", "--save_results", "resumed.txt"]
    run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))

    assert_goes_on_exactly(trained, Path("resumed"), step=2)
    assert_equal_tensors(trained / "checkpoint-4", Path("resumed/checkpoint-4"))
