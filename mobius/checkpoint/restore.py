"""Sets weights and optimizer states of a rank's stages from a checkpoint, equal to the bit.

States that were saved in another format are converted, and so rounded once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mobius.checkpoint.folders import checkpoint_path, open_checkpoint
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.saved_stage import HasMemory, OpenRun
from mobius.config.earlier_results import MANIFEST_FILE
from mobius.distributed.transport import all_gather_numbers
from mobius.engine.reduced_states import REDUCED
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import CODECS, GROUP, MASTER, Parts, StateCodec
from mobius.models.blocks import ModelParts
from mobius.schedule.memory_layout import Part

logger = logging.getLogger(__name__)

_NUM_READER_THREADS: Final = 4
"""Number of a rank's threads that read a checkpoint."""


def restore(
    stages: HasMemory,
    parts: ModelParts,
    reader: CheckpointReader,
    *,
    weights_only: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Set weights and optimizer states of all stages of a rank. Raises CheckpointError.

    Frozen weights of an adapter's base are in no checkpoint, and are not changed. `weights_only` sets only the working
    weights, to evaluate or save them; training cannot continue from them. `progress` is called after each parameter.
    """
    saved, has_all = SavedWeights(reader, parts), not parts.adapters.has_frozen_base
    converted = set[str]()
    with ThreadPoolExecutor(_NUM_READER_THREADS, thread_name_prefix="reading") as threads:
        for own in stages.memory.values():
            is_in_place = weights_only and not own.regions.has_on_disks(Part.WEIGHTS)
            state = own.state if is_in_place else own.states.state_to_fill()
            names = [name for name in state.layout.offsets if has_all or state.layout.is_trained(name)]
            restored = partial(_restore_parameter, state, saved=saved, weights_only=weights_only)
            for change in threads.map(restored, names):
                converted |= {change} if change else set()
                progress()
            if not is_in_place:
                own.states.store(state)
    for change in sorted(converted):
        logger.info("optimizer states are converted and rounded once: %s", change)


def load_best_model(session: OpenRun, save_dir: Path, best_step: int | None, earlier: Path | None = None) -> int | None:
    """Load the best checkpoint's weights into the stages; returns its step, None without such a checkpoint. Collective.

    `best_step` is the step of the best checkpoint in `save_dir`; only the first rank's value is used. `earlier` is the
    best checkpoint from before the run was resumed, in any folder.
    """
    found = [0.0, 0.0]
    if session.all_ranks.rank == 0:
        has_earlier = earlier is not None and (earlier / MANIFEST_FILE).is_file()
        best = best_step or 0
        if not (checkpoint_path(save_dir, best) / MANIFEST_FILE).is_file():
            best = 0  # a user has removed this checkpoint
        found = [float(best), float(not best and has_earlier)]
    step, is_earlier = map(int, all_gather_numbers(session.all_ranks, found).sum(0).tolist())
    if not step and not is_earlier:
        logger.warning(
            "--load_best_model_at_end: there is no checkpoint that was evaluated, so the last weights are the result"
        )
        return None
    reader = open_checkpoint(earlier if is_earlier and earlier else checkpoint_path(save_dir, step))
    session.activity.start_action("the weights of the best checkpoint")
    progress = session.activity.progress
    restore(session, session.run_setup.parts, reader, weights_only=True, progress=progress)
    logger.info("the weights of the best checkpoint are used: %s", reader.path)
    session.all_ranks.barrier()
    return reader.manifest.step


class SavedWeights:
    """Source of the parameters of a checkpoint, in the checkpoint's dtype."""

    def __init__(self, reader: CheckpointReader, parts: ModelParts) -> None:
        self.reader, self._stored_names, self._pieces = reader, parts.stored_names, parts.parameter_pieces

    def stored_name(self, name: str) -> str:
        """Parameter's name in the checkpoint; a tied head has the embedding's name."""
        return self._stored_names.get(name, name)

    def read(self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """Read parameter `name`, into `out` if given; pieces are read one after the other. Raises CheckpointError."""
        stored_name = self.stored_name(name)
        dtype = self.reader.dtype_of(stored_name) or self.reader.dtype
        whole = torch.empty(shape, dtype=dtype) if out is None else out
        if stored_name not in self._pieces:
            return self.reader.read(stored_name, whole)
        for piece in self._pieces[stored_name]:
            self.reader.read(piece.name, piece.of(whole))
        return whole


class MasterWeights(SavedWeights):
    """Source of a checkpoint's fp32 masters, with the bits that its weights lack; without states, its weights."""

    def read(self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """As `SavedWeights.read`, into memory of its own."""
        assert out is None, "masters are in memory of their own"
        weights, stored_name = super().read(name, shape), self.stored_name(name)
        codec, found = _saved_codec(self.reader, stored_name), dict[str, Tensor]()
        for part, dtype in codec.parts.items():
            if part.startswith(MASTER) and self.reader.dtype_of(f"{stored_name}.{part}") is dtype:
                saved = torch.empty(_shape_of(codec, part, shape), dtype=dtype)
                found[part] = self.reader.read(f"{stored_name}.{part}", saved).reshape(-1)
        return codec.decode_master(weights.reshape(-1), found).view(shape).float() if found else weights.float()


def _restore_parameter(state: StageState, name: str, *, saved: SavedWeights, weights_only: bool) -> str | None:
    """Read a parameter and its state; returns a text if the state was converted to another format, else None."""
    layout, stored_name = state.layout, saved.stored_name(name)
    part, shape = layout.slice_of(name), layout.offsets[name][1]
    weights = layout.weight(state.weights, name)
    saved.read(name, shape, out=weights)
    if not layout.is_trained(name) or weights_only:
        return None
    owned = [(own.state, cut) for own in state.owned if (cut := own.overlap(part)) is not None]
    if not owned:
        return None
    codec, saved_codec = owned[0][0].codec, _saved_codec(saved.reader, stored_name)
    if state.shards is None and type(codec) is type(saved_codec):
        for key, tensor in codec.part_of(owned[0][0].parts, owned[0][1][0]).items():
            saved.reader.read(f"{stored_name}.{key}", tensor.view(_shape_of(codec, key, shape)))
        return None
    values = {
        key: saved.reader.read(f"{stored_name}.{key}", torch.empty(_shape_of(saved_codec, key, shape), dtype=dtype))
        for key, dtype in saved_codec.parts.items()
    }
    flat = {key: value.reshape(-1) for key, value in values.items()}
    if type(codec) is not type(saved_codec):
        flat = _convert(flat, weights.view(-1), saved_codec, codec)
    for own, (inside, given) in owned:
        parts = codec.part_of(flat, given)
        for key, tensor in codec.part_of(own.parts, inside).items():
            tensor.copy_(parts[key])
    is_same = type(codec) is type(saved_codec)
    return None if is_same else f"saved as {saved_codec.name}, used as {codec.name} (--optimizer_states)"


def _shape_of(codec: StateCodec, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in which a part of a parameter's state is saved."""
    return (codec.length(part, math.prod(shape)),) if part in codec.per_group else shape


def _saved_codec(reader: CheckpointReader, name: str) -> StateCodec:
    """Return the format of a parameter's saved state, which follows from the tensors in the checkpoint."""
    weights = reader.dtype_of(name) or reader.dtype
    for codec in REDUCED.values() if weights is torch.bfloat16 else ():
        if all(reader.dtype_of(f"{name}.{part}") is dtype for part, dtype in codec.parts.items()):
            return codec
    return CODECS[weights]


def _convert(values: Parts, weights: Tensor, saved: StateCodec, wanted: StateCodec) -> dict[str, Tensor]:
    """Return a parameter's flat state in another format, rounded to nearest.

    The flat `weights` are rounded, too, if the master weights are.
    """
    count = len(weights)
    padded = -(-count // GROUP) * GROUP

    def new(codec: StateCodec) -> dict[str, Tensor]:
        return {key: torch.zeros(codec.length(key, padded), dtype=dtype) for key, dtype in codec.parts.items()}

    before, after, rounded = new(saved), new(wanted), torch.zeros(padded, dtype=weights.dtype)
    rounded[:count] = weights
    for key, value in values.items():
        before[key][: len(value)] = value
    wanted.encode_moments(saved.decode_moments(before), after)
    wanted.encode_master(saved.decode_master(rounded, before), rounded, after)
    weights.copy_(rounded[:count])
    return {key: value[: wanted.length(key, count)] for key, value in after.items()}
