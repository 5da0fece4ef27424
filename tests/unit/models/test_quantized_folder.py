"""Weights of models that come quantized have the values of the libraries that made their codes, to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.quantized_references import FOLDERS, digest, read_records, tiny_config
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mobius.errors import CheckpointError
from mobius.models import quantized_folder
from mobius.models.quantized_folder import find_quantization
from mobius.models.weights import CheckpointWeights

RECORDED, NOTES = read_records(FOLDERS)
Tensors = dict[str, Tensor]
LINEAR = "model.layers.0.mlp.up_proj"


def write_folder(folder: Path, tensors: Tensors, config: dict[str, Any], case: str = "") -> Path:
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny_config(case).to_dict() | {"quantization_config": config}))
    return folder


def weight_of(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Tensor:
    """The weight of `LINEAR`."""
    weights = CheckpointWeights(write_folder(folder, tensors, config), {})
    assert set(weights.stored) == {f"{LINEAR}.weight"}
    return weights.read(f"{LINEAR}.weight", weights.stored[f"{LINEAR}.weight"].shape)


@pytest.mark.parametrize("case", RECORDED)
def test_folders_of_both_libraries_have_their_values(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_folder, "_CHUNK_ELEMENTS", 512)
    stored = CheckpointWeights(write_folder(tmp_path, RECORDED[case], NOTES[case]["config"]), {}).stored

    digests = {f"{name}.weight": own for name, own in NOTES[case]["digests"].items()}
    plain = {name for name, each in RECORDED[case].items() if each.dtype == torch.bfloat16} - digests.keys()
    assert stored.keys() == digests.keys() | {name for name in plain if name.endswith(("norm.weight", "tokens.weight"))}
    for name, own in digests.items():
        values = stored[name].read()
        assert (values.shape, values.dtype) == (stored[name].shape, stored[name].dtype)
        assert digest(values) == own, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu], ids=["fp32", "powers of two"])
@pytest.mark.parametrize("blocks", [(16, 32), None], ids=["blocks", "tensor"])
def test_fp8_of_transformers_has_its_values(blocks: tuple[int, int] | None, dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(48, 64, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand((3, 2) if blocks else (1,), generator=generator).to(dtype)
    tensors = {f"{LINEAR}.weight": codes, f"{LINEAR}.weight_scale_inv": scales}

    found = weight_of(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": blocks})

    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales.view(-1, scales.shape[-1]), torch.float32)
    assert torch.equal(found, theirs)


def test_blocks_of_fp8_that_are_cut_off_have_their_scales(tmp_path: Path) -> None:
    codes, scales = torch.ones(130, 200).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = {f"{LINEAR}.weight": codes, f"{LINEAR}.weight_scale_inv": scales}

    found = weight_of(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})

    assert [float(found[row, column]) for row in (0, 127, 128, 129) for column in (127, 128)] == [
        1,
        2,
        1,
        2,
        3,
        4,
        3,
        4,
    ]


def packed(codes: Any, bits: int) -> Tensor:
    """Words [n, inputs * bits / 32] with the codes of rows [n, inputs], low bits first."""
    numbers = [sum(int(code) << bits * place for place, code in enumerate(row)) for row in codes]
    size = codes.shape[1] * bits // 32
    words = [[(number >> 32 * place) % 2**32 for place in range(size)] for number in numbers]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "by g_idx"])
def test_gptq_has_codes_minus_zeros_times_scales(bits: int, has_order: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    codes, zeros = (generator.integers(1, 2**bits, size) for size in ((32, 64), (4, 32)))  # outputs, inputs; groups
    scales = torch.from_numpy(generator.random((4, 32), np.float32)).half()
    order = generator.permutation(np.arange(64) // 16)
    tensors = {
        f"{LINEAR}.qweight": packed(codes, bits).t(),
        f"{LINEAR}.qzeros": packed(zeros - 1, bits),
        f"{LINEAR}.scales": scales,
    }
    if has_order:
        tensors[f"{LINEAR}.g_idx"] = torch.from_numpy(order).int()
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": has_order}

    found = weight_of(tmp_path, tensors, config)

    for output, column in ((0, 0), (31, 63), (5, 17), (13, 40)):
        group = int(order[column]) if has_order else column // 16
        exact = (int(codes[output, column]) - int(zeros[group, output])) * float(scales[group, output])
        assert float(found[output, column]) == float(torch.tensor(exact).half())


def test_awq_has_codes_minus_zeros_times_scales(tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    codes, zeros = (generator.integers(0, 16, size) for size in ((64, 48), (2, 48)))  # inputs, outputs; groups
    scales = torch.from_numpy(generator.random((2, 48), np.float32)).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # columns of a word, low bits first

    def by_words(numbers: Any) -> Tensor:
        return packed(numbers.reshape(-1, 8)[:, order].reshape(numbers.shape), 4)

    tensors = {
        f"{LINEAR}.qweight": by_words(codes),
        f"{LINEAR}.qzeros": by_words(zeros),
        f"{LINEAR}.scales": scales,
    }

    found = weight_of(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})

    groups = np.arange(64) // 32
    exact = torch.from_numpy((codes - zeros[groups]).T).float() * scales.float()[groups].t()
    assert torch.equal(found, exact.half())


EXPERTS = "model.layers.0.mlp.experts"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def mxfp4_tensors() -> Tensors:
    """Random codes and scales of two experts with 48 outputs and 64 inputs."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (2, 48, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 253, (2, 48, 2), generator=generator, dtype=torch.uint8)
    return {f"{EXPERTS}.gate_up_proj_blocks": blocks, f"{EXPERTS}.gate_up_proj_scales": scales}


