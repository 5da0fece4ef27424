"""The command `mobius export`: writes a saved model as a folder or a GGUF file that other programs can load."""

from __future__ import annotations

import logging
import math
import shutil
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mobius.config.command_parser import CommandParser
from mobius.errors import CheckpointError, ConfigError, HostMemoryError
from mobius.files.regular_files import open_regular
from mobius.process.log import setup_logging
from mobius.process.ranks import prepare_environment
from mobius.units import format_bytes

if TYPE_CHECKING:
    from mobius.checkpoint.whole_model import SavedLayout
    from mobius.config.config import AdapterConfig
    from mobius.models.peft_folder import AdapterFolder

logger = logging.getLogger(__name__)

_CONVERTER: Final = "convert_hf_to_gguf.py"
_ORIGINAL: Final = "original"


def export(words: Sequence[str]) -> None:
    """Write and check the model that `words` name. Raises MobiusError; the output is complete or does not exist."""
    given = parser().parse_args(words)
    converter = _find_converter(given.llama_cpp) if given.gguf else None
    if converter is None and (given.llama_cpp or given.gguf_type != "auto"):
        raise ConfigError("`--llama_cpp` and `--gguf_type` have no effect without `--gguf`. Add it.")
    prepare_environment()
    setup_logging(0)
    import torch

    from mobius.checkpoint.folder_check import check_folder
    from mobius.checkpoint.merged_model import base_shapes, check_free, write_model
    from mobius.checkpoint.saved_model import find_saved_model
    from mobius.config.config import Dtype, ExportAs, ModelConfig
    from mobius.hardware.devices import TORCH_DTYPES
    from mobius.models.blocks import ModelParts
    from mobius.models.families import load_model_config
    from mobius.models.weights import check_model_weights

    output = Path(given.output)
    check_free(output)
    saved = find_saved_model(given.folder, base=given.base, is_exported=True)
    adapters = _adapters_to_merge(given, saved.adapter_to_merge)
    options = ModelConfig(model_path=str(saved.folder))
    config = saved.with_head(load_model_config(saved.folder, options))
    parts = ModelParts(config, torch.device("cpu"), adapters=adapters)
    check_model_weights(saved.folder, parts, options, has_score_elsewhere=saved.adapter is not None)
    layout = saved.find_layout(parts, ExportAs(given.export_as), base=given.base)
    own_dtype = config.dtype or (None if layout.base is None else layout.base.dtype) or torch.bfloat16
    dtype = TORCH_DTYPES[Dtype(given.dtype)] if given.dtype else own_dtype
    num_bytes = sum(map(math.prod, base_shapes(parts).values())) * dtype.itemsize
    _check_room(output, num_bytes, layout, is_one_file=given.one_file, num_copies=2 if given.gguf else 1)
    made = f"{output.name}.gguf"

    def finish(partial: Path) -> None:
        for line in check_folder(partial, layout.whole):
            logger.info("%s", line)
        if converter is not None:
            _make_gguf(converter, partial, made, given.gguf_type)

    if given.one_file:
        layout = replace(layout, max_file_bytes=sys.maxsize)
    write_model(
        *(saved, parts, output),
        dtype=dtype,
        into_original=given.merge_into == _ORIGINAL,
        layout=layout,
        finish=finish,
    )
    logger.info("written: %s%s", output / made if given.gguf else output, f", {layout}" if layout.base else "")


def _adapters_to_merge(given: Namespace, adapter: AdapterFolder | None) -> AdapterConfig:
    """Options with which the parts of the adapter's base are made. Raises ConfigError if `given` does not fit it."""
    from mobius.checkpoint.merged_model import adapters_to_merge

    if given.merge != (adapter is not None):
        what = "holds a whole model: leave --merge out" if given.merge else "holds an adapter: add --merge"
        raise ConfigError(f"{given.folder} {what}.")
    adapters = adapters_to_merge(adapter)
    if given.merge_into and adapters.base_dtype == "bf16":
        raise ConfigError(
            f"--merge_into {given.merge_into}: {given.folder} has no adapter that was trained beside codes "
            "(--base_dtype), so there is one base. Leave the option out."
        )
    return adapters


