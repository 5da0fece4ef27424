"""The table of options: one frozen section per topic, with the meaning of every option under its field.

Field names are the names of the options; `--help` and docs/user/options.md print the texts. `option` gives a field its
bounds, other names, and the modes in which it has an effect. The functions at the end list all options and names, and
convert a config to its flat form.
"""

import difflib
import functools
import hashlib
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any, Final

from mobius.config.lr_schedules import ArgumentValue, LrSchedulerType, read_arguments
from mobius.config.objective import NO_OPTIONS, ObjectiveConfig
from mobius.config.options import (
    COLUMNS_EXAMPLE,
    COUNT,
    DECAY_RATE,
    LAYERS,
    NON_NEGATIVE,
    PARTS,
    POSITIVE,
    RANKS,
    STAGES,
    Bounds,
    Columns,
    DatasetEntry,
    Datasets,
    Need,
    Option,
    OptionValue,
    Spelling,
    option,
    options_of,
    spellings_of,
)

# Users type a member's name in small letters.
Dtype = StrEnum("Dtype", ["BF16", "FP16", "FP32"])
"""Number format of the working weights and activations."""
Device = StrEnum("Device", ["AUTO", "CUDA", "CPU"])
"""Kind of device that a run computes on."""
Compile = StrEnum("Compile", ["AUTO", "ON", "OFF"])
"""Whether layers run as compiled graphs."""
ActivationOffloading = StrEnum("ActivationOffloading", ["AUTO", "ON", "OFF"])
"""Whether inputs of layers wait in CPU memory for their backward."""
DurableSteps = StrEnum("DurableSteps", ["AUTO", "ON", "OFF"])
"""Whether each step with optimizer states on disks is a checkpoint."""
Order = StrEnum("Order", ["AUTO", "BREADTH_FIRST", "DEPTH_FIRST"])
"""Order of a GPU's forwards and backwards."""
Packing = StrEnum("Packing", ["AUTO", "ON", "OFF", "JOINED"])
"""Way in which samples become rows of `seq_length` tokens."""
ExportAs = StrEnum("ExportAs", ["AUTO", "ORIGINAL", "TEXT"])
"""Layout of a saved model whose base has more than text."""
FinetuningType = StrEnum("FinetuningType", ["FULL", "LORA", "PROMPT", "P_TUNING", "PREFIX"])
"""Kind of parameters that are trained."""
EncoderType = StrEnum("EncoderType", ["MLP", "LSTM"])
"""Kind of the encoder of P-tuning."""
SaveStrategy = StrEnum("SaveStrategy", ["STEPS", "EPOCH", "NO"])
"""Times at which checkpoints are saved."""
EvalStrategy = StrEnum("EvalStrategy", ["STEPS", "EPOCH", "NO"])
"""Times at which the model is evaluated during training."""


MatmulDtype = StrEnum("MatmulDtype", ["BF16", "FP8", "INT8"])
BaseDtype = StrEnum("BaseDtype", ["BF16", "FP8", "INT8", "NF4", "MXFP4"])
"""Number format of matrix products; BF16 stands for the format of --dtype."""
OptimizerStates = StrEnum("OptimizerStates", ["FP32", "BF16", "COMPACT"])
"""Number format of AdamW's moments and of the master weights."""
ReduceDtype = StrEnum("ReduceDtype", ["FP32", "BF16"])
"""Number format in which replicas send gradients to each other."""


class BestMetric(StrEnum):
    """Metric of an evaluation that decides which checkpoint is best."""

    LOSS = "loss"
    PERPLEXITY = "perplexity"
    TOKEN_ACCURACY = "token_accuracy"
    REWARD_ACCURACIES = "rewards/accuracies"
    REWARD_MARGINS = "rewards/margins"
    ACCURACY = "accuracy"
    MARGIN = "margin"

    @property
    def is_higher_better(self) -> bool:
        return self not in (BestMetric.LOSS, BestMetric.PERPLEXITY)

    @classmethod
    def _missing_(cls, value: object) -> "BestMetric | None":
        """Return the member for a name of transformers' Trainer, such as `eval_loss`."""
        name = str(value).removeprefix("eval_")
        return next((member for member in cls if member.value == name), None)


class Recompute(StrEnum):
    """Part of a layer's forward that runs again in backward."""

    AUTO = "auto"
    FULL = "full"
    LINEAR = "linear"
    ELEMENTWISE = "elementwise"
    NONE = "none"

    @property
    def saves_activations(self) -> bool:
        """Whether layers save the results of matrix products, so that backward does not compute them again."""
        return self in (Recompute.ELEMENTWISE, Recompute.NONE)


TRACKERS: Final = ("tensorboard", "swanlab", "wandb", "mlflow", "trackio")
"""Trackers that `report_to` may name; their packages have the same names."""
ALL_CHECKPOINTS: Final = 0
"""Value of `save_total_limit` that keeps all checkpoints."""

ADAPTER_OPTIONS: Final = (
    *("lora_rank", "lora_alpha", "lora_rank_pattern", "lora_alpha_pattern", "use_rslora", "use_dora"),
    "lora_dropout",
    *("lora_target", "lora_target_parameters", "additional_target"),
)
"""Options that an adapter's folder gives."""

# At most nine digits, so that no number is too long for `int`.
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)
_STEPS: Final = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)
_DEVICE: Final = re.compile(r"\d{1,4}|(GPU|MIG)-[\w/-]{1,80}", re.ASCII)
_RATES: Final = re.compile(r"\d{1,4}(\.\d{1,4})?(,\d{1,4}(\.\d{1,4})?){1,2}", re.ASCII)
_RATING: Final = re.compile(r"\d{1,9}(\.\d{1,4})?", re.ASCII)
_STRENGTH: Final = re.compile(r"\d{1,9}(\.\d{1,9})?(e[-+]?\d{1,2})?", re.ASCII)
_RANKS_FORM: Final = "names of linear layers with ranks from 1 on, such as q_proj=16"
_STRENGTHS_FORM: Final = "names of linear layers with numbers above 0, such as q_proj=32"
_SURELY_ALIKE: Final = 0.85
"""Similarity above which a name is a misspelling: a missing or swapped letter is above it, `min` for `max` below it."""
_ENDPOINT: Final = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")


def split_names(text: str | None) -> tuple[str, ...]:
    """Return the words of a text with commas, without duplicates."""
    return tuple(dict.fromkeys(filter(None, (word.strip() for word in (text or "").split(",")))))


def steps_between(every: float, num_steps: int) -> int:
    """Return the interval in steps; `every` below 1 is a share of `num_steps`, rounded up."""
    # 0.07 * 100 is 7.000000000000001 in binary, which must not become 8 steps.
    return int(every) if every >= 1 else max(1, math.ceil(round(every * num_steps, 6)))


