"""Codes and values of bitsandbytes, recorded, so that tests need no such package.

pip install --no-deps --target FOLDER bitsandbytes==0.50.2
PYTHONPATH=tests:FOLDER python -m harness.quantized_references
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"
CODES = DATA / "nf4_codes.safetensors"
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
        return tensors, {case: json.loads(text) for case, text in (file.metadata() or {}).items()}


def write_records(path: Path, tensors: dict[str, dict[str, Tensor]], notes: dict[str, Any]) -> None:
    """Write what `read_records` reads."""
    flat = {f"{case}/{name}": each.clone() for case, own in tensors.items() for name, each in own.items()}
    save_file(flat, path, {case: json.dumps(note) for case, note in notes.items()})


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


if __name__ == "__main__":
    record_nf4()
