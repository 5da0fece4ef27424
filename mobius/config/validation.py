"""Validation of a config: each value for itself, values together, and options without effect, all problems at once.

Rules that depend on the model, the data or the machine are checked where those are known.
"""

import errno
import math
import os
import typing
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final

from mobius.config.config import Config, Datasets, EvalStrategy, SaveStrategy, steps_between
from mobius.config.lr_schedules import find_decay_conflict, find_scheduler_conflicts
from mobius.config.options import Option, OptionValue, config_from, dataset_spellings, option_values, options
from mobius.errors import ConfigError, first_line
from mobius.excerpt import excerpt, quoted

_STEP_TOKENS: Final = 2**30
"""A batch holds 16 bytes per token on every rank."""
_SCHEDULE_PARTS: Final = 2**15
"""Each is an action of a schedule that is built and simulated some times before a run: seconds, and 200 MiB."""
_MOST_DATASETS: Final = 1000
_MOST_SHOWN: Final = 5
MUTUALLY_EXCLUSIVE: Final = (("num_iterations", "num_train_epochs"), ("val_size", "eval_dataset"))
"""Pairs of options of which a run takes one."""

IsExempt = Callable[[str, Iterable[str]], bool]
"""Whether an option may be without effect, given the options that make the mode."""
_Conflicts = Iterator[tuple[str, str]]
"""Options that a broken rule is about, with spaces, and the line that says how they break it."""


def none_exempt(option: str, mode_options: Iterable[str]) -> bool:
    """Excuse of no option."""
    return False


def exempt_file_options(typed: Collection[str]) -> IsExempt:
    """Excuse of options of a file that have no effect in a mode that is `typed`."""
    return lambda option, mode_options: option not in typed and any(name in typed for name in mode_options)


def validate(config: Config, num_ranks: int, num_replicas: int = 1, *, is_exempt: IsExempt = none_exempt) -> None:
    """Check everything that can be known before the model is read; raises ConfigError with all problems.

    `is_exempt` is that of `find_problems`.
    """
    if problems := find_problems(config, num_ranks=num_ranks, num_replicas=num_replicas, is_exempt=is_exempt):
        raise ConfigError(*problems)


