"""Sets weights and optimizer states of a rank's stages from a checkpoint, to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mobius.checkpoint.folders import checkpoint_path, open_checkpoint
from mobius.checkpoint.manifest import MANIFEST_FILE
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.saved_stage import HasMemory, OpenRun
from mobius.distributed.transport import all_gather_numbers
from mobius.engine.stage_state import StageState
from mobius.models.blocks import ModelParts

logger = logging.getLogger(__name__)

_NUM_READER_THREADS: Final = 4
"""Threads of a rank that read a checkpoint."""


def restore(
    stages: HasMemory,
    parts: ModelParts,
    reader: CheckpointReader,
    *,
    weights_only: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Set weights and the optimizer's state of all of a rank's stages. Raises CheckpointError.

    Frozen weights of an adapter's base are in no checkpoint, and stay as they are. `weights_only`: working weights
    alone, to evaluate or save them, not to train on. `progress` is called after each parameter.
    """
    saved, has_all = SavedWeights(reader, parts), not parts.adapters.is_lora
    jobs = [
        (own.state, name)
        for own in stages.memory.values()
        for name in own.state.layout.offsets
        if has_all or own.state.layout.is_trained(name)
    ]
    with ThreadPoolExecutor(_NUM_READER_THREADS, thread_name_prefix="reading") as threads:
        for _ in threads.map(lambda job: _restore_parameter(job[0], job[1], saved, weights_only), jobs):
            progress()


def load_best_model(session: OpenRun, save_dir: Path, best_step: int | None, earlier: Path | None = None) -> int | None:
    """Put the best checkpoint's weights into the stages; returns its step, None if there is none. Collective.

    `best_step` is the step of the best checkpoint in `save_dir`; only the first rank's value is used. `earlier` is the
    best checkpoint from before the run was resumed, in any folder.
    """
    found = [0.0, 0.0]
    if session.all_ranks.rank == 0:
        has_earlier = earlier is not None and (earlier / MANIFEST_FILE).is_file()
        best = best_step or 0
        if not (checkpoint_path(save_dir, best) / MANIFEST_FILE).is_file():
            best = 0  # somebody has removed it
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
    logger.info("weights of the best checkpoint are taken: %s", reader.path)
    session.all_ranks.barrier()
    return reader.manifest.step


class SavedWeights:
    """Source of the parameters that a checkpoint holds, in the dtype that it has them in."""

    def __init__(self, reader: CheckpointReader, parts: ModelParts) -> None:
        self.reader, self._stored_names, self._pieces = reader, parts.stored_names, parts.parameter_pieces

    def stored_name(self, name: str) -> str:
        """Name in the checkpoint: that of the embedding for a tied head."""
        return self._stored_names.get(name, name)

    def read(self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """Value of parameter `name`, into `out` if given; pieces one after the other. Raises CheckpointError."""
        stored_name = self.stored_name(name)
        whole = torch.empty(shape, dtype=self.reader.dtype) if out is None else out
        if stored_name not in self._pieces:
            return self.reader.read(stored_name, whole)
        for piece in self._pieces[stored_name]:
            self.reader.read(piece.name, piece.of(whole))
        return whole


def _restore_parameter(state: StageState, name: str, saved: SavedWeights, weights_only: bool) -> None:
    layout, stored_name = state.layout, saved.stored_name(name)
    part, shape = layout.slice_of(name), layout.offsets[name][1]
    saved.read(name, shape, out=state.weights[part].view(shape))
    if not layout.is_trained(name) or weights_only:
        return
    if state.shards is None:
        for key, tensor in state.parts.items():
            saved.reader.read(f"{stored_name}.{key}", tensor[part].view(shape))
        return
    owned = [(own.state, cut) for own in state.owned if (cut := own.overlap(part)) is not None]
    for key, tensor in state.parts.items() if owned else ():
        values = saved.reader.read(f"{stored_name}.{key}", torch.empty(shape, dtype=tensor.dtype)).reshape(-1)
        for own, (inside, given) in owned:
            own.parts[key][inside].copy_(values[given])
