"""Owns whether the values of a config are allowed, each for itself and all together.

What depends on the model, the data or the machine is checked where that is known.
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

_NAME_BYTES, _PATH_BYTES = 255, 4095
"""Longest name of a file, and longest path, that Linux takes."""
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
    """All problems, each as one line; without `num_ranks`, what depends on it is left out.

    `unreadable` names options whose values are only stand-ins: no rule that involves one of them is applied.
    """
    doubtful = set(unreadable)
    problems = []
    values = option_values(config)
    shown = {name: excerpt(value) if isinstance(value, str) else value for name, value in values.items()}
    for name, value in values.items():
        if name not in doubtful and (problem := _value_problem(options()[name], value)):
            problems.append(problem)
            doubtful.add(name)
    rules = [*_RULES]
    if num_ranks is not None:
        rules.append(("num_stages", lambda config: _stages_fit_ranks(config, num_ranks)))
    problems += [
        problem for names, rule in rules if doubtful.isdisjoint(names.split()) and (problem := rule(config)) is not None
    ]
    return problems + [
        message.format(**shown)
        for names, is_broken, message in _FORBIDDEN
        if doubtful.isdisjoint(names.split()) and is_broken(config)
    ]


def _value_problem(option: Option, value: OptionValue) -> str | None:
    """A line about a value that is wrong for itself."""
    if isinstance(value, int | float) and option.bounds and not option.bounds.allow(value):
        shown = excerpt(str(value)) if isinstance(value, int) else f"{value:g}"
        return f"`--{option.name}` is {shown}; it must be {option.bounds.demand(value)}"
    if isinstance(value, str) and option.is_name and (reason := _unusable_name(value)):
        return f"`--{option.name}` {quoted(value)} {reason}"
    return None


def _unusable_name(name: str) -> str | None:
    """The reason why no file can have this name, whatever is on the disk."""
    if "\0" in name:
        return "holds a NUL character, which no name can have; remove it"
    try:
        longest = max(len(os.fsencode(part)) for part in name.split("/"))
        whole = len(os.fsencode(name))
    except UnicodeEncodeError as error:
        wrong = name[error.start]
        kind = "half of a character" if 0xD800 <= ord(wrong) < 0xE000 else "not of this system's encoding"
        return f"holds {wrong!r}, {kind}, which no file name here can have; remove it"
    try:
        Path(name).expanduser()
    except RuntimeError:
        return "begins with the home of a user that there is not; write ./ before it if it is a file's name"
    if longest > _NAME_BYTES or whole > _PATH_BYTES:
        at_most = f"{longest} bytes of at most {_NAME_BYTES}, the whole {whole} of at most {_PATH_BYTES}"
        return f"is too long: its longest part has {at_most}"
    return None


def _batch_splits_evenly(config: Config) -> str | None:
    batch, chunks = config.pipeline.batch_size, config.pipeline.num_chunks
    if chunks is None or batch % chunks == 0 or config.planning.plan is not None:
        return None
    small = [number for number in range(1, math.isqrt(batch) + 1) if batch % number == 0]
    near_chunks = _nearest(chunks, [*small, *(batch // number for number in small)])
    return (
        f"`--batch_size` {batch} cannot be cut into `--num_chunks` {chunks} equal microbatches; "
        f"use --num_chunks {near_chunks}, or --batch_size {_nearest_multiple(batch, chunks)}"
    )


def _stages_fit_ranks(config: Config, num_ranks: int) -> str | None:
    stages = config.pipeline.num_stages
    if stages is None or stages % num_ranks == 0 or config.planning.plan is not None:
        return None
    return (
        f"`--num_stages` {stages} is not a multiple of the number of ranks, {num_ranks}; use --num_stages "
        f"{_nearest_multiple(stages, num_ranks)}, or another number of ranks (--nproc_per_node)"
    )


def _heads_share_the_width(config: Config) -> str | None:
    width, heads = config.model.embedding_dim, config.model.num_heads
    if width is None or heads is None or width % heads == 0:
        return None
    near = _nearest_multiple(width, heads)
    return f"`--embedding_dim` {width} is not a multiple of `--num_heads` {heads}; use --embedding_dim {near}"


def _nearest_multiple(value: int, divisor: int) -> str:
    lower = value // divisor * divisor
    return _nearest(value, [lower, lower + divisor])


def _nearest(value: int, valid: Iterable[int]) -> str:
    """The valid numbers next to `value`, below and above it, as it reads in a message."""
    numbers = [number for number in valid if number > 0]
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)


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


def _outputs_differ(config: Config) -> str | None:
    outputs = {name: getattr(config.output, name) for name in ("save_params", "save_results", "save_dir")}
    for (name, path), (other_name, other_path) in combinations(outputs.items(), 2):
        if PurePath(path) == PurePath(other_path):
            return f"`--{name}` and `--{other_name}` are both {quoted(path)}; give them different names"
    return None


def _is_device_list(text: str | None) -> bool:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    return all(_DEVICE.fullmatch(name) for name in names) and len(set(names)) == len(names)


_Rule = tuple[str, Callable[[Config], str | None]]
"""Options that a rule is about, and what returns the problem."""

_RULES: Final[tuple[_Rule, ...]] = (
    ("batch_size num_chunks", _batch_splits_evenly),
    ("batch_size seq_length", _step_fits_a_machine),
    ("num_stages num_chunks", _schedule_is_small),
    ("embedding_dim num_heads", _heads_share_the_width),
    ("save_params save_results save_dir", _outputs_differ),
)

_FORBIDDEN: Final[tuple[tuple[str, Callable[[Config], bool], str], ...]] = (
    (
        "warmup_steps",
        lambda config: 1 < config.optim.warmup_steps != int(config.optim.warmup_steps),
        "`--warmup_steps` is {warmup_steps:g}; use a whole number of steps, or a number below 1 for a share of the run",
    ),
    (
        "warmup_steps num_iterations",
        lambda config: config.optim.num_iterations < config.optim.warmup_steps == int(config.optim.warmup_steps),
        "`--warmup_steps` {warmup_steps:g} is more than `--num_iterations` {num_iterations}; use at most "
        "{num_iterations}",
    ),
    (
        "gpu_memory_limit device",
        lambda config: config.pipeline.gpu_memory_limit is not None and config.pipeline.device is Device.CPU,
        "`--gpu_memory_limit` {gpu_memory_limit:g} has no effect with `--device cpu`; remove one of them",
    ),
    (
        "probe_topology device",
        lambda config: config.pipeline.probe_topology and config.pipeline.device is Device.CPU,
        "`--probe_topology` has no effect with `--device cpu`; remove one of them",
    ),
    (
        "probe_topology cross_mapping",
        lambda config: config.pipeline.probe_topology and not config.pipeline.cross_mapping,
        "`--probe_topology` has no effect with `--no_cross_mapping`; remove one of them",
    ),
    (
        "recompute use_offload resident_stages",
        lambda config: (
            config.pipeline.recompute is Recompute.NONE
            and config.pipeline.use_offload
            and config.pipeline.resident_stages != "all"
        ),
        "`--recompute none` needs a layer's weights until its backward, but with `--use_offload` they leave the GPU; "
        "use --no_offload, or --recompute auto",
    ),
    (
        "resident_stages",
        lambda config: (
            config.pipeline.resident_stages not in ("auto", "all") and config.pipeline.num_resident_stages is None
        ),
        "`--resident_stages` {resident_stages!r} is not a number of stages; write auto, all, or a number from 0 on",
    ),
    (
        "resident_stages use_offload",
        lambda config: config.pipeline.resident_stages not in ("auto", "all") and not config.pipeline.use_offload,
        "`--resident_stages` {resident_stages} says that other stages are streamed, but with `--no_offload` all stages "
        "stay on the GPU; remove one of them",
    ),
    (
        "profile_steps",
        lambda config: config.output.profile_steps is not None and not any(config.output.profiled_steps[:1]),
        "`--profile_steps` {profile_steps!r} is no step or range of steps; write numbers from 1 on, such as 3 or 3-4",
    ),
    (
        "profile_steps num_iterations",
        lambda config: (
            any(config.output.profiled_steps[:1]) and config.output.profiled_steps[-1] > config.optim.num_iterations
        ),
        "`--profile_steps` {profile_steps} is more than the run has; use steps 1 to {num_iterations}, or more "
        "`--num_iterations`",
    ),
    (
        "cuda_visible_devices",
        lambda config: not _is_device_list(config.launch.cuda_visible_devices),
        "`--cuda_visible_devices` {cuda_visible_devices!r} is not a list of different GPUs; write their numbers, such "
        "as 0,2,1,3",
    ),
    (
        "dry_run plan",
        lambda config: config.planning.dry_run and config.planning.plan is not None,
        "`--dry_run` makes a plan and `--plan` takes one; leave one of them out",
    ),
    (
        "dry_run num_ranks",
        lambda config: not config.planning.dry_run and config.planning.num_ranks is not None,
        "`--num_ranks` has no effect without `--dry_run`: a run has the ranks and GPUs that it is started with",
    ),
    (
        "dry_run card",
        lambda config: not config.planning.dry_run and config.planning.card is not None,
        "`--card` has no effect without `--dry_run`: a run has the ranks and GPUs that it is started with",
    ),
)
"""Options, what must not be true of them, and what is then said, with their values filled in."""
