"""Experts are one tensor in memory and many on the disk, where they are what transformers would write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.pipelines import CPU, model_of
from harness.runs import EXPERTS, make_checkpoint
from harness.tiny_families import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.parameter_pieces import (
    ParameterPiece,
    find_parameter_pieces,
    stored_shapes,
    stored_views,
)
from mobius.models.weights import CheckpointWeights, InitialWeights, check_model_weights

EXPERT = "model.layers.2.mlp.experts.4.up_proj.weight"


def own_values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def stored_values(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def read_all(folder: Path, parts: ModelParts) -> dict[str, Tensor]:
    source = CheckpointWeights(folder, parts.stored_names, parts.parameter_pieces)
    return {name: source.read(name, shape) for name, shape in parts.base_shapes().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize(
    ("family", "experts", "router"),
    [
        ("mixtral", "model.layers.3.block_sparse_moe.experts.5.w3.weight", "block_sparse_moe.gate.weight"),
        ("qwen2_moe", "model.layers.3.mlp.experts.5.up_proj.weight", "mlp.gate.weight"),
        ("qwen3_moe", "model.layers.3.mlp.experts.5.up_proj.weight", "mlp.gate.weight"),
    ],
)
def test_what_transformers_stores_is_read_and_is_what_is_stored(
    tmp_path: Path, family: str, experts: str, router: str
) -> None:
    model = model_of(tiny_config(family))
    model.save_pretrained(tmp_path)
    parts, stored = ModelParts(model.config, CPU), stored_values(tmp_path)
    assert {experts, f"model.layers.3.{router}"} <= stored.keys()
    values = own_values(model)

    assert_same(read_all(tmp_path, parts), values)
    assert_same(stored_views(values, parts.parameter_pieces), stored)
    shapes = {
        name: shape
        for parameter, value in values.items()
        for name, shape in stored_shapes(parameter, tuple(value.shape), parts.parameter_pieces)
    }
    assert shapes == {name: tuple(value.shape) for name, value in stored.items()}
    # Nothing of it is a copy.
    whole = values["model.layers.3.mlp.experts.gate_up_proj"]
    view = stored_views(values, parts.parameter_pieces)[experts]
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_family_that_stores_its_parameters_as_they_are_has_no_pieces() -> None:
    model = model_of(tiny_config("llama"))
    assert ModelParts(model.config, CPU).parameter_pieces == {}


def test_a_checkpoint_that_holds_all_experts_in_one_tensor_is_read(tmp_path: Path) -> None:
    model = model_of(tiny_config("qwen3_moe"))
    save_file(own_values(model), tmp_path / "model.safetensors")
    assert_same(read_all(tmp_path, ModelParts(model.config, CPU)), own_values(model))


def test_pieces_may_lie_across_a_parameter() -> None:
    # Two matrices [2, 3], stored transposed and each on its own.
    whole = torch.arange(12.0).view(2, 2, 3)
    flat = torch.cat([torch.zeros(5), whole.reshape(-1)])
    parameter = flat[5:].view(2, 2, 3)  # a part of a larger tensor, as a stage's are
    piece = ParameterPiece("second", (3, 2), (1, 3), 6)
    assert torch.equal(piece.of(parameter), whole[1].T)
    piece.of(parameter).copy_(torch.zeros(3, 2))
    assert parameter[1].abs().sum() == 0
    assert torch.equal(parameter[0], whole[0])


def test_a_family_that_stores_several_parameters_in_one_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuse(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"fused": torch.cat(list(tensors.values()))}

    monkeypatch.setattr("mobius.models.parameter_pieces.revert_weight_conversion", fuse)
    with pytest.raises(CheckpointError, match="'llama' stores 'fused', which is not a piece of one parameter"):
        find_parameter_pieces(model_of(tiny_config("llama")), {"a": (2, 3), "b": (4, 3)})


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, ModelParts]:
    """A checkpoint in one file."""
    model = make_checkpoint(tmp_path / "sharded", family="qwen3_moe", **EXPERTS)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", ModelParts(model.config, CPU)


def change(folder: Path, name: str, value: Tensor | None) -> None:
    tensors = stored_values(folder)
    tensors |= {} if value is None else {name: value}
    if value is None:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def check(folder: Path, parts: ModelParts) -> None:
    check_model_weights(folder, parts, ModelConfig(model_path=str(folder)))


def test_a_whole_checkpoint_of_experts_passes_without_a_word(
    checkpoint: tuple[Path, ModelParts], caplog: pytest.LogCaptureFixture
) -> None:
    check(*checkpoint)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, f"has no tensor '{EXPERT}'"),
        (torch.zeros(16, 31), rf"'{EXPERT}' has shape \(16, 31\), but the configuration needs \(16, 32\)"),
        (torch.zeros(16, 32, dtype=torch.int8), f"'{EXPERT}' is stored as I8; .* The checkpoint is quantized"),
    ],
    ids=["missing", "of another shape", "quantized"],
)
def test_an_expert_that_is_wrong_is_named_before_anything_is_read(
    checkpoint: tuple[Path, ModelParts], value: Tensor | None, message: str
) -> None:
    change(checkpoint[0], EXPERT, value)
    with pytest.raises(CheckpointError, match=message):
        check(*checkpoint)


def test_scales_of_quantized_experts_are_named(checkpoint: tuple[Path, ModelParts]) -> None:
    change(checkpoint[0], f"{EXPERT}_scale_inv", torch.zeros(1, 1))
    with pytest.raises(CheckpointError, match=f"1 tensors of a quantized model \\('{EXPERT}_scale_inv'"):
        check(*checkpoint)


def test_an_expert_with_a_number_that_is_none_is_named_when_it_is_read(checkpoint: tuple[Path, ModelParts]) -> None:
    folder, parts = checkpoint
    value = torch.zeros(16, 32)
    value[3, 4] = torch.nan
    change(folder, EXPERT, value)
    check(folder, parts)
    with pytest.raises(
        CheckpointError, match=f"'{EXPERT}' has 1 values that are not finite .* the first at \\[3, 4\\]"
    ):
        read_all(folder, parts)


def test_fresh_experts_and_routers_are_drawn_as_transformers_draws_them() -> None:
    config = tiny_config("qwen3_moe", num_experts=32, moe_intermediate_size=64, hidden_size=64, initializer_range=0.05)
    parts = ModelParts(config, CPU)
    source = InitialWeights(parts, seed=1)
    values = {name: source.read(name, shape) for name, shape in parts.base_shapes().items()}
    torch.manual_seed(0)
    expected = own_values(AutoModelForCausalLM.from_config(config))
    prefix = "model.layers.1.mlp"
    for name in ("experts.gate_up_proj", "experts.down_proj", "gate.weight"):
        found = values[f"{prefix}.{name}"]
        assert found.std().item() == pytest.approx(0.05, rel=0.05), name
        assert found.std().item() == pytest.approx(expected[f"{prefix}.{name}"].std().item(), rel=0.05), name
    # Each alone, and in another order, they are the same; and not all alike.
    for name in (f"{prefix}.experts.down_proj", f"{prefix}.experts.gate_up_proj"):
        assert torch.equal(InitialWeights(parts, seed=1).read(name, tuple(values[name].shape)), values[name])
    assert not torch.equal(values[f"{prefix}.experts.down_proj"], values["model.layers.3.mlp.experts.down_proj"])
