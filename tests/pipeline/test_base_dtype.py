"""A frozen base that is codes trains adapters as the base of the decoded values does, to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from harness.quantized_models import make_decoded, quantize
from harness.runs import assert_equal_tensors, make_checkpoint, steps_of, tensors_of
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mobius.commands import run_command
from mobius.errors import ConfigError
from mobius.models.blocks import ModelParts
from mobius.models.peft_folder import AdapterFolder
from mobius.models.prompt_folder import PromptFolder
from mobius.models.weight_codecs import CODECS, PartShapes, Shape, WeightCodec
from mobius.training.evaluation.generation import TextGenerator

COMMON = """--use_lora --lora_rank 4 --learning_rate 1e-2 --warmup_steps 0 --num_stages 4 --num_iterations 4
    --save_params none --save_results auto --max_grad_norm 0.5"""
WAYS = {
    "streamed": "--resident_stages 0 --packing off",
    "resident, saved activations": "--no_offload --recompute none",
    "one resident, rounds": "--resident_stages 1 --num_chunks 4 --num_rounds 2",
    "depth-first": "--no_offload --compute_order depth_first --recompute elementwise",
    "tiles": "--tile_tokens 8 --resident_stages 0",
    "bf16": "--dtype bf16 --resident_stages 0",
    "DoRA, streamed, packed": "--use_dora --resident_stages 0 --packing on",
    "DoRA, bf16, resident": "--use_dora --no_offload --dtype bf16",
}


def assert_same_adapters(run: Run, base_dtype: str, *options: str) -> None:  # noqa: F811
    for name, words in (("one", ["--model_path", "decoded"]), ("other", ["--base_dtype", base_dtype])):
        run(*COMMON.split(), "--save_strategy", "no", *options, *words, "--save_dir", name)
    assert [step["loss"] for step in steps_of(Path("one"))] == [step["loss"] for step in steps_of(Path("other"))]
    assert_equal_tensors(Path("one"), Path("other"))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_a_step_trains_on_the_decoded_values(run: Run, workplace: Path, way: str) -> None:  # noqa: F811
    make_decoded(Path("model").resolve(), "nf4", Path("decoded"), torch.bfloat16 if "bf16" in way else torch.float32)
    assert_same_adapters(run, "nf4", *WAYS[way].split())


@pytest.mark.parametrize("base_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_formats_and_experts(run: Run, workplace: Path, family: str, base_dtype: str) -> None:  # noqa: F811
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_checkpoint(Path("own"), family=family, **(experts if family == "qwen3_moe" else {}))
    make_decoded(Path("own"), base_dtype, Path("decoded"))
    own = ["--use_dora"] if base_dtype == "int8" else ["--lora_target_parameters", "all"] if "moe" in family else []
    assert_same_adapters(run, base_dtype, "--model_path", "own", *own)


@pytest.mark.parametrize("kind", [[], ["--use_dora"]])
def test_merging_keeps_the_trained_model_or_adds_to_the_original_weights(
    run: Run,  # noqa: F811
    workplace: Path,  # noqa: F811
    kind: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_decoded(Path("model").resolve(), "nf4", Path("decoded"))
    with caplog.at_level("INFO"):
        assert_same_adapters(run, "nf4", "--merge", "--lora_target", "q_proj,down_proj", *kind)
    (told,) = [text for text in caplog.messages if "differ from them" in text]
    assert_equal_tensors(Path("one/merged"), Path("other/merged"))

    assert run_command("export", ["other", "first", "--merge", "--merge_into", "decoded"]) == 0
    assert told in capsys.readouterr().out
    assert_equal_tensors(Path("first"), Path("other/merged"))
    assert run_command("export", ["other", "original", "--merge", "--merge_into", "original"]) == 0
    run(*COMMON.split(), "--adapter_path", "other", "--learning_rate", "1e-30", "--save_dir", "plain", "--merge")
    assert_equal_tensors(Path("original"), Path("plain/merged"))
    decoded, original, base = (tensors_of(Path(folder)) for folder in ("first", "original", "model"))
    differences = {name: float((decoded[name] - value).abs().max()) for name, value in original.items()}
    name = max(differences, key=differences.__getitem__)
    assert f"merged with it by up to {differences[name]:.3g} ({name})" in told
    assert "into the original weights; the decoded nf4 weights differ from them by up to 0." in capsys.readouterr().out
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(original[up], base[up]), "has no adapter"
    assert differences[up] > 0, "was codes"

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("decoded"), "other").eval()
    logits = [
        model(torch.arange(3, 40)[None]).logits for model in (adapted, AutoModelForCausalLM.from_pretrained("first"))
    ]
    assert torch.allclose(*logits, atol=1e-4)
    answers = TextGenerator.of_folder(Path("model"), torch.device("cpu"), adapter=AdapterFolder(Path("other")))
    assert all(torch.equal(value, decoded[name]) for name, value in answers.model.state_dict().items())
    assert run_command("export", ["one", "again", "--merge", "--merge_into", "original"]) == 2
    assert "Leave the option out" in capsys.readouterr().err


def test_codes_of_an_nf4_folder_are_made_again_to_the_bit(run: Run, workplace: Path) -> None:  # noqa: F811
    folder = quantize(Path("model").resolve(), "nf4", Path("coded"))
    for file in folder.glob("*.safetensors"):  # values in bf16, as in most folders; their scales are fp32
        tensors = load_file(file)
        for name in [name for name in tensors if "quant_state" in name]:
            state = json.loads(bytes(tensors[name].tolist())) | {"dtype": "bfloat16"}
            tensors[name] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        save_file(tensors, file, {"format": "pt"})
    for name, words in (("one", []), ("other", ["--base_dtype", "nf4"])):
        run(*COMMON.split(), "--dtype", "bf16", "--model_path", "coded", "--merge", *words, "--save_dir", name)
    assert_equal_tensors(Path("one"), Path("other"))
    assert_equal_tensors(Path("one/merged"), Path("other/merged"))


def test_answers_with_a_prompt_are_those_of_the_decoded_base(run: Run, workplace: Path) -> None:  # noqa: F811
    make_decoded(Path("model").resolve(), "nf4", Path("decoded"))
    run("--finetuning_type", "prompt", "--base_dtype", "nf4", "--seq_length", "64", "--num_iterations", "1")
    answers = TextGenerator.of_folder(Path("model"), torch.device("cpu"), adapter=PromptFolder(Path("out")))
    expected = AutoModelForCausalLM.from_pretrained("decoded").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in answers.model.state_dict().items())


class TensorCodec(WeightCodec):
    """A format that only this test knows: eight bits, and one scale for the whole tensor."""

    name = "a scale per tensor"

    def part_shapes(self, shape: Shape) -> PartShapes:
        return {"codes": (torch.uint8, shape), "scale": (torch.float32, (1,))}

    def _encode(self, values: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        parts["scale"].copy_(values.float().abs().max() / 127)
        parts["codes"].copy_((values.float() / parts["scale"]).round() + 128)

    def _decode(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        out.copy_((parts["codes"].float() - 128) * parts["scale"])


def test_a_new_format_trains_saves_and_resumes(
    run: Run,  # noqa: F811
    workplace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cast(dict[str, WeightCodec], CODECS), "int8", TensorCodec())
    monkeypatch.setattr("mobius.training.run_setup.ModelParts", ModelParts)  # parts that are shared know other formats
    make_decoded(Path("model").resolve(), "int8", Path("decoded"))
    assert_same_adapters(run, "int8", "--resident_stages", "1")
    saved = [*COMMON.split(), "--base_dtype", "int8", "--save_steps", "2", "--save_total_limit", "0"]
    run(*saved, "--save_dir", "whole")
    run(*saved, "--resume_from_checkpoint", "whole/checkpoint-2", "--save_dir", "resumed")
    assert_equal_tensors(Path("whole"), Path("resumed"))


def test_a_run_resumes_to_the_bit_and_only_with_its_format(run: Run, workplace: Path) -> None:  # noqa: F811
    options = [*COMMON.split(), "--base_dtype", "int8", "--use_dora", "--save_steps", "2", "--save_total_limit", "0"]
    run(*options, "--save_dir", "one")
    run(*options, "--resume_from_checkpoint", "one/checkpoint-2", "--save_dir", "other")
    assert_equal_tensors(Path("one"), Path("other"))
    with pytest.raises(ConfigError, match=r"`--base_dtype` is nf4, checkpoint-2 has int8"):
        run(*COMMON.split(), "--base_dtype", "nf4", "--resume_from_checkpoint", "one/checkpoint-2", "--save_dir", "no")
