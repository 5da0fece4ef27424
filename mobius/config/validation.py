"""Owns whether the values of a config are allowed, each for itself and all together.

What depends on the model, the data or the machine is checked where that is known.
"""

import math
import os
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations, islice
from pathlib import Path, PurePath
from typing import Final

from mobius.config.adapter_rules import find_adapter_conflicts
from mobius.config.config import TRACKERS, ActivationOffloading, Config, DatasetEntry, Datasets, Device
from mobius.config.ineffective_options import IsExempt, find_ineffective_options, none_exempt
from mobius.config.lr_schedules import find_decay_conflict, find_scheduler_conflicts
from mobius.config.options import Option, OptionValue, config_from, dataset_spellings, option_values, options
from mobius.config.replica_rules import find_replica_conflicts
from mobius.config.saving_evaluation import EvalStrategy, SaveStrategy, steps_between
from mobius.errors import ConfigError
from mobius.excerpt import excerpt, quoted

_NAME_BYTES, _PATH_BYTES = 255, 4095
"""Longest name of a file, and longest path, that Linux takes."""
_STEP_TOKENS: Final = 2**30
"""A batch holds 16 bytes per token on every rank."""
_SCHEDULE_PARTS: Final = 2**15
"""Each is an action of a schedule that is built and simulated some times before a run: seconds, and 200 MiB."""
_MOST_DATASETS: Final = 1000
_MOST_SHOWN: Final = 5
MUTUALLY_EXCLUSIVE: Final = (("num_iterations", "num_train_epochs"), ("val_size", "eval_dataset"))
"""Pairs of options of which a run takes one."""
_DEVICE: Final = re.compile(r"\d{1,4}|(GPU|MIG)-[\w/-]{1,80}", re.ASCII)


def validate(config: Config, num_ranks: int, num_replicas: int = 1, *, is_exempt: IsExempt = none_exempt) -> None:
    """Check everything that can be known before the model is read; raises ConfigError with all problems.

    `is_exempt` is that of `find_problems`.
    """
    if problems := find_problems(config, num_ranks=num_ranks, num_replicas=num_replicas, is_exempt=is_exempt):
        raise ConfigError(*problems)


def resolve_epochs(config: Config, num_steps: int) -> Config:
    """Put the number of steps, which the data told, into the config; `num_train_epochs` stays for the record.

    Raises ConfigError for what does not fit into so many steps.
    """
    config = replace(config, optim=replace(config.optim, num_iterations=num_steps))
    if problems := [problem for _, problem in _find_step_conflicts(config)]:
        raise ConfigError(*problems)
    return config


def find_problems(
    config: Config,
    *,
    num_ranks: int | None = None,
    num_replicas: int = 1,
    invalid_options: Iterable[str] = (),
    is_exempt: IsExempt = none_exempt,
) -> list[str]:
    """All problems, each as one line; without `num_ranks`, those of a pipeline, what depends on it is left out.

    `invalid_options` names options whose values are only stand-ins: no rule that involves one of them is applied.
    `is_exempt` says of an option without effect, and of those that make it so, whether that is no mistake.
    """
    doubtful, reported = set(invalid_options), set[str]()
    problems: list[str] = []
    for name, value in (values := option_values(config)).items():
        if name not in doubtful and (found := _value_problems(options()[name], value)):
            problems += found
            doubtful.add(name)
    usable = config_from({name: value for name, value in values.items() if name not in doubtful})
    broken = chain(
        _find_size_conflicts(usable, num_ranks),
        _find_name_conflicts(usable),
        _find_choice_conflicts(usable),
        _find_data_conflicts(usable),
        find_scheduler_conflicts(
            usable.optim.lr_scheduler_type,
            usable.optim.lr_scheduler_kwargs or (),
            learning_rate=usable.optim.learning_rate,
        ),
        _find_saving_conflicts(usable),
        _find_evaluation_conflicts(usable),
        find_adapter_conflicts(usable),
        find_replica_conflicts(usable, num_replicas),
        () if usable.optim.num_train_epochs is not None else _find_step_conflicts(usable),
    )
    for names, problem in broken:
        if doubtful.isdisjoint(involved := names.split()):
            problems.append(problem)
            reported.update(involved)
    idle = find_ineffective_options(usable, num_ranks=num_ranks, num_replicas=num_replicas)
    doubtful |= reported  # one line for one mistake
    for name, by, text in idle:
        if doubtful.isdisjoint([name, *by]) and not is_exempt(name, by):
            problems.append(text)
            doubtful.add(name)
    return problems