@pytest.mark.parametrize("in_fp32", [False, True])
def test_mxfp4_of_transformers_has_its_values(in_fp32: bool, tmp_path: Path) -> None:
    tensors = mxfp4_tensors()
    stored = CheckpointWeights(write_folder(tmp_path, tensors, MXFP4), {}, decodes_in_fp32=in_fp32).stored

    assert set(stored) == {f"{EXPERTS}.gate_up_proj"}
    found = stored[f"{EXPERTS}.gate_up_proj"]
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32 if in_fp32 else torch.bfloat16)
    assert (found.shape, found.dtype) == ((2, 64, 48), expected.dtype)
    assert torch.equal(found.read(), expected)
    assert torch.equal(found.read().signbit(), expected.signbit())


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("gate_up_proj_scales", lambda _: None, r"has no '.*gate_up_proj_scales', without which"),
        (
            "gate_up_proj_scales",
            lambda t: t[:, 1:],
            r"is U8 of shape \(2, 47, 2\), but mxfp4 needs U8 of shape",
        ),
        (
            "gate_up_proj_scales",
            lambda t: t.fill_(255),
            r"192 scales that are not finite, the first at \[0, 0, 0\]",
        ),
        ("gate_up_proj_blocks", lambda t: t[..., :8], r"_blocks' is U8 of shape .* needs blocks of 16 bytes"),
        ("gate_up_proj_blocks", lambda t: t.char(), r"_blocks' is I8 of shape .* needs U8 there"),
    ],
)
def test_parts_of_mxfp4_that_do_not_fit_are_named(
    part: str, change: Callable[[Tensor], Tensor | None], told: str, tmp_path: Path
) -> None:
    tensors, name = mxfp4_tensors(), f"{EXPERTS}.{part}"
    if (changed := change(tensors.pop(name))) is not None:
        tensors[name] = changed

    with pytest.raises(CheckpointError, match=told):
        CheckpointWeights(write_folder(tmp_path, tensors, MXFP4), {}).stored[f"{EXPERTS}.gate_up_proj"].read()


NF4, INT4 = "bitsandbytes nf4 with quantized scales", "compressed-tensors int4 in groups with zeros"
ROW = "compressed-tensors fp8 by row"
BROKEN: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    (NF4, "weight.absmax", lambda _: None, r"has no '.*up_proj.weight.absmax', without which"),
    (NF4, "weight.absmax", lambda t: t[:-1], r"absmax' is U8 of shape \(63,\), but .* needs U8 of shape \(64,\)"),
    (NF4, "weight.nested_absmax", lambda t: t * math.nan, r"nested_absmax' has 1 scales that are not finite"),
    (NF4, "weight", lambda t: t[:-1], r"weight' is BF16 .* but .* needs 2048 bytes of codes .* \(64, 64\)"),
    (NF4, "weight.quant_state.bitsandbytes__nf4", lambda t: t[:-9], "is no state of bitsandbytes"),
    ("bitsandbytes int8", "SCB", lambda _: None, "has no '.*SCB'"),
    ("bitsandbytes int8", "weight_format", lambda t: t + 2, "weight_format' is U8 .* order of rows alone"),
    (ROW, "weight_scale", lambda _: None, r"is stored as F8_E4M3, in codes of compressed-tensors float-quantized, and"),
    (ROW, "weight_scale", lambda t: t[:7], r"weight_scale' is BF16 of shape \(7, 1\), but .* is \(48, 32\)"),
    (ROW, "weight_scale", lambda t: t.fill_(math.inf), r"48 scales that are not finite, the first at \[0, 0\]"),
    (ROW, "weight", lambda t: t[None], "has codes of matrices"),
    (INT4, "weight_shape", lambda t: t + 9, r"packs a weight of shape \(57, 41\) with \(4,\) bits"),
    (INT4, "weight_shape", lambda _: None, "has no '.*weight_shape'"),
    (INT4, "weight_zero_point", lambda t: t[1:], r"weight_zero_point' is I32 of shape \(5, 2\), but .* \(6, 2\)"),
    (INT4, "weight_packed", lambda t: t.short(), "weight_packed' is I16 of shape .* needs I32"),
]


@pytest.mark.parametrize(("case", "part", "change", "told"), BROKEN)
def test_parts_that_do_not_fit_are_named(
    case: str, part: str, change: Callable[[Tensor], Tensor | None], told: str, tmp_path: Path
) -> None:
    tensors, name = dict(RECORDED[case]), f"{LINEAR}.{part}"
    changed = change(tensors.pop(name).clone())
    if changed is not None:
        tensors[name] = changed

    folder = write_folder(tmp_path, tensors, NOTES[case]["config"])
    with pytest.raises(CheckpointError, match=told) as caught:
        CheckpointWeights(folder, {}).stored[f"{LINEAR}.weight"].read()
    assert str(tmp_path) in str(caught.value)


REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "hqq"}, "methods that are read: bitsandbytes, fp8"),
    ({"load_in_4bit": True}, "methods that are read"),
    ("int4", "methods that are read"),
    ({"quant_method": "compressed-tensors"}, "its fields are not those of the method"),
    ({"quant_method": "compressed-tensors", "config_groups": {}, "format": "marlin-24"}, "format marlin-24"),
    ({"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"a": 1}}, "rotated or sparse"),
    ({"quant_method": "gptq", "bits": 5}, "5 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "its fields are not those of the method"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "its fields are not those of the method"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED)
def test_formats_that_are_not_read_are_named(settings: Any, told: str) -> None:
    found = find_quantization({"quantization_config": settings})

    assert found is not None
    assert told in str(found.refusal)
