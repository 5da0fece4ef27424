"""Inputs of a run, read before a rank allocates much memory: the model without weights, a draft plan, and the data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.resume import Resume
from mobius.checkpoint.whole_model import TEXT_ALONE, SavedLayout
from mobius.config.config import Config
from mobius.data.chat_templates import resolve_template
from mobius.data.tokenization import NO_IMAGES
from mobius.distributed.node_checks import check_same_data, join_replicas
from mobius.hardware.cpu_dtype import resolve_dtype
from mobius.models.adapter_kinds import adopt_adapter
from mobius.models.families import load_model_config, locate_model
from mobius.models.model_files import ModelFiles, read_model_files
from mobius.models.peft_folder import AdapterBase
from mobius.models.quantized_folder import check_dequantized
from mobius.models.reward_head import set_head
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import check_model_weights, folder_has_weights
from mobius.planner.plan_file import apply_saved_plan
from mobius.process.ranks import Ranks
from mobius.training.data import RunData, read_data
from mobius.training.evaluation.generation import check_generation_config
from mobius.training.evaluation.prediction import prediction_samples
from mobius.training.file_checks import check_same_model, find_adapter_base, find_layout
from mobius.training.images import ImageModel, find_image_model, refuse_other_uses
from mobius.training.reference_model import find_reference_model, find_teacher
from mobius.training.reporting import log_end_token, log_model
from mobius.training.run_setup import RunSetup, draft_run


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A model whose weights are not read yet, and the draft of the run."""

    config: Config
    """The options, with the numbers of `--plan` if it is given."""
    draft: RunSetup
    folder: Path
    """Folder with the weights from which the run starts."""
    files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    base: AdapterBase | None
    """Base model of the adapters; None without adapters."""
    origin: Origin
    layout: SavedLayout = TEXT_ALONE
    """Layout of the result."""
    reference: Path | None = None
    """Folder of --reference_model; None if the trained model before step 1 is the reference."""
    teacher: Path | None = None
    """Folder of --teacher_model."""
    images: ImageModel | str = NO_IMAGES
    """The model's frozen tower, or why images cannot be used."""


def read_model(config: Config, ranks: Ranks, *, given: Collection[str] | None, resume: Resume | None) -> ModelInputs:
    """Read the model without its weights, and draft the run. Raises MobiusError, also if the run cannot fit.

    Collective. `given` as in `run_training`.
    """
    trains = config.evaluation.do_train or config.evaluation.do_eval
    replicas = join_replicas(config, ranks) if trains else None
    config = resolve_dtype(config, ranks, given=given if resume is None else None)  # a resumed run keeps its format
    folder = base_folder = locate_model(config.model.model_path)
    if resume is not None and not config.adapters.has_frozen_base:  # base weights are not in an adapter's checkpoint
        folder = resume.reader.path
    check_same_model(folder, config.adapters.adapter_path, replicas)
    config = adopt_adapter(config, given) if resume is None else config
    model_config = load_model_config(folder, config.model)
    tokenizer = load_tokenizer(folder, model_config.vocab_size)
    set_head(model_config, config, pad_token_id=pad_token_id(tokenizer))
    if config.evaluation.do_predict:
        check_generation_config(folder, tokenizer, model_config.vocab_size)
    original_files = read_model_files(folder).with_chat_template(resolve_template(config.data.chat_template))
    files, end = original_files, tokenizer.eos_token_id
    if end is not None:  # the model learns to end each answer with this token
        files = files.with_end_token(end, model_config)
    config, saved = apply_saved_plan(config, given=given or ())
    draft = draft_run(config, ranks, model_config, saved=saved, replica_rendezvous=replicas)
    is_continued = resume is not None or config.adapters.adapter_path is not None
    if resume is None or config.adapters.has_frozen_base:
        check_dequantized(folder, config)
    check_model_weights(folder, draft.parts, config.model, has_score_elsewhere=is_continued)
    base = find_adapter_base(config, draft.parts, folder, resume) if config.adapters.has_frozen_base else None
    reference = find_reference_model(config, draft.parts, model_config, tokenizer) if resume is None else None
    log_model(draft, folder)
    if files is not original_files:
        log_end_token(tokenizer, original_files.end_tokens(model_config))
    layout = find_layout(config, draft.parts, base_folder, resume) if config.evaluation.do_train else TEXT_ALONE
    origin = Origin(config.model.model_path, folder_has_weights(folder)) if resume is None else resume.origin
    return ModelInputs(
        config=config,
        draft=draft,
        folder=folder,
        files=files,
        tokenizer=tokenizer,
        base=base,
        origin=origin,
        layout=layout,
        reference=reference,
        teacher=find_teacher(config, tokenizer),
        images=find_image_model(base_folder, tokenizer),
    )


def read_run_data(model: ModelInputs, resume: Resume | None) -> tuple[Config, RunData]:
    """Tokenize the data; return the options with the number of steps, and the data.

    Collective. All replicas must see equal samples, and a resumed run must see the samples with which it started.
    Raises DataError and ConfigError.
    """
    images = model.images if isinstance(model.images, str) else model.images.rules
    config, data = read_data(model.config, model.draft.ranks, model.tokenizer, images)
    if data.images:
        refuse_other_uses(replace(model, config=config))
    if config.evaluation.do_predict:
        prediction_samples(data)  # raises now rather than after training
    check_same_data(data.fingerprint, data.evaluation_fingerprint, model.draft.rank_context.replica_rendezvous)
    if resume is not None:
        resume.check_steps(config)
        resume.check_data(data.fingerprint())
        data.batches.seek(resume.num_steps_done)
        # The plan is in the checkpoint; the file of --plan may be removed together with old checkpoints.
        config = replace(config, planning=replace(config.planning, plan=None))
    return config, data
