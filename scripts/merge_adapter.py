"""Writes the model that an adapter makes of its base: python scripts/merge_adapter.py ADAPTER OUTPUT [--base MODEL].

Weights are added in fp32, tensor by tensor, and rounded once; no more than 2 GB of them are in memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge as the command line says; the exit code is 1 where that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path, help="folder of the adapter, of Mobius or peft")
    parser.add_argument("output", type=Path, help="folder of the merged model, new or empty")
    parser.add_argument("--base", help="folder or Hugging Face id of the base; default: the one that the adapter names")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16", help="format of the result")
    options = parser.parse_args(arguments)
    from mobius.errors import MobiusError

    try:
        _merge(options.adapter, options.output, options.base, options.dtype)
    except MobiusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"merged model written to {options.output}")
    return 0


def _merge(folder: Path, output: Path, base: str | None, dtype: str) -> None:
    import torch

    from mobius.checkpoint.merged_model import check_free, merge_adapter
    from mobius.config.config import Dtype, ModelConfig
    from mobius.errors import CheckpointError
    from mobius.hardware.devices import TORCH_DTYPES
    from mobius.models.blocks import ModelParts
    from mobius.models.families import load_model_config, locate_model
    from mobius.models.peft_folder import AdapterBase, AdapterFolder, check_base

    check_free(output)
    adapter = AdapterFolder(folder)
    name = base or adapter.fields.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder} names no base; give --base")
    base_folder = locate_model(name)
    check_base(folder, AdapterBase.of(name, base_folder))
    parts = ModelParts(load_model_config(base_folder, ModelConfig(model_path=name)), torch.device("cpu"))
    merge_adapter(adapter, base_folder, parts, output, dtype=TORCH_DTYPES[Dtype(dtype)])


if __name__ == "__main__":
    sys.exit(main())
