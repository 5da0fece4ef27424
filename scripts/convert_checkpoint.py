"""Converts a checkpoint of Mobius to torch's distributed format (torch.distributed.checkpoint) and back, to the bit.

    python scripts/convert_checkpoint.py to-dcp   save_ckpt/checkpoint-500 dcp_500
    python scripts/convert_checkpoint.py from-dcp dcp_500 elsewhere/checkpoint-500 --trust-dcp-metadata

Weights keep their names; states of the optimizer are NAME.exp_avg, NAME.exp_avg_sq and, unless weights are fp32,
NAME.master_low or NAME.master. `torch.distributed.checkpoint.load` reads them on any number of ranks. All other files
of the checkpoint are carried along in FOLDER/mobius. Either result appears under its name when it is complete.

torch keeps the format's index, FOLDER/.metadata, as a pickle, and a pickle can run any program when it is loaded.
Mobius itself neither needs nor loads one; from-dcp has torch load this one, and so asks for --trust-dcp-metadata.
"""

import argparse
import contextlib
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mobius.checkpoint.folders import checkpoint_path, commit_checkpoint, create_partial, discard, open_checkpoint
from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.tensor_files import (
    FileRecord,
    StageParameter,
    plan_files,
    translate_file_errors,
    weight_bytes,
    write_stage,
)
from mobius.config.earlier_results import MANIFEST_FILE
from mobius.engine.reduced_states import REDUCED, codec_for
from mobius.engine.state_codec import MASTER
from mobius.errors import CheckpointError, MobiusError, first_line
from mobius.files.atomic_files import publish_folder, sync_tree
from mobius.models.model_files import read_json_object

CARRIED = "mobius"
"""The folder inside torch's that has the checkpoint's files without tensors."""
INDEXES = ("model.safetensors.index.json", "optimizer.safetensors.index.json")


def to_dcp(checkpoint: Path, folder: Path) -> None:
    """Write `checkpoint`, verified before, to `folder`, which must not exist. Raises CheckpointError."""
    refuse_existing(folder)
    reader = open_checkpoint(checkpoint)
    reader.verify_all()
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        raise CheckpointError(f"{partial} is in the way: what an ended conversion left. Remove it.")
    tensors: dict[str, Tensor] = {}
    for record in reader.manifest.files:
        with safe_open(checkpoint / record.file_name, framework="pt") as file:  # mapped: read as it is written
            tensors |= {name: file.get_tensor(name) for name in record.checksums}
    try:
        with translate_file_errors("write to", partial):
            partial.mkdir(parents=True)
            with translate_torch_errors("write to", partial):
                save(tensors, storage_writer=FileSystemWriter(partial), no_dist=True)
            for name in (*(other.file_name for other in reader.manifest.others), MANIFEST_FILE):
                target = partial / CARRIED / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint / name, target)
            sync_tree(partial)
            publish_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def from_dcp(folder: Path, checkpoint: Path) -> list[str]:
    """Write what `to_dcp` wrote to `checkpoint`, which must not exist; returns the names of tensors that were changed.

    Loads torch's pickle. Raises CheckpointError.
    """
    carried = folder / CARRIED
    if not (folder / ".metadata").is_file() or not (carried / MANIFEST_FILE).is_file():
        raise CheckpointError(f"{folder} was not made by to-dcp: it has no .metadata or no {CARRIED}/{MANIFEST_FILE}.")
    try:
        manifest = Manifest.from_json(read_json_object(carried / MANIFEST_FILE))
    except CheckpointError as error:
        raise CheckpointError(f"{carried / MANIFEST_FILE}: {error}.") from error
    refuse_existing(checkpoint)
    if checkpoint != checkpoint_path(checkpoint.parent, manifest.step):
        raise CheckpointError(
            f"{checkpoint} has another name than checkpoints of step {manifest.step}: give "
            f"{checkpoint_path(checkpoint.parent, manifest.step)}."
        )
    dtype: torch.dtype = getattr(torch, manifest.dtype)
    with translate_torch_errors("read", folder):
        metadata = FileSystemReader(folder).read_metadata()
        parameters = parameters_of(metadata, manifest)
    partial = create_partial(checkpoint.parent, manifest.step)
    try:
        with translate_file_errors("write to", partial):
            for other in manifest.others:
                if other.file_name not in INDEXES:
                    target = partial / other.file_name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(carried / other.file_name, target)
        records: list[FileRecord] = []
        planned = plan_files(parameters, dtype=dtype, has_optimizer=manifest.has_optimizer)
        weights = {name: each.weight_dtype or dtype for each in parameters for name in each.weight_names}
        for file_name, names in (each for files in planned for each in files.items()):  # a file at a time is in memory
            tensors = read_dcp(folder, names, metadata, weights)
            records += write_stage(partial, {file_name: names}, tensors.__getitem__)
        manifest_of_files = replace(manifest, files=tuple(records), others=())
        commit_checkpoint(partial, manifest_of_files, planned, weight_bytes=weight_bytes(parameters, dtype))
    except BaseException:
        discard(partial)
        raise
    before = {name: value for record in manifest.files for name, value in record.checksums.items()}
    return [name for record in records for name, value in record.checksums.items() if value != before[name]]