def _check_room(output: Path, num_bytes: int, layout: SavedLayout, *, is_one_file: bool, num_copies: int) -> None:
    """Raise HostMemoryError or CheckpointError if memory or disk has no room for the output, and what it has besides.

    Raises ConfigError for one file in the layout of a whole model.
    """
    from mobius.checkpoint.tensor_files import free_disk_bytes
    from mobius.hardware.host_memory import available_host_bytes

    if layout.whole is not None and is_one_file:
        raise ConfigError("--one_file: with --export_as original, files are those of the base. Use --export_as text.")
    num_bytes += layout.other_bytes
    if is_one_file and num_bytes > (free := available_host_bytes()):
        raise HostMemoryError(
            f"--one_file holds the model in memory: {format_bytes(num_bytes)}, {format_bytes(free)} is free. Leave it "
            "out; each file then takes 2 GB."
        )
    needed, free = num_bytes * num_copies, free_disk_bytes(output)
    if needed > free:
        raise CheckpointError(f"{output} needs {format_bytes(needed)}, {format_bytes(free)} is free. Free some space.")


def parser() -> CommandParser:
    """Parser of the command's options."""
    text = "Write a trained model again, tensor by tensor, and check the names that vLLM and llama.cpp expect."
    made = CommandParser(prog="mobius export", description=text)
    made.add_argument("folder", help="folder of a result, checkpoint or adapter, or a Hugging Face id")
    made.add_argument("output", help="folder to write, new or empty")
    made.add_argument("--merge", action="store_true", help="write an adapter's base with the adapter added, in fp32")
    made.add_argument(
        "--merge_into",
        choices=["decoded", _ORIGINAL],
        help="of a base that was codes in training (--base_dtype): what they decode to, the default, or the weights",
    )
    made.add_argument(
        "--base", help="folder or id of the base of an adapter, or of a text part; default: the one that it names"
    )
    made.add_argument(
        "--export_as",
        choices=["auto", "original", "text"],
        default="auto",
        help="original: put a text part back into its base's files, with all their other tensors; text: alone; "
        "auto: original where it is possible",
    )
    made.add_argument(
        "--dtype",
        choices=["bf16", "fp16", "fp32"],
        help="default: the model's or the base's; fp32 of a checkpoint: its masters",
    )
    made.add_argument("--one_file", action="store_true", help="write one safetensors file, collected in memory")
    made.add_argument("--gguf", action="store_true", help=f"write a GGUF file with llama.cpp's {_CONVERTER}")
    made.add_argument("--gguf_type", choices=["auto", "f32", "f16", "bf16", "q8_0"], default="auto", help="its format")
    made.add_argument("--llama_cpp", metavar="FOLDER", help=f"llama.cpp's folder; default: {_CONVERTER} on the PATH")
    return made


def _find_converter(llama_cpp: str | None) -> Path:
    """Return the path of llama.cpp's converter. Raises ConfigError."""
    found = shutil.which(_CONVERTER) if llama_cpp is None else str(Path(llama_cpp).expanduser() / _CONVERTER)
    if found is None or not Path(found).is_file():
        raise ConfigError(
            f"--gguf needs llama.cpp's {_CONVERTER}, which is not "
            f"{'on the PATH' if llama_cpp is None else f'in {llama_cpp}'}. Get it with `git clone --depth 1 "
            "https://github.com/ggml-org/llama.cpp` and `pip install ./llama.cpp/gguf-py sentencepiece`, and give "
            "--llama_cpp llama.cpp."
        )
    return Path(found)


def _make_gguf(converter: Path, folder: Path, name: str, number_format: str) -> None:
    """Replace the contents of `folder`, a model, by its GGUF file. Raises CheckpointError."""
    made = folder / name
    words = [sys.executable, str(converter), str(folder), "--outfile", str(made), "--outtype", number_format]
    run = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    head = b""
    if run.returncode == 0 and made.is_file():
        with open_regular(made) as file:
            head = file.read(16)
    if len(head) < 16 or head[:4] != b"GGUF" or not struct.unpack("<Q", head[8:])[0]:  # the header's number of tensors
        last = "\n".join(run.stdout.strip().splitlines()[-5:])
        raise CheckpointError(f"{converter} has made no GGUF file (exit code {run.returncode}):\n{last}")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != made:
            path.unlink()
