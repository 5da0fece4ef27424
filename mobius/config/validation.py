"""Validation of a config: single values, combinations, and options without effect; all problems are reported at once.

A problem reads `given value: reason; what to change`. Rules that depend on the model, the data or the machine are
checked elsewhere, once these are known.
"""

import errno
import math
import os
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, Final

from mobius.config.config import (
    EVALUATION_DATA,
    PROMPTS,
    Config,
    EvalStrategy,
    SaveStrategy,
    config_from,
    option_values,
    options,
    split_names,
    steps_between,
)
from mobius.config.lr_schedules import find_decay_conflict, find_scheduler_conflicts
from mobius.config.objective import KTO_LOSSES, METRICS, OF_TOKENS
from mobius.config.options import MOST_SHOWN, Datasets, Option, OptionValue, dataset_options
from mobius.errors import ConfigError, Problem, excerpt, first_line, quoted

_OF_PROMPTS: Final = ("sft", "dpo", "simpo")
"""Objectives with which prompts are trained."""
LEAST_TEXT: Final = 2
"""Least number of tokens of a sample in a row."""
_STEP_TOKENS: Final = 2**30
"""Largest number of tokens in a step: every rank keeps 16 bytes for each token of the batch."""
_SCHEDULE_PARTS: Final = 2**15
"""Largest number of forwards in a step: building and simulating its schedule takes some seconds and 200 MiB."""
_MOST_DATASETS: Final = 1000

IsExempt = Callable[[str, Iterable[str]], bool]
"""Function that returns whether to accept an option without effect, given the options that decide the mode."""
_Conflicts = Iterator[tuple[str, str]]
"""Names of the options that violate a rule, separated by spaces, and the error line."""


def validate(config: Config, num_ranks: int, num_replicas: int = 1, *, is_exempt: IsExempt | None = None) -> None:
    """Check everything that does not need the model; raises ConfigError with all problems."""
    if problems := find_problems(config, num_ranks=num_ranks, num_replicas=num_replicas, is_exempt=is_exempt):
        raise ConfigError(*problems)


