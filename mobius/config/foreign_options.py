"""Answers to options of other trainers: use this one, not available, or not needed and therefore ignored.

The names are those of transformers' TrainingArguments, TRL's SFTConfig, LLaMA-Factory, Axolotl and DeepSpeed, and of
earlier versions of Mobius.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

IGNORED: Final = "not needed"
"""Beginning of the answer for an option that is ignored."""
_NOTHING: Final = frozenset({"", "~", "false", "null", "none", "no", "off", "0", "0.0"})
"""Values that switch an option off."""
_DATASET_KEYS: Final = {
    "weight": ("probability", "ratio", "proportion", "interleave_prob", "sampling_weight"),
    "max_samples": ("num_samples", "samples", "limit", "max_train_samples"),
    "subset": ("config", "config_name", "configuration", "dataset_config", "dataset_config_name"),
    "path": ("file", "file_name", "data_files", "hf_hub_url", "url", "id", "repo", "repo_id"),
    "columns": ("mapping", "column_mapping", "field_messages"),
}
"""Key of a dataset, and its names in other trainers' files."""


def foreign_dataset_key(name: str) -> list[str]:
    """Dataset keys that other trainers call `name`; empty for an unknown name."""
    return [key for key, names in _DATASET_KEYS.items() if name in names]


def foreign_option(name: str, value: str | None = None) -> str | None:
    """Answer to an option of another trainer, the end of an error text; None for a name that is not known.

    `value` is the text that was given; None where there is none, or where it is a list or a mapping.
    """
    name, value = name.replace("-", "_").lower(), None if value is None else value.strip().lower()
    answer = FOREIGN_OPTIONS.get(f"{name}={value}") or FOREIGN_OPTIONS.get(name)
    if answer is not None and value in _NOTHING and answer.startswith("not ") and not answer.startswith(IGNORED):
        return f"{IGNORED}: the value asks for nothing"
    return answer


def asks_for_nothing(value: object) -> bool:
    """Whether a value of a file switches something off."""
    return value.strip().lower() in _NOTHING if isinstance(value, str) else not value


def read_answers(table: str) -> Iterator[tuple[str, str]]:
    """Names, or `name=value`, of a table like the one below, and their answers."""
    for names, answer in re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", table, re.MULTILINE):
        for name in names.split():
            yield name, " ".join(answer.split())


