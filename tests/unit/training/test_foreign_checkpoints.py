"""Weights that are no plain model, and broken files beside them, are told by file and tensor before training."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mobius.config.cli import parse_args
from mobius.errors import CheckpointError
from mobius.planner.forecast import run_dry
from mobius.process.ranks import Ranks

Run = Callable[..., None]
Tensors = dict[str, torch.Tensor]

LAYER = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def model(workplace: Path, saved_inputs: Path) -> Path:
    """A copy of the tiny model that a test may break: `own`, its weights in one file."""
    folder = workplace / "own"
    folder.mkdir()
    tensors: Tensors = {}
    for path in sorted((saved_inputs / "model").iterdir()):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif "index" not in path.name:
            shutil.copy(path, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def change_weights(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_fields(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(run: Run, *arguments: str) -> str:
    """The message of a run of `own`; it is one line, and nothing is left behind."""
    before = sorted(Path().iterdir())
    with pytest.raises(CheckpointError) as caught:
        run("--model_path", "own", *arguments)
    assert sorted(Path().iterdir()) == before
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)
    return str(caught.value)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name.startswith("mobius.models")
    ]


def no_tokenization(*_: object, **__: object) -> None:
    raise AssertionError("the data was prepared first")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update({LAYER: t[LAYER].to(torch.float8_e4m3fn)}), (LAYER, "F8_E4M3")),
        (lambda t: t.update({LAYER: t[LAYER].to(torch.int8)}), (LAYER, "I8")),
        (lambda t: t.update({LAYER: torch.zeros(1024, 1, dtype=torch.uint8)}), (LAYER, "U8")),
        (lambda t: t.update({f"{LAYER}_scale_inv": torch.ones(1)}), (f"{LAYER}_scale_inv", "quantized")),
        (lambda t: t.update({LAYER.replace("weight", "qweight"): t.pop(LAYER).int()}), ("qweight", "quantized")),
    ],
    ids=["fp8", "int8", "packed", "scales", "gptq"],
)
def test_quantized_weights_are_refused_before_the_data_is_prepared(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], object], named: tuple[str, ...]
) -> None:
    change_weights(model, change)
    monkeypatch.setattr("mobius.training.data.prepare_data", no_tokenization)

    message = refusal(run)

    assert all(part in message for part in (*named, "own", "from before quantization")), message


def test_a_quantized_model_is_refused_by_a_dry_run_too(model: Path) -> None:
    change_weights(model, lambda tensors: tensors.update({LAYER: tensors[LAYER].to(torch.int8)}))
    config = parse_args(["--model_path", "own", "--device", "cpu", "--dry_run"], num_ranks=2)

    with pytest.raises(CheckpointError, match="I8"):
        run_dry(config, Ranks(0, 1, 0))


def test_tensors_that_the_model_does_not_have_are_listed_once_and_harmless_ones_are_not(
    run: Run, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = {f"model.layers.1.adapter.{i}": torch.ones(1) for i in range(5)}
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_weights(model, lambda tensors: tensors.update(strangers | harmless))

    run("--model_path", "own", "--num_iterations", "1")

    (warning,) = warnings_of(caplog)
    assert "5 of the checkpoint's" in warning
    assert "model.layers.1.adapter.0" in warning
    assert "inv_freq" not in warning


def test_layers_that_were_not_asked_for_are_one_warning_and_layers_that_the_configuration_hides_another(
    run: Run, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("--model_path", "own", "--num_iterations", "1", "--num_layers", "2")
    (asked,) = warnings_of(caplog)
    assert "--num_layers 2" in asked
    caplog.clear()

    change_fields(model / "config.json", num_hidden_layers=2)
    run("--model_path", "own", "--num_iterations", "1", "--overwrite_output_dir")

    (hidden,) = warnings_of(caplog)
    assert "18 of the checkpoint's" in hidden  # 9 parameters in each of two layers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_is_not_finite_is_named_though_no_batch_touches_it(
    run: Run, model: Path, value: float, dtype: torch.dtype
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].to(dtype)
        tensors[EMBEDDING][4093:4095, 7] = value

    change_weights(model, spoil)

    message = refusal(run)

    assert f"'{EMBEDDING}' has 2 values that are not finite" in message
    assert "[4093, 7]" in message
    assert "own/model.safetensors" in message


def test_a_value_that_the_working_dtype_cannot_hold_is_named(run: Run, model: Path) -> None:
    change_weights(model, lambda tensors: tensors[LAYER][3, 5].fill_(-1e5))

    message = refusal(run, "--dtype", "fp16")

    assert f"'{LAYER}' has 1 values that are too large for float16" in message
    assert "[3, 5] is -100000" in message
    assert "--dtype bf16" in message
    run("--model_path", "own", "--dtype", "bf16", "--num_iterations", "1")


@pytest.fixture
def tied(model: Path) -> Path:
    change_fields(model / "config.json", tie_word_embeddings=True)
    return model


def test_a_stored_head_that_differs_is_trained_apart_as_transformers_loads_it(
    run: Run, tied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not torch.equal(
        load_file(tied / "model.safetensors")[HEAD], load_file(tied / "model.safetensors")[EMBEDDING]
    )

    run("--model_path", "own", "--learning_rate", "1e-30", "--weight_decay", "0")

    (warning,) = warnings_of(caplog)
    assert "tie_word_embeddings" in warning
    base, saved = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("own", "out"))
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in base.state_dict().items())
    assert not saved.config.tie_word_embeddings


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD, None])
def test_a_tied_matrix_may_be_stored_under_either_name_or_both(
    run: Run, tied: Path, caplog: pytest.LogCaptureFixture, kept: str | None
) -> None:
    def tie(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        for name in {EMBEDDING, HEAD} - {kept} if kept else set():
            del tensors[name]

    change_weights(tied, tie)

    run("--model_path", "own", "--learning_rate", "1e-30", "--weight_decay", "0")

    assert warnings_of(caplog) == []
    base, saved = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("own", "out"))
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in base.state_dict().items())
    assert saved.config.tie_word_embeddings
    assert HEAD not in load_file("out/model.safetensors")


BROKEN_INDICES = {
    "not JSON": "{",
    "no map": "{}",
    "a list": '{"weight_map": []}',
    "no text": '{"weight_map": {"lm_head.weight": 3}}',
    "outside": '{"weight_map": {"lm_head.weight": "../../etc/x.safetensors"}}',
    "absolute": '{"weight_map": {"lm_head.weight": "/etc/x.safetensors"}}',
    "no weights": '{"weight_map": {"lm_head.weight": "config.json"}}',
    "another file's": '{"weight_map": {"no.such.weight": "a.safetensors"}}',
    "nul": '{"weight_map": {"lm_head.weight": "a\\u0000.safetensors"}}',
}


@pytest.mark.parametrize("text", BROKEN_INDICES.values(), ids=BROKEN_INDICES.keys())
def test_a_broken_index_is_named(run: Run, model: Path, text: str) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text(text)

    assert "own/model.safetensors.index.json" in refusal(run)


def test_two_files_with_the_same_tensor_and_no_index_are_refused(run: Run, model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    shutil.copy(model / "a.safetensors", model / "b.safetensors")

    message = refusal(run)

    assert "a.safetensors and b.safetensors" in message


def test_other_weights_beside_a_single_file_are_not_read_and_told_unless_they_are_a_known_copy(
    run: Run, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"layers.0.attention.wq.weight": torch.ones(1)}, model / name)

    run("--model_path", "own", "--num_iterations", "1")

    (warning,) = warnings_of(caplog)
    assert "adapter_model.safetensors" in warning
    assert "consolidated" not in warning


BROKEN_FILES: list[tuple[str, str]] = [
    ("generation_config.json", "{"),
    ("generation_config.json", "[]"),
    ("generation_config.json", '{"watermarking_config": 3}'),
    ("generation_config.json", '{"compile_config": [1]}'),
    ("generation_config.json", '{"max_new_tokens": -4}'),
    ("tokenizer.json", ""),
    ("tokenizer.json", "{"),
    ("tokenizer.json", '{"version": "1.0", "model": {"type": "no-such"}}'),
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
    ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": ["x"]}'),
    ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
    ("special_tokens_map.json", "{"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN_FILES)
def test_a_broken_file_beside_the_weights_is_named(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (model / name).write_text(text)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked on the terminal"))

    assert f"own/{name}" in refusal(run)


def test_a_tokenizer_of_custom_code_is_refused_with_the_way_out(run: Run, model: Path) -> None:
    change_fields(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own_code.Own", None]})
    (model / "own_code.py").write_text("raise SystemExit('custom code was run')")

    message = refusal(run)

    assert "own_code.Own" in message
    assert "not run" in message
    assert "trust_remote_code=True" in message
