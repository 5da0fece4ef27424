"""Owns what a run can be told: one frozen section per topic, with the meaning of every option under its field.

Field names are the names of the options, and the texts are what `--help` prints.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Annotated, Final

from mobius.config.adapters import AdapterConfig
from mobius.config.bounds import (
    Bounds,
    ChunkCount,
    Count,
    DecayRate,
    LayerCount,
    NonNegative,
    Positive,
    RankCount,
    RoundCount,
    Seed,
    SliceCount,
    StageCount,
)
from mobius.config.launch_config import LaunchConfig
from mobius.config.lr_schedules import ArgumentValue, LrSchedulerType, read_arguments
from mobius.config.saving_evaluation import EvaluationConfig, SavingConfig

# Nine digits at most, so that no number is too long to be read.
_STEPS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)

# What is typed is a member's name in small letters.
Dtype = StrEnum("Dtype", ["BF16", "FP16", "FP32"])
"""Number format of the working weights and activations."""
Device = StrEnum("Device", ["AUTO", "CUDA", "CPU"])
"""Kind of device that a run computes on."""
Compile = StrEnum("Compile", ["AUTO", "ON", "OFF"])
"""Whether layers run as compiled graphs."""
ActivationOffloading = StrEnum("ActivationOffloading", ["AUTO", "ON", "OFF"])
"""Whether inputs of layers wait in CPU memory for their backward."""


class ReduceDtype(StrEnum):
    """Choice of the format of gradients between replicas."""

    FP32 = "fp32"
    BF16 = "bf16"


class Recompute(StrEnum):
    """Choice of what runs its forward again in backward."""

    AUTO = "auto"
    FULL = "full"
    LINEAR = "linear"
    ELEMENTWISE = "elementwise"
    NONE = "none"

    @property
    def saves_activations(self) -> bool:
        """Whether no layer is recomputed from its input alone."""
        return self in (Recompute.ELEMENTWISE, Recompute.NONE)


Packing = StrEnum("Packing", ["AUTO", "ON", "OFF", "JOINED"])
"""How samples become rows of seq_length."""

TRACKERS: Final = ("tensorboard", "swanlab", "wandb")
"""Words of `report_to`, which are the names of the packages too."""

Columns = tuple[tuple[str, str], ...]
"""Pairs of what is read and the column that holds it, such as (("prompt", "document"), ("completion", "summary"))."""


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a mixture; None stands for what the options of all datasets say."""

    name: str
    """Known name, Hugging Face id, or a local file or folder."""
    weight: Annotated[float, Bounds(above=0, ceiling=1001)] = 1.0
    """How many times each sample appears in an epoch, on average: floor(weight) or ceil(weight) times."""
    max_samples: Count | None = None
    """Samples to use, from its start."""
    columns: Columns | None = None
    """Columns of a table that is in no known format."""
    split: str = "train"
    """Split of a dataset of the hub, or of a folder with files of several."""
    subset: str | None = None
    """Configuration of a dataset of the hub."""