def resolve_epochs(config: Config, num_steps: int) -> Config:
    """Return the config with the number of steps, which follows from the data; it keeps `num_train_epochs` as a record.

    Raises ConfigError for options that do not fit this number of steps.
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
    is_exempt: IsExempt | None = None,
) -> list[str]:
    """Return all problems, one line each; without `num_ranks` (of a pipeline), rules that need it are skipped.

    `invalid_options` names options with placeholder values: rules that involve one of them are skipped.
    """
    doubtful, reported = set(invalid_options), set[str]()
    problems: list[str] = []
    for name, value in (values := option_values(config)).items():
        if name not in doubtful and (found := _value_problems(options()[name], value)):
            problems += found
            doubtful.add(name)
    usable = config_from({name: value for name, value in values.items() if name not in doubtful})
    o = SimpleNamespace(**option_values(usable), pipeline_size=num_ranks, num_replicas=num_replicas)
    broken = chain(
        _find_rule_conflicts(o),
        _find_size_conflicts(o),
        find_scheduler_conflicts(o.lr_scheduler_type, o.lr_scheduler_kwargs or (), learning_rate=o.learning_rate),
        () if o.num_train_epochs is not None else _find_step_conflicts(usable),
    )
    for names, problem in broken:
        if doubtful.isdisjoint(involved := names.split()):
            problems.append(problem)
            reported.update(involved)
    doubtful |= reported  # report one line per mistake
    return problems + [text for name, text in _find_ineffective_options(o, doubtful, is_exempt)]


def _find_ineffective_options(o: SimpleNamespace, doubtful: set[str], is_exempt: IsExempt | None) -> _Conflicts:
    """Return options that are set although they have no effect in the mode.

    Dry runs and previews describe a run, so they accept all of its options.
    """
    for name, option in options().items():
        for need in option.needs if asks(name, getattr(o, name)) else ():
            by = need.decided_by.split()
            if need.is_met(o) or not doubtful.isdisjoint([name, *by]):
                continue
            if need.is_strict or is_exempt is None or not is_exempt(name, by):
                remedy = f"{need.instead}, or remove it" if need.instead else "remove it"
                yield name, f"`--{name}` has no effect {need.otherwise}; {remedy}"
                break


def leave_out_ineffective_options(
    config: Config, typed: Container[str], said: Container[str]
) -> tuple[Config, str | None]:
    """Reset options without effect; returns the config, and a log line about reset options that a file `said`.

    Other trainers accept such options silently. Options in `typed` (from the command line) are not reset, so a later
    check reports them as errors.
    """
    values = option_values(config)
    out = [name for name in options_without_effect(config) if name not in typed]
    asked = [f"--{name}" for name in out if name in said and asks(name, values[name])]
    line = f"left out, as they have no effect here: {', '.join(asked)}" if asked else None
    return config_from({name: value for name, value in values.items() if name not in out}), line


def options_without_effect(config: Config) -> list[str]:
    """Names of the options that have no effect in the mode, set or not."""
    o = SimpleNamespace(**option_values(config), pipeline_size=None, num_replicas=1)
    return [name for name, option in options().items() if not all(need.is_met(o) for need in option.needs)]


def asks(name: str, value: OptionValue) -> bool:
    """Whether a value enables something that is off by default; switching off a disabled feature does not count."""
    return value != options()[name].default and bool(value) and str(value) not in ("no", "off", "none", "auto")


def _value_problems(option: Option, value: OptionValue) -> list[str]:
    """Lines about a single invalid value."""
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
        for key, own in dataset_options().items():
            at = place if key == "name" else f"{place} {quoted(entry.name)}: its {key}"
            if problem := list(_value_problem(own, getattr(entry, key), at)):
                found += problem
                break
    return found[:MOST_SHOWN]


def _value_problem(option: Option, value: object, place: str) -> Iterator[str]:
    if isinstance(value, int | float) and option.bounds and not option.bounds.allow(value):
        number = excerpt(str(value)) if isinstance(value, int) else f"{value:g}"
        yield f"{place} is {number}; it must be {option.bounds.demand(value)}"
    if not isinstance(value, str | tuple):
        return
    if option.form is not None and not option.form[0](value):
        text = value if isinstance(value, str) else ",".join(map("=".join, value))
        yield f"{place} is {quoted(text)}; it must be {option.form[1]}"
    if isinstance(value, str) and option.is_name and (reason := _unusable_name(value)):
        yield f"{place} {quoted(value)} {reason}"


def _unusable_name(name: str) -> str | None:
    """Reason why a file cannot have this name."""
    try:
        os.lstat(Path(name).expanduser())
    except ValueError as error:  # raised for a NUL or half of a surrogate pair
        return f"cannot be the name of a file: {first_line(error)}"
    except RuntimeError:
        return "begins with the home directory of an unknown user; write ./ before it if it is a file's name"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"is too long: {len(name)} characters"
    return None


def _given(o: Any, names: Iterable[str]) -> str:
    """Options and their values as typed: `--num_iterations` 5 and `--no_offload`."""

    def written(name: str, value: object) -> str:
        if value is False:
            return f"`--no_{name.removeprefix('use_')}`"
        is_number = isinstance(value, float)
        text = f"{value:g}" if is_number else excerpt(str(value)) if isinstance(value, int | str) else ""
        return f"`--{name}`" if value is True else f"`--{name}` {text}".rstrip()

    return " and ".join(written(name, getattr(o, name)) for name in names)


_EXCLUSIVE: Final[Mapping[tuple[str, str], str]] = {
    ("num_iterations", "num_train_epochs"): "both set the length of the run",
    ("val_size", "eval_dataset"): "the first holds samples out of training, the second names other data",
    ("train_on_prompt", "mask_history"): "the first trains on all of a conversation, the second on its last answer",
    ("train_on_all_turns", "mask_history"): "the first trains on all of a conversation, the second on its last answer",
    ("preview", "dry_run"): "the first shows data, the second plans a run",
    ("dry_run", "plan"): "the first makes a plan, the second uses a saved plan",
    ("dry_run", "resume_from_checkpoint"): "the first plans a new run, the second uses a saved plan",
}
"""Pairs of options that exclude each other, and why; the user removes one."""
MUTUALLY_EXCLUSIVE: Final = tuple(_EXCLUSIVE)[:2]
"""Pairs of alternatives: if one is typed, the other is removed from the file's options."""
_Test = Callable[[Any], object]
_RULES: Final[Sequence[tuple[str, _Test, str]]] = (
    (
        "num_slices recompute",
        lambda o: (o.num_slices or 1) > 1 and o.recompute.saves_activations,
        Problem.of("with slices, layers are always recomputed", {"recompute": ["auto"]}),
    ),
    (
        "compute_order activation_offloading",
        lambda o: o.compute_order == "depth_first" and o.activation_offloading == "on",
        "in a depth-first order few activations wait for backward, and they are not offloaded; remove one",
    ),
    (
        "compute_order num_slices",
        lambda o: o.compute_order == "depth_first" and (o.num_slices or 1) > 1,
        "slices go backward in reverse order, and a depth-first order cannot do this; use breadth_first",
    ),
    (
        "spread_head compute_order",
        lambda o: o.spread_head and o.compute_order == "breadth_first",
        Problem.of("ranks can share the head only in a depth-first order", {"compute_order": ["auto"]}),
    ),
    (
        "spread_head num_slices",
        lambda o: o.spread_head and (o.num_slices or 1) > 1,
        "ranks can share the head only in a depth-first order, which has no slices; remove one",
    ),
    (
        "objective num_slices",
        lambda o: o.objective not in OF_TOKENS and (o.num_slices or 1) > 1,
        "this objective needs complete sequences; remove --num_slices",
    ),
    (
        "save_scores num_slices",
        lambda o: o.save_scores and (o.num_slices or 1) > 1,
        "log-probabilities are of complete sequences; remove --num_slices",
    ),
    (
        "objective do_predict",
        lambda o: o.objective not in OF_TOKENS and o.do_predict,
        "answers are generated for samples with one answer; predict in a second run, with --no_do_train --do_predict",
    ),
    (
        "objective packing",
        lambda o: o.objective not in OF_TOKENS and o.packing == "joined",
        "only plain text can be joined; remove --packing joined",
    ),
    (
        "objective train_on_prompt train_on_all_turns mask_history",
        lambda o: o.objective not in OF_TOKENS and (o.train_on_prompt or o.train_on_all_turns or o.mask_history),
        "the objective decides which tokens count; remove the others",
    ),
    (
        "objective metric_for_best_model",
        lambda o: o.metric_for_best_model not in METRICS[o.objective],
        "this objective has other metrics; use --metric_for_best_model loss",
    ),
    (
        "objective save_scores",
        lambda o: o.objective == "reward" and o.save_scores,
        "a reward model gives no log-probabilities; remove --save_scores",
    ),
    (
        "objective teacher_model",
        lambda o: o.objective == "distill" and o.teacher_model is None,
        "a student needs a teacher; give --teacher_model",
    ),
    (
        "objective loss_type",
        lambda o: o.loss_type is not None and (o.loss_type in KTO_LOSSES) != (o.objective == "kto"),
        "kto and apo_zero_unpaired are the losses of kto, all others of dpo; change one",
    ),
    (
        "loss_type label_smoothing",
        lambda o: o.label_smoothing > 0 and o.objective == "dpo" and o.loss_type != "robust",
        "only the robust loss has label smoothing; use --loss_type robust, or omit --label_smoothing",
    ),
    (
        "recompute activation_offloading",
        lambda o: o.recompute.saves_activations and o.activation_offloading == "on",
        Problem.of("only inputs of recomputed layers are offloaded", {"activation_offloading": ["auto"]}),
    ),
    (
        "recompute tile_tokens",
        lambda o: o.recompute.saves_activations and o.tile_tokens not in ("auto", "off"),
        "only recomputed layers run in tiles, and no layer is recomputed; remove one",
    ),
    (
        "resident_stages use_offload",
        lambda o: o.resident_stages not in ("auto", "all") and not o.use_offload,
        "the first streams the other stages, the second streams none; remove one",
    ),
    (
        "do_train do_eval do_predict",
        lambda o: not (o.do_train or o.do_eval or o.do_predict),
        "nothing is left to do; add --do_eval or --do_predict",
    ),
    (
        "do_train resume_from_checkpoint",
        lambda o: not o.do_train and o.resume_from_checkpoint is not None,
        "without training, the model of --model_path is evaluated; use --model_path with the checkpoint's folder",
    ),
    (
        "load_best_model_at_end save_strategy save_steps eval_strategy eval_steps",
        lambda o: o.load_best_model_at_end and o.eval_strategy != "no" and not _may_save_what_is_evaluated(o),
        "each checkpoint must be evaluated when it is saved; use the same words for --save_strategy and "
        "--eval_strategy, and a --save_steps that is a multiple of --eval_steps",
    ),
    (
        "do_predict merge",
        lambda o: o.finetuning_type == "lora" and o.do_train and o.do_predict and not o.merge,
        "answers need a full model, not adapters; add --merge",
    ),
    (
        "eval_strategy eval_on_start do_eval do_predict val_size eval_dataset",
        lambda o: EVALUATION_DATA.is_met(o) and o.preview is None and not o.val_size and o.eval_dataset is None,
        "there is nothing to evaluate on; add --eval_dataset, or --val_size to hold samples out of the training data",
    ),
    (
        "save_params save_results save_dir",
        lambda o: _has_doubled_name([o.save_dir, o.save_params, o.save_results]),
        "two of --save_params, --save_results and --save_dir are the same path; give different names",
    ),
    (
        "optimizer_states dtype",
        lambda o: o.optimizer_states != "fp32" and o.dtype != "bf16",
        "only with bf16 weights can optimizer states have another format; use --bf16, or --optimizer_states fp32",
    ),
    (
        "base_dtype matmul_dtype",
        lambda o: o.base_dtype != "bf16" and o.matmul_dtype != "bf16",
        "weights that are codes are decoded before they multiply; use --matmul_dtype bf16, or --base_dtype bf16",
    ),
    (
        "matmul_dtype dtype",
        lambda o: o.matmul_dtype != "bf16" and o.dtype != "bf16",
        "only bf16 weights and activations are quantized; use --bf16, or omit --matmul_dtype",
    ),
    (
        "lora_target_parameters lora_dropout",
        lambda o: o.lora_target_parameters is not None and o.lora_dropout > 0,
        "adapters of experts have no dropout, as in peft; use --lora_dropout 0",
    ),
    (
        "lora_target_parameters use_dora",
        lambda o: o.lora_target_parameters is not None and o.use_dora,
        "adapters of experts have no lengths of rows, as in peft; omit one of them",
    ),
    (
        "use_dora matmul_dtype",
        lambda o: o.use_dora and o.matmul_dtype != "bf16",
        "DoRA needs the lengths of the rows of the weights, of which products in eight bits have only codes; omit one",
    ),
    (
        "disk_endurance offload_states_to",
        lambda o: (
            o.disk_endurance and len(o.disk_endurance.split(",")) not in (1, len(split_names(o.offload_states_to)))
        ),
        "each folder is a separate drive; give one number for all drives, or one for each folder",
    ),
    (
        "durable_steps pipeline_ranks",
        lambda o: o.durable_steps == "on" and o.num_replicas > 1,
        "a replica has only a part of a stage's states; omit one of them",
    ),
    (
        "weights_on_disks pipeline_ranks",
        lambda o: o.weights_on_disks and o.num_replicas > 1,
        "replicas send each other updated weights from CPU memory; omit one of them",
    ),
    (
        "node_rank nnodes",
        lambda o: o.node_rank is not None and o.node_rank >= o.nnodes,
        "nodes are numbered from 0; use a number below --nnodes",
    ),
    (
        "nnodes node_rank rdzv_endpoint",
        lambda o: o.nnodes > 1 and not o.dry_run and None in (o.node_rank, o.rdzv_endpoint),
        "each node needs --node_rank and --rdzv_endpoint; add them (--help)",
    ),
    (
        "do_predict train_on_prompt train_on_all_turns",
        lambda o: o.do_predict and (o.train_on_prompt or o.train_on_all_turns),
        "answers cannot be separated from prompts if prompts are targets, too; omit one of these, or predict in a "
        "second run, with --no_do_train --do_predict",
    ),
    (
        "finetuning_type objective",
        lambda o: PROMPTS.is_met(o) and o.objective not in _OF_PROMPTS,
        f"prompts have the objectives {', '.join(_OF_PROMPTS)}; use one of them, or adapters (--use_lora)",
    ),
    (
        "finetuning_type objective adapter_path reference_model",
        lambda o: (
            PROMPTS.is_met(o) and o.objective == "dpo" and (o.adapter_path is None or o.reference_model is not None)
        ),
        "the reference is the model before step 1 with its prompt; give a trained one with --adapter_path, and no "
        "--reference_model",
    ),
    (
        "finetuning_type num_virtual_tokens seq_length",
        lambda o: PROMPTS.is_met(o) and o.seq_length - o.num_virtual_tokens < LEAST_TEXT,
        "the prompt leaves no room for a sample in a row; lower --num_virtual_tokens, or raise --seq_length",
    ),
    (
        "finetuning_type adapter_path",
        lambda o: o.finetuning_type == "p_tuning" and o.adapter_path is not None,
        "a saved prompt has no encoder; continue it with --finetuning_type prompt, or resume from a checkpoint",
    ),
    (
        "finetuning_type do_train adapter_path",
        lambda o: PROMPTS.is_met(o) and not o.do_train and o.adapter_path is None,
        "a new prompt is random; name a trained one with --adapter_path",
    ),
    (
        "finetuning_type do_train",
        lambda o: o.finetuning_type == "lora" and not o.do_train,
        "this trains adapters; to evaluate an adapter, merge it first (mobius export ADAPTER FOLDER --merge)",
    ),
)
"""Conflicting options: the condition, the reason and what to change. The line shows options that are not at their
defaults.
"""
_CUTS: Final = (
    ("batch_size", "num_chunks", "microbatches"),
    ("batch_size", "num_rounds", "rounds"),
    ("num_chunks", "num_rounds", "rounds"),
    ("seq_length", "num_slices", "slices"),
    ("embedding_dim", "num_heads", "heads"),
)
"""Pairs of numbers; the first must be a multiple of the second. The noun names the parts."""