_RENAMED: Final = {
    "num_train_epochs": "num_epochs epochs n_epochs train_epochs max_epochs",
    "seq_length": "max_seq_length max_seq_len model_max_length block_size context_length sequence_length "
    "sequence_len max_source_length max_target_length",
    "max_samples": "max_train_samples num_samples num_train_samples",
    "warmup_steps": "num_warmup_steps warmup_num_steps",
    "adam_epsilon": "adam_eps eps",
    "max_grad_norm": "gradient_clipping clip_grad grad_clip gradient_clip_val",
    "use_offload": "offload_optimizer offload_param cpu_offload offload optimizer_offload",
    "node_rank": "machine_rank",
    "default_system": "system_prompt system_message default_system_prompt",
    "preprocessing_num_workers": "dataset_num_proc num_proc preprocessing_batch_size dataset_num_workers",
    "eval_dataset": "validation_file validation_dataset val_dataset eval_file eval_data validation_data",
    "eval_strategy": "evaluation_strategy",
    "early_stopping_patience": "early_stopping_steps early_stopping",
    "save_steps": "save_freq save_interval checkpointing_steps save_every",
    "run_name": "wandb_run_name swanlab_run_name swanlab_experiment_name experiment_name",
    "logging_steps": "logging_strategy log_interval steps_per_print log_every_n_steps",
    "model_path": "model_id pretrained_model_name_or_path base_model tokenizer_name_or_path tokenizer_name config_name",
}
"""Options of Mobius, and their names in other trainers."""
_ANSWERS: Final = """
per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu micro_batch_size
per_device_batch_size
    use --batch_size, all sequences of a step over all GPUs together, cut into microbatches by --num_chunks
train_batch_size global_batch_size total_batch_size effective_batch_size
    use --batch_size, all sequences of a step over all GPUs together
gradient_accumulation_steps grad_accum_steps accumulate_grad_batches gradient_accumulation
    use --batch_size with the product, as it counts all sequences of a step, in --num_chunks microbatches whose
    gradients are summed; --num_rounds plays them in parts where memory asks for it
warmup_ratio warmup_fraction warmup_proportion
    use --warmup_steps with a number below 1, such as --warmup_steps 0.03 for 3 % of the run
lr_schedule scheduler
    use --lr_scheduler_type with one of transformers' names, such as linear, cosine or constant_with_warmup
min_lr min_lr_rate lr_min min_learning_rate cosine_min_lr_ratio min_lr_ratio
    use --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs min_lr=1e-6, or min_lr_rate=0.1
num_cycles lr_end num_decay_steps lr_decay_steps power timescale
    use --lr_scheduler_kwargs, such as num_cycles=3, with the --lr_scheduler_type that takes it
optim=adamw optim=adamw_torch optim=adamw_torch_fused optim=adamw_hf optim=fused_adamw optim=adamw_apex_fused
optimizer=adamw optimizer=adamw_torch optimizer=adamw_torch_fused optimizer=adamw_hf optimizer_type=adamw
    not needed: the optimizer is AdamW
optim=adamw_8bit optim=adamw_bnb_8bit optim=paged_adamw_8bit optim=paged_adamw_32bit optim=paged_adamw
optim=adamw_torch_8bit optimizer=adamw_8bit optimizer=adamw_bnb_8bit optimizer=paged_adamw_8bit
optimizer=paged_adamw_32bit optimizer=paged_adamw optimizer=adamw_torch_8bit
    not needed: AdamW's states are fp32 and in CPU memory where the GPU has no room; --optimizer_states compact takes
    half of it
optim optim_args optim_target_modules optimizer optimizer_type adafactor use_galore use_badam use_apollo use_muon
use_adam_mini
    not available; the optimizer is AdamW, whose fp32 states are on the GPU or in CPU memory
betas adam_betas
    use --adam_beta1 and --adam_beta2
probe_topology
    not needed: the PCIe tree shows which GPUs share a link; CUDA_VISIBLE_DEVICES=0,2,1,3 gives another order
label_smoothing_factor
    not available; the loss is plain cross entropy
neftune_noise_alpha noisy_embedding_alpha
    not available (NEFTune); no noise is added to embeddings
full_determinism
    not available; a run on CPUs of one kind is equal to the bit, --seed orders the data
data_seed
    use --seed, which also orders the data
activation_offload offload_activations enable_activation_offloading cpu_checkpointing activation_cpu_offload
offload_gradient_checkpoints activation_checkpointing_offload cpu_offloading_activations
    use --activation_offloading on, off or auto, the default: activations wait in CPU memory where they do not fit
gradient_checkpointing activation_checkpointing disable_gradient_checkpointing checkpoint_activations use_reentrant_gc
gradient_checkpointing_kwargs use_unsloth_gc
    not needed: layers are recomputed as far as memory requires; --recompute says otherwise
bf16_full_eval fp16_full_eval
    not needed: evaluation runs in the format of training
torch_dtype mixed_precision precision fp16_opt_level pure_bf16 half
    use --dtype bf16, fp16 or fp32
fp8 int8
    not available; use --dtype bf16, fp16 or fp32
tf32
    not needed: --dtype bf16 is the fast format, and fp32 products are computed in fp32
deepspeed deepspeed_config zero_stage zero_optimization ds_config fsdp fsdp_config fsdp_transformer_layer_cls_to_wrap
accelerator_config
    not needed: the pipeline does the work of DeepSpeed and FSDP; see --num_stages and --use_offload
torch_compile torch_compile_mode torch_compile_backend
    use --compile on, off or auto
flash_attn attn_implementation use_flash_attention_2 flash_attention sdp_attention xformers_attention eager_attention
    not needed: the fastest attention of the model's transformers class is used
enable_liger_kernel use_liger_kernel use_liger liger_kernel liger_rope liger_rms_norm liger_glu_activation
liger_layer_norm liger_cross_entropy liger_fused_linear_cross_entropy
    not needed (Liger): layers are compiled (--compile), and not all logits exist at once (--loss_chunk_tokens)
use_unsloth unsloth
    not needed (Unsloth): memory is saved by offload and recompute, layers run as compiled graphs (--compile)
shift_attn
    not available; attention is the model's own
pipeline_parallel_size pipeline_model_parallel_size pp_size pp
    use --num_stages, and start one process per GPU (--nproc_per_node)
tensor_parallel_size tensor_model_parallel_size tp_size tp sequence_parallel_size cp_size context_parallel_size
expert_parallel_size data_parallel_size dp_size
    not available; GPUs share the model as a pipeline only (--num_stages)
num_gpus n_gpu num_processes world_size gpus devices
    use --nproc_per_node, one process per GPU
num_nodes num_machines
    use --nnodes, with --node_rank and --rdzv_endpoint on each node
master_addr main_process_ip
    use --rdzv_endpoint, HOST:PORT of node 0
use_cpu no_cuda
    use --device cpu
adapter=qlora peft_type=qlora train_type=qlora tuner_type=qlora
    not available (QLoRA); use --finetuning_type lora, with --lora_rank, --lora_alpha and --lora_target: its frozen
    base takes 2 bytes per parameter of CPU memory and is streamed to the GPU
train_type=full tuner_type=full
    not needed: all parameters are trained unless --finetuning_type lora is given
lora use_peft peft_config adapter peft_type train_type tuner_type
    use --finetuning_type lora, with --lora_rank, --lora_alpha and --lora_target
modules_to_save lora_modules_to_save
    use --additional_target embedding, head or norms
target_modules lora_target_linear
    use --lora_target all, or names such as q_proj,v_proj
freeze_trainable_layers freeze_trainable_modules unfrozen_parameters freeze_layers
    use --freeze, which names what is not trained, such as --freeze embedding,layers.0-15
merge_adapter merge_lora merge_and_unload
    use --merge, or `mobius export ADAPTER FOLDER --merge` for an adapter that is there
export_dir
    use --save_dir, which holds the model in Hugging Face layout, and `mobius export` for other forms of it
qlora quantization_bit quantization_method load_in_4bit load_in_8bit bnb_4bit_quant_type export_quantization_bit
quantization double_quantization bnb_4bit_compute_dtype
    not available (QLoRA): LoRA here streams plain weights from CPU memory, 2 bytes each; nothing is quantized to fit
use_dora dora use_adalora loraplus_lr_ratio pissa_init init_lora_weights loftq_config use_oft use_vera lora_bias
layers_to_transform rank_pattern alpha_pattern
    not available (DoRA and other variants): the adapters are those of LoRA, with or without rsLoRA's scale
lora_dropout
    not available: backward runs layers again, and dropout would draw other numbers then; leave it out, or give 0
create_new_adapter
    not needed: adapters are fresh ones unless a folder with some is given
stage=sft task=sft task=causal_lm
    not needed: supervised fine-tuning is the only method
stage=pt task=pt
    not needed: all tokens of plain text (data with a `text` column) are trained on
stage task rlhf_type rl
    not available: Mobius does supervised fine-tuning (sft) and pretraining (pt), no dpo, kto, orpo, grpo, ppo or rm
pref_beta dpo_beta kto_beta beta pref_loss ref_model reward_model ppo_epochs
    not available: Mobius does supervised fine-tuning, without a reward or reference model
dataset_name dataset_path train_file data_path data_files dataset_dir train_data train_dataset data_file
custom_dataset_path datasets dataset_mixer
    use --dataset with a known name, a Hugging Face id, or a local file or folder; several are mixed
dataset_config_name dataset_config dataset_subset split dataset_split train_split subset
    not an option; a YAML file may give `dataset` as a mapping with `path`, `split` and `subset`
interleave_probs mix_strategy dataset_weights dataset_mixture sampling_ratio data_weights
    use --dataset with a weight after each name, such as --dataset a.jsonl b.jsonl:0.3
dataset_text_field text_column prompt_column response_column input_column text_field column_mapping dataset_columns
messages_field
    use --columns, such as --columns text=body or --columns prompt=document,completion=summary
template prompt_template conversation_template chat_template_path
    use --chat_template with a Jinja file or the name of a built-in template; without it, the tokenizer's own is used
neat_packing pack sample_packing padding_free packing_strategy
    use --packing on, off, joined or auto; samples in a row never see each other with on
group_by_length
    not needed: --packing fills rows with complete samples
pad_to_sequence_len pad_to_multiple_of length_column_name
    not needed: rows are padded to --seq_length
completion_only_loss assistant_only_loss train_on_inputs mask_prompt train_on_input
    use --train_on_prompt to train on prompts too; without it, only answers are trained on
dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last streaming num_workers
dataloader_persistent_workers
    not needed: tokens are prepared before the run; --preprocessing_num_workers speeds that up
use_cached_dataset dataset_prepared_path
    not needed: tokenized data is cached and reused while nothing changes
tokenized_path
    not available; use --dataset with the records: their tokens are cached by content
validation_split validation_size validation_split_percentage test_size val_set_size eval_size val_split
    use --val_size with a number of samples, or below 1 with a share of the data
per_device_eval_batch_size eval_batch_size eval_accumulation_steps batch_eval_metrics prediction_loss_only
    not needed: evaluation goes through the same pipeline with the same --batch_size
max_eval_samples
    use `max_samples` of a dataset in a YAML file's `eval_dataset`, or --max_samples for all
compute_accuracy
    not needed: token accuracy is part of every evaluation
greater_is_better
    not needed: --metric_for_best_model says it
eval_delay
    not available; --eval_strategy and --eval_steps say when
save_epochs
    use --save_strategy epoch
save_on_each_node
    not needed: the first node saves, and all see its folder
resume load_checkpoint
    use --resume_from_checkpoint true, or a checkpoint's folder
ignore_data_skip
    not available; a resumed run continues at its position in the data without reading earlier records
save_safetensors export_size
    not needed: --save_dir holds the model in Hugging Face layout, as safetensors of up to 5 GB
hub_token
    not an option, as options are saved and logged: --push_to_hub takes the token of `hf auth login` or HF_TOKEN
hub_strategy hub_always_push push_to_hub_model_id
    not needed: --push_to_hub uploads the result at the end of the run, as --hub_model_id
logging_dir log_dir tensorboard_dir
    not needed: --save_dir holds everything, its metrics.jsonl the losses, its runs/ what --report_to tensorboard
    writes
plot_loss
    not needed: training_loss.png in --save_dir is always drawn
use_wandb use_swanlab use_tensorboard
    use --report_to wandb, swanlab, tensorboard, mlflow, trackio, or several of them with commas
wandb_project wandb_entity swanlab_project swanlab_workspace project
    not an option; trackers read it from the environment (WANDB_PROJECT, WANDB_ENTITY, SWANLAB_PROJECT)
logging_strategy=steps logging_first_step
    not needed: --logging_steps says when
remove_unused_columns disable_tqdm log_level log_on_each_node include_num_input_tokens_seen include_tokens_per_second
low_cpu_mem_usage skip_memory_metrics torch_empty_cache_steps average_tokens_across_devices label_names
ddp_find_unused_parameters ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers use_cache use_fast_tokenizer
print_param_status
    not needed: it changes nothing here
ddp_timeout nccl_timeout
    not needed: ranks wait for each other as long as it takes
local_rank
    not needed: the launcher sets it in the environment
trust_remote_code
    not needed: code from a model's folder is never run, its class is one of transformers
model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model
    not needed: the model's config.json says it
model_revision cache_dir hf_hub_token
    not available; download that version and give its folder as --model_path
rope_scaling resize_vocab rope_theta
    not available; the model's own config.json says it (--model_path)
profile profiler tensorboard_trace
    use --trace, or --profile_steps
show_actions
    not needed: scripts/show_schedule.py prints the action lists of a schedule
preview_output
    not needed: --preview prints the histogram of lengths
overwrite_cache
    not needed: tokens are cached by the content of data and tokenizer, and damaged ones are made again
"""
"""Names, and indented below them the answer; `name=value` has the answer to one value."""
FOREIGN_OPTIONS: Final[Mapping[str, str]] = {
    **{name: f"use --{ours}" for ours, names in _RENAMED.items() for name in names.split()},
    **dict(read_answers(_ANSWERS)),
}
"""Answers by name, or name=value, in lower case with underscores."""