def pattern_value(pattern: Columns | None, linear: str, default: float | str) -> float | str:
    """Return the value of the first name in `pattern` that matches the end of a linear's full name, as in peft."""
    return next((value for name, value in pattern or () if re.fullmatch(rf"(.*\.)?({name})", linear)), default)


def _number_or(*words: str, least: int) -> tuple[Callable[[str], bool], str]:
    """Return a function that accepts `words` and numbers from `least` on, and a description of both."""

    def is_valid(text: str) -> bool:
        return text in words or (_NUMBER.fullmatch(text) is not None and int(text) >= least)

    return is_valid, f"{', '.join(words)}, or a number from {least} on"


def _step_range(text: str) -> range:
    match = _STEPS.fullmatch(text.strip())
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


def _are_rates(text: str) -> bool:
    return _RATES.fullmatch(text) is not None and min(map(float, text.split(","))) > 0


def _are_ratings(text: str) -> bool:
    return all(_RATING.fullmatch(word) and float(word) > 0 for word in text.split(","))


def _are_ranks(pattern: Columns) -> bool:
    return all(_is_pattern(name) and _NUMBER.fullmatch(rank) and int(rank) > 0 for name, rank in pattern)


def _are_strengths(pattern: Columns) -> bool:
    return all(_is_pattern(name) and _STRENGTH.fullmatch(alpha) and float(alpha) > 0 for name, alpha in pattern)


def _is_pattern(name: str) -> bool:
    try:
        return re.compile(name) is not None
    except re.error:
        return False


def _are_devices(text: str) -> bool:
    names = [name.strip() for name in text.split(",")]
    return len(set(names)) == len(names) and all(map(_DEVICE.fullmatch, names))


def _are_options(text: str) -> bool:
    return options().keys() >= set(split_names(text))


def _are_trackers(text: str) -> bool:
    names = set(split_names(text))
    return names == {"none"} or set() < names <= set(TRACKERS)