def parameters_of(metadata: Metadata, manifest: Manifest) -> list[StageParameter]:
    """Parameters with the shapes of torch's index, a stage for each of the checkpoint's files of weights."""
    found = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    if missing := sorted(manifest.tensor_files.keys() - found.keys()):
        raise CheckpointError(f"torch's index lacks {len(missing)} tensors of the checkpoint, such as {missing[0]!r}.")
    dtype, dtypes = getattr(torch, manifest.dtype), dtypes_of(metadata)
    formats = {}
    """Format of the optimizer's state, by parameter."""
    for reduced in ("", *REDUCED):
        first, its_dtype = next(iter(codec_for(dtype, reduced).parts.items()))
        owned = [name for name in found if name.endswith(f".{first}") and dtypes[name] == its_dtype]
        formats.update(dict.fromkeys((name.removesuffix(f".{first}") for name in owned), reduced))
    states = {f"{name}.{part}" for name, reduced in formats.items() for part in codec_for(dtype, reduced).parts}
    weights = [record for record in manifest.files if not states.issuperset(record.checksums)]
    # Weights in fp32 beside others in 16 bits have no separate master.
    masters = [part for part in codec_for(dtype).parts if part.startswith(MASTER)] if manifest.has_optimizer else []
    in_fp32 = {
        name
        for name in found
        if masters and dtypes[name] is torch.float32 and not any(f"{name}.{part}" in found for part in masters)
    }
    parameters = [
        StageParameter(
            name,
            found[name],
            stage,
            is_trained=name in formats,
            reduced_format=formats.get(name, ""),
            weight_dtype=torch.float32 if name in in_fp32 else None,
        )
        for stage, record in enumerate(weights)
        for name in record.checksums
    ]
    # Experts of a layer are one parameter to the optimizer, and their weights a tensor for each.
    named = {parameter.name for parameter in parameters}
    for name in sorted(formats.keys() - named):
        first = next(iter(codec_for(dtype, formats[name]).parts))
        parameters.append(StageParameter(name, found[f"{name}.{first}"], len(weights), True, formats[name], ()))
    return parameters


def dtypes_of(metadata: Metadata) -> dict[str, torch.dtype]:
    """Dtypes of the tensors of torch's index."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry.properties.dtype for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def read_dcp(
    folder: Path, names: Sequence[str], metadata: Metadata, weights: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Tensors of torch's folder by their full names; those of `weights` have a dtype of their own."""
    dtypes, tensors = dtypes_of(metadata), {}
    for name in names:
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), "a tensor"
        tensors[name] = torch.empty(entry.size, dtype=weights.get(name, dtypes[name]))
    with translate_torch_errors("read", folder):
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def refuse_existing(path: Path) -> None:
    """Raise CheckpointError where `path` is taken."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists. Choose another name, or remove it.")


@contextlib.contextmanager
def translate_torch_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn whatever torch raises into CheckpointError, and leave out its warning that there is one process."""
    with warnings.catch_warnings(action="ignore", category=UserWarning), translate_file_errors(doing, path):
        try:
            yield
        except CheckpointException as error:  # no Exception; it has those of all ranks
            cause = next(iter(error.failures.values()))[0]
            raise (cause if isinstance(cause, OSError) else unreadable(doing, path, cause)) from error
        except (OSError, MobiusError):
            raise
        except Exception as error:  # a foreign pickle can raise anything
            raise unreadable(doing, path, error) from error


def unreadable(doing: str, path: Path, error: BaseException) -> CheckpointError:
    """The error that tells what torch says."""
    return CheckpointError(f"cannot {doing} {path}: {type(error).__name__}: {first_line(error)}")


def main(argv: list[str] | None = None) -> int:
    """Convert; returns 1, with one message, on an error, and 2 on a mistake in the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("to-dcp", help="write a checkpoint of Mobius in torch's distributed format")
    forward.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    forward.add_argument("folder", type=Path, metavar="FOLDER")
    back = commands.add_parser("from-dcp", help="write what to-dcp wrote as a checkpoint of Mobius again")
    back.add_argument("folder", type=Path, metavar="FOLDER")
    back.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    back.add_argument("--trust-dcp-metadata", action="store_true", help="let torch load the pickle FOLDER/.metadata")
    arguments = parser.parse_args(argv)
    metadata = arguments.folder / ".metadata"
    try:
        if arguments.command == "to-dcp":
            to_dcp(arguments.checkpoint, arguments.folder)
            print(f"{arguments.folder}: written; torch has made {metadata}, its index, a pickle")
            return 0
        if not arguments.trust_dcp_metadata:
            print(
                f"error: {metadata} is a pickle of torch's own, which can run any program when it is loaded. If you "
                "know where the folder comes from, add --trust-dcp-metadata",
                file=sys.stderr,
            )
            return 2
        print(f"loading {metadata}, a pickle of torch's own, as --trust-dcp-metadata says")
        changed = from_dcp(arguments.folder, arguments.checkpoint)
    except MobiusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    same = "to the bit as it was" if not changed else f"{len(changed)} tensors are other ones now, such as {changed[0]}"
    print(f"{arguments.checkpoint}: written; {same}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
