"""Owns what to tell a user who gives an option of another trainer: what to use here, or that there is no such thing.

The names are those of transformers' TrainingArguments, TRL's SFTConfig, LLaMA-Factory and DeepSpeed. Names that this
program takes itself are in `options.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ForeignOption:
    """`answer` ends the message about the option; `instead` are the options here that it was meant for."""

    answer: str
    instead: tuple[str, ...] = ()


def find_foreign(name: str) -> ForeignOption | None:
    """What is known of a name that is no option here, written with dashes or underscores; None: nothing."""
    return FOREIGN_OPTIONS.get(name.replace("-", "_").lower())


def _answered(answer: str, *names: str, instead: tuple[str, ...] = ()) -> dict[str, ForeignOption]:
    return dict.fromkeys(names, ForeignOption(answer, instead))


_ALL_PARAMETERS: Final = "not available; this program trains all parameters, without adapters or quantization"
_NO_EVALUATION: Final = "not available; nothing is evaluated during a run. Evaluate the model in --save_dir afterwards"
_NO_CHECKPOINTS: Final = "not available; the model is saved once, at the end, to --save_dir"
_NO_SHARDING: Final = (
    "not available; this program has its own pipeline instead of DeepSpeed or FSDP. --use_offload and "
    "--num_stages say what is kept in CPU memory"
)
_SUPERVISED: Final = "not available; only supervised fine-tuning is done, without a reward or reference model"
_LEAVE_OUT: Final = "not needed; leave it out"

FOREIGN_OPTIONS: Final[Mapping[str, ForeignOption]] = {
    # how long and how much
    **_answered(
        "use --num_iterations, the number of steps: epochs x samples / --batch_size",
        *("num_train_epochs", "num_epochs", "epochs", "n_epochs"),
        instead=("num_iterations",),
    ),
    **_answered(
        "use --batch_size, all sequences of a step over all GPUs together, and --num_chunks, the microbatches that "
        "it is cut into",
        *("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
        *("micro_batch_size", "per_device_batch_size"),
        instead=("batch_size", "num_chunks"),
    ),
    **_answered(
        "use --batch_size, all sequences of a step over all GPUs together",
        *("train_batch_size", "global_batch_size", "total_batch_size", "effective_batch_size"),
        instead=("batch_size",),
    ),
    **_answered(
        "use --num_chunks: the microbatches of a step, whose gradients are summed; --batch_size counts the sequences "
        "of all of them",
        *("gradient_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches", "gradient_accumulation"),
        instead=("num_chunks",),
    ),
    **_answered(
        "use --seq_length, the tokens of a sequence",
        *("max_seq_length", "max_seq_len", "model_max_length", "block_size", "context_length", "sequence_length"),
        *("max_source_length", "max_target_length"),
        instead=("seq_length",),
    ),
    **_answered(
        "use --max_samples, the records that are read",
        *("max_train_samples", "num_samples", "num_train_samples"),
        instead=("max_samples",),
    ),
    # optimizer
    **_answered(
        "use --warmup_steps with a number below 1, such as --warmup_steps 0.03 for 3 % of the run",
        *("warmup_ratio", "warmup_fraction", "warmup_proportion"),
        instead=("warmup_steps",),
    ),
    **_answered("use --warmup_steps", "num_warmup_steps", "warmup_num_steps", instead=("warmup_steps",)),
    **_answered(
        "use --lr_scheduler_type linear, cosine or constant", "lr_scheduler_kwargs", "lr_schedule", "scheduler"
    ),
    **_answered(
        "not available; the optimizer is AdamW, whose fp32 states are kept where they fit",
        *("optim", "optim_args", "optim_target_modules", "optimizer", "optimizer_type", "adafactor", "use_galore"),
        *("use_badam", "use_apollo", "use_muon", "use_adam_mini"),
    ),
    **_answered("use --adam_beta1 and --adam_beta2", "betas", "adam_betas", instead=("adam_beta1", "adam_beta2")),
    **_answered("use --adam_epsilon", "adam_eps", "eps", instead=("adam_epsilon",)),
    **_answered(
        "use --max_grad_norm",
        "gradient_clipping",
        "clip_grad",
        "grad_clip",
        "gradient_clip_val",
        instead=("max_grad_norm",),
    ),
    **_answered("not available; the loss is plain cross entropy", "label_smoothing_factor", "neftune_noise_alpha"),
    **_answered("use --seed, which also orders the data", "data_seed", instead=("seed",)),
    # memory, formats and speed
    **_answered(
        "use --recompute full (on), none (off) or auto",
        *(
            "gradient_checkpointing",
            "activation_checkpointing",
            "disable_gradient_checkpointing",
            "checkpoint_activations",
        ),
        *("use_reentrant_gc", "gradient_checkpointing_kwargs"),
        instead=("recompute",),
    ),
    **_answered(
        "use --dtype bf16, fp16 or fp32",
        *("torch_dtype", "mixed_precision", "precision", "fp16_opt_level", "pure_bf16", "bf16_full_eval", "half"),
        instead=("dtype",),
    ),
    **_answered("not available; use --dtype bf16, fp16 or fp32", "fp8", "int8", instead=("dtype",)),
    **_answered("not available; fp32 products are computed in fp32, --dtype bf16 is the fast format", "tf32"),
    **_answered(_NO_SHARDING, "deepspeed", "deepspeed_config", "zero_stage", "zero_optimization", "ds_config"),
    **_answered(_NO_SHARDING, "fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "accelerator_config"),
    **_answered(
        "use --use_offload",
        *("offload_optimizer", "offload_param", "cpu_offload", "offload", "optimizer_offload"),
        instead=("use_offload",),
    ),
    **_answered(
        "use --compile on, off or auto",
        "torch_compile",
        "torch_compile_mode",
        "torch_compile_backend",
        instead=("compile",),
    ),
    **_answered(
        "not needed; the attention of the model's transformers class is used",
        "flash_attn",
        "attn_implementation",
        "use_flash_attention_2",
        "use_unsloth",
        "enable_liger_kernel",
        "use_liger_kernel",
        "shift_attn",
    ),
    **_answered(
        "use --num_stages, and start one process per GPU (--nproc_per_node)",
        *("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size", "pp"),
        instead=("num_stages",),
    ),
    **_answered(
        "not available; GPUs share the model as a pipeline only (--num_stages)",
        *("tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tp", "sequence_parallel_size", "cp_size"),
        *("context_parallel_size", "expert_parallel_size", "data_parallel_size", "dp_size"),
    ),
    **_answered(
        "use --nproc_per_node, one process per GPU",
        *("num_gpus", "n_gpu", "num_processes", "world_size", "gpus", "devices"),
        instead=("nproc_per_node",),
    ),
    **_answered("not available; a run is on one node", "num_nodes", "nnodes", "node_rank", "master_addr"),
    **_answered("use --device cpu", "use_cpu", "no_cuda", instead=("device",)),
    # adapters and other methods
    **_answered(
        _ALL_PARAMETERS,
        *(
            "use_lora",
            "lora",
            "lora_rank",
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "lora_target",
            "lora_target_modules",
        ),
        *("use_peft", "peft_config", "additional_target", "adapter_name_or_path", "use_dora", "use_rslora", "qlora"),
        *("quantization_bit", "quantization_method", "load_in_4bit", "load_in_8bit", "freeze_trainable_layers"),
        *("bnb_4bit_quant_type", "create_new_adapter", "export_quantization_bit"),
    ),
    **_answered(
        "not needed: all parameters are trained and that is the only method; leave it out",
        *("finetuning_type", "train_type", "tuner_type"),
    ),
    **_answered(
        "not needed: supervised fine-tuning is the only method, and data with a `text` column is trained on whole; "
        "leave it out",
        *("stage", "task", "rlhf_type"),
    ),
    **_answered(_SUPERVISED, "pref_beta", "dpo_beta", "beta", "pref_loss", "ref_model", "reward_model", "ppo_epochs"),
    # data
    **_answered(
        "use --dataset with a known name, a Hugging Face id, or a local file or folder",
        *("dataset_name", "dataset_path", "train_file", "data_path", "data_files", "dataset_dir", "train_data"),
        *("train_dataset", "data_file", "custom_dataset_path"),
        instead=("dataset",),
    ),
    **_answered(
        "not available; of a dataset its `train` split is read (--dataset)",
        "dataset_config_name",
        "split",
        "dataset_split",
        "train_split",
    ),
    **_answered(
        "not available; the columns are recognized by their names: rename them in the data",
        *("dataset_text_field", "text_column", "prompt_column", "response_column", "input_column", "columns"),
    ),
    **_answered(
        "not needed: the tokenizer's own chat template is used; leave it out",
        *("template", "chat_template", "prompt_template", "conversation_template", "default_system"),
    ),
    **_answered(
        "not an option: data with a `text` column is always packed, and conversations never are",
        *("packing", "neat_packing", "pack", "sample_packing", "group_by_length", "padding_free"),
    ),
    **_answered(
        "not an option: only answers are trained on, and all of data with a `text` column",
        *("train_on_prompt", "completion_only_loss", "assistant_only_loss", "mask_history", "train_on_inputs"),
        *("mask_prompt", "train_on_input"),
    ),
    **_answered(
        "not needed: tokens are prepared before the run; --preprocessing_num_workers speeds that up",
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_drop_last"),
        *("streaming", "num_workers", "dataloader_persistent_workers"),
    ),
    **_answered(
        "use --preprocessing_num_workers",
        *("dataset_num_proc", "num_proc", "preprocessing_batch_size", "dataset_num_workers"),
        instead=("preprocessing_num_workers",),
    ),
    **_answered(
        "not needed: tokenized data is kept and used again while nothing changes; leave it out",
        *("overwrite_cache", "tokenized_path", "use_cached_dataset"),
    ),
    # evaluation, saving, logging
    **_answered(
        _NO_EVALUATION,
        *("do_eval", "do_predict", "eval_steps", "eval_strategy", "evaluation_strategy", "val_size", "eval_dataset"),
        *("per_device_eval_batch_size", "eval_batch_size", "eval_accumulation_steps", "predict_with_generate"),
        *("compute_accuracy", "metric_for_best_model", "load_best_model_at_end", "eval_on_start", "validation_file"),
        *("early_stopping_steps", "greater_is_better", "max_eval_samples", "eval_delay"),
    ),
    **_answered(
        _NO_CHECKPOINTS,
        *("save_steps", "save_strategy", "save_total_limit", "save_on_each_node", "save_freq", "save_interval"),
        *("checkpointing_steps", "save_epochs"),
    ),
    **_answered(
        "not available; a run starts at step 1. Give the --save_dir of an earlier run as --model_path to train on "
        "from its weights",
        *("resume_from_checkpoint", "resume", "load_checkpoint", "ignore_data_skip"),
        instead=(),
    ),
    **_answered(
        "not needed: --save_dir holds the model in Hugging Face layout, as safetensors, without optimizer states",
        *(
            "save_only_model",
            "save_safetensors",
            "export_dir",
            "export_size",
            "push_to_hub",
            "hub_model_id",
            "hub_token",
        ),
    ),
    **_answered(
        "not needed: --save_dir holds everything, its metrics.jsonl the losses",
        "logging_dir",
        "plot_loss",
        "log_dir",
        "tensorboard_dir",
    ),
    **_answered(
        "not available; the losses are in metrics.jsonl in --save_dir",
        *("report_to", "use_wandb", "wandb_project", "run_name", "use_swanlab", "use_tensorboard", "wandb_run_name"),
    ),
    **_answered(
        "use --logging_steps",
        "logging_strategy",
        "log_interval",
        "steps_per_print",
        "log_every_n_steps",
        "logging_first_step",
        instead=("logging_steps",),
    ),
    # switches of other programs
    **_answered(
        _LEAVE_OUT,
        "do_train",
        "remove_unused_columns",
        "disable_tqdm",
        "log_level",
        "ddp_find_unused_parameters",
        "include_num_input_tokens_seen",
        "low_cpu_mem_usage",
        "ddp_backend",
    ),
    **_answered(
        "not needed: ranks wait for each other as long as it takes; leave it out", "ddp_timeout", "nccl_timeout"
    ),
    **_answered("not needed: torchrun tells it through the environment; leave it out", "local_rank"),
    **_answered(
        "not available; code from a model's folder is never run, its class must be in transformers", "trust_remote_code"
    ),
    **_answered(
        "use --model_path",
        "model_id",
        "pretrained_model_name_or_path",
        "base_model",
        "tokenizer_name_or_path",
        "tokenizer_name",
        "config_name",
        instead=("model_path",),
    ),
    **_answered(
        "not available; download that version and give its folder as --model_path",
        "model_revision",
        "cache_dir",
        "hf_hub_token",
    ),
    **_answered(
        "not available; the model's own config.json says it (--model_path)",
        "rope_scaling",
        "resize_vocab",
        "use_cache",
        "use_fast_tokenizer",
        "rope_theta",
    ),
    **_answered("use --trace, or --profile_steps", "profile", "profiler", "tensorboard_trace"),
}
"""Name, with underscores, -> what to tell."""