# Modes that options need to have an effect. `o` has the values of all options, and the run's `pipeline_size` (None:
# unknown) and `num_replicas`.
TRAINING: Final = Need("do_train", lambda o: o.do_train, "with `--no_do_train`, which trains nothing")
LOSSES: Final = Need(
    "do_train do_eval", lambda o: o.do_train or o.do_eval, "where only answers are generated", "add --do_eval"
)
CHECKPOINTS: Final = Need(
    "save_strategy", lambda o: not o.do_train or o.save_strategy != "no", "with `--save_strategy no`"
)
SAVE_STEPS: Final = Need(
    "save_strategy", lambda o: not o.do_train or o.save_strategy != "epoch", "with `--save_strategy epoch`"
)
EVAL_STEPS: Final = Need(
    "eval_strategy", lambda o: not o.do_train or o.eval_strategy != "epoch", "with `--eval_strategy epoch`"
)
EVALUATIONS: Final = Need(
    "eval_strategy val_size eval_dataset",
    lambda o: not o.do_train or o.eval_strategy != "no",
    "without evaluations during the training",
    "add --eval_strategy steps or epoch, with --eval_dataset or --val_size",
)
COMPARED: Final = replace(EVALUATIONS, decided_by="eval_strategy", is_strict=True)
EVALUATION_DATA: Final = Need(
    "eval_strategy eval_on_start do_eval do_predict preview",
    lambda o: o.eval_strategy != "no" or o.eval_on_start or o.do_eval or o.do_predict or o.preview is not None,
    "where nothing is evaluated",
    "add --eval_strategy, --do_eval or --do_predict",
)
ANSWERS: Final = Need("do_predict", lambda o: o.do_predict, "where no answers are generated", "add --do_predict")
LAST_EVALUATION: Final = Need("do_eval", lambda o: o.do_eval, "without `--do_eval`", "add it", is_strict=True)
DRY_RUN: Final = Need(
    "dry_run", lambda o: o.dry_run, "without `--dry_run`; a run has the ranks that it is started with"
)
PUSHING: Final = Need("push_to_hub", lambda o: o.push_to_hub, "without `--push_to_hub`", "add it", is_strict=True)
RESUMING: Final = Need(
    "resume_from_checkpoint",
    lambda o: o.resume_from_checkpoint is not None,
    "without `--resume_from_checkpoint`",
    is_strict=True,
)
ADAPTERS: Final = Need(
    "finetuning_type", lambda o: o.finetuning_type == "lora", "without LoRA adapters", "add --use_lora", is_strict=True
)
PROMPTS: Final = Need(
    "finetuning_type",
    lambda o: o.finetuning_type not in ("full", "lora"),
    "without a trained prompt",
    "add --finetuning_type prompt, p_tuning or prefix",
    is_strict=True,
)
PROMPT_TUNING: Final = Need(
    "finetuning_type",
    lambda o: o.finetuning_type == "prompt",
    "without prompt tuning",
    "add --finetuning_type prompt",
    is_strict=True,
)
NEW_PROMPT: Final = Need(
    "adapter_path",
    lambda o: o.adapter_path is None,
    "with `--adapter_path`, which has the vectors",
    is_strict=True,
)
P_TUNING: Final = Need(
    "finetuning_type",
    lambda o: o.finetuning_type == "p_tuning",
    "without an encoder of the prompt",
    "add --finetuning_type p_tuning",
    is_strict=True,
)
FROZEN_BASE: Final = Need(
    "finetuning_type",
    lambda o: o.finetuning_type != "full",
    "without adapters: all parameters are trained",
    "add --use_lora",
    is_strict=True,
)
WHOLE_RESULT: Final = Need(
    "finetuning_type merge",
    lambda o: o.finetuning_type == "full" or o.merge,
    "for adapters and prompts, which are saved alone",
    "add --merge",
)
NO_ADAPTERS: Final = Need(
    "finetuning_type",
    lambda o: o.finetuning_type == "full",
    "where the model is frozen (`--finetuning_type`)",
    is_strict=True,
)
OFFLOADING: Final = Need(
    "use_offload", lambda o: o.use_offload, "with `--no_offload`, which streams no stage", is_strict=True
)
DISKS: Final = Need(
    "offload_states_to", lambda o: o.offload_states_to is not None, "without `--offload_states_to`", is_strict=True
)
CLIPPING: Final = Need(
    "max_grad_norm dtype",
    lambda o: o.max_grad_norm > 0 or o.dtype == "fp16",  # loss scaling also waits for all gradients
    "with `--max_grad_norm 0`, where no gradient waits for a norm",
    is_strict=True,
)
OVERLAPPING: Final = Need(
    "overlap_optimizer", lambda o: o.overlap_optimizer, "with `--no_overlap_optimizer`", is_strict=True
)
NOT_ON_CPU: Final = Need("device", lambda o: o.device != "cpu", "with `--device cpu`", is_strict=True)
REPLICAS: Final = Need(
    "pipeline_ranks",
    lambda o: o.pipeline_size is None or o.num_replicas > 1,
    "with one pipeline, which sends no gradients",
    "see --pipeline_ranks",
)
SEVERAL_GPUS: Final = Need(
    "pipeline_ranks",
    lambda o: o.pipeline_size is None or o.pipeline_size > 1,
    "with one GPU in a pipeline, which computes everything",
    "use --no_spread_head",
    is_strict=True,
)
NODES: Final = Need(
    "nnodes",
    lambda o: o.nnodes > 1 if o.dry_run else o.pipeline_size is None or o.num_replicas > 1,
    "on one node, whose replicas share its memory",
    "see --nnodes",
)


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    model_path: str = option("meta-llama/Llama-2-7b-hf", aliases=("model", "model_name_or_path"))
    """Hugging Face id or local folder; short names: llama-2-7b-hf, llama-2-13b-hf. A folder with only a config.json is
    trained from random weights. A dry run also takes names of shapes: 1b, 7b, 8b, 13b, 14b, 30b, 70b, qwen3-30b-a3b,
    mixtral-8x7b."""
    num_layers: int | None = option(None, LAYERS)
    """Number of the model's first layers to use; a smaller number simulates a smaller model. Default: all."""
    embedding_dim: int | None = option(None, COUNT)
    """Width of the hidden state, for a model without weights. Default: the model's own width."""
    ff_dim: int | None = option(None, COUNT)
    """Inner width of the feed-forward part, for a model without weights. Default: the model's own width."""
    num_heads: int | None = option(None, COUNT)
    """Number of attention heads, for a model without weights. Default: the model's own number."""
    dtype: Dtype = option(Dtype.BF16, flags={dtype.value: dtype for dtype in Dtype})
    """Format of weights and activations on the GPU; the optimizer always keeps fp32 master weights. bf16 needs no loss
    scaling, fp16 is for GPUs without bf16, fp32 for tests and CPUs. On a CPU without bf16 instructions fp32 is the
    default."""
    matmul_dtype: MatmulDtype = MatmulDtype.BF16
    """Format of matrix products with the weights of decoder layers. bf16: the format of --dtype. fp8, int8: faster and
    less exact. Weights, activations and output gradients are quantized by row; weight gradients, embedding, head,
    routers, experts, norms and attention are not. fp8 needs an RTX 40 or 50, L4, L40S, H100 or newer; int8 needs an RTX
    30, A100 or newer."""
    dequantize_base: bool = option(False, needs=(TRAINING, NO_ADAPTERS))
    """Train all parameters of a model that comes quantized: its codes are decoded once, and plain weights are trained
    and saved. Adapters need no option."""


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    dataset: Datasets = (DatasetEntry("xsum"),)
    """Known name (xsum), Hugging Face id, or a local file or folder (JSON, JSONL, CSV, Parquet, Arrow, text, also .gz,
    .zst); several are mixed, with optional weights, such as a.jsonl b.parquet:0.3. In YAML also a list of mappings with
    path and optionally weight, max_samples, columns, split and subset."""
    seq_length: int = option(512, Bounds(minimum=2), aliases=("cutoff_len", "max_length"))
    """Tokens per sequence (row). Longer samples are truncated and counted, shorter ones packed or padded."""
    packing: Packing = option(Packing.AUTO, needs=(LOSSES,))
    """Sequence packing. on: several samples share a row, and attention is masked per sample. joined: plain text is
    joined and split into full rows, as for pretraining, without a mask between documents. off: one sample per row,
    padded. auto: on for conversations, instructions and prompts, joined for plain text."""
    max_samples: int | None = option(None, COUNT)
    """Number of samples to use from the start of each dataset. Default: all."""
    columns: Columns | None = option(None, example=COLUMNS_EXAMPLE)
    """Columns of a table in another format, such as prompt=document,completion=summary. In YAML also a mapping."""
    chat_template: str | None = option(None, is_text=True)
    """Chat template in place of the tokenizer's: a Jinja file, the name of a built-in template, or the Jinja text
    itself. Default: the tokenizer's."""
    default_system: str | None = option(None, is_text=True)
    """System message for conversations without one."""
    train_on_prompt: bool = False
    """Train on prompts too, not on answers only."""
    train_on_all_turns: bool = False
    """Train on all tokens of conversations, as TRL does. With prompts and completions, train only on completions."""
    mask_history: bool = False
    """Train only on the last answer of a conversation."""
    val_size: float = option(0.0, Bounds(minimum=0, share_of="samples"))
    """Samples held out of training for evaluation: a whole number, or a share of the data if below 1."""
    eval_dataset: Datasets | None = option(None, needs=(EVALUATION_DATA,))
    """Datasets to evaluate on, written like the option dataset, but without weights."""
    preprocessing_num_workers: int | None = option(None, Bounds(minimum=1, ceiling=4096, allows_auto=True))
    """Number of processes that tokenize. The result is cached, so more processes shorten only the first run. auto:
    depends on the machine's cores and the size of the data."""
    preview: int | None = option(None, Bounds(minimum=1, ceiling=1001), bare="3")
    """Show this number of samples as they will be trained on, and the contents of a step; then exit. Needs no GPU.
    Default without a number: 3."""

    @property
    def is_text_joined(self) -> bool:
        """Whether documents of plain text are joined, so that a row may end inside a document."""
        return self.packing in (Packing.AUTO, Packing.JOINED)


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline and memory"""

    batch_size: int = option(128, COUNT)
    """Sequences per optimizer step, over all microbatches of all replicas; a multiple of num_chunks times replicas."""
    num_chunks: int | None = option(4, PARTS, aliases=("num_micro_batches",))
    """Number of microbatches per pipeline and step. At least one per GPU keeps all GPUs busy; more microbatches are
    smaller and take less activation memory. auto: the number with the shortest predicted step, if the GPU is known."""
    num_rounds: int | None = option(None, PARTS, needs=(LOSSES,))
    """Gradient accumulation: number of rounds in which the microbatches go forward and backward, so that only the
    activations of one round exist at a time; a divisor of num_chunks. Results are bit-identical. auto: the fewest that
    fit."""
    num_slices: int | None = option(None, PARTS, needs=(LOSSES,))
    """Number of slices of each sequence, which go through the stages like microbatches, so that one long sequence keeps
    every GPU busy; a divisor of seq_length. Results differ by rounding. auto: 1; or 4 slices per GPU, of at least 4,096
    tokens, if sequences have 16,384 tokens or more and are too few to keep the GPUs busy."""
    num_stages: int | None = option(8, STAGES)
    """Number of pipeline stages, a multiple of the number N of ranks (GPUs): stage s runs on rank s modulo N. More
    stages take less GPU memory for weights. auto: the number with the shortest predicted step, if the GPU is known."""
    compute_order: Order = option(Order.AUTO, needs=(TRAINING,))
    """Order of a GPU's forwards and backwards. breadth_first: all microbatches of a round in a stage, then the next
    stage. depth_first: each microbatch goes backward as soon as it can (interleaved 1F1B); fewer activations wait, but
    all weights are on the GPU. Results are bit-identical. auto: the order with the shorter predicted step."""
    spread_head: bool = option(False, needs=(TRAINING, SEVERAL_GPUS))
    """Let all GPUs of a pipeline, not only the last one, compute the model's head and the loss, each for some
    microbatches. Takes 6 bytes of GPU memory per parameter of the head, and needs a depth-first compute_order. Results
    differ by rounding."""
    use_prefetch: bool = True
    """Load the weights of the next stage into a second GPU buffer while a stage computes. No effect with no_offload."""
    use_offload: bool = True
    """Keep weights that do not fit on the GPU in CPU memory while they are not used; no_offload keeps all weights on
    the GPU."""
    resident_stages: str = option("auto", needs=(LOSSES,), form=_number_or("auto", "all", least=0))
    """Number of each GPU's first stages whose weights and optimizer state stay on the GPU, which updates them; the
    other stages are streamed. A number, all, or auto: as many as fit and shorten the step; 0 on a CPU. Needs
    use_offload; no_offload means all."""
    recompute: Recompute = option(Recompute.AUTO, needs=(TRAINING,))
    """Activation recomputation: the part of each layer's forward that backward runs again. full: all of it. linear: all
    but attention, only with num_slices. elementwise: all but matrix products and attention. none: nothing, which saves
    a quarter of the compute. auto: as little as memory allows. elementwise and none keep all weights on the GPU."""
    activation_offloading: ActivationOffloading = option(ActivationOffloading.AUTO, needs=(TRAINING,))
    """Activation offloading: inputs of recomputed layers wait for backward in pinned CPU memory. Results are
    bit-identical. auto: for as many of a GPU's first stages as memory requires, or more if that shortens the step. on:
    for all stages that recompute. off: for no stage."""
    compile: Compile = option(Compile.AUTO, needs=(LOSSES,))
    """Run layers and loss under torch.compile, which takes a minute in the first run. auto: on a GPU. If compilation
    fails, layers and loss run uncompiled, and the log reports it."""
    overlap_optimizer: bool = True
    """Update stages in CPU memory while the GPU computes; an update may still run during the next step. Results are
    bit-identical. No effect with no_offload, where the GPU updates all stages."""
    reduce_dtype: ReduceDtype = option(ReduceDtype.FP32, needs=(TRAINING, REPLICAS))
    """Number format in which replicas send gradients; they are summed in fp32. bf16: half the bytes, and one more
    rounding per replica. No effect with one pipeline."""
    fp32_gradients: bool = option(False, needs=(TRAINING, NO_ADAPTERS))
    """Give gradients to the optimizer in fp32 instead of the format of the weights (they are always summed in fp32).
    Takes 2 more bytes per parameter and, with streamed stages, a second fp32 buffer on the GPU."""
    offload_states_to: str | None = option(None, needs=(TRAINING, NO_ADAPTERS, OFFLOADING))
    """Folders on local disks (NVMe), with commas between them, for the states (master weights and AdamW moments) of
    streamed stages: states are read before a stage's update and written after it. Takes 4 bytes of CPU memory per
    parameter instead of 14, and memory for the states of three stages. Without durable_steps, states that fit
    host_memory_limit stay in memory. Results are bit-identical."""
    gradients_on_disks: bool = option(False, needs=(DISKS, OVERLAPPING, CLIPPING))
    """Also keep gradients that wait for the norm of all stages (max_grad_norm) on the disks of offload_states_to. A
    parameter then takes 2 bytes of CPU memory instead of 4, and a step writes and reads 2 more bytes of it. Results are
    bit-identical."""
    weights_on_disks: bool = option(False, needs=(DISKS,))
    """Also keep the weights of streamed stages on the disks of offload_states_to, for models whose weights exceed CPU
    memory. A streamed parameter then takes CPU memory only in buffers; each load reads 2 bytes per parameter, each
    update reads and writes 2 more bytes. Results are bit-identical. Not with replicas."""
    durable_steps: DurableSteps = option(DurableSteps.AUTO, needs=(DISKS,))
    """Make each step a checkpoint on the disks of offload_states_to, where states are written anyway. Two checkpoints
    are written in turn, so that a kill or power cut loses one step at most. Takes twice the space on the disks; each
    step also writes the weights and the states of resident stages. auto: on one node without replicas, if there is
    room. Results are bit-identical."""
    copy_messages: bool = True
    """Send activations by the copy engines of the GPUs, which take no multiprocessors from compute. With
    no_copy_messages, or if a test at the start fails, NCCL sends them. No effect with one rank or on a CPU."""
    cross_mapping: bool = True
    """Give neighbouring ranks, which load at nearly the same time, GPUs on different PCIe root complexes, if the
    machine reports these complexes; the log has the order. With no_cross_mapping, or a GPU list that is not ascending
    (0,2,1,3), the list's order is used."""
    device: Device = Device.AUTO
    """auto: CUDA on a machine with GPUs (each rank needs one), otherwise the CPU."""
    gpu_memory_limit: float | None = option(None, POSITIVE, needs=(NOT_ON_CPU,))
    """Hard limit of each rank's GPU memory in GiB; a large GPU then behaves like a small one. Default: all of it."""
    host_memory_limit: float | None = option(None, POSITIVE)
    """CPU memory of all ranks together in GiB. Default: the memory that is available at the start."""
    tile_tokens: str = option("auto", needs=(LOSSES,), form=_number_or("auto", "off", least=1))
    """Tiled MLP: number of tokens that a recomputed layer computes at a time outside attention, so that its memory
    hardly grows with seq_length. Results differ by rounding. A number, off, or auto: off if layers fit into GPU memory
    untiled, else the largest of 32768, 16384, 8192 and 4096 that fits; off on a CPU."""
    loss_chunk_tokens: int = option(2048, COUNT, needs=(LOSSES,))
    """Tokens whose logits exist at a time; 2048 with a vocabulary of 32k take 0.25 GiB in fp32. Smaller is slower."""

    @property
    def manual_numbers(self) -> list[str]:
        """Names of the options that could be auto, but have the manual's default number."""
        numbers = {"num_stages": self.num_stages, "num_chunks": self.num_chunks}
        return [name for name, number in numbers.items() if number == options()[name].default]

    @property
    def num_resident_stages(self) -> int | None:
        """`resident_stages` if it is a number; None for auto and all."""
        return int(self.resident_stages) if _NUMBER.fullmatch(self.resident_stages) else None

    @property
    def state_folders(self) -> list[Path]:
        """`offload_states_to` as folders."""
        return [Path(name).expanduser() for name in split_names(self.offload_states_to)]

    @property
    def num_tile_tokens(self) -> int | None:
        """`tile_tokens` if it is a number; None for auto and off."""
        return int(self.tile_tokens) if _NUMBER.fullmatch(self.tile_tokens) else None

    @property
    def num_microbatches(self) -> int:
        """`num_chunks` under the name that the code uses; auto must be resolved before."""
        assert self.num_chunks is not None, "auto is resolved before the number is used"
        return self.num_chunks

    @property
    def num_slots(self) -> int:
        """Number of GPU buffers for streamed stages; only meaningful with `use_offload`."""
        return 2 if self.use_prefetch else 1


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    num_iterations: int | None = option(None, COUNT, aliases=("max_steps",), needs=(TRAINING,))
    """Optimizer steps. Default: 2, or the steps of num_train_epochs."""
    num_train_epochs: float | None = option(None, Bounds(above=0, ceiling=10_001), needs=(TRAINING,))
    """Passes over the data, such as 2 or 0.5, instead of num_iterations."""
    learning_rate: float = option(1e-5, POSITIVE, aliases=("lr",), needs=(TRAINING,))
    """Peak learning rate of AdamW; 1e-5 is a safe choice for fine-tuning all parameters of a pretrained model."""
    lr_scheduler_type: LrSchedulerType = option(LrSchedulerType.COSINE, aliases=("lr_scheduler",), needs=(TRAINING,))
    """Learning-rate schedule, by transformers' names. Both constant schedules stay at the peak after the warm-up;
    linear and cosine fall towards zero. The rates of the first and the last step are above zero."""
    lr_scheduler_kwargs: Columns | None = option(None, example="min_lr=1e-6", needs=(TRAINING,))
    """Arguments of the schedule, by transformers' names, such as min_lr=1e-6 for cosine_with_min_lr, num_cycles=3 for
    cosine_with_restarts, num_decay_steps=100 for warmup_stable_decay. In YAML also a mapping."""
    warmup_steps: float = option(0.03, Bounds(minimum=0, share_of="steps"), needs=(TRAINING,))
    """Steps over which the learning rate rises to its peak: a whole number, or, if below 1, a share of all steps
    (rounded up). With n steps, the first step has 1/n of the peak."""
    weight_decay: float = option(0.0, NON_NEGATIVE, needs=(TRAINING,))
    """Decoupled weight decay per unit of learning rate; norms, biases and other vectors have none."""
    adam_beta1: float = option(0.9, DECAY_RATE, needs=(TRAINING,))
    """Decay rate of AdamW's mean of gradients, per step."""
    adam_beta2: float = option(0.999, DECAY_RATE, needs=(TRAINING,))
    """Decay rate of AdamW's mean of squared gradients, per step."""
    adam_epsilon: float = option(1e-8, POSITIVE, needs=(TRAINING,))
    """Number that is added to AdamW's denominator."""
    optimizer_states: OptimizerStates = option(OptimizerStates.FP32, needs=(TRAINING, NO_ADAPTERS))
    """Number format of the layers' optimizer states, with bf16 weights. CPU memory per parameter, with weights and
    gradients: fp32 takes 14 bytes; bf16 (moments in bf16) takes 10; compact (8-bit moments and a 24-bit master, rounded
    stochastically) takes 7.06. Embedding, head, norms and biases always have fp32 states."""
    max_grad_norm: float = option(1.0, NON_NEGATIVE, needs=(TRAINING,))
    """Gradient clipping: largest L2 norm of all gradients together; larger gradients are scaled down. 0: no
    clipping."""
    seed: int = option(42, Bounds(minimum=0, below=2**32))
    """Seed of the data order and of fresh weights."""

    @property
    def schedule_arguments(self) -> dict[str, ArgumentValue]:
        """`lr_scheduler_kwargs` as numbers and words."""
        return read_arguments(self.lr_scheduler_type, self.lr_scheduler_kwargs or ())

    @property
    def num_steps(self) -> int:
        """`num_iterations`, once it is known; with `num_train_epochs` it follows from the data."""
        assert self.num_iterations is not None or self.num_train_epochs is None, "epochs are counted before this"
        return 2 if self.num_iterations is None else self.num_iterations

    @property
    def num_warmup_steps(self) -> int:
        """`warmup_steps` as a number of steps."""
        return steps_between(self.warmup_steps, self.num_steps) if self.warmup_steps else 0


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters and frozen parts"""

    finetuning_type: FinetuningType = option(FinetuningType.FULL, flags={"use_lora": FinetuningType.LORA})
    """full: train the model's parameters. lora: train adapters on its linear layers. prompt: train vectors that stand
    before each sample (prompt tuning). p_tuning: train an encoder that makes these vectors. prefix: train keys and
    values before each sample, in all layers. With all but full, the model's weights are frozen and take 2 bytes of CPU
    memory each. use_lora is short for lora."""
    base_dtype: BaseDtype = option(BaseDtype.BF16, needs=(FROZEN_BASE,))
    """Format of the frozen model's matrices in memory and on disks: bytes per weight. bf16: the format of --dtype. fp8,
    int8: 1. nf4: 0.56, that of bitsandbytes. mxfp4: 0.56, exact, of experts that come in it alone. They are decoded
    each time that compute turns to their stage. Embedding, head, routers and vectors keep the format of --dtype."""
    lora_rank: int = option(8, COUNT, aliases=("lora_r",), needs=(ADAPTERS,))
    """Rank of the adapter of a linear layer."""
    lora_alpha: float = option(16.0, POSITIVE, needs=(ADAPTERS,))
    """Strength of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_rank_pattern: Columns | None = option(
        None, form=(_are_ranks, _RANKS_FORM), example="q_proj=16,down_proj=4", needs=(ADAPTERS,)
    )
    """Other ranks for some linear layers, such as q_proj=16,down_proj=4, as peft's rank_pattern. A name is the end of a
    layer's full name or a regular expression of it; the first name that matches counts. In YAML also a mapping."""
    lora_alpha_pattern: Columns | None = option(
        None, form=(_are_strengths, _STRENGTHS_FORM), example="q_proj=32,down_proj=8", needs=(ADAPTERS,)
    )
    """Other strengths for some linear layers, as peft's alpha_pattern; written as lora_rank_pattern."""
    lora_target: str = option("all", aliases=("lora_target_modules",), needs=(ADAPTERS,))
    """Linear layers that get an adapter: the word all (every linear layer in the model's layers), names with commas
    such as q_proj,v_proj, or a regular expression of full names such as .*self_attn[.](q|v)_proj. none: no linear
    layer, for adapters of experts alone."""
    lora_target_parameters: str | None = option(None, aliases=("target_parameters",), needs=(ADAPTERS,))
    """Matrices of experts that get an adapter for each expert, which are no linear layers: names with commas such as
    mlp.experts.gate_up_proj,mlp.experts.down_proj, as peft's target_parameters, or the word all. Default: none."""
    use_rslora: bool = option(False, needs=(ADAPTERS,))
    """Multiply the adapters' output by lora_alpha / sqrt(lora_rank), so that large ranks do not learn more slowly."""
    lora_dropout: float = option(0.0, Bounds(minimum=0, below=1), needs=(ADAPTERS,))
    """Probability that an element of an adapter's input is dropped in training. Random numbers depend on the seed, the
    step and the token's place only, so recomputation, ranks, stages and microbatches drop the same elements."""
    use_dora: bool = option(False, needs=(ADAPTERS,))
    """DoRA: also train the length of each row of the adapted matrices (a vector per layer). Slower than LoRA; it learns
    more with small ranks."""
    loraplus_lr_ratio: float = option(1.0, POSITIVE, needs=(ADAPTERS,))
    """LoRA+: learning rate of the adapters' second matrices (B) and of trained norms and biases, as a multiple of
    learning_rate, which the first matrices (A) have. 16 is usual, with a learning_rate half as large. Default: 1."""
    additional_target: str | None = option(None, needs=(ADAPTERS,))
    """Parts that are fully trained together with adapters, separated by commas: embedding, head, norms, or the end of
    the names of linear layers, such as down_proj or layers.0.mlp.up_proj, which then get no adapter."""
    freeze: str | None = option(None, needs=(TRAINING, NO_ADAPTERS))
    """Parts to freeze in a run without adapters, separated by commas: embedding, head, norms, layers.0-15, layers.3."""
    adapter_path: str | None = option(None, aliases=("adapter_name_or_path",), needs=(FROZEN_BASE,))
    """Folder of an adapter or prompt of Mobius or peft to continue from. It decides lora_rank, lora_target and the
    other options of adapters, or num_virtual_tokens; other values are refused. Default: new ones."""
    merge: bool = option(False, needs=(ADAPTERS,))
    """Also write the model with merged adapters, to save_dir/merged."""
    num_virtual_tokens: int = option(20, COUNT, needs=(PROMPTS,))
    """Number of a prompt's vectors, or of a prefix's keys in a layer. They take this many places of each sequence,
    before each sample."""
    prompt_init_text: str | None = option(None, is_text=True, needs=(PROMPT_TUNING, NEW_PROMPT))
    """Text whose tokens' embeddings are the first values of the vectors, repeated or cut to their number. Default:
    random vectors."""
    encoder_type: EncoderType = option(EncoderType.MLP, needs=(P_TUNING,))
    """Encoder of p_tuning. mlp: three linear layers. lstm: two bidirectional layers of an LSTM, and two linear ones."""
    encoder_hidden_size: int | None = option(None, COUNT, needs=(P_TUNING,))
    """Inner width of the encoder of p_tuning. Default: the model's width."""

    @property
    def is_lora(self) -> bool:
        """Whether adapters of linear layers are trained."""
        return self.finetuning_type is FinetuningType.LORA

    def rank_of(self, linear: str) -> int:
        """Return the rank of the adapter of the linear layer with this full name."""
        return int(pattern_value(self.lora_rank_pattern, linear, self.lora_rank))

    def scale_of(self, linear: str) -> float:
        """Return the factor by which the output of this linear layer's adapter is multiplied."""
        rank, alpha = self.rank_of(linear), pattern_value(self.lora_alpha_pattern, linear, self.lora_alpha)
        return float(alpha) / (rank**0.5 if self.use_rslora else rank)

    @property
    def num_reserved_tokens(self) -> int:
        """Number of places before each sample's tokens that a prompt needs."""
        return self.num_virtual_tokens if self.is_prompt else 0

    @property
    def is_prompt(self) -> bool:
        """Whether a prompt is trained: prompt tuning, P-tuning or prefix tuning."""
        return self.finetuning_type not in (FinetuningType.FULL, FinetuningType.LORA)

    @property
    def has_frozen_base(self) -> bool:
        """Whether all trained parameters are beside the model, whose weights no result holds."""
        return self.finetuning_type is not FinetuningType.FULL

    @property
    def additional_parts(self) -> tuple[str, ...]:
        """Words of `additional_target`."""
        return split_names(self.additional_target)

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """Words of `freeze`."""
        return split_names(self.freeze)