def _has_doubled_name(names: Iterable[str]) -> bool:
    """Whether two names are the same path; the words `none` and `auto` do not count."""
    paths = [PurePath(name) for name in names if name not in ("none", "auto")]
    return len(set(paths)) < len(paths)


def _may_save_what_is_evaluated(o: Any) -> bool:
    """Whether every checkpoint can be evaluated when it is saved; checked again once the number of steps is known."""
    is_multiple = o.save_strategy == "epoch" or min(o.save_steps, o.eval_steps) < 1 or o.save_steps % o.eval_steps == 0
    return bool(o.save_strategy == o.eval_strategy and is_multiple)


def _find_rule_conflicts(o: Any) -> _Conflicts:
    for pair, reason in _EXCLUSIVE.items():
        if all(getattr(o, name) != options()[name].default for name in pair):
            yield " ".join(pair), f"{_given(o, pair)}: {reason}; remove one"
    for names, is_broken, reason in _RULES:
        if is_broken(o):
            changed = (name for name in names.split() if getattr(o, name) != options()[name].default)
            yield names, Problem(f"{_given(o, changed)}: {reason}", getattr(reason, "advice", ()))


def _find_size_conflicts(o: Any) -> _Conflicts:
    for whole_name, part_name, noun in _CUTS:
        whole, part = getattr(o, whole_name), getattr(o, part_name)
        is_ruled = o.plan is None or part_name == "num_heads"  # with --plan, the numbers come from the plan
        is_indirect = (whole_name, part_name) == ("batch_size", "num_rounds") and o.num_chunks is not None
        if is_ruled and not is_indirect and whole is not None and part is not None and whole % part:
            reason = f"{_given(o, (whole_name, part_name))}: {whole} has no {part} equal {noun}"
            changes = {part_name: _nearest(part, _divisors(whole)), whole_name: _multiples(whole, part)}
            yield f"{whole_name} {part_name} plan", Problem.of(reason, changes)
    if o.plan is not None:
        return
    if (tokens := o.batch_size * o.seq_length) > _STEP_TOKENS:
        given = _given(o, ("batch_size", "seq_length"))
        line = f"{given}: a step would have {tokens} tokens, but at most {_STEP_TOKENS} are allowed; lower one"
        yield "batch_size seq_length plan", line
    numbers = {name: getattr(o, name) or 1 for name in ("num_stages", "num_chunks", "num_slices")}
    if (parts := math.prod(numbers.values())) > _SCHEDULE_PARTS:
        given = _given(o, (name for name, number in numbers.items() if number > 1))
        line = f"{given}: {parts} forwards and as many backwards per step, at most {_SCHEDULE_PARTS} can be planned"
        yield f"{' '.join(numbers)} plan", f"{line}; lower one"
    if o.pipeline_size is not None and o.num_stages is not None and o.num_stages % o.pipeline_size:
        reason = f"{_given(o, ('num_stages',))}: not a multiple of the number of ranks, {o.pipeline_size}"
        changes = {"num_stages": _multiples(o.num_stages, o.pipeline_size)}
        yield "num_stages plan", Problem.of(reason, changes, more=", or another number of ranks (--nproc_per_node)")
    chunks = o.num_chunks or 1
    if o.num_replicas > 1 and o.batch_size % (parts := o.num_replicas * chunks):
        each = f" of {chunks} microbatches each (--num_chunks)" if chunks > 1 else ""
        reason = f"shared by {o.num_replicas} replicas{each} it must be a multiple of {parts}"
        changes = {"batch_size": _multiples(o.batch_size, parts)}
        more = ", or another number of nodes or microbatches"
        names = "batch_size num_chunks pipeline_ranks plan"
        yield names, Problem.of(f"{_given(o, ('batch_size',))}: {reason}", changes, more=more)


