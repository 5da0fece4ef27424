"""Owns which options have an effect in which mode: one that asks for what then does not happen is an error.

An option at its default asks for nothing, and one that switches off what is off anyway is obeyed. Dry runs and previews
look at a run and take all of its options. Options that act on some formats of data only are
in mobius/data/ineffective_options.py.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

from mobius.config.config import Config
from mobius.config.options import OptionValue, option_values, options
from mobius.config.saving_evaluation import EvalStrategy, SaveStrategy

IsExempt = Callable[[str, Iterable[str]], bool]
"""Whether an option may be without effect, given the options that make the mode."""


@dataclass(frozen=True)
class _Rule:
    """Options without effect while `holds`; `mode_options` are the options that decide that."""

    mode_options: tuple[str, ...]
    holds: Callable[[Config], bool]
    reason: str
    """Text that completes "`--x` has no effect ..."."""
    options: tuple[str, ...]


def none_exempt(option: str, mode_options: Iterable[str]) -> bool:
    """Excuse of no option."""
    return False


def find_ineffective_options(
    config: Config, *, num_ranks: int | None, num_replicas: int
) -> Iterator[tuple[str, list[str], str]]:
    """Options that ask for something and have no effect, with those that make the mode, and a line for the user.

    `num_ranks` are those of a pipeline, None where they are not known.
    """
    values = option_values(config)
    for rule in _rules():
        if rule.holds(config):
            for name in rule.options:
                if _asks(name, values[name]):
                    yield name, [*rule.mode_options], f"`--{name}` has no effect {rule.reason}"
    if num_ranks is not None and num_replicas == 1 and _asks("reduce_dtype", values["reduce_dtype"]):
        told = "with one pipeline, which sends no gradients; remove it, or see --pipeline_ranks"
        yield "reduce_dtype", ["pipeline_ranks"], f"`--reduce_dtype` has no effect {told}"
    is_alone = num_ranks is not None and num_replicas == 1
    is_one_node = is_alone or (config.planning.dry_run and config.launch.nnodes == 1)
    if is_one_node and _asks("node_link", values["node_link"]):
        told = "on one node, whose replicas share its memory; remove it, or see --nnodes"
        yield "node_link", ["nnodes"], f"`--node_link` has no effect {told}"


def infer_eval_strategy(config: Config, given: Iterable[str]) -> tuple[Config, str | None]:
    """The config with the --eval_strategy that the given options mean where it is not given, and a line that says so.

    Steps for --eval_steps, epochs for data to evaluate on that nothing else uses.
    """
    names, evaluation = set(given), config.evaluation
    is_chosen = "eval_strategy" in names or evaluation.eval_strategy is not EvalStrategy.NO or not evaluation.do_train
    if is_chosen or evaluation.load_best_model_at_end or not _has_evaluation_data(config):
        return config, None  # the best model needs a strategy that goes with the saves
    if _asks("eval_steps", evaluation.eval_steps):
        strategy, source, meaning = EvalStrategy.STEPS, "eval_steps", f"every {evaluation.eval_steps:g} steps"
        if evaluation.eval_steps < 1:
            meaning = f"after every {evaluation.eval_steps:g} of the run"
    elif not (evaluation.evaluates or evaluation.predicts):
        source = "eval_dataset" if config.data.eval_dataset is not None else "val_size"
        strategy, meaning = EvalStrategy.EPOCH, "at the end of each epoch and of the run"
    else:
        return config, None
    line = (
        f"`--{source}` without `--eval_strategy`: the model is evaluated {meaning}, as with --eval_strategy {strategy}"
    )
    return replace(config, evaluation=replace(evaluation, eval_strategy=strategy)), line


def find_ineffective_launch_options(
    config: Config, typed: Container[str], *, num_ranks: int, num_nodes: int, devices: str | None
) -> tuple[list[str], list[str]]:
    """Problems of typed options and notices of a file's that only train.sh reads, for ranks that were started without.

    The file's are silent where the start is as they say; `devices` is CUDA_VISIBLE_DEVICES.
    """
    if config.planning.dry_run or config.data.preview is not None:
        return [], []
    launch, values = config.launch, option_values(config)
    as_started = {"nproc_per_node": num_ranks // num_nodes, "nnodes": num_nodes, "cuda_visible_devices": devices}
    names = [name for name in (field.name for field in fields(launch)) if name != "pipeline_ranks"]
    asked = [name for name in names if _asks(name, values[name])]
    problems = [
        f"`--{name}` has no effect on ranks that are already started; remove it and start with `bash train.sh`, or "
        + (
            f"write CUDA_VISIBLE_DEVICES={launch.cuda_visible_devices} before the command"
            if name == "cuda_visible_devices"
            else f"give --{name} to torchrun, before main.py"
        )
        for name in asked
        if name in typed
    ]
    others = [name for name in asked if name not in typed and values[name] != as_started.get(name)]
    shown = ", ".join(f"{name}: {values[name]}" for name in others)
    notice = f"the file's {shown} is for `bash train.sh`, and the ranks were started without it"
    return problems, [notice] if others else []


def _has_evaluation_data(config: Config) -> bool:
    return bool(config.data.val_size) or config.data.eval_dataset is not None


def _asks(name: str, value: OptionValue) -> bool:
    """Whether a value asks for something that the default does not do."""
    return value != options()[name].default and bool(value) and str(value) not in ("no", "off", "none")


@cache
def _rules() -> tuple[_Rule, ...]:
    """All rules that need only the config, made from the table of options, so that new ones are in it."""

    def section(name: str, *, without: tuple[str, ...] = ()) -> tuple[str, ...]:
        return tuple(o.name for o in options().values() if o.section == name and o.name not in without)

    def only_answers(config: Config) -> bool:
        return not config.evaluation.do_train and not config.evaluation.do_eval

    resuming = ("watchdog_minutes", "resume_from_checkpoint", "resume_changes")
    return (
        _Rule(
            ("do_train",),
            lambda config: not config.evaluation.do_train,
            "with `--no_do_train`: nothing is trained; remove it",
            (
                *section("optim", without=("seed",)),
                *section("saving", without=resuming),
                *("eval_strategy", "eval_steps", "eval_on_start", "metric_for_best_model"),
                *("load_best_model_at_end", "early_stopping_patience"),
                *("save_params", "save_results", "logging_steps", "trace", "profile_steps"),
                *("freeze", "fp32_gradients", "recompute", "activation_offloading", "reduce_dtype"),
            ),
        ),
        _Rule(
            ("do_train", "do_eval"),
            only_answers,
            "where answers are all that is asked for; remove it, or add --do_eval",
            (
                *("packing", "num_rounds", "num_slices", "resident_stages", "compile", "tile_tokens"),
                *("loss_chunk_tokens", "report_to", "run_name", "show_actions", "watchdog_minutes"),
            ),
        ),
        _Rule(
            ("save_strategy",),
            lambda config: config.evaluation.do_train and config.saving.save_strategy is SaveStrategy.NO,
            "with `--save_strategy no`, which saves no checkpoint; remove it, or use --save_strategy steps or epoch",
            ("save_steps", "save_total_limit", "save_only_model"),
        ),
        _Rule(
            ("save_strategy",),
            lambda config: config.evaluation.do_train and config.saving.save_strategy is SaveStrategy.EPOCH,
            "with `--save_strategy epoch`; remove it, or use --save_strategy steps",
            ("save_steps",),
        ),
        _Rule(
            ("eval_strategy",),
            lambda config: config.evaluation.do_train and config.evaluation.eval_strategy is EvalStrategy.EPOCH,
            "with `--eval_strategy epoch`; remove it, or use --eval_strategy steps",
            ("eval_steps",),
        ),
        _Rule(
            ("eval_strategy", "val_size", "eval_dataset"),
            lambda config: config.evaluation.do_train and config.evaluation.eval_strategy is EvalStrategy.NO,
            "without evaluations during the training; remove it, or add --eval_strategy steps or epoch, with "
            "--eval_dataset or --val_size",
            ("eval_steps", "metric_for_best_model"),
        ),
        _Rule(
            ("eval_strategy", "eval_on_start", "do_eval", "do_predict", "predict_with_generate", "preview"),
            lambda c: not (c.evaluation.evaluates or c.evaluation.predicts) and c.data.preview is None,
            "where nothing is evaluated; remove it, or add --eval_strategy, --do_eval or --do_predict",
            ("eval_dataset",),
        ),
        _Rule(
            ("do_predict", "predict_with_generate"),
            lambda config: not config.evaluation.predicts,
            "where no answers are generated; remove it, or add --do_predict",
            ("max_new_tokens", "max_predict_samples"),
        ),
        _Rule(
            ("dry_run",),
            lambda config: not config.planning.dry_run,
            "without `--dry_run`: a run has the ranks and GPUs that it is started with, and its plan in --save_dir",
            ("num_ranks", "card", "plan_output"),
        ),
        _Rule(
            ("preview",),
            lambda config: config.data.preview is None,
            "without `--preview`; add that",
            ("preview_output",),
        ),
    )