def resolve_epochs(config: Config, num_steps: int) -> Config:
    """Put the number of steps, which follows from the data, into the config; `num_train_epochs` stays for the record.

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
    o = SimpleNamespace(**option_values(usable), pipeline_size=num_ranks, num_replicas=num_replicas)
    shown = {name: excerpt(value) if isinstance(value, str) else value for name, value in vars(o).items()}
    broken = chain(
        ((rule.names, rule.text.format_map(shown)) for rule in _RULES if rule.is_broken(o)),
        _find_size_conflicts(o),
        _find_other_conflicts(o),
        find_scheduler_conflicts(o.lr_scheduler_type, o.lr_scheduler_kwargs or (), learning_rate=o.learning_rate),
        () if o.num_train_epochs is not None else _find_step_conflicts(usable),
    )
    for names, problem in broken:
        if doubtful.isdisjoint(involved := names.split()):
            problems.append(problem)
            reported.update(involved)
    doubtful |= reported  # one line for one mistake
    return problems + [text for name, text in _find_ineffective_options(o, doubtful, is_exempt)]


def _find_ineffective_options(o: SimpleNamespace, doubtful: set[str], is_exempt: IsExempt) -> _Conflicts:
    """Options that ask for something in a mode in which they have no effect.

    Dry runs and previews look at a run and take all of its options.
    """
    for name, option in options().items():
        for need in option.rules.needs if asks(name, getattr(o, name)) else ():
            by = need.decided_by.split()
            if need.is_met(o) or not doubtful.isdisjoint([name, *by]):
                continue
            if need.is_strict or not is_exempt(name, by):
                remedy = f"remove it, or {need.instead}" if need.instead else "remove it"
                yield name, f"`--{name}` has no effect {need.otherwise}; {remedy}"
                break


def asks(name: str, value: OptionValue) -> bool:
    """Whether a value asks for something that the default does not do; switching off what is off asks for nothing."""
    return value != options()[name].default and bool(value) and str(value) not in ("no", "off", "none")


def _value_problems(option: Option, value: OptionValue) -> list[str]:
    """Lines about a value that is wrong for itself."""
    place = f"`--{option.name}`"
    if not option.is_list or value is None:
        return list(_value_problem(option, value, place))
    entries, found = typing.cast(Datasets, value), list[str]()
    if len(entries) > _MOST_DATASETS:
        return [f"{place} names more than {_MOST_DATASETS} datasets; give a folder that holds the files"]
    for entry in entries:
        if option.name == "eval_dataset" and entry.weight != 1:
            detail = f"has the weight {entry.weight:g}, but each sample is evaluated once; leave the weight out"
            found.append(f"{place} {quoted(entry.name)} {detail}")
            continue
        for key, own in ((key, spelling.option) for key, spelling in dataset_spellings().items()):
            at = place if key == "path" else f"{place} {quoted(entry.name)}: its {key}"
            if problem := list(_value_problem(own, getattr(entry, own.name), at)):
                found += problem
                break
    return found[:_MOST_SHOWN]


def _value_problem(option: Option, value: object, place: str) -> Iterator[str]:
    if isinstance(value, int | float) and option.bounds and not option.bounds.allow(value):
        number = excerpt(str(value)) if isinstance(value, int) else f"{value:g}"
        yield f"{place} is {number}; it must be {option.bounds.demand(value)}"
    if not isinstance(value, str):
        return
    if option.rules.form is not None and not option.rules.form[0](value):
        yield f"{place} is {quoted(value)}; write {option.rules.form[1]}"
    if option.is_name and (reason := _unusable_name(value)):
        yield f"{place} {quoted(value)} {reason}"


def _unusable_name(name: str) -> str | None:
    """The reason why no file can have this name, whatever is on the disk."""
    try:
        os.lstat(Path(name).expanduser())
    except ValueError as error:  # a NUL, or half of a character
        return f"is no name that a file can have: {first_line(error)}"
    except RuntimeError:
        return "begins with the home of a user that there is not; write ./ before it if it is a file's name"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"is too long: {len(name)} characters"
    return None


@dataclass(frozen=True)
class _Rule:
    """Options that do not go together. `o` has all values, which `text` may name; see `config.py` for both."""

    names: str
    is_broken: Callable[[Any], object]
    text: str


def _saves_activations(o: Any) -> bool:
    return bool(o.recompute.saves_activations)


_RULES: Final = (
    _Rule(
        "num_iterations num_train_epochs",
        lambda o: o.num_iterations is not None and o.num_train_epochs is not None,
        "`--num_iterations` {num_iterations} and `--num_train_epochs` {num_train_epochs:g} both end a run; remove one",
    ),
    _Rule(
        "val_size eval_dataset",
        lambda o: o.val_size and o.eval_dataset is not None,
        "`--val_size` {val_size:g} holds samples out of training and `--eval_dataset` names others; remove one of them",
    ),
    _Rule(
        "train_on_prompt mask_history",
        lambda o: o.train_on_prompt and o.mask_history,
        "`--train_on_prompt` trains on a whole conversation, `--mask_history` on its last answer; remove one of them",
    ),
    _Rule(
        "preview dry_run",
        lambda o: o.preview is not None and o.dry_run,
        "`--preview` shows the data and `--dry_run` plans a run, each by itself; remove one of them",
    ),
    _Rule(
        "dry_run plan",
        lambda o: o.dry_run and o.plan is not None,
        "`--dry_run` makes a plan and `--plan` takes one; leave one of them out",
    ),
    _Rule(
        "dry_run resume_from_checkpoint",
        lambda o: o.dry_run and o.resume_from_checkpoint is not None,
        "`--dry_run` plans a run that starts anew, `--resume_from_checkpoint` takes a saved plan; remove one",
    ),
    _Rule(
        "num_slices recompute",
        lambda o: (o.num_slices or 1) > 1 and _saves_activations(o),
        "`--num_slices` {num_slices} recomputes each slice, `--recompute {recompute}` does not; use --recompute auto",
    ),
    _Rule(
        "recompute use_offload resident_stages",
        lambda o: _saves_activations(o) and o.use_offload and o.resident_stages != "all",
        "`--recompute {recompute}` needs weights on the GPU until backward; use --no_offload, or --recompute auto",
    ),
    _Rule(
        "recompute activation_offloading",
        lambda o: _saves_activations(o) and o.activation_offloading == "on",
        "`--activation_offloading on` needs recomputed layers, which `--recompute {recompute}` rules out; use auto",
    ),
    _Rule(
        "recompute tile_tokens",
        lambda o: _saves_activations(o) and o.tile_tokens not in ("auto", "off"),
        "`--tile_tokens` {tile_tokens} is for recomputed layers; with `--recompute {recompute}` none is; remove one",
    ),
    _Rule(
        "resident_stages use_offload",
        lambda o: o.resident_stages not in ("auto", "all") and not o.use_offload,
        "`--resident_stages` {resident_stages} streams the other stages, `--no_offload` none; remove one of them",
    ),
    _Rule(
        "do_train do_eval do_predict",
        lambda o: not (o.do_train or o.do_eval or o.do_predict),
        "`--no_do_train` leaves nothing to do; add --do_eval or --do_predict",
    ),
    _Rule(
        "do_train resume_from_checkpoint",
        lambda o: not o.do_train and o.resume_from_checkpoint is not None,
        "`--no_do_train` evaluates --model_path; give it the folder of `--resume_from_checkpoint` and leave that out",
    ),
    _Rule(
        "load_best_model_at_end save_strategy save_steps eval_strategy eval_steps",
        lambda o: o.load_best_model_at_end and o.eval_strategy != "no" and not _may_save_what_is_evaluated(o),
        "`--load_best_model_at_end` needs each checkpoint evaluated when it is saved; use the same words for "
        "--save_strategy and --eval_strategy, and a --save_steps that is a multiple of --eval_steps",
    ),
    _Rule(
        "do_predict merge",
        lambda o: o.finetuning_type == "lora" and o.do_train and o.do_predict and not o.merge,
        "`--do_predict` answers by a whole model, which adapters are none of; add --merge",
    ),
    _Rule(
        "finetuning_type do_train",
        lambda o: o.finetuning_type == "lora" and not o.do_train,
        "`--finetuning_type lora` trains, `--no_do_train` does not; merge an adapter first (scripts/merge_adapter.py)",
    ),
)
_CUTS: Final = (
    ("batch_size", "num_chunks", "microbatches"),
    ("batch_size", "num_rounds", "rounds"),
    ("num_chunks", "num_rounds", "rounds"),
    ("seq_length", "num_slices", "slices"),
    ("embedding_dim", "num_heads", "heads"),
)
"""Numbers of which the first must be a multiple of the second."""


def _may_save_what_is_evaluated(o: Any) -> bool:
    """Whether each checkpoint is evaluated, as far as that is known before the number of steps."""
    is_multiple = o.save_strategy == "epoch" or min(o.save_steps, o.eval_steps) < 1 or o.save_steps % o.eval_steps == 0
    return bool(o.save_strategy == o.eval_strategy and is_multiple)


def _find_size_conflicts(o: Any) -> _Conflicts:
    for whole_name, part_name, noun in _CUTS:
        whole, part = getattr(o, whole_name), getattr(o, part_name)
        is_ruled = o.plan is None or part_name == "num_heads"  # else the numbers come from the plan
        is_indirect = (whole_name, part_name) == ("batch_size", "num_rounds") and o.num_chunks is not None
        if is_ruled and not is_indirect and whole is not None and part is not None and whole % part:
            yield (
                f"{whole_name} {part_name} plan",
                f"`--{whole_name}` {whole} cannot be cut into `--{part_name}` {part} equal {noun}; use --{part_name} "
                f"{_nearest(part, _divisors(whole))}, or --{whole_name} {_nearest_multiple(whole, part)}",
            )
    if o.plan is not None:
        return
    if o.batch_size * o.seq_length > _STEP_TOKENS:
        yield (
            "batch_size seq_length plan",
            f"`--batch_size` {o.batch_size} of `--seq_length` {o.seq_length} are {o.batch_size * o.seq_length} tokens "
            f"per step; at most {_STEP_TOKENS} can be; lower one of them",
        )
    numbers = {"num_stages": o.num_stages or 1, "num_chunks": o.num_chunks or 1, "num_slices": o.num_slices or 1}
    if (parts := math.prod(numbers.values())) > _SCHEDULE_PARTS:
        given = " of ".join(f"`--{name}` {number}" for name, number in numbers.items() if number > 1)
        yield (
            "num_stages num_chunks num_slices plan",
            f"{given} are {parts} forwards and as many backwards per step; at most {_SCHEDULE_PARTS} can be planned; "
            "lower one of them",
        )
    if o.pipeline_size is not None and o.num_stages is not None and o.num_stages % o.pipeline_size:
        yield (
            "num_stages plan",
            f"`--num_stages` {o.num_stages} is not a multiple of the number of ranks, {o.pipeline_size}; use "
            f"--num_stages {_nearest_multiple(o.num_stages, o.pipeline_size)}, or another number of ranks "
            "(--nproc_per_node)",
        )
    chunks = o.num_chunks or 1
    if o.num_replicas > 1 and o.batch_size % (parts := o.num_replicas * chunks):
        each = f" of {chunks} microbatches each (--num_chunks)" if chunks > 1 else ""
        yield (
            "batch_size num_chunks pipeline_ranks plan",
            f"`--batch_size` {o.batch_size} cannot be shared by {o.num_replicas} replicas{each}: it must be a multiple "
            f"of {parts}; use --batch_size {_nearest_multiple(o.batch_size, parts)}, or another number of nodes or "
            "microbatches",
        )


def _find_other_conflicts(o: Any) -> _Conflicts:
    evaluating = ("eval_strategy", "eval_on_start", "do_eval", "do_predict")
    if (
        not o.val_size
        and o.eval_dataset is None
        and (name := next((n for n in evaluating if asks(n, getattr(o, n))), ""))
    ):
        detail = (
            "has nothing to evaluate on; add --eval_dataset, or --val_size to hold samples out of the training data"
        )
        yield f"{name} val_size eval_dataset", f"`--{name}` {detail}"
    outputs = ("save_params", "save_results", "save_dir")
    for name, other in combinations(outputs, 2):
        if PurePath(getattr(o, name)) == PurePath(getattr(o, other)):
            detail = f"are both {quoted(getattr(o, name))}; give them different names"
            yield " ".join(outputs), f"`--{name}` and `--{other}` {detail}"
            break
    for name in (word.strip() for word in (o.resume_changes or "").split(",")):
        if name and name not in options():
            detail = f"names {quoted(name)}, which is no option; name options as they are typed, without dashes"
            yield "resume_changes", f"`--resume_changes` {detail}"

    if o.node_rank is not None and o.node_rank >= o.nnodes:
        detail = f"nodes are numbered from 0, and there are {o.nnodes} (`--nnodes`); use one below that"
        yield "node_rank nnodes", f"`--node_rank` {o.node_rank}: {detail}"
    for name in ("node_rank", "rdzv_endpoint"):
        if o.nnodes > 1 and not o.dry_run and getattr(o, name) is None:
            yield f"nnodes {name}", f"`--nnodes` {o.nnodes} needs `--{name}` on each node; add it (--help)"


def _find_step_conflicts(config: Config) -> _Conflicts:
    """Rules about a number of steps that is known."""
    optim, steps, profiled = config.optim, config.optim.num_steps, config.output.profiled_steps
    length, given = "num_iterations", f"`--num_iterations` {steps}"
    if optim.num_train_epochs is not None:
        length, given = "num_train_epochs", f"the {steps} steps of `--num_train_epochs` {optim.num_train_epochs:g}"
    if steps < optim.warmup_steps == int(optim.warmup_steps):
        detail = f"is more than {given}; use at most {steps}"
        yield "warmup_steps num_iterations num_train_epochs", f"`--warmup_steps` {optim.warmup_steps:g} {detail}"
    arguments, num_warmup_steps = optim.schedule_arguments, optim.num_warmup_steps
    if problem := find_decay_conflict(arguments, num_steps=steps, num_warmup_steps=num_warmup_steps):
        yield "lr_scheduler_type lr_scheduler_kwargs warmup_steps num_iterations num_train_epochs", problem
    if any(profiled[:1]) and profiled[-1] > steps:
        detail = f"is more than the run has; use steps 1 to {steps}, or more `--{length}`"
        shown = excerpt(str(config.output.profile_steps))
        yield "profile_steps num_iterations num_train_epochs", f"`--profile_steps` {shown} {detail}"
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


def infer_eval_strategy(config: Config, given: Iterable[str]) -> tuple[Config, str | None]:
    """The config with the --eval_strategy that the given options mean where it is not given, and a line that says so.

    Steps for --eval_steps, epochs for data to evaluate on that nothing else uses.
    """
    evaluation, data = config.evaluation, config.data
    is_chosen = "eval_strategy" in set(given) or evaluation.eval_strategy is not EvalStrategy.NO
    has_data = bool(data.val_size) or data.eval_dataset is not None
    # The best model needs a strategy that goes with the saves.
    if is_chosen or not evaluation.do_train or evaluation.load_best_model_at_end or not has_data:
        return config, None
    if asks("eval_steps", evaluation.eval_steps):
        strategy, source, meaning = EvalStrategy.STEPS, "eval_steps", f"every {evaluation.eval_steps:g} steps"
        if evaluation.eval_steps < 1:
            meaning = f"after every {evaluation.eval_steps:g} of the run"
    elif not (evaluation.evaluates or evaluation.predicts):
        source = "eval_dataset" if data.eval_dataset is not None else "val_size"
        strategy, meaning = EvalStrategy.EPOCH, "at the end of each epoch and of the run"
    else:
        return config, None
    detail = f"the model is evaluated {meaning}, as with --eval_strategy {strategy}"
    line = f"`--{source}` without `--eval_strategy`: {detail}"
    return replace(config, evaluation=replace(evaluation, eval_strategy=strategy)), line


def find_ineffective_launch_options(
    config: Config, typed: Container[str], *, num_ranks: int, num_nodes: int, devices: str | None
) -> tuple[list[str], list[str]]:
    """Problems of typed options and notices of a file's that only train.sh reads, for ranks that were started without.

    The file's are silent where the start is as they say; `devices` is CUDA_VISIBLE_DEVICES.
    """
    if config.planning.dry_run or config.data.preview is not None:
        return [], []
    values = {field.name: getattr(config.launch, field.name) for field in fields(config.launch)}
    as_started = {"nproc_per_node": num_ranks // num_nodes, "nnodes": num_nodes, "cuda_visible_devices": devices}
    asked = {name: value for name, value in values.items() if name != "pipeline_ranks" and asks(name, value)}
    problems = [
        f"`--{name}` has no effect on ranks that are already started; remove it and start with `bash train.sh`, or "
        + (
            f"write CUDA_VISIBLE_DEVICES={value} before the command"
            if name == "cuda_visible_devices"
            else f"give --{name} to torchrun, before main.py"
        )
        for name, value in asked.items()
        if name in typed
    ]
    others = [
        f"{name}: {value}" for name, value in asked.items() if name not in typed and value != as_started.get(name)
    ]
    notice = f"the file's {', '.join(others)} is for `bash train.sh`, and the ranks were started without it"
    return problems, [notice] if others else []


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in small)]


def _nearest_multiple(value: int, divisor: int) -> str:
    lower = value // divisor * divisor
    return _nearest(value, [lower, lower + divisor])


def _nearest(value: int, valid: Iterable[int]) -> str:
    """The valid numbers next to `value`, below and above it, as it reads in a message."""
    numbers = [number for number in valid if number > 0]
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)