def _find_step_conflicts(config: Config) -> _Conflicts:
    """Yield conflicts with the number of steps, which must be known."""
    optim, steps, profiled = config.optim, config.optim.num_steps, config.output.profiled_steps
    ends = "num_iterations num_train_epochs"
    given = "" if optim.num_train_epochs is None else f" (`--num_train_epochs` {optim.num_train_epochs:g})"
    length = f"the run has {steps} steps{given}"
    o = SimpleNamespace(**option_values(config))
    if steps < optim.warmup_steps == int(optim.warmup_steps):
        yield f"warmup_steps {ends}", f"{_given(o, ('warmup_steps',))}: {length}; use at most {steps}"
    arguments, num_warmup_steps = optim.schedule_arguments, optim.num_warmup_steps
    if problem := find_decay_conflict(arguments, num_steps=steps, num_warmup_steps=num_warmup_steps):
        yield f"lr_scheduler_type lr_scheduler_kwargs warmup_steps {ends}", problem
    if any(profiled[:1]) and profiled[-1] > steps:
        yield f"profile_steps {ends}", f"{_given(o, ('profile_steps',))}: {length}; use steps 1 to {steps}"
    is_best, both = o.load_best_model_at_end, (o.save_steps, o.eval_steps)
    if is_best and o.save_strategy is SaveStrategy.STEPS and o.eval_strategy is EvalStrategy.STEPS:
        saved, evaluated = (steps_between(every, steps) for every in both)
        if min(both) < 1 and saved % evaluated:
            yield (
                f"load_best_model_at_end save_strategy save_steps eval_strategy eval_steps {ends}",
                f"{_given(o, ('save_steps', 'eval_steps'))}: {length}, so that checkpoints come every {saved} and "
                f"evaluations every {evaluated}; with --load_best_model_at_end the first must be a multiple",
            )


