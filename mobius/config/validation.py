"""Owns whether the values of a config are allowed, each for itself and all together.

Does not own what depends on the model, the data or the machine: those are checked where they are known.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path, PurePath
from typing import Final

from mobius.config.config import Config, Device, Recompute
from mobius.config.options import Option, OptionValue, option_values, options
from mobius.errors import ConfigError
from mobius.excerpt import excerpt, quoted

_NAME_BYTES: Final = 255
"""Of a file's name, and of a whole path: what Linux takes."""
_PATH_BYTES: Final = 4095
_STEP_TOKENS: Final = 2**30
"""A batch holds 16 bytes per token on every rank."""
_SCHEDULE_PARTS: Final = 2**15
"""Each is an action of a schedule that is built and simulated some times before a run: seconds, and 200 MiB."""
_DEVICE: Final = re.compile(r"\d{1,4}|(GPU|MIG)-[\w/-]{1,80}", re.ASCII)


def validate(config: Config, num_ranks: int) -> None:
    """Check everything that can be known before the model is read; raises ConfigError with all problems."""
    problems = find_problems(config, num_ranks=num_ranks)
    if problems:
        raise ConfigError(*problems)


def find_problems(config: Config, *, num_ranks: int | None = None, unreadable: Iterable[str] = ()) -> list[str]:
    """Every problem as one line; without `num_ranks`, what depends on it is left out.

    `unreadable` names options whose values are only stand-ins: no rule that involves one of them is applied.
    """
    doubtful = set(unreadable)
    problems = []
    for name, value in option_values(config).items():
        problem = None if name in doubtful else _value_problem(options()[name], value)
        if problem:
            problems.append(problem)
            doubtful.add(name)
    rules = _RULES
    if num_ranks is not None:
        rules = (*rules, (("num_stages",), lambda config: _stages_fit_ranks(config, num_ranks)))
    for names, rule in rules:
        problem = None if doubtful.intersection(names) else rule(config)
        if problem:
            problems.append(problem)
    return problems


def _value_problem(option: Option, value: OptionValue) -> str | None:
    """What is wrong with a value for itself, as a line."""
    if isinstance(value, int | float) and option.bounds and not option.bounds.allow(value):
        shown = excerpt(str(value)) if isinstance(value, int) else f"{value:g}"
        return f"`--{option.name}` is {shown}; it must be {option.bounds.demand(value)}"
    if isinstance(value, str) and option.is_name:
        reason = _unusable_name(value)
        return f"`--{option.name}` {quoted(value)} {reason}" if reason else None
    return None


def _unusable_name(name: str) -> str | None:
    """Why no file can have this name, whatever is on the disk."""
    if "\0" in name:
        return "holds a NUL character, which no name can have; remove it"
    try:
        longest = max(len(os.fsencode(part)) for part in name.split("/"))
        whole = len(os.fsencode(name))
    except UnicodeEncodeError as error:
        wrong = name[error.start]
        kind = "half of a character" if 0xD800 <= ord(wrong) < 0xE000 else "not of this system's encoding"
        return f"holds {wrong!r}, {kind}, which no file name here can have; remove it"
    if _is_nobodys_home(name):
        return "begins with the home of a user that there is not; write ./ before it if it is a file's name"
    if longest > _NAME_BYTES or whole > _PATH_BYTES:
        return (
            f"is too long: its longest part has {longest} bytes of at most {_NAME_BYTES}, the whole {whole} of at "
            f"most {_PATH_BYTES}"
        )
    return None


def _is_nobodys_home(name: str) -> bool:
    """Whether the name is `~user` or below it, without such a user: nothing could look it up."""
    try:
        Path(name).expanduser()
    except RuntimeError:
        return True
    return False