def _value_problems(option: Option, value: OptionValue) -> list[str]:
    """Lines about a value that is wrong for itself."""
    if not option.is_list or value is None:
        return [problem] if (problem := _value_problem(option, value, f"`--{option.name}`")) else []
    entries = typing.cast(Datasets, value)
    if len(entries) > _MOST_DATASETS:
        told = f"names {len(entries)} datasets; {_MOST_DATASETS} can be mixed. Give a folder that holds the files"
        return [f"`--{option.name}` {told}"]
    found = (_entry_problem(option, entry) for entry in entries)
    return list(islice((problem for problem in found if problem), _MOST_SHOWN))


def _entry_problem(option: Option, entry: DatasetEntry) -> str | None:
    """A line about the first value of a dataset that is wrong for itself."""
    if option.name == "eval_dataset" and entry.weight != 1:
        told = f"has the weight {entry.weight:g}, but each sample is evaluated once; leave the weight out"
        return f"`--{option.name}` {quoted(entry.name)} {told}"
    for key, spelling in dataset_spellings().items():
        place = f"`--{option.name}`" + ("" if key == "path" else f" {quoted(entry.name)}: its {key}")
        if problem := _value_problem(spelling.option, getattr(entry, spelling.option.name), place):
            return problem
    return None


def _value_problem(option: Option, value: object, place: str) -> str | None:
    if isinstance(value, int | float) and option.bounds and not option.bounds.allow(value):
        shown = excerpt(str(value)) if isinstance(value, int) else f"{value:g}"
        return f"{place} is {shown}; it must be {option.bounds.demand(value)}"
    if isinstance(value, str) and option.is_name and (reason := _unusable_name(value)):
        return f"{place} {quoted(value)} {reason}"
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
        parts = f"its longest part has {longest} bytes of at most {_NAME_BYTES}"
        return f"is too long: {parts}, the whole {whole} of at most {_PATH_BYTES}"
    return None


_Conflicts = Iterator[tuple[str, str]]
"""Options that a broken rule is about, and the line that says how they break it."""