@dataclass(frozen=True)
class OutputConfig:
    """Output"""

    save_params: str = option("finetune_params.pt", needs=(TRAINING,))
    """File (.pt) of the fine-tuned parameters, as large as the model in save_dir; none: no such file."""
    save_results: str = option("test_result.txt", needs=(TRAINING,))
    """Text summary of the run: settings, seconds, memory. auto: test_result.txt in save_dir; none: no such file."""
    save_dir: str = option("save_ckpt", aliases=("output_dir",))
    """Folder of the fine-tuned model in Hugging Face layout, with metrics and the resolved options."""
    overwrite_output_dir: bool = False
    """Replace results of an earlier run instead of refusing to start."""
    export_as: ExportAs = option(ExportAs.AUTO, needs=(TRAINING, WHOLE_RESULT))
    """Layout of the result if the base has more than the trained text, such as a vision tower or mtp.* layers.
    original: the trained tensors go back into the base's files, all others are copied. text: only the text, as a text
    model. auto: original where it is possible. Other bases have one layout, whatever this says."""
    push_to_hub: bool = option(False, needs=(TRAINING,))
    """Upload the result to the Hugging Face Hub after the run: model, model card and numbers, without checkpoints. The
    token comes from `hf auth login` or HF_TOKEN, and is checked before training."""
    hub_model_id: str | None = option(None, needs=(PUSHING,))
    """Repository on the Hub, such as me/model or model. Default: save_dir's name, in the account of the token."""
    hub_private_repo: bool = option(False, needs=(PUSHING,))
    """Create the repository on the Hub as a private one; the run refuses a public repository that exists already."""
    logging_steps: int = option(1, COUNT, needs=(TRAINING,))
    """Steps between two lines of the log and of trackers; a line has the mean loss. metrics.jsonl has every step."""
    report_to: str = option(
        "none", needs=(LOSSES,), form=(_are_trackers, f"none, or with commas any of {', '.join(TRACKERS)}")
    )
    """Experiment trackers: tensorboard (in save_dir/runs), swanlab, wandb, mlflow, trackio, or several separated by
    commas. Install the tracker's package first; swanlab and wandb record offline if they cannot go online."""
    run_name: str | None = option(None, needs=(LOSSES,))
    """Name of the run in trackers, in the model card and on the picture of the losses. Default: save_dir's name."""
    verbose: bool = False
    """Also log details: every stage of the plan, memory by owner, other plans, measurements, a first sample, and a
    second line per step with samples, padding, waits and memory."""
    trace: bool = option(False, needs=(TRAINING,))
    """Write trace.json (for ui.perfetto.dev or chrome://tracing) and its picture timeline.png into save_dir. They show
    what each rank did and when, in steps 3 to 5, or in the last three steps of a shorter run."""
    profile_steps: str | None = option(
        None, needs=(TRAINING,), form=(lambda text: any(_step_range(text)[:1]), "numbers from 1 on, such as 3 or 3-4")
    )
    """Steps to profile with torch, counted from 1, such as 3 or 3-4. Each rank writes a Chrome trace of every operation
    and kernel to save_dir/profile/rankN.json.gz. Profiled steps are slower, and many of them make large files. Default:
    none."""

    @property
    def params_file(self) -> str | None:
        """`save_params`, or None for "none"."""
        return None if self.save_params == "none" else self.save_params

    @property
    def results_file(self) -> str | None:
        """Path of the text summary (`save_results`); None for "none"."""
        words = {"none": None, "auto": str(PurePath(self.save_dir, "test_result.txt"))}
        return words.get(self.save_results, self.save_results)

    @property
    def hub_name(self) -> str:
        """`hub_model_id`, or its default."""
        return self.hub_model_id or PurePath(self.save_dir).name

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names in `report_to`, each once; empty for none."""
        return tuple(name for name in split_names(self.report_to) if name != "none")

    @property
    def name(self) -> str:
        """`run_name`, or its default."""
        return self.run_name or PurePath(self.save_dir).name or "mobius"

    @property
    def profiled_steps(self) -> range:
        """`profile_steps` as step numbers; empty if none are given or the text is invalid."""
        return _step_range(self.profile_steps or "")


@dataclass(frozen=True)
class SavingConfig:
    """Checkpoints"""

    save_strategy: SaveStrategy = option(SaveStrategy.STEPS, needs=(TRAINING,))
    """When the full state of the run is saved to save_dir/checkpoint-STEP: every save_steps, at the end of each epoch,
    or never (no). Except with no, the state is also saved when the run ends early (Ctrl-C, SIGTERM, max_run_time)."""
    save_steps: float = option(500, Bounds(above=0, share_of="steps"), needs=(TRAINING, CHECKPOINTS, SAVE_STEPS))
    """Steps between two checkpoints: a whole number, or a share of all steps if below 1 (rounded up)."""
    save_total_limit: int = option(2, NON_NEGATIVE, needs=(TRAINING, CHECKPOINTS))
    """Number of checkpoints to keep; older ones are removed, except the best one. 0 keeps all."""
    save_only_model: bool = option(False, needs=(TRAINING, CHECKPOINTS))
    """Save checkpoints without optimizer state, at a sixth of the size. Runs cannot resume from them."""
    resume_from_checkpoint: str | None = None
    """Checkpoint to resume from: its folder, or true for the newest complete one in save_dir."""
    resume_changes: str | None = option(
        None, needs=(RESUMING,), form=(_are_options, "names of options without dashes, separated by commas")
    )
    """Options that affect training and may differ from the checkpoint's options, separated by commas, such as
    learning_rate,num_iterations. Devices, stages, saving and logging may always differ."""
    max_run_time: float | None = option(None, POSITIVE, needs=(TRAINING,))
    """Minutes after which the run saves and ends, such as slightly less than a job scheduler's time limit."""
    watchdog_minutes: float = option(30.0, NON_NEGATIVE, needs=(LOSSES,))
    """Minutes without progress after which each rank logs what it does and waits for, and the run ends. 0: no limit."""

    @property
    def is_on(self) -> bool:
        """Whether the run saves its state."""
        return self.save_strategy is not SaveStrategy.NO

    @property
    def changes(self) -> tuple[str, ...]:
        """Names in `resume_changes`."""
        return split_names(self.resume_changes)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation"""

    eval_strategy: EvalStrategy = option(EvalStrategy.NO, needs=(TRAINING,))
    """When the model is evaluated on eval_dataset or val_size: every eval_steps, at the end of each epoch, or never."""
    eval_steps: float = option(500, Bounds(above=0, share_of="steps"), needs=(TRAINING, EVAL_STEPS, EVALUATIONS))
    """Steps between two evaluations: a whole number, or a share of all steps if below 1 (rounded up)."""
    eval_on_start: bool = option(False, needs=(TRAINING,))
    """Also evaluate before the first step."""
    do_train: bool = True
    """Train. no_do_train only evaluates or predicts, with the weights of model_path."""
    do_eval: bool = False
    """Evaluate after the last step."""
    save_scores: bool = option(False, needs=(LAST_EVALUATION,))
    """With do_eval: also write the log-probability of each evaluation sample to scores.jsonl in save_dir."""
    metric_for_best_model: BestMetric = option(BestMetric.LOSS, needs=(TRAINING, EVALUATIONS))
    """Metric of the evaluations that decides which checkpoint is the best one."""
    load_best_model_at_end: bool = option(False, needs=(TRAINING, COMPARED))
    """Save the weights of the best checkpoint as the result, instead of the weights after the last step."""
    early_stopping_patience: int | None = option(None, COUNT, needs=(TRAINING, COMPARED))
    """Early stopping: number of consecutive evaluations without a better metric_for_best_model that end the run."""
    do_predict: bool = option(False, flags={"predict_with_generate": True})
    """Generate answers to the samples of eval_dataset or val_size after the last step, and score them. LLaMA-Factory
    calls it predict_with_generate."""
    max_new_tokens: int = option(256, COUNT, needs=(ANSWERS,))
    """Largest number of tokens of a generated answer."""
    max_predict_samples: int | None = option(None, COUNT, needs=(ANSWERS,))
    """Number of samples from the start of each dataset for which answers are generated. Default: all."""

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated."""
        return self.eval_strategy is not EvalStrategy.NO or self.eval_on_start or self.do_eval


