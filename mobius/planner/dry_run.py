"""The answer before the run (`--dry_run`): the plan, its bytes and its predicted step as a table, and as a file.

It reads a model's configuration, no weights, and touches no GPU but for its name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from transformers import PretrainedConfig

from mobius.atomic_files import atomic_write
from mobius.config.config import Config, Device, Dtype, MatmulDtype, split_names
from mobius.config.validation import validate
from mobius.distributed.device_order import device_names, order_devices
from mobius.errors import HostMemoryError, MobiusError, PlanError, StateFileError, reason_of
from mobius.hardware.cpu_dtype import resolve_cpu_dtype
from mobius.models.blocks import ModelParts
from mobius.models.config_rules import max_positions_warning
from mobius.models.families import load_planned_config
from mobius.models.weights import check_model_weights
from mobius.planner.disk_use import check_disks, with_room_for_steps
from mobius.planner.fit import DoesNotFitError
from mobius.planner.gpu_specs import GPU_SPECS, check_matmul_dtype, find_gpu_spec
from mobius.planner.measured_disks import measured_rates, measured_shares
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.plan_file import SavedPlan
from mobius.planner.plan_table import describe_details, describe_verdict
from mobius.planner.remedies import check_host_memory, gpu_refusal
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.run_setup import host_bytes_per_pipeline, machine_of_gpu
from mobius.planner.solver import PlanResult, solve
from mobius.planner.step_prediction import predict_step_seconds
from mobius.ranks import Ranks, visible_devices
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

WORTHWHILE_GAIN = 0.03
"""Least share of a step's tokens per second for which an option that changes rounding is mentioned."""
CPU_RANKS = 2
"""As train.sh starts where there is no GPU."""


def run_dry(config: Config, ranks: Ranks, *, given: Collection[str] | None = None) -> bool:
    """Print what a run would do and save its plan to `--plan_output`, if that is given; whether it fits.

    `given` are the options that the user set; None: all of them. Raises MobiusError for what cannot be planned at all.
    """
    if not ranks.is_first:
        return True
    machine = machine_to_plan_for(config, planned_ranks(config, ranks))
    if machine.on_cpu:
        config = resolve_cpu_dtype(config, given=given)
    # What has no effect was refused when it was read, where it is known what was typed.
    validate(config, machine.num_ranks, machine.num_replicas, is_exempt=lambda *_: True)
    model = load_planned_config(config.model)
    parts = ModelParts(
        model.config, torch.device("cpu"), adapters=config.adapters, matmul_dtype=config.model.matmul_dtype
    )
    if model.folder is not None:
        if model.undownloaded_bytes:
            text = "%s of weights are not downloaded by a dry run, which goes by their index; a run checks them"
            logger.info(text, format_bytes(model.undownloaded_bytes))
        else:
            check_model_weights(model.folder, parts, config.model)
        if (warning := max_positions_warning(model.config, config.data.seq_length)) is not None:
            logger.warning("%s", warning)
    shape = parts.shape()
    logger.info("plan of %s: %s, %s", model.name or config.model.model_path, shape.describe(), config.model.dtype)
    available = None  # of another machine nothing is known but what is said
    if config.planning.card is None or config.pipeline.host_memory_limit is not None:
        available = host_bytes_per_pipeline(config, machine.replicas_per_node)
    try:
        machine = with_room_for_steps(machine, config, shape, is_possible=parts.stores_in_order)
        found = solve(PlanRequest.of(config, shape, machine), layer=None if machine.on_cpu else estimated_layer)
    except DoesNotFitError as error:
        logger.info("the run does not fit")
        logger.error("does not fit: %s", gpu_refusal(error, model.config))
        return False
    disks = _refusal(partial(check_disks, found, is_here=config.planning.card is None))
    logger.info("%s", describe_verdict(found, available, fits_disks=disks is None))
    memory = None
    if available is not None:
        memory = _refusal(partial(check_host_memory, found, available, model.config))
    refusals = [each for each in (disks, memory) if each is not None]
    for each in refusals:
        logger.error("does not fit: %s", each)
    if not refusals:
        _save(found)
    logger.info("")
    if not machine.on_cpu:
        _log_devices(config, machine.num_ranks)
    for lines in (
        *describe_details(found, available),
        *describe_spread_head(found),
        *describe_products(found, model.config),
    ):
        logger.info("%s", lines)
    return not refusals


def describe_spread_head(found: PlanResult) -> list[str]:
    """Say what `--spread_head` would bring to a depth-first plan, with the same numbers; nothing if that is little."""
    request, plan = found.request, found.plan
    if found.profile is None or plan.num_ranks == 1 or plan.spreads_head or not plan.is_depth_first:
        return []
    try:
        other = solve(request.with_pipeline(spread_head=True), layer=found.layer, profile=found.profile)
    except MobiusError:
        return []
    gain = found.step_seconds / other.step_seconds - 1
    host = format_bytes(other.host_estimate.total)
    text = f"with --spread_head: {other.step_seconds:.3f} s, {100 * gain:.1f} % more tokens/s, {host} of host memory"
    return [text] if gain >= WORTHWHILE_GAIN else []