def _batch_splits_evenly(config: Config) -> str | None:
    batch, chunks = config.pipeline.batch_size, config.pipeline.num_chunks
    if chunks is None or batch % chunks == 0 or config.planning.plan is not None:
        return None
    small = [number for number in range(1, math.isqrt(batch) + 1) if batch % number == 0]
    divisors = [*small, *(batch // number for number in small)]
    near_chunks = _nearest(chunks, divisors)
    near_batches = _nearest(batch, [batch // chunks * chunks, (batch // chunks + 1) * chunks])
    return (
        f"`--batch_size` {batch} cannot be cut into `--num_chunks` {chunks} equal microbatches; "
        f"use --num_chunks {near_chunks}, or --batch_size {near_batches}"
    )


def _step_fits_a_machine(config: Config) -> str | None:
    batch, length = config.pipeline.batch_size, config.data.seq_length
    if batch * length <= _STEP_TOKENS or config.planning.plan is not None:
        return None
    return (
        f"`--batch_size` {batch} of `--seq_length` {length} are {batch * length} tokens per step; at most "
        f"{_STEP_TOKENS} can be; lower one of them"
    )


def _schedule_is_small(config: Config) -> str | None:
    stages, chunks = config.pipeline.num_stages, config.pipeline.num_chunks
    if stages is None or chunks is None or stages * chunks <= _SCHEDULE_PARTS or config.planning.plan is not None:
        return None
    return (
        f"`--num_stages` {stages} of `--num_chunks` {chunks} are {stages * chunks} forwards and as many backwards per "
        f"step; at most {_SCHEDULE_PARTS} can be planned; lower one of them"
    )


def _stages_fit_ranks(config: Config, num_ranks: int) -> str | None:
    stages = config.pipeline.num_stages
    if stages is None or stages % num_ranks == 0 or config.planning.plan is not None:
        return None
    lower = stages // num_ranks * num_ranks
    return (
        f"`--num_stages` {stages} is not a multiple of the number of ranks, {num_ranks}; "
        f"use --num_stages {_nearest(stages, [max(lower, num_ranks), lower + num_ranks])}, or another number of ranks "
        "(--nproc_per_node)"
    )


def _heads_share_the_width(config: Config) -> str | None:
    width, heads = config.model.embedding_dim, config.model.num_heads
    if width is None or heads is None or width % heads == 0:
        return None
    near = _nearest(width, [width // heads * heads, (width // heads + 1) * heads])
    return f"`--embedding_dim` {width} is not a multiple of `--num_heads` {heads}; use --embedding_dim {near}"


def _warmup_fits_run(config: Config) -> str | None:
    warmup, steps = config.optim.warmup_steps, config.optim.num_iterations
    if warmup > 1 and warmup != int(warmup):
        return (
            f"`--warmup_steps` is {warmup:g}; use a whole number of steps, or a number below 1 for a share of the run"
        )
    if warmup > steps:
        return f"`--warmup_steps` {warmup:g} is more than `--num_iterations` {steps}; use at most {steps}"
    return None


def _limit_has_a_gpu(config: Config) -> str | None:
    limit = config.pipeline.gpu_memory_limit
    if limit is None or config.pipeline.device is not Device.CPU:
        return None
    return f"`--gpu_memory_limit` {limit:g} has no effect with `--device cpu`; remove one of them"


def _probe_has_a_use(config: Config) -> str | None:
    if not config.pipeline.probe_topology:
        return None
    if config.pipeline.device is Device.CPU:
        return "`--probe_topology` has no effect with `--device cpu`; remove one of them"
    if not config.pipeline.cross_mapping:
        return "`--probe_topology` has no effect with `--no_cross_mapping`; remove one of them"
    return None


def _kept_activations_have_weights(config: Config) -> str | None:
    pipeline = config.pipeline
    if pipeline.recompute is not Recompute.NONE or not pipeline.use_offload or pipeline.resident_stages == "all":
        return None
    return (
        "`--recompute none` needs a layer's weights until its backward, but with `--use_offload` they leave the GPU; "
        "use --no_offload, or --recompute auto"
    )


def _resident_stages_are_a_number(config: Config) -> str | None:
    given = config.pipeline.resident_stages
    if given in ("auto", "all") or config.pipeline.num_resident_stages is not None:
        return None
    return f"`--resident_stages` {quoted(given)} is not a number of stages; write auto, all, or a number from 0 on"


def _resident_stages_leave_something(config: Config) -> str | None:
    given = config.pipeline.resident_stages
    if config.pipeline.use_offload or given in ("auto", "all"):
        return None
    return (
        f"`--resident_stages` {given} says that other stages are streamed, but with `--no_offload` all stages stay on "
        "the GPU; remove one of them"
    )


def _outputs_differ(config: Config) -> str | None:
    outputs = {name: getattr(config.output, name) for name in ("save_params", "save_results", "save_dir")}
    for (name, path), (other_name, other_path) in combinations(outputs.items(), 2):
        if PurePath(path) == PurePath(other_path):
            return f"`--{name}` and `--{other_name}` are both {quoted(path)}; give them different names"
    return None


def _profiled_steps_are_run(config: Config) -> str | None:
    text, last = config.output.profile_steps, config.optim.num_iterations
    if text is None:
        return None
    steps = config.output.profiled_steps
    if not steps or steps[0] < 1:
        return (
            f"`--profile_steps` {quoted(text)} is no step or range of steps; write numbers from 1 on, such as 3 or 3-4"
        )
    if steps[-1] > last:
        return (
            f"`--profile_steps` {excerpt(text)} is more than the run has; use steps 1 to {last}, or more "
            "`--num_iterations`"
        )
    return None


def _planning_fits_a_dry_run(config: Config) -> str | None:
    planning = config.planning
    if planning.dry_run:
        return (
            None if planning.plan is None else "`--dry_run` makes a plan and `--plan` takes one; leave one of them out"
        )
    given = [name for name in ("num_ranks", "card") if getattr(planning, name) is not None]
    if not given:
        return None
    return f"`--{given[0]}` has no effect without `--dry_run`: a run has the ranks and GPUs that it is started with"


def _devices_are_a_list(config: Config) -> str | None:
    devices = config.launch.cuda_visible_devices
    if devices is None:
        return None
    names = [name.strip() for name in devices.split(",")]
    is_list = all(_DEVICE.fullmatch(name) for name in names)
    if is_list and len(set(names)) == len(names):
        return None
    return (
        f"`--cuda_visible_devices` {quoted(devices)} is not a list of different GPUs; "
        "write their numbers, such as 0,2,1,3"
    )


def _nearest(value: int, valid: Iterable[int]) -> str:
    """The valid numbers next to `value`, below and above it, as it reads in a message."""
    numbers = [number for number in valid if number > 0]
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)


_Rule = tuple[tuple[str, ...], Callable[[Config], str | None]]
_RULES: Final[tuple[_Rule, ...]] = (
    (("batch_size", "num_chunks"), _batch_splits_evenly),
    (("batch_size", "seq_length"), _step_fits_a_machine),
    (("num_stages", "num_chunks"), _schedule_is_small),
    (("embedding_dim", "num_heads"), _heads_share_the_width),
    (("warmup_steps", "num_iterations"), _warmup_fits_run),
    (("gpu_memory_limit", "device"), _limit_has_a_gpu),
    (("probe_topology", "device", "cross_mapping"), _probe_has_a_use),
    (("recompute", "use_offload", "resident_stages"), _kept_activations_have_weights),
    (("resident_stages",), _resident_stages_are_a_number),
    (("resident_stages", "use_offload"), _resident_stages_leave_something),
    (("save_params", "save_results", "save_dir"), _outputs_differ),
    (("profile_steps", "num_iterations"), _profiled_steps_are_run),
    (("cuda_visible_devices",), _devices_are_a_list),
    (("dry_run", "num_ranks", "card", "plan"), _planning_fits_a_dry_run),
)
