"""Forecast of a run: whether it fits, its memory by owner, its predicted step, and changes that make it fit.

`forecast` takes options as typed and returns data; `run_dry` prints what a run would do (`--dry_run`). Both read a
model's configuration without its weights, and only the name and memory size of a GPU.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mobius.config.cli import given_options, parse_args
from mobius.config.config import Config, Device, split_names
from mobius.config.gpu_count import CPU_RANKS
from mobius.config.validation import validate
from mobius.distributed.device_order import device_names, order_devices
from mobius.errors import (
    GpuMemoryError,
    HostMemoryError,
    PlanError,
    RemediableError,
    StateFileError,
    reason_of,
)
from mobius.files.atomic_files import atomic_write
from mobius.hardware.cpu_dtype import resolve_cpu_dtype
from mobius.models.adapter_kinds import adopt_adapter
from mobius.models.blocks import ModelParts
from mobius.models.config_rules import max_positions_warning
from mobius.models.families import PlannedModel, load_planned_config
from mobius.models.quantized_folder import check_dequantized
from mobius.models.reward_head import set_head
from mobius.models.weights import check_model_weights
from mobius.planner.disk_use import check_disks, check_folders, with_room_for_steps
from mobius.planner.fit import DoesNotFitError
from mobius.planner.gpu_specs import GIGA, GPU_SPECS, Host, check_matmul_dtype, find_gpu_spec
from mobius.planner.measured_disks import known_disks
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.plan_file import SavedPlan
from mobius.planner.plan_table import describe_details, describe_verdict
from mobius.planner.remedies import check_host_memory, check_least_host_memory, gpu_refusal
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import Effort, PlanResult, solve
from mobius.planner.step_prediction import SimulatedSteps, predict_step_time
from mobius.planner.this_machine import host_bytes_per_pipeline, machine_of_gpu
from mobius.planner.training_command import training_command
from mobius.process.ranks import Ranks, visible_devices
from mobius.schedule.lanes import WaitCause
from mobius.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Forecast:
    """Forecast of a run on a machine."""

    config: Config
    model: PlannedModel
    machine: Machine
    available: int | None
    """Bytes of host memory for a pipeline; None if only the GPUs of the machine are known."""
    found: PlanResult | None
    """Plan with its memory and predicted step; None if no plan fits the GPUs."""
    refusals: tuple[RemediableError | StateFileError, ...]
    """Reasons why the run does not fit."""
    options: tuple[str, ...] = ()
    """Options as typed."""
    is_command: bool = True
    """Whether the options were typed for a subcommand of `mobius`, which has other defaults than main.py."""

    def __repr__(self) -> str:
        gpu = "CPU" if self.machine.gpu_spec is None else self.machine.gpu_spec.name
        head = f"Forecast of {self.model.name or self.config.model.model_path} on {self.machine.num_ranks} x {gpu}"
        return f"<{head}\n{self.answer}>"

    @property
    def fits(self) -> bool:
        return not self.refusals

    @property
    def problem(self) -> str | None:
        """Reasons why the run does not fit, as text with the arithmetic; None if it fits."""
        return "\n".join(map(str, self.refusals)) or None

    @property
    def remedies(self) -> dict[str, str]:
        """Changes that each make the run fit: options as typed -> text of memory and speed with the change."""
        own = (each.remedies for each in self.refusals if isinstance(each, RemediableError))
        return {options: text for remedies in own for options, text in remedies.items()}

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a predicted step; None for CPUs, for fp32, and if the run does not fit the GPUs."""
        return None if self.found is None or self.found.step_time_prediction is None else self.found.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all GPUs; None without a predicted step."""
        return None if self.found is None or self.step_seconds is None else self.found.tokens_per_second

    @property
    def command(self) -> str:
        """Command that runs this training on the machine; words in capitals stand for values that were not given."""
        processes = self.machine.num_ranks * self.machine.replicas_per_node
        is_shape = self.model.folder is None
        path = self.config.model.model_path
        return training_command(
            self.options, path, is_shape=is_shape, num_processes=processes, is_command=self.is_command
        )

    @property
    def verdict(self) -> str:
        """Text that says whether the run fits, with its predicted step, its memory and the chosen numbers."""
        if self.found is None:
            return "the run does not fit"
        fits_disks = not any(isinstance(each, StateFileError) for each in self.refusals)
        return describe_verdict(self.found, self.available, fits_disks=fits_disks)

    @property
    def answer(self) -> str:
        """Verdict, followed by the command to train, or by the reasons and changes if the run does not fit."""
        return "\n".join(
            [self.verdict, *(map(str, self.refusals) if self.refusals else [f"  run          {self.command}"])]
        )

    def describe(self) -> str:
        """Answer and all parts of the plan, as `--dry_run --verbose` prints them."""
        details = [] if self.found is None else ["", *describe_details(self.found, self.available)]
        return "\n".join([self.answer, *details])

    def save(self, path: str | Path) -> None:
        """Write the plan to a file that a run can use with `--plan`.

        Raises PlanError if the run does not fit or the file cannot be written.
        """
        if self.found is None or not self.fits:
            raise PlanError(f"a plan that does not fit is not saved: {self.problem}")
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                text = SavedPlan.of(self.found.request, self.found.plan).to_json()
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            reason = reason_of(error)
            raise PlanError(f"--plan_output {path} cannot be written: {reason}. Name another file.") from error

    def to_json(self) -> dict[str, Any]:
        """Return all numbers by name, in bytes and seconds; `timeline` has a list of spans for each rank.

        A span has its lane, its name as in the schedule grid, and its start and end in seconds since the step's start.
        """
        facts: dict[str, Any] = {
            "fits": self.fits,
            "problem": self.problem,
            "remedies": self.remedies,
            "command": self.command,
            "model": self.model.name or self.config.model.model_path,
            "num_ranks": self.machine.num_ranks,
            "gpu": None if self.machine.gpu_spec is None else self.machine.gpu_spec.name,
        }
        if self.found is None:
            return facts
        found, request, plan = self.found, self.found.request, self.found.plan
        gpus = [{name: own for name, own in each.parts.items() if own} for each in found.gpu_estimates]
        facts |= {
            "num_parameters": request.shape.num_parameters,
            "plan": plan.describe(),
            "numbers": {
                "num_stages": plan.num_stages,
                "num_chunks": plan.num_chunks,
                "num_rounds": plan.num_rounds,
                "compute_order": plan.order.value,
                "resident_stages": len(plan.resident),
            },
            "gpu_memory": {"available": request.gpu_bytes, "ranks": [] if request.machine.on_cpu else gpus},
            "host_memory": {
                "available": self.available,
                "total": found.host_estimate.total,
                "parts": self._host_parts(),
            },
            "disk": {"bytes": found.host_estimate.disk, "written_per_step": found.host_estimate.disk_writes},
            "tokens_per_step": request.all_tokens,
            "step_seconds": self.step_seconds,
            "pass_seconds": found.pass_seconds if found.request.config.objective.needs_reference else None,
            "tokens_per_second": self.tokens_per_second,
            "details": self.describe(),
        }
        if (steps := found.step_time_prediction) is not None:
            facts |= {
                "mfu": found.mfu,
                "bubble": steps.bubble,
                "limited_by": steps.bottleneck.value,
                "gain_if_faster": steps.gain,
                "waits": {cause.value: steps.worst_wait(cause) for cause in WaitCause},
                "timeline": [[*_spans_of_last_step(steps, rank)] for rank in range(len(steps.spans))],
            }
        return facts

    def _host_parts(self) -> dict[str, int]:
        assert self.found is not None
        host = self.found.host_estimate
        parts = {
            "streamed stages": host.streamed,
            "computing on the CPU": host.computing,
            "stages that are updated": host.state_buffers,
            "activations": host.offloaded_activations,
            "processes": host.num_ranks * host.process_bytes,
        }
        return {name: own for name, own in parts.items() if own}

    def _repr_html_(self) -> str:
        """Table for a notebook."""
        facts = self.to_json()
        rows = {"fits": "yes" if self.fits else f"no: {self.problem}", "model": facts["model"]}
        if self.found is not None:
            rows["plan"] = facts["plan"]
            rows["host memory"] = format_bytes(facts["host_memory"]["total"])
            if facts["gpu_memory"]["ranks"]:
                most = max(sum(parts.values()) for parts in facts["gpu_memory"]["ranks"])
                rows["GPU memory"] = f"{format_bytes(most)} of {format_bytes(facts['gpu_memory']['available'])}"
        if self.step_seconds is not None:
            rows["step"] = f"{self.step_seconds:.3f} s, {self.tokens_per_second:,.0f} tokens/s"
        rows |= {f"fits with {options}": text for options, text in self.remedies.items()}
        rows["command"] = self.command
        cells = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(text))}</td></tr>" for name, text in rows.items()
        )
        return f"<table>{''.join(cells)}</table>"


def forecast(words: Sequence[str], *, is_draft: bool = False, only_fitting: bool = False) -> Forecast:
    """Return the forecast that `mobius plan` prints for options as typed.

    A draft (`is_draft`) chooses the numbers of auto by lower bounds of step times. A draft takes about half the time,
    and its plan may be a tenth slower. With `only_fitting`, a run is not planned if a bound shows that the host is too
    small. Both skip the search for remedies, which takes seconds. Raises MobiusError if nothing can be planned.
    """
    config, given = parse_args(["--dry_run", *words], is_command=True), given_options(words)
    found = make_forecast(config, Ranks(0, 1, 0), given=given, is_draft=is_draft, only_fitting=only_fitting)
    return replace(found, options=tuple(words))


def make_forecast(
    config: Config,
    ranks: Ranks,
    *,
    given: Collection[str] | None = None,
    is_draft: bool = False,
    only_fitting: bool = False,
) -> Forecast:
    """Return the forecast of a run; `given`: options that the user set (None: all options). Errors as in `forecast`."""
    config = adopt_adapter(config, given)
    machine = machine_to_plan_for(config, planned_ranks(config, ranks))
    if machine.on_cpu:
        config = resolve_cpu_dtype(config, given=given)
    # Options without effect are refused where options are read, because only that code knows what was typed.
    validate(config, machine.num_ranks, machine.num_replicas, is_exempt=lambda *_: True)
    model = load_planned_config(config.model)
    with_remedies = not (is_draft or only_fitting)
    parts = ModelParts.of(config, set_head(model.config, config))
    if model.folder is not None:
        _check_files(model, model.folder, parts, config)
    shape = parts.shape()
    described = shape.describe(trains=config.evaluation.do_train)
    logger.info("plan of %s: %s, %s", model.name or config.model.model_path, described, config.model.dtype)
    available = None  # another machine's host memory is known only if an option gives it
    if config.planning.card is None or config.pipeline.host_memory_limit is not None:
        available = host_bytes_per_pipeline(config, machine)
    found, refusals = None, list[RemediableError | StateFileError]()
    try:
        machine = with_room_for_steps(machine, config, shape, is_possible=parts.stores_in_order)
        request = PlanRequest.of(config, shape, machine)
        found = _planned(request, available if only_fitting else None, is_draft=is_draft)
    except DoesNotFitError as error:
        refusals.append(gpu_refusal(error, model.config) if with_remedies else GpuMemoryError(str(error)))
    except HostMemoryError as error:
        refusals.append(error)
    if found is not None:
        checks = [partial(check_disks, found, is_here=config.planning.card is None)]
        if available is not None:
            checks.append(partial(check_host_memory, found, available, model.config, with_remedies=with_remedies))
        for check in checks:
            try:
                check()
            except (HostMemoryError, StateFileError) as error:
                refusals.append(error)
    return Forecast(config, model, machine, available, found, tuple(refusals))


def _check_files(model: PlannedModel, folder: Path, parts: ModelParts, config: Config) -> None:
    """Check the weights if they are downloaded, and the model's longest sequence.

    Raises CheckpointError, and ConfigError as `check_dequantized`.
    """
    check_dequantized(folder, config)
    if model.undownloaded_bytes:
        text = "%s of weights are not downloaded by a dry run, which reads only their index; a run checks them"
        logger.info(text, format_bytes(model.undownloaded_bytes))
    else:
        check_model_weights(folder, parts, config.model)
    if (warning := max_positions_warning(model.config, config.data.seq_length)) is not None:
        logger.warning("%s", warning)


def _planned(request: PlanRequest, most_host_bytes: int | None, *, is_draft: bool) -> PlanResult:
    """Return the plan, with a predicted step if rates are known.

    Raises the errors of `solve`, and HostMemoryError if every plan needs more than `most_host_bytes`.
    """
    if most_host_bytes is not None:
        check_least_host_memory(request, most_host_bytes)
    effort = Effort.NOTHING if is_draft else Effort.ALL
    found = solve(request, layer=None if request.machine.on_cpu else estimated_layer, effort=effort)
    if is_draft and found.profile is not None:
        prediction = predict_step_time(found.plan, found.request, found.profile)
        found = replace(found, step_time_prediction=prediction)
    return found


def machine_to_plan_for(config: Config, ranks: Ranks) -> Machine:
    """Return the machine with the card of `--card`, or else this machine.

    Raises PlanError for a card that is not known, or that has no products in the requested format.
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
        if config.pipeline.device is not Device.CPU:
            logger.info("no GPU is here: planned for this CPU; for GPUs give, say, --card RTX4090 --num_ranks 4")
        machine = Machine(num_ranks)
    if machine.gpu_spec is not None:
        check_matmul_dtype(config.model.matmul_dtype, machine.gpu_spec.name, machine.gpu_spec.matmul_dtypes)
    own = config.planning
    machine = replace(machine, host=Host(own.host_cores, own.host_bandwidth * GIGA, own.pcie))
    link = config.planning.node_link or machine.node_link
    if config.planning.card is None:
        check_folders(config)
        disks, shares = known_disks(split_names(config.pipeline.offload_states_to))
        machine = replace(machine, disks=disks, disk_shares=shares)
    return replace(machine, num_replicas=ranks.num_replicas, num_nodes=ranks.num_nodes, node_link=link)