def infer_eval_strategy(config: Config, given: Iterable[str]) -> tuple[Config, str | None]:
    """Return the config, with an inferred --eval_strategy if none was given, and a log line about it (else None).

    --eval_steps implies steps. Evaluation data that no other option uses imply epochs.
    """
    evaluation, data = config.evaluation, config.data
    is_chosen = "eval_strategy" in set(given) or evaluation.eval_strategy is not EvalStrategy.NO
    has_data = bool(data.val_size) or data.eval_dataset is not None
    # With --load_best_model_at_end, --eval_strategy must be given: it has to match --save_strategy.
    if is_chosen or not evaluation.do_train or evaluation.load_best_model_at_end or not has_data:
        return config, None
    if asks("eval_steps", evaluation.eval_steps):
        strategy, source, meaning = EvalStrategy.STEPS, "eval_steps", f"every {evaluation.eval_steps:g} steps"
        if evaluation.eval_steps < 1:
            meaning = f"after every {evaluation.eval_steps:g} of the run"
    elif not (evaluation.evaluates or evaluation.do_predict):
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
    """Check options that only train.sh reads, for ranks started without it; return problems and notices.

    Typed options are problems, options of a file are notices. An option of the file gives no notice if the ranks were
    started with its value. `devices`: CUDA_VISIBLE_DEVICES.
    """
    as_started = {"nproc_per_node": num_ranks // num_nodes, "nnodes": num_nodes, "cuda_visible_devices": devices}
    problems, others = list[str](), list[str]()
    for name, value in vars(config.launch).items():
        if name == "pipeline_ranks" or not asks(name, value):
            continue
        if name in typed:
            other = f"give --{name} to torchrun, before main.py"
            if name == "cuda_visible_devices":
                other = f"write CUDA_VISIBLE_DEVICES={value} before the command"
            reason = "has no effect on ranks that are already started"
            problems.append(f"`--{name}` {reason}; remove it and start with `bash train.sh`, or {other}")
        elif value != as_started.get(name):
            others.append(f"{name}: {value}")
    notice = f"the file's {', '.join(others)} is for `bash train.sh`, and the ranks were started without it"
    return problems, [notice] if others else []


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in small)]


def _multiples(value: int, divisor: int) -> list[int]:
    lower = value // divisor * divisor
    return _nearest(value, [lower, lower + divisor])


def _nearest(value: int, valid: Iterable[int]) -> list[int]:
    """Return the largest valid number below `value` and the smallest above it."""
    numbers = [number for number in valid if number > 0]
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    return [number for number in (below, above) if number is not None]