def describe_products(found: PlanResult, model: PretrainedConfig) -> list[str]:
    """Compare a step in bf16 with those of as many stages and microbatches in the card's other formats of products.

    No plan is searched for: theirs is this one, or the best one by a bound. A search ends within 5 % of it.
    """
    request, config, seconds = found.request, found.request.config, dict[MatmulDtype, float]()
    is_bf16 = (config.model.dtype, config.model.matmul_dtype) == (Dtype.BF16, MatmulDtype.BF16)
    if found.profile is None or request.gpu_spec is None or not is_bf16:
        return []
    for each in request.gpu_spec.matmul_dtypes[1:]:
        shape = ModelParts(model, torch.device("cpu"), adapters=config.adapters, matmul_dtype=each).shape()
        for given in (None, found.plan):
            with suppress(MobiusError):  # with copies of resident stages it may not fit
                asked = request.with_products(each, shape)
                other = solve(asked, layer=estimated_layer, given=given, is_preliminary=True)
                assert other.profile is not None
                found_seconds = predict_step_seconds(other.plan, other.request, other.profile)
                seconds[each] = min(found_seconds, seconds.get(each, math.inf))
    if not seconds:
        return []
    (first, least), *others = sorted(seconds.items(), key=itemgetter(1))
    rest = [f"{each} {number:.3f}" for each, number in (*others, (config.model.matmul_dtype, found.step_seconds))]
    return [f"--matmul_dtype {first} would take {least:.3f} s per step ({', '.join(rest)})"]


def _refusal(check: Callable[[], None]) -> MobiusError | None:
    try:
        check()
    except (HostMemoryError, StateFileError) as error:
        return error
    return None


def machine_to_plan_for(config: Config, ranks: Ranks) -> Machine:
    """Return the machine with the named card, else this one.

    Raises PlanError for a card that is not known, or has no products in the format that is asked for.
    """
    num_ranks = ranks.num_pipeline_ranks
    if config.planning.card is not None:
        machine = Machine(num_ranks, find_gpu_spec(config.planning.card))
    elif config.pipeline.device is not Device.CPU and torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        machine = machine_of_gpu(name, torch.cuda.get_device_properties(0).total_memory, num_ranks)
        if machine.gpu_spec is None:
            raise PlanError(f"the GPU {name!r} is not known; name one like it with --card: {', '.join(GPU_SPECS)}.")
    elif config.pipeline.device is Device.CUDA:
        raise PlanError("--device cuda: there is no GPU here; say with --card which one to plan for.")
    else:
        machine = Machine(num_ranks)
    if machine.gpu_spec is not None:
        check_matmul_dtype(config.model.matmul_dtype, machine.gpu_spec.name, machine.gpu_spec.matmul_dtypes)
    link = config.planning.node_link or machine.node_link
    if config.planning.card is None:
        folders = split_names(config.pipeline.offload_states_to)
        machine = replace(machine, disks=measured_rates(folders), disk_shares=measured_shares(folders))
    return replace(machine, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes, node_link=link)


def _log_devices(config: Config, num_ranks: int) -> None:
    """Say which GPU every rank would get, if it is for those that are here."""
    if config.planning.card is not None or torch.cuda.device_count() < num_ranks:
        return
    order = order_devices(config, num_ranks, None)
    names = device_names(visible_devices(), num_ranks)
    logger.info("GPUs of ranks 0 to %d: %s", num_ranks - 1, ", ".join(names[index] for index in order))


def planned_ranks(config: Config, ranks: Ranks) -> Ranks:
    """Return the processes to plan for. A node's number is the option's, else that of those started, else of its GPUs.

    Raises ConfigError where a node's processes do not make whole pipelines.
    """
    listed = config.launch.cuda_visible_devices
    started = ranks.num_local if ranks.num_ranks > 1 else None
    visible = len(listed.split(",")) if listed else torch.cuda.device_count()
    of_node = config.planning.num_ranks or started or config.launch.nproc_per_node or visible or CPU_RANKS
    nodes = max(ranks.num_nodes, config.launch.nnodes)
    return Ranks(0, nodes * of_node, 0, num_replicas=nodes, num_nodes=nodes).split_into_pipelines(
        config.launch.pipeline_ranks
    )


def _save(result: PlanResult) -> None:
    if (name := result.request.config.planning.plan_output) is None:
        return
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(SavedPlan.of(result.request, result.plan).to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--plan_output {path} cannot be written: {reason_of(error)}. Name another file.") from error
    logger.info("  plan         saved to %s; train by it with --plan %s", path, path)