def planned_ranks(config: Config, ranks: Ranks) -> Ranks:
    """Return the processes to plan for.

    The number per node comes from an option, or else from the started processes, or else from the visible GPUs.
    Raises ConfigError if a node's processes do not make whole pipelines.
    """
    listed = config.launch.cuda_visible_devices
    started = ranks.num_local if ranks.num_ranks > 1 else None
    visible = len(listed.split(",")) if listed else torch.cuda.device_count()
    of_node = config.planning.num_ranks or started or config.launch.nproc_per_node or visible or CPU_RANKS
    nodes = max(ranks.num_nodes, config.launch.nnodes)
    return Ranks(0, nodes * of_node, 0, num_replicas=nodes, num_nodes=nodes).split_into_pipelines(
        config.launch.pipeline_ranks
    )


def _spans_of_last_step(steps: SimulatedSteps, rank: int) -> Iterator[tuple[str, str, float, float]]:
    end = steps.step_ends[-1]
    start = end - steps.step_seconds
    for span in steps.spans[rank]:
        if span.end > start and span.start < end:
            since, until = max(span.start, start) - start, min(span.end, end) - start
            yield span.lane.value, span.name, round(since, 5), round(until, 5)


def run_dry(
    config: Config,
    ranks: Ranks,
    *,
    given: Collection[str] | None = None,
    words: Sequence[str] = (),
    is_command: bool = False,
) -> bool:
    """Print what a run would do, and save its plan to `--plan_output` if given; return whether the run fits.

    `given` are the options that the user set; None: all options. `words` are the options as typed, for a subcommand of
    `mobius` if `is_command`, else for main.py. `--verbose` adds all parts of the plan. Raises MobiusError if nothing
    can be planned.
    """
    if not ranks.is_first:
        return True
    own = replace(make_forecast(config, ranks, given=given), options=tuple(words), is_command=is_command)
    logger.info("%s", own.verdict)
    names = [] if given is None or own.machine.on_cpu else config.pipeline.manual_numbers
    if options := " ".join(f"--{name} auto" for name in names if name not in (given or ())):
        logger.info("  numbers      the manual's defaults; %s may be faster", options)
    for each in own.refusals:
        logger.error("does not fit: %s", each)
    if own.fits:
        if (name := config.planning.plan_output) is not None:
            own.save(name)
            logger.info("  saved        %s; train by it with --plan %s", name, name)
        logger.info("  run          %s", own.command)
        if not config.output.verbose:
            logger.info("  more         with --verbose: stages, memory by owner, waits, alternatives")
    if own.found is not None and config.output.verbose:
        logger.info("")
        if not own.machine.on_cpu:
            _log_devices(config, own.machine.num_ranks)
        for lines in describe_details(own.found, own.available):
            logger.info("%s", lines)
    return own.fits


def _log_devices(config: Config, num_ranks: int) -> None:
    """Log which GPU each rank would get, if the plan is for this machine's GPUs."""
    if config.planning.card is not None or torch.cuda.device_count() < num_ranks:
        return
    order = order_devices(config, num_ranks, None)
    names = device_names(visible_devices(), num_ranks)
    logger.info("GPUs of ranks 0 to %d: %s", num_ranks - 1, ", ".join(names[index] for index in order))
