"""The answer before the run (`--dry_run`): the plan, its bytes and its predicted step as a table, and as a file.

Reads a model's configuration, no weights, and touches no GPU but for its name. The prediction is plan/what_if.py's
business; on CPUs there is no estimate of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mobius.config.config import Config, Device, Dtype
from mobius.config.validation import validate
from mobius.errors import GpuMemoryError, HostMemoryError, PlanError
from mobius.machine.available import available_host_bytes
from mobius.machine.cpu_dtype import settle_on_cpus
from mobius.machine.device_order import device_names, order_devices
from mobius.messages.meeting import Told, told_text, told_value
from mobius.models.blocks import ModelParts
from mobius.models.known_shapes import load_planned_config
from mobius.models.weights import check_model_weights
from mobius.output.output_folder import replaced_whole
from mobius.plan.budget import (
    HostNeed,
    StepTokens,
    check_host_memory,
    gpu_need,
    host_need,
)
from mobius.plan.cards import CARDS, Card, Host, card_of_device, find_card
from mobius.plan.fit import fit_plan
from mobius.plan.fit_request import FitRequest
from mobius.plan.plan import Plan, make_plan
from mobius.plan.plan_file import ModelDigest, SavedPlan
from mobius.plan.plan_table import GpuTable, describe_gpus, describe_host, describe_stages, describe_step
from mobius.plan.shape import ModelShape
from mobius.plan.what_if import Answer, Machine, Run, answer, waiting_of
from mobius.planning.auto import resolve_auto, run_of, usual_process_bytes
from mobius.ranks import Ranks, cpu_share, visible_devices
from mobius.units import GIB

logger = logging.getLogger(__name__)

CPU_RANKS = 2
"""As train.sh starts where there is no GPU."""


@dataclass(frozen=True)
class _Planned:
    plan: Plan
    graph_stages: frozenset[int]
    batch_size: int


def run_dry(config: Config, ranks: Ranks, *, given: Collection[str] | None = None) -> bool:
    """Print what a run would do and save its plan to `--plan_output`; whether it fits.

    `given` are the options that the user set; None: all of them. Raises MobiusError for what cannot be planned at all.
    """
    if not ranks.is_first:
        return True
    card = _card(config)
    if card is None:
        config = settle_on_cpus(config, given=given)
    num_ranks = _num_ranks(config, ranks)
    validate(config, num_ranks)
    model_config, model_folder = load_planned_config(config.model)
    parts = ModelParts(model_config, torch.device("cpu"))
    if model_folder is not None:
        check_model_weights(model_folder, parts, config.model)
    shape = parts.shape()
    if card is None:
        config = resolve_auto(config, shape, num_ranks=num_ranks, gpu=None).config
    run = run_of(config, shape)
    logger.info("plan of %s: %.3g parameters, %s", config.model.model_path, shape.num_parameters, run.dtype)
    if card is not None:
        _log_devices(config, num_ranks)
    try:
        planned = (
            _on_cpus(config, run, num_ranks)
            if card is None
            else _on_gpus(run, Machine(card, num_ranks, _host(config, num_ranks)))
        )
    except GpuMemoryError as error:
        logger.error("does not fit: %s", error)
        return False
    fits = _log_host(config, run, planned, on_cpu=card is None)
    _save(config, shape, planned)
    logger.info("%s", "the run fits" if fits else "the run does not fit")
    return fits


def _card(config: Config) -> Card | None:
    """The card to plan for; None for CPUs. Raises PlanError for one that is not known."""
    if config.planning.card is not None:
        return find_card(config.planning.card)
    if config.pipeline.device is Device.CPU or not torch.cuda.is_available():
        if config.pipeline.device is Device.CUDA:
            raise PlanError("--device cuda: there is no GPU here; say with --card which one to plan for.")
        return None
    name = torch.cuda.get_device_name(0)
    card = card_of_device(name)
    if card is None:
        raise PlanError(f"the GPU {name!r} is not known; name one like it with --card: {', '.join(CARDS)}.")
    total = torch.cuda.get_device_properties(0).total_memory
    return replace(card, memory_gb=total / GIB)


@dataclass
class _Alone:
    """A meeting of which only the first rank is there."""

    num_ranks: int
    rank: int = 0

    def gather(self, value: Told) -> list[Any]:
        return [told_value(told_text(value).encode(), by=self.rank)]


def _log_devices(config: Config, num_ranks: int) -> None:
    """Say which GPU every rank would get, if it is for those that are here."""
    if config.planning.card is not None or torch.cuda.device_count() < num_ranks:
        return
    order = order_devices(config, _Alone(num_ranks))
    names = device_names(visible_devices(), num_ranks)
    logger.info("GPUs of ranks 0 to %d: %s", num_ranks - 1, ", ".join(names[index] for index in order))


def _num_ranks(config: Config, ranks: Ranks) -> int:
    """What is said, else what is started, else the GPUs that there are."""
    listed = config.launch.cuda_visible_devices
    started = ranks.num_ranks if ranks.num_ranks > 1 else None
    visible = len(listed.split(",")) if listed else torch.cuda.device_count()
    return config.planning.num_ranks or started or config.launch.nproc_per_node or visible or CPU_RANKS


def _host(config: Config, num_ranks: int) -> Host:
    """This machine's cores, unless the plan is for a card that may not be here."""
    if config.planning.card is not None:
        return Host()
    return Host(cores_per_rank=max(1, cpu_share(num_ranks)))


