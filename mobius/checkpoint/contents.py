"""Contents of a checkpoint except tensors: the model's files, options and plan, and the numbers of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.model_folder import write_adapter, write_model_files
from mobius.checkpoint.resume import ORIGIN
from mobius.checkpoint.saved_stage import OpenRun, saved_parameters
from mobius.checkpoint.tensor_files import TRAINED_PREFIX, FileRecord, write_text
from mobius.checkpoint.whole_model import TEXT_ALONE, SavedLayout
from mobius.config.earlier_results import OPTIONS_FILE, PLAN_FILE
from mobius.config.sources import to_yaml, written_options
from mobius.distributed.node_checks import versions
from mobius.engine.optimizer_stepper import StepCounts
from mobius.models.model_files import ModelFiles
from mobius.models.peft_folder import AdapterBase
from mobius.reporting.trainer_state import STATE_FILE, TrainerState


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """Facts about the end of a step that a checkpoint holds in addition to tensors."""

    step: int
    counts: StepCounts
    epoch: float
    metric: float | None
    is_best: bool
    """Whether this step has the best metric of all evaluations so far."""
    loop_state: Mapping[str, Any]
    """Everything else that the loop needs to resume, in types that JSON can hold."""
    trainer_state: TrainerState | str
    """Contents of trainer_state.json on the first rank: a snapshot, turned into text while training goes on."""
    follows: str = "training goes on"
    """Text for messages: what the run does next, whether the save fails or not."""


class CheckpointContents:
    """Writes the files that all checkpoints of a run have in common, and describes each checkpoint."""

    def __init__(
        self,
        session: OpenRun,
        model_files: ModelFiles,
        *,
        data_fingerprint: str,
        origin: Origin,
        base: AdapterBase | None = None,
        layout: SavedLayout = TEXT_ALONE,
    ) -> None:
        """Take the parts that are saved; `base` is the model that adapters are for.

        Checkpoints have a text alone; of the result's `layout`, they name the base of the text.
        """
        self._run_setup, self._model_files, self._base = session.run_setup, model_files, base
        self._layout = replace(layout, is_whole=False)
        self._data = {"fingerprint": data_fingerprint, ORIGIN: asdict(origin)}
        optim = self._run_setup.config.optim
        requested = replace(self._run_setup.requested_config, optim=optim)
        self._options, self._options_text = written_options(requested), to_yaml(requested)
        """Options as the user requested them, with auto still as auto."""
        self.parameters = saved_parameters(self._run_setup)

    def write_common(self, folder: Path) -> None:
        """Write the files that no step changes, and an adapter's files from its tensors. Raises CheckpointError."""
        run_setup = self._run_setup
        config = run_setup.parts.config
        write_model_files(folder, self._model_files, config, dtype=run_setup.dtype, layout=self._layout)
        if self._base is not None:
            files = sorted(folder.glob(f"{TRAINED_PREFIX}*.safetensors"))
            write_adapter(folder, files, run_setup.parts, self._base)
            (folder / "config.json").unlink()
        write_text(folder / OPTIONS_FILE, self._options_text)
        write_text(folder / PLAN_FILE, run_setup.saved_plan.to_json())

    def write_history(self, folder: Path, metadata: StepMetadata) -> None:
        """Write the records of all steps so far. Raises CheckpointError."""
        state = metadata.trainer_state
        write_text(folder / STATE_FILE, state if isinstance(state, str) else state.to_json())

    def manifest(
        self, metadata: StepMetadata, files: Sequence[FileRecord], *, save_number: int, has_optimizer: bool
    ) -> Manifest:
        """Return the manifest of a step, with `others` still empty."""
        return Manifest(
            step=metadata.step,
            save_number=save_number,
            num_parameters=sum(parameter.num_elements for parameter in self.parameters),
            dtype=str(self._run_setup.dtype).removeprefix("torch."),
            has_optimizer=has_optimizer,
            files=tuple(sorted(files, key=lambda record: record.file_name)),
            training=asdict(metadata.counts),
            data={**metadata.loop_state, "epoch": metadata.epoch, **self._data},
            options=self._options,
            versions=versions(),
            metric=metadata.metric,
        )
