"""The files of a fine-tuned model: who writes what, that everything loads, and that a wrong bit is found."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mobius.checkpoint.model_folder import (
    adapter_tensors,
    verify_folder,
    write_adapter,
    write_model_files,
    write_params_file,
)
from mobius.checkpoint.tensor_files import StageParameter, plan_files, write_indexes, write_stage
from mobius.config.config import AdapterConfig, FinetuningType
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.model_files import ModelFiles
from mobius.models.peft_folder import AdapterBase
from mobius.models.prefix_folder import PrefixFolder

MIB = 2**20


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def parameters_over_ranks(model: torch.nn.Module, num_ranks: int) -> list[StageParameter]:
    """Embedding and layer i on rank i mod num_ranks, norm and head with the last layer, as stages of one layer are."""
    parameters = []
    rank = 0
    for name, parameter in model.named_parameters():
        layer = re.search(r"layers\.(\d+)\.", name)
        rank = int(layer[1]) % num_ranks if layer else rank
        parameters.append(StageParameter(name, tuple(parameter.shape), rank))
    return parameters


def reader(model: torch.nn.Module) -> Callable[[str], torch.Tensor]:
    values = model.state_dict()
    return lambda name: values[name]


def save(model: torch.nn.Module, folder: Path, *, num_ranks: int, max_file_bytes: int = 5_000_000_000) -> None:
    parameters = parameters_over_ranks(model, num_ranks)
    files = plan_files(parameters, dtype=model.dtype, has_optimizer=False, max_file_bytes=max_file_bytes)
    for own in files:
        write_stage(folder, own, reader(model))
    num_parameters = sum(parameter.num_elements for parameter in parameters)
    written = {file_name: names for own in files for file_name, names in own.items()}
    write_indexes(folder, written, num_parameters=num_parameters, num_bytes=2 * num_parameters)


def save_values(values: dict[str, torch.Tensor], folder: Path) -> None:
    parameters = [StageParameter(name, tuple(value.shape), 0) for name, value in values.items()]
    (files,) = plan_files(parameters, dtype=next(iter(values.values())).dtype, has_optimizer=False)
    write_stage(folder, files, values.__getitem__)


def test_the_index_counts_parameters_and_bytes_of_the_whole_model(model: torch.nn.Module, tmp_path: Path) -> None:
    save(model, tmp_path, num_ranks=2, max_file_bytes=4000)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert index["metadata"] == {"total_parameters": num_parameters, "total_size": 2 * num_parameters}
    assert set(index["weight_map"]) == set(model.state_dict())
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}


def test_the_config_names_dtype_and_an_architecture_if_the_base_has_none_and_the_given_one_stays_as_it_is(
    tmp_path: Path,
) -> None:
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    before = config.to_dict()
    fields = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2}

    write_model_files(tmp_path, ModelFiles(fields, {}), config, dtype=torch.float16)

    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "float16"
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert config.to_dict() == before


def peak_memory_bytes() -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def test_saving_checking_and_the_single_file_need_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    num_tensors, tensor_bytes = 16, 16 * MIB
    arena = torch.full((num_tensors * tensor_bytes // 2,), 1.5, dtype=torch.bfloat16)
    views = dict(zip([f"p{index}" for index in range(num_tensors)], arena.chunk(num_tensors), strict=True))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak that VmHWM tells
    before = peak_memory_bytes()

    save_values(views, tmp_path)
    verify_folder(tmp_path, views)
    write_params_file(tmp_path / "params.pt", tmp_path)

    assert (tmp_path / "params.pt").stat().st_size > num_tensors * tensor_bytes
    assert peak_memory_bytes() - before < 160 * MIB


def test_verification_accepts_what_was_saved_even_not_a_number(tmp_path: Path) -> None:
    values = {"p": torch.tensor([1.0, float("nan"), -0.0])}
    save_values(values, tmp_path)

    verify_folder(tmp_path, values)


def index_that_lies(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.bias"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "trained", "complaint"),
    [
        (None, lambda value: flipped(value), r"layers\.1\.mlp\.up_proj\.weight.*1 of 384 elements differ"),
        (None, lambda value: value.t(), r"\(24, 16\) instead of .*\(16, 24\)"),
        (None, lambda value: value.half(), r"torch.bfloat16 .* instead of torch.float16"),
        (index_that_lies, None, "says that 'lm_head.bias' is in model-00001-of-00002"),
        (lambda folder: (folder / "model-00001-of-00002.safetensors").unlink(), None, "incomplete.*00001-of-00002"),
    ],
)
def test_verification_tells_what_differs(
    model: torch.nn.Module,
    tmp_path: Path,
    change: Callable[[Path], object] | None,
    trained: Callable[[torch.Tensor], torch.Tensor] | None,
    complaint: str,
) -> None:
    save(model, tmp_path, num_ranks=2)
    values = dict(model.state_dict())
    if change is not None:
        change(tmp_path)
    if trained is not None:
        values[NAME] = trained(values[NAME])
    with pytest.raises(CheckpointError, match=complaint):
        verify_folder(tmp_path, values)


def flipped(value: torch.Tensor) -> torch.Tensor:
    changed = value.clone()
    changed.view(torch.int16)[3, 5] ^= 1
    return changed


def test_verification_tells_a_missing_tensor_and_the_sign_of_zero(tmp_path: Path) -> None:
    save_values({"p": torch.zeros(2, 3)}, tmp_path)
    for trained, complaint in (
        ({"p": torch.full((2, 3), -0.0)}, "6 of 6 elements differ"),
        ({"model.layers.9.x": torch.zeros(1)}, "no tensor 'model.layers.9.x'"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            verify_folder(tmp_path, trained)


def test_a_full_disk_leaves_no_part_of_the_single_file(model: torch.nn.Module, tmp_path: Path) -> None:
    save(model, tmp_path, num_ranks=1)
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old_limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*params\.pt: .*File too large"):
            write_params_file(tmp_path / "params.pt", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)

    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_each_rank_checks_its_layers_of_a_prefix_which_peft_stores_as_one_tensor(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=12, num_attention_heads=2)
    adapters = AdapterConfig(finetuning_type=FinetuningType.PREFIX, num_virtual_tokens=3)
    parts = ModelParts(config, torch.device("cpu"), adapters=adapters)
    torch.manual_seed(0)
    values = {f"model.layers.{layer}.prefix": torch.randn(3, 32) for layer in range(12)}
    ranks = [{name: values[name] for name in [*values][rank::2]} for rank in range(2)]
    files = [{f"{rank}.safetensors": tuple(own)} for rank, own in enumerate(ranks)]
    for own in files:
        write_stage(tmp_path, own, values.__getitem__)
    base = AdapterBase("base", None, None, tmp_path)
    write_adapter(tmp_path, [tmp_path / name for own in files for name in own], parts, base)
    for own in files:
        (tmp_path / next(iter(own))).unlink()

    found = PrefixFolder(tmp_path).values(parts)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name].read(), value) for name, value in values.items())
    for own in ranks:
        verify_folder(tmp_path, adapter_tensors(tmp_path, parts, own, base))
        wrong = own | {(name := [*own][-1]): own[name] + 1}
        with pytest.raises(CheckpointError, match="'prompt_embeddings' was not saved as it was trained: 96 of 1,152"):
            verify_folder(tmp_path, adapter_tensors(tmp_path, parts, wrong, base))