@dataclass(frozen=True)
class PlanningConfig:
    """Planning"""

    dry_run: bool = False
    """Print the plan of a run and exit: whether the run fits, its step time and memory, and the command or what to
    change; with verbose, all details. Needs no weights, GPU or torchrun. The exit code is 0 if it fits, else 1."""
    num_ranks: int | None = option(None, RANKS, needs=(DRY_RUN,))
    """Ranks (GPUs) that a dry run plans for. Default: nproc_per_node, or the visible GPUs; 2 without GPUs."""
    card: str | None = option(None, needs=(DRY_RUN,))
    """GPU that a dry run plans for, such as H200 or RTX4090; after an unknown name, the message lists all of them.
    Default: the GPU of this machine, or its CPU."""
    pcie: int | None = option(None, Bounds(minimum=3, below=6), needs=(DRY_RUN,))
    """PCIe generation of the slots that a dry run plans for, from 3 to 5. Default: the card's."""
    host_cores: int = option(16, COUNT, needs=(DRY_RUN,))
    """CPU cores per GPU of the host that a dry run plans for."""
    host_bandwidth: float = option(190, POSITIVE, needs=(DRY_RUN,))
    """GB/s of a node's CPU memory in a dry run, for all users together. The default is for a server with 64 cores."""
    node_link: float | None = option(None, POSITIVE, needs=(NODES,))
    """Bandwidth between nodes in GB/s per direction, for the plan of replicas; 100 Gbit/s are 12.5 GB/s. Default: a run
    on GPUs measures it, estimates use 12.5. No effect on one node."""
    disk_rate: str | None = option(None, needs=(DISKS,), form=(_are_rates, "two or three numbers above 0, such as 7,2"))
    """Sustained GB/s that each drive of offload_states_to reads and writes, such as 7,2. A third number (7,2,7.5) is
    the rate of both together, if below their sum. Consumer drives write far more slowly than data sheets say once their
    cache is full. Default: rates of earlier runs with these folders; a first run on GPUs tests them. Without rates (dry
    runs), predictions ignore the disks."""
    disk_endurance: str | None = option(
        None, needs=(DISKS,), form=(_are_ratings, "numbers above 0 with commas between them, such as 1200 or 1200,600")
    )
    """Terabytes that each drive of offload_states_to is rated for (TBW in its data sheet): one number, or one per
    folder. Linux does not know the rating. Default: unknown; then the used share of the rating is not reported."""
    max_disk_writes: float | None = option(None, POSITIVE, needs=(DISKS,))
    """Terabytes that a run may write to offload_states_to, for all drives of a node together; a run that would write
    more is refused before it starts. Default: half of disk_endurance times the drives; no limit if disk_endurance is
    unknown."""
    plan_output: str | None = option(None, needs=(DRY_RUN,))
    """File to which a dry run saves its plan, such as plan.json; not in save_dir, which must be empty for a run."""
    plan: str | None = None
    """File of the plan to train with, from a dry run or a save_dir: stages, microbatches, batch, resident stages,
    slots, recomputation."""

    @property
    def disk_rates(self) -> tuple[float, ...]:
        """GB/s of `disk_rate`: of reads, of writes and, if given, of both at once; empty without `disk_rate`."""
        return tuple(map(float, self.disk_rate.split(","))) if self.disk_rate else ()

    @property
    def disk_ratings(self) -> tuple[float, ...]:
        """`disk_endurance` as terabytes; empty if it is not given."""
        return tuple(map(float, self.disk_endurance.split(","))) if self.disk_endurance else ()