def _on_gpus(run: Run, machine: Machine) -> _Planned:
    """Plan by the estimate for the card; prints stages, bytes and the step."""
    if run.dtype is Dtype.FP32:
        logger.warning("the cards' rates are for formats of two bytes: the step of fp32 is longer than predicted")
    found = answer(machine, run)
    candidate, fitting = found.candidate, found.candidate.fitting
    plan = Plan(machine.num_ranks, candidate.num_chunks, fitting.slots, candidate.spans, fitting.resident)
    for notice in found.choice.notices:
        logger.info("%s", notice)
    logger.info("%s", describe_stages(plan, run.shape, fitting.graph_stages))
    logger.info("%s", describe_gpus(_gpu_table(found, plan)))
    logger.info("%s", describe_step(found))
    return _Planned(plan, fitting.graph_stages, run.batch_size)


def _gpu_table(found: Answer, plan: Plan) -> GpuTable:
    run, machine = found.run, found.machine
    tokens = StepTokens(run.step_tokens, run.step_tokens // plan.num_microbatches, run.loss_chunk_tokens)
    needs = [
        gpu_need(
            plan,
            run.shape,
            run.sizes,
            tokens,
            rank=rank,
            waiting=waiting_of(run, plan.num_stages),
            graph_stages=found.candidate.fitting.graph_stages,
        )
        for rank in range(plan.num_ranks)
    ]
    message = tokens.microbatch * run.shape.hidden_size * run.sizes.weight
    return GpuTable(tuple(needs), message, machine.num_ranks, machine.card, run.gpu_memory_limit)


def _on_cpus(config: Config, run: Run, num_ranks: int) -> _Planned:
    """Nothing is chosen by memory on a CPU, and no step is predicted."""
    assert run.num_stages is not None
    assert run.num_chunks is not None
    plan = make_plan(
        run.shape,
        num_ranks=num_ranks,
        num_stages=run.num_stages,
        num_microbatches=run.num_chunks,
        num_slots=config.pipeline.num_slots if run.use_offload else None,
    )
    tokens = StepTokens(run.step_tokens, run.step_tokens // run.num_chunks, run.loss_chunk_tokens)
    request = FitRequest(
        plan,
        run.shape,
        run.sizes,
        tokens,
        gpu_bytes=None,
        recompute=run.recompute,
        num_resident=run.num_resident,
        waiting=waiting_of(run, plan.num_stages),
    )
    fitted = fit_plan(request, rank=0)
    graphs = fitted.graph_stages | fitted.others_graph_stages
    logger.info("%s", describe_stages(fitted.plan, run.shape, graphs))
    logger.info("no step is predicted for CPUs; name a GPU to plan for with --card")
    return _Planned(fitted.plan, graphs, run.batch_size)


def _log_host(config: Config, run: Run, planned: _Planned, *, on_cpu: bool) -> bool:
    """Print the host's bytes; whether they are there."""
    need = _host_need(config, run, planned.plan, on_cpu=on_cpu)
    available = _host_bytes(config)
    logger.info("%s", describe_host(need, available))
    if available is None:
        return True
    try:
        check_host_memory(need, available_bytes=available)
    except HostMemoryError as error:
        logger.error("does not fit: %s", error)
        return False
    return True


def _host_bytes(config: Config) -> int | None:
    """What may be used: what is said, else what this machine has; None if the plan is for another one."""
    if config.pipeline.host_memory_limit is not None:
        return int(config.pipeline.host_memory_limit * GIB)
    return available_host_bytes() if config.planning.card is None else None


def _host_need(config: Config, run: Run, plan: Plan, *, on_cpu: bool) -> HostNeed:
    return host_need(
        plan,
        run.shape,
        run.sizes,
        process_bytes=usual_process_bytes(config, plan, on_cpu=on_cpu),
        waiting=waiting_of(run, plan.num_stages),
        on_cpu=on_cpu,
    )


def _save(config: Config, shape: ModelShape, planned: _Planned) -> None:
    path = Path(config.planning.plan_output)
    saved = SavedPlan(
        ModelDigest.of(shape, config.model.dtype),
        planned.plan,
        planned.graph_stages,
        batch_size=planned.batch_size,
        seq_length=config.data.seq_length,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_whole(path) as temporary:
            temporary.write_text(saved.to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--plan_output {path} cannot be written: {error.strerror}. Name another file.") from error
    logger.info("plan saved to %s; train by it with --plan %s", path, path)
