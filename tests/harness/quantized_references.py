"""Codes and values of bitsandbytes, recorded, so that tests need no such package.

pip install --no-deps --target FOLDER bitsandbytes==0.50.2
PYTHONPATH=tests:FOLDER python -m harness.quantized_references
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

DATA = Path(__file__).parents[1] / "data"
CODES = DATA / "nf4_codes.safetensors"
FOLDERS = DATA / "quantized_folders.safetensors"
"""Tiny models as the two libraries save them: the tensors, their config.json, and hashes of the decoded weights."""
SHAPES = ((64, 64), (33, 72), (3, 21), (4, 5, 13), (130, 129))
"""Sizes that are and are not multiples of a block; more than 256 blocks; an odd number of values."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def digest(values: Tensor) -> str:
    """Return a hash of the bytes of `values`."""
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read_records(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by case and name, and JSON by case."""
    tensors: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            case, _, name = key.partition("/")
            tensors.setdefault(case, {})[name] = file.get_tensor(key)
        return tensors, json.loads(file.metadata()["notes"])


def write_records(path: Path, tensors: dict[str, dict[str, Tensor]], notes: dict[str, Any]) -> None:
    """Write what `read_records` reads."""
    flat = {f"{case}/{name}": each.clone() for case, own in tensors.items() for name, each in own.items()}
    save_file(flat, path, {"notes": json.dumps(notes)})


def record_nf4() -> None:
    """Record codes, scales and decoded values of bitsandbytes on a CPU."""
    functional = importlib.import_module("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(5)
    tensors, notes = dict[str, dict[str, Tensor]](), dict[str, Any]()
    for shape in SHAPES:
        for word, dtype in [*DTYPES.items()][: 1 if math.prod(shape) > 2**14 else 3]:
            values = (0.02 * torch.randn(shape, generator=generator)).to(dtype)
            values.view(-1)[7:11] = 0
            # Sums of scales in fewer bits than fp32 are exact, so a mean has the same bits on every processor.
            has_nested = dtype != torch.float32 and values.numel() > 64
            for is_nested in (False, True)[: 1 + has_nested]:
                codes, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=is_nested)
                case = f"{'double' if is_nested else 'plain'} {word} {'x'.join(map(str, shape))}"
                tensors[case] = {} if is_nested else {"values": values}
                tensors[case] |= {"codes": codes.view(-1), "absmax": state.absmax}
                if is_nested:
                    tensors[case] |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset.view(1)}
                notes[case] = digest(functional.dequantize_4bit(codes, state))
    write_records(CODES, tensors, notes)


BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
    "nf4 with quantized scales": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "bfloat16",
    },
    "fp4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "fp8 by tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 by row": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 by block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    "int8 by row": {"num_bits": 8, "strategy": "channel"},
    "int8 with zeros": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int4 in groups": {"num_bits": 4, "strategy": "group", "group_size": 16},
    "int4 in groups with zeros": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "int3 by row": {"num_bits": 3, "strategy": "channel"},
}
"""Descriptions of the codes of compressed-tensors."""


def tiny_config(case: str) -> LlamaConfig:
    """Return the configuration of the recorded model.

    Rows of bitsandbytes have whole blocks: its kernel for CPUs with AVX-512 decodes 80 or 96 columns wrongly.
    """
    width, inner = (64, 64) if case.startswith("bitsandbytes") else (32, 48)
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=16, tie_word_embeddings=True, dtype="bfloat16")


def record_folders() -> None:
    """Record tiny models in the formats of both libraries."""
    tensors, notes = dict[str, dict[str, Tensor]](), dict[str, Any]()
    for kind, settings in BITSANDBYTES.items():
        with _plain_folder(case := f"bitsandbytes {kind}") as folder:
            given = {"quantization_config": BitsAndBytesConfig(**settings), "device_map": "cpu"}
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **given)
            model.save_pretrained(saved := Path(folder, "saved"))
            tensors[case] = load_file(saved / "model.safetensors")
            fields = json.loads((saved / "config.json").read_text())["quantization_config"]
        found = {
            name: dequantize_bnb_weight(each.weight, getattr(each, "state", None)) for name, each in _linears(model)
        }
        notes[case] = {"config": fields, "digests": {name: digest(each) for name, each in found.items()}}
    for kind, weights in WEIGHTS.items():
        with _plain_folder(case := f"compressed-tensors {kind}") as folder:
            model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        tensors[case], notes[case] = _compress(model, weights)
    write_records(FOLDERS, tensors, notes)


@contextlib.contextmanager
def _plain_folder(case: str) -> Iterator[str]:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(tiny_config(case)).to(torch.bfloat16)
    for parameter in plain.parameters():
        parameter.data.normal_(float(parameter.dim() == 1), 0.1)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        yield folder


def _linears(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"]


def _compress(model: LlamaForCausalLM, weights: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantize the linear layers of `model`; return its tensors, and its description with hashes of decoded weights."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    helpers = importlib.import_module("compressed_tensors.quantization.utils")
    compressors = importlib.import_module("compressed_tensors.compressors")
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if weights["num_bits"] == 8:  # else the format would be packed
        scheme["input_activations"] = {
            "num_bits": 8,
            "type": weights.get("type", "int"),
            "strategy": "token",
            "dynamic": True,
        }
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for _, layer in _linears(model):
        arguments = layer.quantization_scheme.weights
        scale, zero = helpers.calculate_qparams(
            *_extremes(layer.weight.data, layer.weight_scale.shape, weights), arguments
        )
        layer.weight_scale.data.copy_(scale)
        if not arguments.symmetric:
            layer.weight_zero_point.data.copy_(zero)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = {name: each.clone() for name, each in model.state_dict().items() if name != "lm_head.weight"}
    fields = compressor.quantization_config.model_dump(mode="json")
    compressor.decompress_model(model)
    return stored, {"config": fields, "digests": {name: digest(each.weight.data) for name, each in _linears(model)}}


def _extremes(values: Tensor, shape: torch.Size, weights: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest values of each part of `values` that has a scale; there are `shape` of them."""
    rows, columns = weights.get("block_structure") or (1, weights.get("group_size", values.shape[1]))
    if weights["strategy"] == "tensor":
        return values.min().reshape(shape), values.max().reshape(shape)
    parts = [strip.split(columns, 1) for strip in values.split(rows)]
    low, high = ([[float(getattr(block, name)()) for block in strip] for strip in parts] for name in ("min", "max"))
    return torch.tensor(low, dtype=values.dtype), torch.tensor(high, dtype=values.dtype)


if __name__ == "__main__":
    record_nf4()
    record_folders()