@dataclass(frozen=True)
class LaunchConfig:
    """Launch (for train.sh; main.py reads only pipeline_ranks; for torchrun, use its options and the environment)"""

    cuda_visible_devices: str | None = option(None, form=(_are_devices, "a list of different GPUs, such as 0,2,1,3"))
    """GPUs in the order of the ranks, such as 0,2,1,3; cross_mapping reorders an ascending list. Default: all."""
    master_port: int = option(29502, Bounds(minimum=1, below=65_536))
    """TCP port of the rendezvous. If the port is in use and the user did not choose it, train.sh uses any free port."""
    nproc_per_node: int | None = option(None, RANKS)
    """Number of ranks (processes, one per GPU) on this node. Default: one for each listed GPU, or all; 2 without
    GPUs."""
    nnodes: int = option(1, Bounds(minimum=1, ceiling=1025))
    """Number of nodes (machines). Start train.sh on each node with the same options, except node_rank."""
    node_rank: int | None = option(None, NON_NEGATIVE)
    """Number of this node, from 0; node 0 writes the log and the files of the run. Needed with several nodes."""
    rdzv_endpoint: str | None = option(None, form=(_ENDPOINT.fullmatch, "HOST:PORT, such as node0:29502"))
    """HOST:PORT of node 0 for the rendezvous, reachable from the other nodes. Needed with several nodes."""
    pipeline_ranks: int | None = option(None, RANKS)
    """Number of ranks of a pipeline. A node with a multiple of that many ranks runs several pipelines as data-parallel
    replicas, which share each step's batch and the optimizer's work. Default: all ranks of a node."""
    max_restarts: int = option(0, NON_NEGATIVE)
    """Number of times that all ranks restart from the newest checkpoint after one of them has died."""


