"""The files of a fine-tuned model: who writes what, that everything loads, and that a wrong bit is found."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from mobius.checkpoint.model_folder import verify_folder, write_model_files, write_params_file
from mobius.checkpoint.tensor_files import StageParameter, plan_files, write_indexes, write_stage
from mobius.errors import CheckpointError
from mobius.models.model_files import ModelFiles, read_model_files

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


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{number}" for number in range(28))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


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
    write_indexes(folder, written, num_parameters=num_parameters, dtype=model.dtype)


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


def test_transformers_loads_the_folder_bit_by_bit_and_generates(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    save(model, tmp_path, num_ranks=3, max_file_bytes=4000)
    base = tmp_path / "base"
    tokenizer.save_pretrained(base)
    model.config.save_pretrained(base)
    write_model_files(tmp_path, read_model_files(base), model.config, dtype=torch.bfloat16)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    prompt = loaded_tokenizer("w1 w5 w9", return_tensors="pt").input_ids
    assert loaded.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 6)
    chat = [{"role": "user", "content": "w3 w4"}]
    assert loaded_tokenizer.apply_chat_template(chat, tokenize=False) == "w3 w4"


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_single_file_loads_safely_with_and_without_mapping(
    model: torch.nn.Module, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = model.to(dtype)
    save(model, tmp_path, num_ranks=2, max_file_bytes=4000)
    path = tmp_path / "params.pt"

    write_params_file(path, tmp_path)

    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert set(loaded) == set(model.state_dict())
        for name, value in model.state_dict().items():
            assert loaded[name].dtype == dtype
            assert torch.equal(loaded[name], value), name
            assert loaded[name].untyped_storage().nbytes() == value.numel() * value.element_size()
    assert not list(tmp_path.glob("*.partial"))


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


def test_verification_names_the_first_tensor_that_differs_in_one_bit(model: torch.nn.Module, tmp_path: Path) -> None:
    save(model, tmp_path, num_ranks=2)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    changed = trained["model.layers.1.mlp.up_proj.weight"].view(torch.int16)
    changed[3, 5] ^= 1

    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.*1 of 384 elements differ"):
        verify_folder(tmp_path, trained)


@pytest.mark.parametrize(
    ("trained", "complaint"),
    [
        (torch.zeros(3, 2), r"\(2, 3\) instead of .*\(3, 2\)"),
        (torch.zeros(2, 3, dtype=torch.float16), r"torch.float32 .* instead of torch.float16"),
        (torch.full((2, 3), -0.0), "6 of 6 elements differ"),
    ],
)
def test_verification_tells_shape_dtype_and_sign_of_zero(tmp_path: Path, trained: torch.Tensor, complaint: str) -> None:
    save_values({"p": torch.zeros(2, 3)}, tmp_path)

    with pytest.raises(CheckpointError, match=complaint):
        verify_folder(tmp_path, {"p": trained})


def test_verification_finds_a_missing_tensor_a_missing_file_and_an_index_that_lies(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    save(model, tmp_path, num_ranks=2)
    with pytest.raises(CheckpointError, match="no tensor 'model.layers.9.x'"):
        verify_folder(tmp_path, {"model.layers.9.x": torch.zeros(1)})

    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["lm_head.bias"] = "model-00001-of-00002.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="says that 'lm_head.bias' is in model-00001-of-00002"):
        verify_folder(tmp_path, {})

    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="incomplete.*00001-of-00002"):
        verify_folder(tmp_path, {})


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