def _find_size_conflicts(config: Config, num_ranks: int | None) -> _Conflicts:
    batch, chunks, stages = config.pipeline.batch_size, config.pipeline.num_chunks, config.pipeline.num_stages
    length, width, heads = config.data.seq_length, config.model.embedding_dim, config.model.num_heads
    is_planned = config.planning.plan is not None  # then these come from the plan
    if chunks is not None and batch % chunks and not is_planned:
        small = [number for number in range(1, math.isqrt(batch) + 1) if batch % number == 0]
        near_chunks = _nearest(chunks, [*small, *(batch // number for number in small)])
        yield (
            "batch_size num_chunks plan",
            f"`--batch_size` {batch} cannot be cut into `--num_chunks` {chunks} equal microbatches; "
            f"use --num_chunks {near_chunks}, or --batch_size {_nearest_multiple(batch, chunks)}",
        )
    rounds = config.pipeline.num_rounds
    if chunks is None and rounds is not None and batch % rounds and not is_planned:
        yield (
            "batch_size num_rounds plan",
            f"`--batch_size` {batch} cannot be cut into `--num_rounds` {rounds} equal rounds; use --batch_size "
            f"{_nearest_multiple(batch, rounds)}, or another number of rounds",
        )
    if chunks is not None and rounds is not None and chunks % rounds and not is_planned:
        possible = _nearest(rounds, [number for number in range(1, chunks + 1) if chunks % number == 0])
        yield (
            "num_chunks num_rounds plan",
            f"`--num_chunks` {chunks} microbatches cannot be played in `--num_rounds` {rounds} equal rounds; use "
            f"--num_rounds {possible}, or --num_chunks {_nearest_multiple(chunks, rounds)}",
        )
    slices = config.pipeline.num_slices
    if slices is not None and length % slices and not is_planned:
        possible = _nearest(slices, [number for number in range(1, length + 1) if length % number == 0])
        yield (
            "seq_length num_slices plan",
            f"`--seq_length` {length} cannot be cut into `--num_slices` {slices} equal slices; use --num_slices "
            f"{possible}, or --seq_length {_nearest_multiple(length, slices)}",
        )
    recompute = config.pipeline.recompute
    if slices is not None and slices > 1 and recompute.saves_activations:
        told = f"`--num_slices` {slices} recomputes each slice, which `--recompute {recompute}` rules out"
        yield "num_slices recompute", f"{told}; use --recompute auto"
    if batch * length > _STEP_TOKENS and not is_planned:
        yield (
            "batch_size seq_length plan",
            f"`--batch_size` {batch} of `--seq_length` {length} are {batch * length} tokens per step; at most "
            f"{_STEP_TOKENS} can be; lower one of them",
        )
    known = {"num_stages": stages, "num_chunks": chunks, "num_slices": slices if slices != 1 else None}
    parts = math.prod(number or 1 for number in known.values())
    if parts > _SCHEDULE_PARTS and not is_planned:
        given = [f"`--{name}` {number}" for name, number in known.items() if number is not None]
        yield (
            "num_stages num_chunks num_slices plan",
            f"{' of '.join(given)} are {parts} forwards and as many backwards per step; at most {_SCHEDULE_PARTS} can "
            "be planned; lower one of them",
        )
    if width is not None and heads is not None and width % heads:
        yield (
            "embedding_dim num_heads",
            f"`--embedding_dim` {width} is not a multiple of `--num_heads` {heads}; use --embedding_dim "
            f"{_nearest_multiple(width, heads)}",
        )
    if num_ranks is not None and stages is not None and stages % num_ranks and not is_planned:
        yield (
            "num_stages plan",
            f"`--num_stages` {stages} is not a multiple of the number of ranks, {num_ranks}; use --num_stages "
            f"{_nearest_multiple(stages, num_ranks)}, or another number of ranks (--nproc_per_node)",
        )


def _find_name_conflicts(config: Config) -> _Conflicts:
    outputs = {name: getattr(config.output, name) for name in ("save_params", "save_results", "save_dir")}
    for (name, path), (other_name, other_path) in combinations(outputs.items(), 2):
        if PurePath(path) == PurePath(other_path):
            told = f"`--{name}` and `--{other_name}` are both {quoted(path)}; give them different names"
            yield " ".join(outputs), told
            break
    pipeline, steps = config.pipeline, config.output.profile_steps
    if (resident := pipeline.resident_stages) not in ("auto", "all") and pipeline.num_resident_stages is None:
        told = f"{quoted(resident)} is not a number of stages; write auto, all, or a number from 0 on"
        yield "resident_stages", f"`--resident_stages` {told}"
    if (tile := pipeline.tile_tokens) not in ("auto", "off") and not pipeline.num_tile_tokens:
        told = f"{quoted(tile)} is not a number of tokens; write auto, off, or a number from 1 on"
        yield "tile_tokens", f"`--tile_tokens` {told}"
    if unknown := [word for word in config.output.trackers if word not in TRACKERS]:
        told = f"{quoted(config.output.report_to)} names {quoted(unknown[0])}; write none, or with commas any of "
        yield "report_to", f"`--report_to` {told}{', '.join(TRACKERS)}"
    if steps is not None and not any(config.output.profiled_steps[:1]):
        told = f"{quoted(steps)} is no step or range of steps; write numbers from 1 on, such as 3 or 3-4"
        yield "profile_steps", f"`--profile_steps` {told}"
    for name, number, unit in (
        ("warmup_steps", config.optim.warmup_steps, "steps, or a number below 1 for a share of the run"),
        ("val_size", config.data.val_size, "samples, or a number below 1 for a share of the data"),
        ("save_steps", config.saving.save_steps, "steps, or a number below 1 for a share of the run"),
        ("eval_steps", config.evaluation.eval_steps, "steps, or a number below 1 for a share of the run"),
    ):
        if 1 < number != int(number):
            yield name, f"`--{name}` is {number:g}; use a whole number of {unit}"
    devices = config.launch.cuda_visible_devices
    names = [] if devices is None else [name.strip() for name in devices.split(",")]
    if len(set(names)) < len(names) or not all(_DEVICE.fullmatch(name) for name in names):
        told = f"{quoted(devices)} is not a list of different GPUs; write their numbers, such as 0,2,1,3"
        yield "cuda_visible_devices", f"`--cuda_visible_devices` {told}"


def _find_choice_conflicts(config: Config) -> _Conflicts:
    pipeline, planning = config.pipeline, config.planning
    is_cpu, resident = pipeline.device is Device.CPU, pipeline.resident_stages
    if pipeline.gpu_memory_limit is not None and is_cpu:
        told = f"`--gpu_memory_limit` {pipeline.gpu_memory_limit:g} has no effect with `--device cpu`"
        yield "gpu_memory_limit device", f"{told}; remove one of them"
    recompute = f"`--recompute {pipeline.recompute}`"
    if pipeline.recompute.saves_activations and pipeline.use_offload and resident != "all":
        yield (
            "recompute use_offload resident_stages",
            f"{recompute} needs a layer's weights until its backward, but with `--use_offload` they leave the GPU; use "
            "--no_offload, or --recompute auto",
        )
    if pipeline.recompute.saves_activations and pipeline.activation_offloading is ActivationOffloading.ON:
        yield (
            "recompute activation_offloading",
            "`--activation_offloading on` sends inputs that backward recomputes from to the host, and with "
            f"{recompute} it does not; use --recompute auto, or --activation_offloading auto",
        )
    if pipeline.recompute.saves_activations and pipeline.num_tile_tokens:
        told = f"`--tile_tokens` {excerpt(pipeline.tile_tokens)} is for layers that are recomputed"
        yield "recompute tile_tokens", f"{told}, and with {recompute} none is; remove one of them"
    if resident not in ("auto", "all") and not pipeline.use_offload:
        yield (
            "resident_stages use_offload",
            f"`--resident_stages` {excerpt(resident)} says that other stages are streamed, but with `--no_offload` all "
            "stages stay on the GPU; remove one of them",
        )
    if planning.dry_run and planning.plan is not None:
        yield "dry_run plan", "`--dry_run` makes a plan and `--plan` takes one; leave one of them out"


def _find_data_conflicts(config: Config) -> _Conflicts:
    data, optim = config.data, config.optim
    if optim.num_iterations is not None and optim.num_train_epochs is not None:
        yield (
            "num_iterations num_train_epochs",
            f"`--num_iterations` {optim.num_iterations} and `--num_train_epochs` {optim.num_train_epochs:g} both say "
            "how long to train; remove one of them",
        )
    if data.val_size and data.eval_dataset is not None:
        yield (
            "val_size eval_dataset",
            f"`--val_size` {data.val_size:g} holds samples out of training and `--eval_dataset` names others; remove "
            "one of them",
        )
    if data.train_on_prompt and data.mask_history:
        yield (
            "train_on_prompt mask_history",
            "`--train_on_prompt` trains on all of a conversation and `--mask_history` on its last answer only; remove "
            "one of them",
        )
    if data.preview is not None and config.planning.dry_run:
        told = "`--preview` shows the data and `--dry_run` plans a run, each by itself; remove one of them"
        yield "preview dry_run", told


def _find_saving_conflicts(config: Config) -> _Conflicts:
    saving = config.saving
    if saving.resume_changes is not None:
        if saving.resume_from_checkpoint is None:
            told = "has no effect without `--resume_from_checkpoint`; remove it, or add that"
            yield "resume_changes resume_from_checkpoint", f"`--resume_changes` {told}"
        for name in saving.changes:
            if name not in options():
                told = f"names {quoted(name)}, which is no option; name options as they are typed, without dashes"
                yield "resume_changes", f"`--resume_changes` {told}"
    if saving.resume_from_checkpoint is not None and config.planning.dry_run:
        told = "`--dry_run` plans a run that starts anew, `--resume_from_checkpoint` takes a saved plan; remove one"
        yield "dry_run resume_from_checkpoint", told


def _find_evaluation_conflicts(config: Config) -> _Conflicts:
    evaluation, saving = config.evaluation, config.saving
    has_data = bool(config.data.val_size) or config.data.eval_dataset is not None
    wanted = [
        *([f"eval_strategy {evaluation.eval_strategy}"] if evaluation.eval_strategy is not EvalStrategy.NO else []),
        *(
            name
            for name in ("eval_on_start", "do_eval", "do_predict", "predict_with_generate")
            if getattr(evaluation, name)
        ),
    ]
    if wanted and not has_data:
        told = "has nothing to evaluate on; add --eval_dataset, or --val_size to hold samples out of the training data"
        yield f"{wanted[0].split()[0]} val_size eval_dataset", f"`--{wanted[0]}` {told}"
    if not evaluation.do_train and not (evaluation.do_eval or evaluation.predicts):
        yield "do_train do_eval do_predict", "`--no_do_train` leaves nothing to do; add --do_eval or --do_predict"
    if not evaluation.do_train and saving.resume_from_checkpoint is not None:
        told = "evaluates the weights of `--model_path`; name the checkpoint's folder there"
        yield "do_train resume_from_checkpoint", f"`--no_do_train` {told}, not by --resume_from_checkpoint"
    if evaluation.eval_strategy is EvalStrategy.NO:
        for name in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(evaluation, name):
                told = "goes by evaluations during training; add --eval_strategy steps or epoch"
                yield f"{name} eval_strategy", f"`--{name}` {told}"
    elif evaluation.load_best_model_at_end and not _may_save_what_is_evaluated(config):
        yield (
            "load_best_model_at_end save_strategy save_steps eval_strategy eval_steps",
            "`--load_best_model_at_end` needs each checkpoint evaluated when it is saved; use the same words for "
            "--save_strategy and --eval_strategy, and a --save_steps that is a multiple of --eval_steps",
        )


def _may_save_what_is_evaluated(config: Config) -> bool:
    """Whether each checkpoint is evaluated, as far as that is known before the number of steps."""
    saving, evaluation = config.saving, config.evaluation
    if saving.save_strategy.value != evaluation.eval_strategy.value:
        return False
    is_share = min(saving.save_steps, evaluation.eval_steps) < 1
    return saving.save_strategy is SaveStrategy.EPOCH or is_share or saving.save_steps % evaluation.eval_steps == 0


def _find_step_conflicts(config: Config) -> _Conflicts:
    """Rules about a number of steps that is known."""
    optim, steps, profiled = config.optim, config.optim.num_steps, config.output.profiled_steps
    length, given = "num_iterations", f"`--num_iterations` {steps}"
    if optim.num_train_epochs is not None:
        length, given = "num_train_epochs", f"the {steps} steps of `--num_train_epochs` {optim.num_train_epochs:g}"
    if steps < optim.warmup_steps == int(optim.warmup_steps):
        told = f"is more than {given}; use at most {steps}"
        yield "warmup_steps num_iterations num_train_epochs", f"`--warmup_steps` {optim.warmup_steps:g} {told}"
    arguments, num_warmup_steps = optim.schedule_arguments, optim.num_warmup_steps
    if problem := find_decay_conflict(arguments, num_steps=steps, num_warmup_steps=num_warmup_steps):
        yield "lr_scheduler_type lr_scheduler_kwargs warmup_steps num_iterations num_train_epochs", problem
    if any(profiled[:1]) and profiled[-1] > steps:
        told = f"is more than the run has; use steps 1 to {steps}, or more `--{length}`"
        shown = excerpt(str(config.output.profile_steps))
        yield "profile_steps num_iterations num_train_epochs", f"`--profile_steps` {shown} {told}"
    saving, evaluation = config.saving, config.evaluation
    is_best, both = evaluation.load_best_model_at_end, (saving.save_steps, evaluation.eval_steps)
    if is_best and saving.save_strategy is SaveStrategy.STEPS and evaluation.eval_strategy is EvalStrategy.STEPS:
        saved, evaluated = (steps_between(every, steps) for every in both)
        if min(both) < 1 and saved % evaluated:
            yield (
                "load_best_model_at_end save_strategy save_steps eval_strategy eval_steps num_iterations",
                f"`--load_best_model_at_end` needs each checkpoint evaluated when it is saved, but of {given} "
                f"`--save_steps` {both[0]:g} are {saved} and `--eval_steps` {both[1]:g} are {evaluated}; use a "
                "--save_steps that is a multiple of --eval_steps in steps, too",
            )


def _nearest_multiple(value: int, divisor: int) -> str:
    lower = value // divisor * divisor
    return _nearest(value, [lower, lower + divisor])


def _nearest(value: int, valid: Iterable[int]) -> str:
    """The valid numbers next to `value`, below and above it, as it reads in a message."""
    numbers = [number for number in valid if number > 0]
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)