@dataclass(frozen=True)
class Config:
    """Config of a run as the user gave it."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    objective: ObjectiveConfig = NO_OPTIONS
    optim: OptimConfig = OptimConfig()
    adapters: AdapterConfig = AdapterConfig()
    output: OutputConfig = OutputConfig()
    saving: SavingConfig = SavingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    planning: PlanningConfig = PlanningConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def slots_name(self) -> str:
        """Name of the folder for durable steps in each folder of `offload_states_to`; derived from `save_dir`."""
        whole = Path(self.output.save_dir).resolve()
        return f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"


COMMAND_DEFAULTS: Final[Mapping[str, OptionValue]] = {
    "num_stages": None,
    "num_chunks": None,  # None means auto
    "save_params": "none",
    "save_results": "auto",
}
"""Defaults for subcommands of `mobius` without a file, for files of other trainers and for Python. main.py, train.sh
and files in Mobius' format use the defaults of the fields, which are the manual's.
"""


def _sections() -> dict[str, type]:
    return typing.get_type_hints(Config)


@functools.cache
def options() -> Mapping[str, Option]:
    """All options by name, in the order of the config's fields."""
    return {option.name: option for name, section in _sections().items() for option in options_of(section, name)}


def sections() -> Mapping[str, list[Option]]:
    """Options of each section, by the section's title in the help."""
    every = options().values()
    return {str(kind.__doc__): [own for own in every if own.section == name] for name, kind in _sections().items()}


@functools.cache
def spellings() -> Mapping[str, Spelling]:
    """All accepted names of options, without dashes."""
    return spellings_of(options().values())


def nearest_name(name: str, names: Iterable[str] | None = None) -> str | None:
    """Return the name in `names` closest to `name`; None if no name is close, because a wrong hint is worse than none.

    `names` are by default all spellings of a run's options.
    """
    typed = name.replace("-", "_").lower()[:60]
    alike = [known for known in names or spellings() if re.findall(r"\d", known) == re.findall(r"\d", typed)]
    return next(iter(difflib.get_close_matches(typed, alike, 1, _SURELY_ALIKE)), None)


def option_values(config: Config) -> dict[str, OptionValue]:
    """Flat form of a config: option name -> value."""
    return {option.name: getattr(getattr(config, option.section), option.name) for option in options().values()}


def config_from(values: Mapping[str, OptionValue]) -> Config:
    """Config with `values` in place of defaults; does not check types or bounds."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    for name, value in values.items():
        sections[options()[name].section][name] = value
    return Config(**{name: section(**sections[name]) for name, section in _sections().items()})
