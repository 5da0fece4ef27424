"""On a GPU: codes are decoded to the bits of the CPU, and what is trained beside or in other formats runs as there."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from harness.pipelines import model_of
from harness.runs import VOCAB, assert_equal_tensors, make_checkpoint, steps_of
from harness.small_run import Run
from harness.tiny_families import tiny_config

from mobius.models.weight_codecs import CODECS, MX_VALUES, DoubleNf4Codec

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODECS_WITH_CODES = {name: CODECS[name] for name in ("fp8", "int8", "nf4")} | {"double": DoubleNf4Codec()}
SHAPES = [(4096, 11008), (33, 4100), (8, 96, 640), (1, 70)]
OPTIONS = f"""--device {DEVICE} --num_stages 4 --num_chunks 4 --batch_size 8 --seq_length 64 --num_iterations 4
    --learning_rate 1e-3 --warmup_steps 0 --max_grad_norm 0.5 --save_params none --save_strategy no
    --save_results auto"""
LORA = "--use_lora --lora_rank 4"
WAYS = [
    "--resident_stages 0 --packing off",
    "--no_offload --recompute none",
    "--no_offload --recompute elementwise",
    "--resident_stages 1 --num_rounds 2",
    "--resident_stages 0 --tile_tokens 128",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS_WITH_CODES)
def test_codes_have_the_values_of_the_cpu(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codec = CODECS_WITH_CODES[name]
    values = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    raw = torch.zeros(codec.num_bytes(shape), dtype=torch.uint8)
    codec.encode(values, raw)
    plain = codec.decode(raw, shape, torch.empty(shape, dtype=dtype))
    found = codec.decode(raw.to(DEVICE), shape, torch.full(shape, math.nan, dtype=dtype, device=DEVICE))
    assert torch.equal(found.cpu(), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_of_mxfp4_have_their_values(dtype: torch.dtype) -> None:
    generator, shape = torch.Generator().manual_seed(1), (3, 96, 5760)
    codes = torch.randint(0, 16, (3, 3, 32, 5760), generator=generator)
    exponents = torch.randint(-120, 120, (3, 3, 1, 5760), generator=generator)
    values = torch.ldexp(torch.tensor(MX_VALUES)[codes], exponents).view(shape).to(DEVICE, dtype)
    codec = CODECS["mxfp4"]
    raw = torch.zeros(codec.num_bytes(shape), dtype=torch.uint8, device=DEVICE)
    codec.encode(values, raw)
    found = codec.decode(raw, shape, torch.full(shape, math.nan, dtype=dtype, device=DEVICE))
    assert torch.equal(found, values)
    assert torch.equal(found.signbit(), values.signbit())


@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("base_dtype", ["fp8", "int8", "nf4"])
def test_each_way_of_a_step_has_the_bits_of_resident_codes(run: Run, base_dtype: str, compiled: str) -> None:
    common = f"{OPTIONS} {LORA} --dtype bf16 --base_dtype {base_dtype} --compile {compiled}"
    run(*common.split(), "--no_offload", "--recompute", "full", "--save_dir", "first")
    for number, way in enumerate(WAYS):
        run(*common.split(), *way.split(), "--save_dir", f"way{number}")
        first, found = ([step["loss"] for step in steps_of(Path(name))] for name in ("first", f"way{number}"))
        assert found == pytest.approx(first, rel=2e-3), way  # compiled layers that save activations round differently
        if compiled == "off" and "--packing off" not in way and "--tile" not in way and "rounds" not in way:
            assert_equal_tensors(Path("first"), Path(f"way{number}"))


KINDS = {
    "dora": f"{LORA} --use_dora",
    "dropout": f"{LORA} --lora_dropout 0.25",
    "loraplus": f"{LORA} --loraplus_lr_ratio 8",
    "prompt": "--finetuning_type prompt --num_virtual_tokens 5",
    "p_tuning": "--finetuning_type p_tuning --num_virtual_tokens 5 --encoder_hidden_size 32",
    **{name: f"{LORA} --base_dtype {name}" for name in ("fp8", "int8", "nf4")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_fp32_are_those_of_the_cpu(run: Run, kind: str) -> None:
    """TF32 is off, so kernels differ by the order of their sums only."""
    for device, compiled in (("cpu", "off"), (DEVICE, "on")):
        words = f"{OPTIONS} {KINDS[kind]} --dtype fp32 --device {device} --compile {compiled}"
        run(*words.split(), "--save_dir", f"on-{device}", "--overwrite_output_dir")
    plain, found = (steps_of(Path(f"on-{device}")) for device in ("cpu", DEVICE))
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in plain], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("way", ["--no_offload --recompute none", "--resident_stages 0"])
@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize("family", ["deepseek_v2", "ernie4_5_moe"])
def test_routers_in_fp32_beside_bf16(run: Run, family: str, compiled: str, way: str) -> None:
    make_checkpoint(Path("plain"))
    model_of(tiny_config(family, vocab_size=VOCAB)).save_pretrained("routed")
    for file in Path("plain").glob("*token*"):
        shutil.copy(file, "routed")
    common = f"{OPTIONS} --model_path routed --dtype bf16 --packing off"
    run(*common.split(), "--device", "cpu", "--compile", "off", "--save_dir", "cpu")
    run(*common.split(), "--compile", compiled, *way.split(), "--save_dir", "gpu")
    plain, found = ([step["loss"] for step in steps_of(Path(name))] for name in ("cpu", "gpu"))
    assert found == pytest.approx(plain, rel=5e-3)
