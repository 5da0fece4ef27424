"""Copies of a plain model whose layers' linears are in the codes of a format, and of its decoded values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from harness.runs import tensors_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from mobius.models.weight_codecs import CODECS, NF4_VALUES, Nf4Codec
from mobius.models.weights import CheckpointWeights

FP8_BLOCK = 16


def _nf4(name: str, weight: Tensor) -> dict[str, Tensor]:
    codec, shape = Nf4Codec(), tuple(weight.shape)
    raw = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
    codec.encode(weight, raw)
    parts = codec.parts(raw, shape)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": shape}
    return {
        name: parts["codes"][:, None],
        f"{name}.absmax": parts["absmax"],
        f"{name}.quant_map": torch.tensor(NF4_VALUES),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    blocks = weight.float().unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))  # [rows, 16, columns, 16]
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def _int4(name: str, weight: Tensor) -> dict[str, Tensor]:
    groups = weight.float().unflatten(1, (-1, 16))
    scales = groups.abs().amax(-1) / 7
    codes = (groups / scales[..., None]).round().long().flatten(1) + 8
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(8) * 4).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": torch.tensor(weight.shape)}


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    if not name.endswith(EXPERTS):
        return {name: weight}
    groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, groups, 32]
    exponents = groups.abs().amax(-1).log2().floor() - 2
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = (groups / exponents.exp2()[..., None]).unsqueeze(-1) - torch.cat([table, -table])
    pairs = distance.abs().argmin(-1).to(torch.uint8).unflatten(-1, (-1, 2))
    return {f"{name}_blocks": pairs[..., 0] | pairs[..., 1] << 4, f"{name}_scales": (exponents + 127).to(torch.uint8)}


EXPERTS = "experts.gate_up_proj", "experts.down_proj"
KINDS: Mapping[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}),
    "int4": (
        _int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}},
        },
    ),
    "mxfp4": (_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
}
"""Format -> function that makes the tensors of a linear, and the quantization_config."""


def quantize(plain: Path, kind: str, folder: Path) -> Path:
    """Write the model of `plain` in a format to `folder`."""
    make, settings = KINDS[kind]
    tensors: dict[str, Tensor] = {}
    for name, weight in tensors_of(plain).items():
        tensors |= make(name, weight) if name.endswith(("proj.weight", *EXPERTS)) else {name: weight}
    return _write(plain, folder, tensors, {"quantization_config": settings})


def decode(folder: Path, plain: Path) -> Path:
    """Write the values of the codes in `folder` to `plain`."""
    tensors = {name: stored.read() for name, stored in CheckpointWeights(folder, {}).stored.items()}
    return _write(folder, plain, tensors, {"quantization_config": None})


def _write(source: Path, folder: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: each.clone().contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: each for name, each in config.items() if each is not None}))
    return folder


def make_decoded(folder: Path, base_dtype: str, target: Path, dtype: torch.dtype = torch.float32) -> None:
    """Copy a model with the values that its layers' matrices have after codes, in `dtype`."""
    shutil.copytree(folder, target)
    codec = CODECS[base_dtype]
    for file in target.glob("*.safetensors"):
        values = load_file(file)
        for name, value in values.items():
            if ".layers." in name and value.dim() == 2 and not name.endswith("gate.weight"):
                raw = torch.zeros(codec.num_bytes(tuple(value.shape)), dtype=torch.uint8)
                codec.encode(value, raw)
                values[name] = codec.decode(raw, tuple(value.shape), torch.empty_like(value, dtype=dtype))
        save_file(values, file, {"format": "pt"})
