"""Writes the text part of a larger model as a text model of its own: python scripts/extract_text_model.py MODEL OUTPUT.

Training takes the text part by itself; adapters need it as a model that they can name. Tensors go one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write as the command line says; the exit code is 1 where that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hugging Face id of a model that also takes images or sound")
    parser.add_argument("output", type=Path, help="folder of the text model, new or empty")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16", help="format of the result")
    options = parser.parse_args(arguments)
    from mobius.errors import MobiusError

    try:
        _take(options.model, options.output, options.dtype)
    except MobiusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"text model written to {options.output}")
    return 0


def _take(name: str, output: Path, dtype_name: str) -> None:
    import torch

    from mobius.checkpoint.merged_model import base_shapes, check_free, write_whole
    from mobius.config.config import Dtype, ModelConfig
    from mobius.errors import CheckpointError
    from mobius.hardware.devices import TORCH_DTYPES
    from mobius.models.blocks import ModelParts
    from mobius.models.families import load_model_config, locate_model
    from mobius.models.family_support import supported_text_config
    from mobius.models.model_files import read_json_object, read_model_files
    from mobius.models.weights import CheckpointWeights, check_model_weights, folder_has_weights

    check_free(output)
    folder, options = locate_model(name), ModelConfig(model_path=name)
    config = load_model_config(folder, options)
    if supported_text_config(read_json_object(folder / "config.json")) is None:
        raise CheckpointError(f"{name} is a text model ({config.model_type}) already: give it to --model_path.")
    if not folder_has_weights(folder):
        raise CheckpointError(f"{name} has no weights, so there is nothing to write.")
    parts, dtype = ModelParts(config, torch.device("cpu")), TORCH_DTYPES[Dtype(dtype_name)]
    check_model_weights(folder, parts, options)
    source, shapes = CheckpointWeights(folder, parts.stored_names, dtype=dtype), base_shapes(parts)

    def read(parameter: str) -> torch.Tensor:
        return source.read(parameter, shapes[parameter]).to(dtype)

    write_whole(output, parts, shapes, read, read_model_files(folder), dtype=dtype)


if __name__ == "__main__":
    sys.exit(main())