Datasets = tuple[DatasetEntry, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    model_path: str = "meta-llama/Llama-2-7b-hf"
    """Hugging Face id or local folder, or llama-2-7b-hf or llama-2-13b-hf for short. Weights are fine-tuned; a folder
    with only a config.json is trained from fresh ones. A dry run takes shapes, too: 1b, 7b, 8b, 13b, 14b, 30b, 70b,
    qwen3-30b-a3b, mixtral-8x7b."""
    num_layers: LayerCount | None = None
    """Layers to use; fewer than the model has are its first ones (a smaller model, simulated). Default: all."""
    embedding_dim: Count | None = None
    """Width of the hidden state; shapes a model without weights. Default: the model's own."""
    ff_dim: Count | None = None
    """Inner width of the feed-forward part; shapes a model without weights. Default: the model's own."""
    num_heads: Count | None = None
    """Attention heads; shapes a model without weights. Default: the model's own."""
    dtype: Dtype = Dtype.BF16
    """Format of weights and activations on the GPU; the optimizer always keeps fp32 master weights. bf16 needs no loss
    scaling, fp16 is for GPUs without bf16, fp32 for tests and CPUs: the default on a CPU without bf16 instructions."""


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    dataset: Datasets = (DatasetEntry("xsum"),)
    """Known name (xsum), Hugging Face id, or a local file or folder (JSON, JSONL, CSV, Parquet, Arrow, also .gz, .zst);
    several are mixed, each by its weight if it has one, such as a.jsonl b.parquet:0.3. In YAML a list, also of mappings
    with path and, if wanted, weight, max_samples, columns, split and subset."""
    seq_length: Annotated[int, Bounds(minimum=2)] = 512
    """Tokens per sequence (row); longer samples are cut and counted, shorter ones packed or padded."""
    packing: Packing = Packing.AUTO
    """Whether several samples share a row, each by itself: attention never crosses from one to another. auto: on for
    conversations, instructions and prompts, joined for plain text. joined: plain text is joined and cut into full rows,
    as for pretraining, and attention crosses. off: one sample in a row, the rest padded."""
    max_samples: Count | None = None
    """Samples to use of each dataset, from its start. Default: all."""
    columns: Columns | None = None
    """Columns of tables that are in no known format, such as prompt=document,completion=summary. In YAML a mapping,
    too."""
    chat_template: str | None = None
    """Jinja file, or name of a built-in template, in place of the tokenizer's own. Default: the tokenizer's."""
    default_system: str | None = None
    """System message of conversations that have none."""
    train_on_prompt: bool = False
    """Train on prompts too, not on answers only."""
    mask_history: bool = False
    """Train on the last answer of a conversation only."""
    val_size: NonNegative = 0.0
    """Samples held out of training for evaluation: a whole number, or below 1 a share of the data."""
    eval_dataset: Datasets | None = None
    """Datasets to evaluate on, written like dataset, without weights."""
    preprocessing_num_workers: Annotated[int, Bounds(minimum=1, ceiling=4096, allows_auto=True)] | None = None
    """Processes that tokenize; the result is cached, so that more only shorten the first run. auto: by the machine's
    cores and the size of the data."""
    overwrite_cache: bool = False
    """Tokenize again, even if an earlier run has left the result."""
    preview: Annotated[int, Bounds(minimum=1, ceiling=1001)] | None = None
    """Show as many samples as they will be trained on, and what a step will hold, and end; needs no GPU. Without a
    number: 3."""
    preview_output: str | None = None
    """File for the picture of a preview: how many samples have how many tokens, such as preview.png. Default: none."""

    @property
    def is_text_joined(self) -> bool:
        """Whether documents of plain text follow each other, cut into rows anywhere."""
        return self.packing in (Packing.AUTO, Packing.JOINED)


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline and memory"""

    batch_size: Count = 128
    """Sequences per optimizer step, over all microbatches of all replicas; a multiple of num_chunks times replicas."""
    num_chunks: ChunkCount | None = 4
    """Microbatches of a pipeline's part of the batch; at least its number of GPUs keeps all busy, more need less
    activation memory each. auto: by the predicted step time, where the GPU is known."""
    num_rounds: RoundCount | None = None
    """Parts of the microbatches that go forward and backward one after the other, so that only one part's activations
    take memory; a divisor of num_chunks. Results are the same to the bit. auto: the fewest that fit into GPU memory."""
    num_slices: SliceCount | None = None
    """Slices of each sequence, which go through the stages like microbatches, so that one long sequence keeps every GPU
    busy; a divisor of seq_length. Results differ by rounding. auto: 1, or for sequences of 16,384 tokens and more
    that are too few for the GPUs, 4 microbatches for each GPU, of at least 4,096 tokens."""
    num_stages: StageCount | None = 8
    """Pipeline stages, a multiple of the number of ranks (GPUs): stage s runs on rank s modulo ranks. More need less
    GPU memory for weights. auto: by the predicted step time, where the GPU is known."""
    use_prefetch: bool = True
    """Load the next stage's weights into a second GPU buffer while this one computes. No effect with no_offload."""
    use_offload: bool = True
    """Keep weights that do not fit on the GPU in CPU memory while not in use; no_offload keeps all on the GPU."""
    resident_stages: str = "auto"
    """First stages of each GPU that stay there with their optimizer state and are updated there; the others are
    streamed. A number, all, or auto: as many as shorten the step and fit beside the activations that recompute keeps; 0
    on a CPU. Needs use_offload; no_offload is the same as all."""
    recompute: Recompute = Recompute.AUTO
    """Part of each layer's forward that backward runs again, so that one layer's activations exist at a time. auto: as
    little as memory allows. full: all. linear: all but attention, of num_slices. elementwise: all but products and
    attention. none: nothing, a quarter less compute. The last two need no_offload or resident_stages all."""
    activation_offloading: ActivationOffloading = ActivationOffloading.AUTO
    """Whether the inputs of layers, from which backward recomputes, wait for it in page-locked CPU memory. Results are
    the same to the bit. auto: those of a GPU's first stages, as many as are needed to fit, or as shorten the step by
    what is done with the memory. on: of all stages that recompute. off: none do."""
    compile: Compile = Compile.AUTO
    """Run layers and loss under torch.compile, which takes a minute in the first run. auto: on a GPU. Where it fails,
    they run as they are, and a line says so."""
    overlap_optimizer: bool = True
    """Update stages in CPU memory while the GPU computes, also into the next step; results are the same to the bit. No
    effect with no_offload, where the GPU updates."""
    reduce_dtype: ReduceDtype = ReduceDtype.FP32
    """Format in which gradients travel between replicas, which add them up in fp32. bf16: half the bytes, and each
    replica's part of a gradient is rounded once more. No effect with one pipeline."""
    fp32_gradients: bool = False
    """Hand gradients, always summed in fp32, to the optimizer in fp32 instead of the format of the weights: 2 bytes
    more per parameter where they are kept, and with streamed stages a second fp32 buffer on the GPU."""
    copy_messages: bool = True
    """Send activations by the GPUs' copy engines, which take no multiprocessors from compute; over NCCL with
    no_copy_messages, or where a trial at the start fails. No effect with one rank or on a CPU."""
    cross_mapping: bool = True
    """Give neighbouring ranks, which load at nearly the same time, GPUs on different PCIe root complexes, as far as the
    machine tells; a line says which. no_cross_mapping, or a list that is not ascending (0,2,1,3): as listed."""
    probe_topology: bool = False
    """Measure in a few seconds which GPUs slow each other's loads down, for (virtual) machines that tell it wrongly.
    Later runs on these GPUs know it. No effect with fewer than three ranks."""
    device: Device = Device.AUTO
    """auto: CUDA on a machine with GPUs, of which every rank needs its own, otherwise the CPU."""
    gpu_memory_limit: Positive | None = None
    """Hard cap on each rank's GPU memory in GiB; a large GPU behaves like a small one. Default: the whole GPU."""
    host_memory_limit: Positive | None = None
    """CPU memory of all ranks together in GiB, if it grows on demand. Default: what is available at the start."""
    tile_tokens: str = "auto"
    """Tokens that a layer which is recomputed takes at a time, in all but its attention; then its work in memory hardly
    grows with seq_length, and only rounding changes. A number, off, or auto: whole layers where they fit into GPU
    memory, else the most of 32768, 16384, 8192 and 4096 tokens that fit; off on a CPU."""
    loss_chunk_tokens: Count = 2048
    """Tokens whose logits exist at one time; 2048 of a 32k vocabulary take 0.25 GiB in fp32, fewer are slower."""

    @property
    def num_resident_stages(self) -> int | None:
        """`resident_stages` where it is a number; None for auto and all."""
        return int(self.resident_stages) if _NUMBER.fullmatch(self.resident_stages) else None

    @property
    def num_tile_tokens(self) -> int | None:
        """`tile_tokens` where it is a number; None for auto and off."""
        return int(self.tile_tokens) if _NUMBER.fullmatch(self.tile_tokens) else None

    @property
    def num_microbatches(self) -> int:
        """`num_chunks` under the name the code uses, once it is chosen."""
        assert self.num_chunks is not None, "auto is resolved before anything asks"
        return self.num_chunks

    @property
    def stages(self) -> int:
        """`num_stages`, once it is chosen."""
        assert self.num_stages is not None, "auto is resolved before anything asks"
        return self.num_stages

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.batch_size // self.num_microbatches

    @property
    def num_slots(self) -> int:
        """GPU buffers for streamed stages; only meaningful with `use_offload`."""
        return 2 if self.use_prefetch else 1


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    num_iterations: Count | None = None
    """Optimizer steps. Default: 2, or what num_train_epochs needs."""
    num_train_epochs: Annotated[float, Bounds(above=0, ceiling=10_001)] | None = None
    """Passes over the data, also parts of one, in place of num_iterations."""
    learning_rate: Positive = 1e-5
    """Peak learning rate of AdamW; 1e-5 is a safe choice for fine-tuning all parameters of a pretrained model."""
    lr_scheduler_type: LrSchedulerType = LrSchedulerType.COSINE
    """Course of the learning rate by transformers' names. Both constant ones stay at the peak after the warm-up;
    linear and cosine fall towards zero. Neither the first nor the last step has a rate of zero."""
    lr_scheduler_kwargs: Columns | None = None
    """Further numbers of the course by transformers' names, such as min_lr=1e-6 for cosine_with_min_lr, num_cycles=3
    for cosine_with_restarts, num_decay_steps=100 for warmup_stable_decay. In YAML a mapping, too."""
    warmup_steps: NonNegative = 0.03
    """Steps n over which the learning rate rises to its peak, from 1/n of it in the first step: whole, or below 1 a
    share of all (rounded up)."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay per unit of learning rate; norms, biases and other vectors have none."""
    adam_beta1: DecayRate = 0.9
    """Decay rate of AdamW's mean of gradients, per step."""
    adam_beta2: DecayRate = 0.999
    """Decay rate of AdamW's mean of squared gradients, per step."""
    adam_epsilon: Positive = 1e-8
    """Added to AdamW's denominator."""
    max_grad_norm: NonNegative = 1.0
    """Largest L2 norm of all gradients together, to which larger ones are scaled down; 0 switches clipping off."""
    seed: Seed = 42
    """Seed of the data order and of fresh weights."""

    @property
    def schedule_arguments(self) -> dict[str, ArgumentValue]:
        """`lr_scheduler_kwargs` as numbers and words."""
        return read_arguments(self.lr_scheduler_type, self.lr_scheduler_kwargs or ())

    @property
    def num_steps(self) -> int:
        """`num_iterations`, once it is known; with `num_train_epochs` the data tell it."""
        assert self.num_iterations is not None or self.num_train_epochs is None, "epochs are counted before anyone asks"
        return 2 if self.num_iterations is None else self.num_iterations

    @property
    def num_warmup_steps(self) -> int:
        """`warmup_steps` as a number of steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        # 0.07 * 100 is 7.000000000000001 in binary, which must not become 8 steps.
        return math.ceil(round(self.warmup_steps * self.num_steps, 6))


@dataclass(frozen=True)
class OutputConfig:
    """Output"""

    save_params: str = "finetune_params.pt"
    """One .pt file with the fine-tuned parameters, as many bytes again as the model in save_dir; none: no such file."""
    save_results: str = "test_result.txt"
    """Text summary of the run: settings, seconds, memory."""
    save_dir: str = "save_ckpt"
    """Folder of the fine-tuned model in Hugging Face layout, with metrics and the resolved options."""
    overwrite_output_dir: bool = False
    """Replace results of an earlier run instead of refusing to start."""
    logging_steps: Count = 1
    """Steps between two progress lines, also of trackers, which tell the mean loss of these steps; every step by itself
    is in metrics.jsonl."""
    report_to: str = "none"
    """Trackers that get the numbers too: tensorboard (in save_dir/runs), swanlab, wandb, or several with commas; each
    is a package of its own to install, and records offline where it cannot go online."""
    run_name: str | None = None
    """Name of the run in trackers, in the model card and on the picture of its losses. Default: save_dir's name."""
    verbose: bool = False
    """Log details too: every stage of the plan, what was measured, a first sample, host memory by owner, and a second
    line under each step with its samples, padding, waits and memory."""
    show_actions: bool = False
    """Print the action list of each rank before training."""
    trace: bool = False
    """Write trace.json (for ui.perfetto.dev or chrome://tracing) and its picture timeline.png into save_dir: what each
    rank did and when, in steps 3 to 5, or the last three of a shorter run."""
    profile_steps: str | None = None
    """Steps to profile with torch, counted from 1, such as 3 or 3-4. Each rank writes a Chrome trace of every operation
    and kernel to save_dir/profile/rankN.json.gz. They are slower, and many make large files. Default: none."""

    @property
    def params_file(self) -> str | None:
        """`save_params`, or None for the word none."""
        return None if self.save_params == "none" else self.save_params

    @property
    def trackers(self) -> tuple[str, ...]:
        """Words of `report_to`, each once; there are none in the place of none."""
        words = (word.strip() for word in self.report_to.split(","))
        return () if self.report_to.strip() == "none" else tuple(dict.fromkeys(words))

    @property
    def name(self) -> str:
        """`run_name`, or what stands for it."""
        return self.run_name or PurePath(self.save_dir).name or "mobius"

    @property
    def profiled_steps(self) -> range:
        """`profile_steps` as step numbers; empty where there are none, or the text is not readable."""
        match = _STEPS.fullmatch((self.profile_steps or "").strip())
        return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


@dataclass(frozen=True)
class PlanningConfig:
    """Planning"""

    dry_run: bool = False
    """Print the plan of a run (stages, bytes by category, predicted step, whether it fits), and end; needs no
    weights, GPU or torchrun. The exit code is 0 if the run fits, else 1."""
    num_ranks: RankCount | None = None
    """Ranks (GPUs) that a dry run plans for. Default: nproc_per_node, or the visible GPUs; 2 without any."""
    card: str | None = None
    """GPU that a dry run plans for, such as H200 or RTX4090 (scripts/simulate.py --help lists them). Default: the one
    that is here; without any, the CPU."""
    node_link: Positive | None = None
    """GB/s of a node's link to the other nodes, in each direction, that replicas are planned for; 100 Gbit/s are 12.5.
    Default: a run on GPUs measures it, estimates take 12.5. No effect on one node."""
    plan_output: str | None = None
    """File in which a dry run saves its plan, such as plan.json; not in save_dir, which a run wants empty. Default:
    none."""
    plan: str | None = None
    """Plan to train by, of a dry run or in a save_dir: stages, chunks, batch, residency, slots, kept activations."""


@dataclass(frozen=True)
class Config:
    """A run as the user asked for it."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optim: OptimConfig = OptimConfig()
    adapters: AdapterConfig = AdapterConfig()
    output: OutputConfig = OutputConfig()
    saving: SavingConfig = SavingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    planning: PlanningConfig = PlanningConfig()
    launch: LaunchConfig = LaunchConfig()
