"""Each parameter is read from the file that holds it and from no other; fresh ones do not depend on the partition."""

from __future__ import annotations

import json
import mmap
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.pipelines import CPU, FAMILIES
from harness.rank_memory import rules_of
from harness.run_setups import make_run_setup
from harness.runs import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobius.config.cli import parse_args
from mobius.errors import CheckpointError
from mobius.models import weights
from mobius.models.blocks import ModelParts
from mobius.models.families import load_model_config
from mobius.models.tensor_file import StoredTensor
from mobius.models.weights import CheckpointWeights, InitialWeights, WeightRead
from mobius.process.ranks import Ranks
from mobius.training.stages import RankStages, StageOptions

INDEX = "model.safetensors.index.json"


def weight_map(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def merge(folder: Path, target: Path) -> Path:
    """The sharded checkpoint of `folder` as a single file in `target`."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for shard in set(weight_map(folder).values()):
        tensors.update(load_file(folder / shard))
    save_file(tensors, target / "model.safetensors")
    return target


def assert_reads_all(source: CheckpointWeights, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(source.read(name, tuple(parameter.shape)), parameter), name


def test_a_sharded_checkpoint_and_the_same_in_one_file_are_read_alike(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "sharded")
    assert len(set(weight_map(tmp_path / "sharded").values())) > 2
    single = merge(tmp_path / "sharded", tmp_path / "single")

    assert_reads_all(CheckpointWeights(tmp_path / "sharded", {}), model)
    assert_reads_all(CheckpointWeights(single, {}), model)


def test_a_tied_head_is_read_from_the_embedding(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, is_tied=True)
    assert "lm_head.weight" not in weight_map(tmp_path)

    assert_reads_all(CheckpointWeights(tmp_path, {"lm_head.weight": "model.embed_tokens.weight"}), model)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("model.layers.4.mlp.up_proj.weight", (64, 32), ("has no tensor 'model.layers.4.mlp.up_proj.weight'",)),
        ("model.layers.2.mlp.up_proj.weight", (48, 32), ("(64, 32)", "(48, 32)", "model-0000")),
    ],
)
def test_a_tensor_that_is_not_there_or_has_another_shape_is_named(
    tmp_path: Path, name: str, shape: tuple[int, int], told: tuple[str, ...]
) -> None:
    make_checkpoint(tmp_path)

    with pytest.raises(CheckpointError) as caught:
        CheckpointWeights(tmp_path, {}).read(name, shape)

    assert [part for part in (name, *told) if part not in str(caught.value)] == []


def test_a_missing_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    lost = sorted(set(weight_map(tmp_path).values()))[1]
    (tmp_path / lost).unlink()

    with pytest.raises(CheckpointError, match=lost):
        CheckpointWeights(tmp_path, {})


@pytest.mark.parametrize("keep", [0, 4, 100])
def test_a_damaged_file_is_named(tmp_path: Path, keep: int) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.2.mlp.up_proj.weight"
    damaged = tmp_path / weight_map(tmp_path)[name]
    single = merge(tmp_path, tmp_path / "single") / "model.safetensors"
    for path in (damaged, single):
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match=str(path)):
            CheckpointWeights(path.parent, {}).read(name, (64, 32))


def absurd(folder: Path, number: int, value: float) -> list[str]:
    """Put `value` into the first `number` matrices of the checkpoint in `folder`, by name; these names."""
    path = merge(folder, folder / "single") / "model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name, tensor in tensors.items() if tensor.ndim == 2)[:number]
    for name in names:
        tensors[name][0, 1] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return names


@pytest.mark.parametrize("value", [1e38, -1e6, 65537.0])
def test_a_finite_value_that_no_model_has_is_told_once_with_its_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    make_checkpoint(tmp_path)
    name, _ = absurd(tmp_path, 2, value)
    source = CheckpointWeights(tmp_path / "single", {})
    for each, stored in [*source.stored.items(), *source.stored.items()]:
        source.read(each, stored.shape)

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for word in (str(tmp_path / "single"), repr(name), f"{value:g}"):
        assert word in record.getMessage()


def test_the_largest_weight_of_fp16_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path)
    (name,) = absurd(tmp_path, 1, -65504.0)
    source = CheckpointWeights(tmp_path / "single", {})
    assert source.read(name, source.stored[name].shape).min() == -65504
    assert not caplog.records


def test_a_read_opens_only_the_file_that_holds_the_tensor(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    source = CheckpointWeights(tmp_path, {})
    name = "model.layers.2.mlp.up_proj.weight"
    for other in set(weight_map(tmp_path).values()) - {weight_map(tmp_path)[name]}:
        (tmp_path / other).unlink()

    assert torch.equal(source.read(name, (64, 32)), model.get_parameter(name))


def test_a_rank_reads_every_parameter_of_its_own_stages_once_and_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path)
    read: list[str] = []

    def recorded(tensor: StoredTensor, mapped: mmap.mmap) -> torch.Tensor:
        read.append(tensor.name)
        return of(tensor, mapped)

    of = StoredTensor.of
    monkeypatch.setattr(StoredTensor, "of", recorded)
    arguments = ["--model_path", str(tmp_path), "--device", "cpu", "--fp32", "--num_stages", "4", "--batch_size", "4"]
    config = parse_args(arguments, num_ranks=2)
    held: list[set[str]] = []
    for rank in range(2):
        read.clear()
        run_setup = make_run_setup(config, Ranks(rank, 2, rank), load_model_config(tmp_path, config.model))
        stages = RankStages.allocate(
            run_setup.parts,
            run_setup.plan,
            rank,
            StageOptions(dtype=run_setup.dtype, rules=rules_of(run_setup.dtype), loss_chunk_tokens=16),
            device=run_setup.device,
        )
        stages.load_weights(CheckpointWeights(tmp_path, run_setup.parts.stored_names, dtype=run_setup.dtype))
        names = [name for memory in stages.memory.values() for name in memory.state.layout.offsets]
        assert sorted(read) == sorted(names)
        for stage in (memory.state for memory in stages.memory.values()):
            for name, view in stage.layout.views(stage.weights).items():
                assert torch.equal(view, model.get_parameter(name)), name
        stages.close()
        held.append(set(names))
    assert not held[0] & held[1]
    assert held[0] | held[1] == {name for name, _ in model.named_parameters()}


def fresh(family: str, seed: int = 42) -> tuple[ModelParts, InitialWeights]:
    parts = ModelParts(FAMILIES[family](), CPU)
    return parts, InitialWeights(parts, seed=seed)


def all_shapes(parts: ModelParts) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for block in (parts.embedding, *parts.layers, parts.norm, parts.head):
        shapes.update(block.parameter_shapes())
    return shapes


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gemma3"])
def test_fresh_weights_do_not_depend_on_the_order_or_on_what_else_is_read(family: str) -> None:
    parts, source = fresh(family)
    shapes = all_shapes(parts)
    first = {name: source.read(name, shape) for name, shape in shapes.items()}
    torch.manual_seed(99)
    _, another_rank = fresh(family)

    for name, shape in list(reversed(shapes.items()))[::3]:
        assert torch.equal(another_rank.read(name, shape), first[name]), name


def test_fresh_weights_leave_the_random_state_alone() -> None:
    _, source = fresh("llama")
    before = torch.random.get_rng_state()

    source.read("model.layers.0.mlp.up_proj.weight", (48, 32))

    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fresh_weights_have_the_statistics_of_the_family(family: str) -> None:
    parts, source = fresh(family)
    norm_value = 0.0 if family.startswith("gemma3") else 1.0  # Gemma multiplies by 1 + weight
    for name, shape in all_shapes(parts).items():
        value = source.read(name, shape)
        assert value.dtype == torch.float32
        assert value.device.type == "cpu"
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.full(shape, norm_value)), name
        elif name.endswith(".bias"):
            assert torch.equal(value, torch.zeros(shape)), name
        else:
            drawn = value[1:] if name == "model.embed_tokens.weight" else value  # token 0 is the padding
            # The standard deviation of n draws is off by 1 / sqrt(2 n) typically; five times that is never seen.
            margin = 5 / (2 * drawn.numel()) ** 0.5
            assert float(drawn.std()) == pytest.approx(parts.config.initializer_range, rel=margin), name
            assert abs(float(drawn.mean())) < 5 * parts.config.initializer_range / drawn.numel() ** 0.5, name


def test_fresh_weights_differ_by_seed_layer_and_matrix() -> None:
    _, source = fresh("llama")
    _, other_seed = fresh("llama", seed=2**32 - 1)
    names = [f"model.layers.{layer}.mlp.{kind}_proj.weight" for layer in range(3) for kind in ("gate", "up")]
    drawn = [reader.read(name, (48, 32)) for reader in (source, other_seed) for name in names]

    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_fresh_tied_head_is_the_embedding() -> None:
    parts, source = fresh("llama-tied")
    shape = parts.head.shapes["weight"]

    assert torch.equal(source.read("lm_head.weight", shape), source.read("model.embed_tokens.weight", shape))


class Constant(nn.Module):
    """Has a parameter that nobody but its constructor gives a value."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(2, device="meta"))


def test_a_parameter_that_transformers_does_not_draw_is_refused_by_name() -> None:
    parts = ModelParts(FAMILIES["llama"](), CPU)
    parts.model.model.constant = Constant()

    with pytest.raises(CheckpointError, match=r"no initial values for 'model\.constant\.slope'"):
        InitialWeights(parts, seed=1).read("model.constant.slope", (2,))


def test_values_are_read_ahead_in_order_unless_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_AHEAD_ELEMENTS", 10)
    begun: list[int] = []

    def read(size: int) -> Tensor:
        begun.append(size)
        if size == 5:
            raise CheckpointError("the fifth is damaged")
        return torch.tensor(size)

    ahead = weights.read_ahead((WeightRead(0, size, partial(read, size)) for size in (1, 2, 30, 4, 5)), num_threads=4)
    assert next(ahead) == 1
    assert 30 not in begun  # as long as smaller ones are in use
    assert next(ahead) == 2
    assert next(ahead) == 30
    assert sorted(begun) == [1, 2, 30]  # while a large one is used, nothing else is read
    assert next(ahead) == 4
    with pytest.raises(CheckpointError, match="the fifth"):
        next(ahead)


def test_threads_that_read_fresh_weights_at_once_read_the_same_values() -> None:
    parts, source = fresh("qwen2")  # linear layers with biases: two parameters of one module
    shapes = parts.base_shapes()
    alone = {name: source.read(name, shape) for name, shape in shapes.items()}
    state = torch.get_rng_state()
    reads = [read for name, shape in shapes.items() for read in weights.reads_of(source, name, shape)]
    together = dict(zip(shapes, weights.read_ahead(reads, num_threads=8), strict=True))
    assert all(torch.equal(together[name], value) for name, value in alone.items())
    assert torch.equal(torch.get_rng_state(), state)
