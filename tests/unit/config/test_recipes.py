"""Files of LLaMA-Factory, Axolotl and TRL: a key becomes an option, is ignored with a word, or is refused by name."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from mobius.config.cli import given_options, parse_args
from mobius.config.config import option_values, spellings
from mobius.config.recipes.__main__ import page
from mobius.config.recipes.answers import TOOLS, read_table
from mobius.config.recipes.llamafactory import templates
from mobius.config.recipes.recipe import Recipe
from mobius.config.recipes.tools import RECIPES
from mobius.config.sources import to_yaml
from mobius.data.chat_templates import BUILTIN_TEMPLATES
from mobius.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
BASE = {
    "LLaMA-Factory": "model_name_or_path: m\ntemplate: llama3\nfinetuning_type: full\n"
    "dataset: d\ndataset_dir: ONLINE\n",
    "Axolotl": "base_model: m\nmicro_batch_size: 1\nlearning_rate: 1e-4\ndatasets: [{path: d, type: chat_template}]\n",
    "TRL": "model_name_or_path: m\ndataset_name: d\n",
}
# `lines of a file -> options of the run`, the first key is the one that is claimed. A line of the base is replaced.
TRAINER_TAKEN = """
output_dir: out -> save_dir out
learning_rate: 3e-4 -> learning_rate 0.0003
weight_decay: 0.01 -> weight_decay 0.01
adam_beta1: 0.8 -> adam_beta1 0.8
adam_beta2: 0.95 -> adam_beta2 0.95
adam_epsilon: 1e-6 -> adam_epsilon 1e-06
max_grad_norm: 0.5 -> max_grad_norm 0.5
seed: 7 -> seed 7
run_name: r -> run_name r
logging_steps: 10 -> logging_steps 10
save_strategy: epoch -> save_strategy epoch
save_steps: 50 -> save_strategy steps; save_steps 50.0
save_only_model: true -> save_only_model True
save_total_limit: 3 -> save_total_limit 3
save_total_limit: null -> save_total_limit 0
eval_strategy: epoch; val_size: 8 -> eval_strategy epoch
evaluation_strategy: epoch; val_size: 8 -> eval_strategy epoch
eval_steps: 20; eval_strategy: steps; val_size: 8 -> eval_steps 20.0
eval_strategy: steps; logging_steps: 30; val_size: 8 -> eval_steps 30.0
eval_steps: 20 -> eval_strategy no
eval_on_start: true; val_size: 8 -> eval_on_start True
load_best_model_at_end: true; eval_strategy: steps; val_size: 8; eval_steps: 500 -> load_best_model_at_end True
metric_for_best_model: eval_loss -> metric_for_best_model loss
do_train: true -> do_train True
do_eval: true; val_size: 8 -> do_eval True
overwrite_output_dir: true -> overwrite_output_dir True
per_device_train_batch_size: 3 -> batch_size 6; num_chunks 2
gradient_accumulation_steps: 4 -> batch_size 64; num_chunks 8; num_stages auto
num_train_epochs: 2 -> num_train_epochs 2.0; num_iterations auto
max_steps: 100; num_train_epochs: 2 -> num_iterations 100; num_train_epochs auto
max_steps: -1 -> num_iterations auto; num_train_epochs 3.0
lr_scheduler_type: cosine -> lr_scheduler_type cosine
lr_scheduler_type: constant; warmup_steps: 9 -> lr_scheduler_type constant; warmup_steps 0.0
lr_scheduler_kwargs: '{"num_cycles": 2}'; lr_scheduler_type: cosine -> lr_scheduler_kwargs (('num_cycles', '2'),)
warmup_steps: 30 -> warmup_steps 30.0
warmup_ratio: 0.1 -> warmup_steps 0.1
bf16: true -> dtype bf16
fp16: true -> dtype fp16
bf16: false -> dtype fp32
resume_from_checkpoint: true -> resume_from_checkpoint true
resume_from_checkpoint: null -> resume_from_checkpoint auto
report_to: [tensorboard, wandb] -> report_to tensorboard,wandb
report_to: none -> report_to none
push_to_hub: true; hub_model_id: me/m; hub_private_repo: true -> push_to_hub True; hub_model_id me/m
hub_model_id: me/m -> push_to_hub False; hub_model_id auto
hub_private_repo: true; push_to_hub: true -> hub_private_repo True
use_cpu: true -> device cpu
no_cuda: true -> device cpu
"""
TAKEN = {
    "LLaMA-Factory": f"""{TRAINER_TAKEN}
model_name_or_path: org/model -> model_path org/model; learning_rate 5e-05; lr_scheduler_type linear; seq_length 2048
template: llama3 -> warmup_steps 0.0; max_grad_norm 1.0; weight_decay 0.0; num_train_epochs 3.0; batch_size 16
template: llama3 -> dtype fp32; packing off; save_total_limit 0; save_dir trainer_output; chat_template llama3
adapter_name_or_path: a; finetuning_type: lora; lora_rank: 32; lora_target: v -> adapter_path a; lora_rank 8
cutoff_len: 4096 -> seq_length 4096
max_samples: 50 -> max_samples 50
train_on_prompt: true -> train_on_prompt True
mask_history: true -> mask_history True
default_system: Be kind. -> default_system Be kind.
val_size: 0.1 -> val_size 0.1; eval_strategy no; do_eval False
eval_strategy: steps; val_size: 8 -> do_eval True
preprocessing_num_workers: 16 -> preprocessing_num_workers 16
early_stopping_steps: 3; eval_strategy: epoch; val_size: 8 -> early_stopping_patience 3
stage: sft -> packing off
stage: pt -> packing joined; chat_template auto
stage: pt; packing: false -> packing off
finetuning_type: full -> finetuning_type full
finetuning_type: lora -> finetuning_type lora; lora_rank 8; lora_alpha 16.0; lora_target all
template: smollm2 -> default_system You are a helpful AI assistant named SmolLM, trained by Hugging Face.
template: qwen; default_system: Be kind. -> chat_template chatml; default_system Be kind.
template: phi -> chat_template phi3; default_system auto
template: deepseek3 -> chat_template auto
dataset: a, b; dataset_dir: ONLINE; stage: pt -> dataset a,columns=text:instruction b,columns=text:instruction
dataset_dir: ONLINE; dataset: a -> dataset a,columns=instruction:instruction;query:input;output:output
eval_dataset: e; dataset_dir: ONLINE; eval_strategy: epoch; stage: pt -> eval_dataset e,columns=text:instruction
packing: true -> packing on
neat_packing: true -> packing on
lora_rank: 32; finetuning_type: lora -> lora_rank 32; lora_alpha 64.0
lora_alpha: 7; finetuning_type: lora -> lora_alpha 7.0
lora_target: q_proj,v_proj; finetuning_type: lora -> lora_target q_proj,v_proj
lora_rank: 32 -> finetuning_type full; lora_rank 8
use_rslora: true; finetuning_type: lora -> use_rslora True
use_dora: true; finetuning_type: lora -> use_dora True
loraplus_lr_ratio: 16; finetuning_type: lora -> loraplus_lr_ratio 16.0
additional_target: embed_tokens,q_proj; finetuning_type: lora -> additional_target embedding,q_proj
lora_dropout: 0.1; finetuning_type: lora -> lora_dropout 0.1
pure_bf16: true -> dtype bf16
fp8: true; bf16: true -> matmul_dtype fp8
quantization_bit: 4; finetuning_type: lora -> finetuning_type lora; base_dtype nf4
infer_backend: vllm -> dataset d,columns=instruction:instruction;query:input;output:output
do_predict: true; val_size: 8 -> do_predict True; max_new_tokens 1024
predict_with_generate: true; val_size: 8 -> do_predict True
max_new_tokens: 64; do_predict: true; val_size: 8 -> max_new_tokens 64
max_new_tokens: 64 -> do_predict False; max_new_tokens 256
use_swanlab: true; report_to: wandb -> report_to wandb,swanlab
swanlab_run_name: s -> run_name s
num_stages: 4 -> num_stages 4
stage: dpo -> objective dpo; loss_type sigmoid; beta 0.1; sft_weight 0.0; packing off; seq_length 4096; batch_size 16
pref_loss: hinge; stage: dpo -> objective dpo; loss_type hinge; reference_model auto
pref_loss: ipo; stage: dpo -> objective dpo; loss_type ipo
pref_loss: simpo; stage: dpo -> objective simpo; beta 0.1; simpo_gamma 0.5; learning_rate 5e-05
simpo_gamma: 1; pref_loss: simpo; stage: dpo; pref_beta: 2.5 -> objective simpo; beta 2.5; simpo_gamma 1.0
pref_beta: 0.3; stage: dpo -> beta 0.3
pref_beta: 0.3; pref_loss: simpo; pref_ftx: 0.5; ref_model: r; ld_alpha: 0 -> objective sft; beta auto; sft_weight 0.0
pref_ftx: 0.5; stage: dpo -> sft_weight 0.5
ref_model: org/r; stage: dpo -> reference_model org/r
ref_model: org/r; stage: dpo; pref_loss: simpo -> reference_model auto
adapter_name_or_path: a; finetuning_type: lora; stage: dpo -> adapter_path a; reference_model m
dpo_label_smoothing: 0.0; stage: dpo -> label_smoothing 0.0
pref_bco_weight: 0.0; stage: dpo -> objective dpo
ld_alpha: 1.0; stage: dpo -> objective dpo
ref_model_adapters: null; stage: dpo -> reference_model auto
ref_model_quantization_bit: null; stage: dpo -> reference_model auto
cutoff_len: 1000; stage: dpo -> seq_length 2000
stage: kto -> objective kto; beta 0.1; desirable_weight 1.0; seq_length 2048; packing off; loss_type auto
kto_chosen_weight: 2; stage: kto; pref_beta: 0.2 -> desirable_weight 2.0; undesirable_weight 1.0; beta 0.2
kto_rejected_weight: 0.5; stage: kto; ref_model: r -> undesirable_weight 0.5; reference_model r
stage: rm -> objective reward; seq_length 4096; packing off; beta auto; learning_rate 5e-05
packing: true; stage: dpo -> packing off
objective: orpo; stage: dpo; pref_loss: orpo -> objective orpo; beta 0.1
""",
    "TRL": f"""{TRAINER_TAKEN}
model_name_or_path: org/model -> model_path org/model; learning_rate 2e-05; lr_scheduler_type linear; seq_length 1024
dataset_name: d -> dataset d; dtype bf16; packing off; train_on_all_turns True; batch_size 16; finetuning_type full
dataset_name: d; eval_strategy: epoch -> eval_dataset d,split=test
dataset_config: c; dataset_train_split: big -> dataset d,split=big,subset=c
dataset_name: d; eval_strategy: epoch; test_split_size: 8 -> eval_dataset auto; val_size 8.0
dataset_train_split: big -> dataset d,split=big
dataset_test_split: small; eval_strategy: epoch -> eval_dataset d,split=small
dataset_mixture: {{datasets: [{{id: a, config: c, weight: 0.5}}]}}; dataset_name: -> dataset a,subset=c; val_size 0.0
dataset_mixture: {{datasets: [{{id: a}}], test_split_size: 8}}; dataset_name: -> dataset a; val_size 8.0
dataset_kwargs: {{add_special_tokens: false}} -> dataset d
chat_template: "{{{{ messages }}}}" -> chat_template {{{{ messages }}}}
eos_token: <|im_end|> -> dataset d
load_in_8bit: true; use_peft: true -> finetuning_type lora; dtype bf16
load_in_4bit: true; use_peft: true -> finetuning_type lora; base_dtype nf4; dtype bf16
lora_r: 4; use_peft: false -> finetuning_type full
datasets: [{{path: a, name: c}}, {{path: json, data_files: b.jsonl}}]; dataset_name: -> dataset a,subset=c b.jsonl
test_split_size: 0.2 -> val_size 0.2
max_length: 4096 -> seq_length 4096
max_seq_length: 4096 -> seq_length 4096
activation_offloading: true -> activation_offloading on
dataset_num_proc: 4 -> preprocessing_num_workers 4
chat_template_path: chat.jinja -> chat_template chat.jinja
packing: true -> packing on
packing_strategy: wrapped; packing: true -> packing joined
completion_only_loss: true -> train_on_prompt False; train_on_all_turns False
completion_only_loss: false -> train_on_prompt True; train_on_all_turns False
completion_only_loss: null -> train_on_prompt False; train_on_all_turns True
assistant_only_loss: true -> train_on_all_turns False
assistant_only_loss: false -> train_on_all_turns True
dataset_text_field: body -> columns (('text', 'body'),)
use_peft: true -> finetuning_type lora; lora_rank 16; lora_alpha 32.0; lora_target q_proj,v_proj; lora_dropout 0.05
lora_r: 4; use_peft: true -> lora_rank 4
lora_alpha: 8; use_peft: true -> lora_alpha 8.0
lora_target_modules: [q_proj, o_proj]; use_peft: true -> lora_target q_proj,o_proj
lora_target_modules: all-linear; use_peft: true -> lora_target all
lora_modules_to_save: [lm_head]; use_peft: true -> additional_target head
use_rslora: true; use_peft: true -> use_rslora True
use_dora: true; use_peft: true -> use_dora True
lora_target_parameters: [experts.down_proj]; lora_dropout: 0; use_peft: true -> lora_target none; lora_dropout 0.0
lora_dropout: 0.1; use_peft: true -> lora_dropout 0.1
dtype: bfloat16 -> dtype bf16
torch_dtype: auto; bf16: false -> dtype fp32
fp16: true; bf16: null -> dtype fp16
model_init_kwargs: {{attn_implementation: sdpa}} -> model_path m
num_train_epochs: 2; num_stages: 4 -> num_stages 4
beta: 0.05 -> objective dpo; loss_type sigmoid; beta 0.05; learning_rate 1e-06; train_on_all_turns False
loss_type: sigmoid -> objective dpo; loss_type sigmoid; beta 0.1; packing off; dtype bf16
loss_type: [apo_zero]; learning_rate: 5e-7 -> objective dpo; loss_type apo_zero; learning_rate 5e-07
loss_type: nll -> objective sft
label_smoothing: 0.1; loss_type: robust -> loss_type robust; label_smoothing 0.1
label_smoothing: 0.1; loss_type: ipo -> loss_type ipo; label_smoothing 0.0
loss_type: simpo; cpo_alpha: 0 -> objective simpo; beta 0.1; simpo_gamma 0.5; seq_length 2048; learning_rate 1e-06
simpo_gamma: 1; loss_type: simpo; cpo_alpha: 0.0; beta: 2 -> objective simpo; beta 2.0; simpo_gamma 1.0
cpo_alpha: 1; loss_type: simpo; sft_weight: 0.5 -> objective simpo; sft_weight 0.5
max_length: 512; loss_type: hinge -> seq_length 1024
desirable_weight: 1.5; beta: 0.2 -> objective kto; desirable_weight 1.5; beta 0.2; seq_length 1024; learning_rate 1e-06
undesirable_weight: 0.5; loss_type: apo_zero_unpaired -> objective kto; undesirable_weight 0.5
loss_type: kto -> objective kto; loss_type kto; train_on_all_turns False; packing off
center_rewards_coefficient: 0.01 -> objective reward; center_rewards 0.01; learning_rate 0.0001; seq_length 2048
lora_task_type: SEQ_CLS; use_peft: true; lora_modules_to_save: [score] -> objective reward; additional_target auto
objective: reward; max_length: 512 -> objective reward; center_rewards 0.0; seq_length 1024; train_on_all_turns False
max_prompt_length: 512 -> objective dpo; seq_length 2048
ld_alpha: null -> objective sft
precompute_ref_log_probs: true -> objective dpo
precompute_ref_batch_size: 4 -> objective dpo
f_alpha_divergence_coef: 0.5 -> objective dpo
discopop_tau: 0.05 -> objective dpo
ref_model_mixup_alpha: 0.6 -> objective dpo
ref_model_sync_steps: 512 -> objective dpo
f_divergence_type: reverse_kl; loss_type: sigmoid -> objective dpo
use_weighting: false; loss_type: sigmoid -> objective dpo
sync_ref_model: false; loss_type: sigmoid -> objective dpo
loss_weights: [1.0]; loss_type: [sigmoid] -> objective dpo
reference_free: false; loss_type: sigmoid -> objective dpo
rpo_alpha: null; loss_type: sigmoid -> objective dpo
alpha: 0.0; loss_type: simpo; cpo_alpha: 0 -> objective simpo
objective: orpo; beta: 0.05 -> objective orpo; beta 0.05; loss_type auto
""",
    "Axolotl": """
base_model: org/model -> model_path org/model; lr_scheduler_type cosine; seq_length 512; warmup_steps 0.03; dtype bf16
micro_batch_size: 3 -> batch_size 6; num_chunks 2
batch_size: 12; micro_batch_size: 3 -> batch_size 24; num_chunks 8
context_parallel_size: 2 -> batch_size 1
tensor_parallel_size: 2 -> batch_size 1
sequence_parallel_degree: 2 -> batch_size 1
adapter: qlora; load_in_4bit: true -> finetuning_type lora; base_dtype nf4
load_in_8bit: true; adapter: lora -> finetuning_type lora
fp8: true -> matmul_dtype fp8
use_swanlab: true -> report_to swanlab
swanlab_run_name: s -> run_name s
cosine_min_lr_ratio: 1 -> lr_scheduler_type constant_with_warmup
gradient_accumulation_steps: 4 -> batch_size 8; num_chunks 8; num_stages auto
sequence_len: 4096 -> seq_length 4096
learning_rate: 0.0002 -> learning_rate 0.0002
weight_decay: 0.1 -> weight_decay 0.1
adam_beta1: 0.8 -> adam_beta1 0.8
adam_beta2: 0.95 -> adam_beta2 0.95
adam_epsilon: 1e-6 -> adam_epsilon 1e-06
max_grad_norm: 0.3 -> max_grad_norm 0.3
seed: 9 -> seed 9
output_dir: out -> save_dir out
val_set_size: 0.05 -> val_size 0.05; eval_strategy epoch
val_set_size: 0 -> val_size 0.0; eval_strategy no
train_on_inputs: true -> train_on_prompt True
default_system_message: Be kind. -> default_system Be kind.
dataset_num_proc: 3 -> preprocessing_num_workers 3
dataset_processes: 3 -> preprocessing_num_workers 3
logging_steps: 5 -> logging_steps 5
save_only_model: true -> save_only_model True
early_stopping_patience: 2; val_set_size: 8 -> early_stopping_patience 2
load_best_model_at_end: true; val_set_size: 8 -> load_best_model_at_end True
metric_for_best_model: eval_loss -> metric_for_best_model loss
wandb_name: w -> run_name w
num_epochs: 4 -> num_train_epochs 4.0
max_steps: 20; num_epochs: 4 -> num_iterations 20; num_train_epochs auto
lr_scheduler: linear -> lr_scheduler_type linear
lr_scheduler_kwargs: {num_cycles: 2} -> lr_scheduler_kwargs (('num_cycles', '2'),)
cosine_min_lr_ratio: 0.1 -> lr_scheduler_type cosine_with_min_lr; lr_scheduler_kwargs (('min_lr_rate', '0.1'),)
warmup_steps: 10 -> warmup_steps 10.0
warmup_steps: 0 -> warmup_steps 0.0
warmup_ratio: 0.2 -> warmup_steps 0.2
datasets: [{path: a, type: chat_template, name: c, split: s}] -> dataset a,split=s,subset=c; chat_template auto
datasets: [{path: a, type: chat_template, field_messages: talk}] -> dataset a,columns=messages:talk
datasets: [{path: a, type: alpaca}] -> dataset a; chat_template alpaca
datasets: [{path: a, type: completion, field: body}] -> dataset a,columns=text:body
datasets: [{path: json, data_files: [x.jsonl, y.jsonl], type: completion}] -> dataset x.jsonl y.jsonl
test_datasets: [{path: t, type: chat_template}] -> eval_dataset t; eval_strategy epoch
pretraining_dataset: [{path: p, text_column: body}] -> dataset p,columns=text:body; packing joined
pretraining_dataset: p -> dataset p; packing joined
chat_template: chatml; datasets: [{path: a, type: chat_template}] -> chat_template chatml
chat_template_jinja: own.jinja; datasets: [{path: a, type: chat_template}] -> chat_template own.jinja
sample_packing: true -> packing on
sample_packing: false -> packing off
adapter: lora -> finetuning_type lora; lora_rank 8
adapter: null -> finetuning_type full
lora_r: 64; adapter: lora -> lora_rank 64
lora_alpha: 8; adapter: lora -> lora_alpha 8.0
lora_target_modules: [q_proj, k_proj]; adapter: lora -> lora_target q_proj,k_proj
lora_target_linear: true; adapter: lora -> lora_target all
lora_modules_to_save: [embed_tokens, lm_head]; adapter: lora -> additional_target embedding,head
peft_use_rslora: true; adapter: lora -> use_rslora True
peft_use_dora: true; adapter: qlora; load_in_4bit: true -> use_dora True; base_dtype nf4
loraplus_lr_ratio: 16; adapter: lora -> loraplus_lr_ratio 16.0
lora_target_parameters: [a.down_proj]; adapter: lora -> lora_target_parameters a.down_proj; lora_target none
lora_target_parameters: experts.down_proj; adapter: lora; lora_target_linear: true -> lora_target all
lora_model_dir: old; adapter: lora; lora_r: 4 -> adapter_path old; lora_rank 8
lora_rank_pattern: {q_proj: 4}; adapter: lora -> lora_rank_pattern (('q_proj', '4'),)
lora_alpha_pattern: {q_proj: 4}; adapter: lora -> lora_alpha_pattern (('q_proj', '4'),)
lora_dropout: 0.05; adapter: lora -> lora_dropout 0.05
bf16: auto -> dtype bf16
bfloat16: true -> dtype bf16
fp16: true; bf16: false -> dtype fp16
float16: true -> dtype fp16
bf16: false -> dtype fp32
save_steps: 40 -> save_strategy steps; save_steps 40.0; save_total_limit 4
save_strategy: no -> save_strategy no
saves_per_epoch: 4; num_epochs: 2 -> save_strategy steps; save_steps 0.125
saves_per_epoch: 1 -> save_strategy epoch
eval_steps: 40; val_set_size: 8 -> eval_strategy steps; eval_steps 40.0
eval_strategy: no; val_set_size: 8 -> eval_strategy no
evaluation_strategy: epoch; val_set_size: 8 -> eval_strategy epoch
evals_per_epoch: 5; num_epochs: 2; val_set_size: 8 -> eval_strategy steps; eval_steps 0.1
save_total_limit: 2 -> save_total_limit 2
resume_from_checkpoint: there -> resume_from_checkpoint there
auto_resume_from_checkpoints: true -> resume_from_checkpoint true
wandb_project: p -> report_to wandb
use_wandb: true -> report_to wandb
use_tensorboard: true -> report_to tensorboard
use_mlflow: true; wandb_project: p -> report_to wandb,mlflow
use_trackio: true -> report_to trackio
hub_model_id: me/m -> push_to_hub True; hub_model_id me/m
special_tokens: {pad_token: x} -> model_path m
plugins: [axolotl.integrations.liger.LigerPlugin] -> model_path m
rl: dpo -> objective dpo; loss_type sigmoid; beta 0.1; seq_length 1024; packing off; learning_rate 0.0001
rl: ipo; sequence_len: 2000; sample_packing: true -> objective dpo; loss_type ipo; seq_length 4000; packing off
rl: orpo; orpo_alpha: 0.2 -> objective orpo; beta 0.2; loss_type auto
rl: simpo; cpo_alpha: 0 -> objective simpo; beta 0.1; simpo_gamma 0.5
rl: dpo; lora_model_dir: old; adapter: lora -> adapter_path old; reference_model m
rl: dpo; datasets: [{path: a, type: chatml.intel}] -> dataset a,columns=instruction:question; chat_template chatml
rl: dpo; datasets: [{path: a, type: llama3.icr}] -> dataset a,columns=instruction:input; chat_template llama3
rl: dpo; datasets: [{path: a, type: chatml.argilla}] -> chat_template chatml; objective dpo
rl: dpo; datasets: [{path: a, type: chatml.ultra}] -> dataset a; chat_template chatml
rl: dpo; datasets: [{path: a, type: chat_template.default, field_chosen: good}] -> dataset a,columns=chosen:good
rl: orpo; datasets: [{path: a, type: chat_template.argilla}] -> dataset a; chat_template auto
rl: kto; datasets: [{path: a, type: chatml.prompt_pairs}] -> dataset a,columns=instruction:prompt;output:completion
rl: kto; datasets: [{path: a, type: llama3.argilla_chat}] -> dataset a,columns=messages:completion; seq_length 512
rl_beta: 0.3; rl: dpo -> beta 0.3
trl: {beta: 0.4}; rl: dpo; rl_beta: 0.3 -> beta 0.4
orpo_alpha: 0.2; rl: orpo -> beta 0.2
kto_desirable_weight: 2; rl: kto; datasets: [{path: a, type: llama3.ultra}] -> desirable_weight 2.0
kto_undesirable_weight: 2; rl: kto; datasets: [{path: a, type: llama3.ultra}] -> undesirable_weight 2.0
simpo_gamma: 1; rl: simpo; cpo_alpha: 0 -> simpo_gamma 1.0
cpo_alpha: 0; rl: simpo; rl_beta: 2 -> objective simpo; beta 2.0; sft_weight 0.0
dpo_label_smoothing: 0; rl: dpo -> objective dpo; label_smoothing 0.0
""",
}
TRAINER_IGNORED = """
data_seed logging_strategy=epoch full_determinism auto_find_batch_size torch_compile
torch_compile_backend torch_compile_mode logging_nan_inf_filter log_level_replica eval_do_concat_batches
eval_use_gather_object include_for_metrics enable_jit_checkpoint restore_callback_states_from_checkpoint
parallelism_config dataloader_multiprocessing_context dataloader_in_order ddp_static_graph debug liger_kernel_config
activation_checkpointing_kwargs jit_mode_eval use_ipex past_index tpu_num_cores use_mps_device fp16_backend
half_precision_backend trackio_space_id hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization
push_to_hub_token hub_token hub_strategy train_sampling_strategy=random optim=adamw_torch_fused optim=paged_adamw_8bit
gradient_checkpointing gradient_checkpointing_kwargs bf16_full_eval fp16_full_eval tf32 deepspeed fsdp fsdp_config
fsdp_transformer_layer_cls_to_wrap accelerator_config use_liger_kernel group_by_length length_column_name
dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last project
dataloader_persistent_workers per_device_eval_batch_size eval_accumulation_steps batch_eval_metrics
prediction_loss_only greater_is_better save_on_each_node save_safetensors logging_dir logging_first_step
remove_unused_columns disable_tqdm log_level log_on_each_node include_num_input_tokens_seen include_tokens_per_second
skip_memory_metrics torch_empty_cache_steps average_tokens_across_devices label_names ddp_find_unused_parameters
ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers ddp_timeout local_rank use_cache
"""
TRAINER_REFUSED = """
optim_args label_smoothing_factor train_sampling_strategy=sequential optim=adafactor optim_target_modules
neftune_noise_alpha eval_delay ignore_data_skip
"""
IGNORED = {
    "LLaMA-Factory": f"""{TRAINER_IGNORED}
mix_strategy=concat freeze_trainable_layers freeze_trainable_modules freeze_extra_modules preprocessing_batch_size
buffer_size data_shared_file_system media_dir ignore_pad_token_for_loss eval_num_beams eval_on_each_dataset
tool_format enable_thinking preserve_thinking split_special_tokens init_special_tokens upcast_layernorm
upcast_lmhead_output use_kv_cache use_v1_kernels infer_dtype offload_folder disable_shuffling
include_effective_tokens_per_second generation_max_length generation_num_beams max_length pissa_iter pissa_convert
loraplus_lr_embedding module_dropout asft_alpha eaft_alpha ppo_epochs quantization_type
quantization_method double_quantization quantization_device_map crop_to_patches use_audio_in_video freeze_vision_tower
freeze_multi_modal_projector freeze_language_model hyper_parallel_args ms_hub_token om_hub_token do_sample temperature
top_p top_k num_beams repetition_penalty length_penalty skip_special_tokens model_revision=main cache_dir hf_hub_token
swanlab_project swanlab_workspace create_new_adapter streaming overwrite_cache flash_attn enable_liger_kernel
use_unsloth use_unsloth_gc disable_gradient_checkpointing use_reentrant_gc print_param_status trust_remote_code
use_fast_tokenizer low_cpu_mem_usage plot_loss compute_accuracy galore_rank vllm_maxlen swanlab_mode
""",
    "TRL": f"""{TRAINER_IGNORED}
model_revision=main loss_type=nll lora_task_type=causal_lm truncation_mode=keep_start pad_token accelerate_config
shuffle_dataset dataset_streaming ignore_bias_buffers eval_packing padding_free use_bnb_nested_quant streaming
attn_implementation trust_remote_code pad_to_multiple_of bnb_4bit_quant_type do_train=false disable_dropout
padding_value label_pad_token_id is_encoder_decoder generate_during_eval use_logits_to_keep hub_model_revision
""",
    "Axolotl": """
optimizer=adamw_torch_fused optimizer=adamw_bnb_8bit excess_length_strategy=truncate group_by_length eval_sample_packing
pad_to_sequence_len multipack_real_batches batch_flattening shuffle_merged_datasets shuffle_before_merging_datasets
dataset_keep_in_memory dataset_exact_deduplication skip_prepare_dataset curriculum_sampling min_sample_len
streaming_multipack_buffer_size max_packed_sequence_len eval_sequence_len eval_table_size eval_max_new_tokens
do_causal_lm_eval eval_causal_lm_metrics strict debug device_map ddp hf_use_auth_token base_model_config
tokenizer_config tokenizer_use_fast tokenizer_legacy is_qwen_derived_model lora_on_cpu
lora_fan_in_fan_out gc_steps gc_collect_steps fsdp_version fsdp_final_state_dict_type deepcompile fp32_norms
embeddings_skip_upcast mean_resizing_embeddings save_first_step profiler_steps profiler_steps_start include_tkps
flex_attention flex_attn_compile_kwargs s2_attention sage_attention sdpa_varlen fused_attn_kernel
experts_implementation lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel cut_cross_entropy
selective_checkpointing layer_offloading activation_offloading dp_shard_size dp_replicate_size generate_samples
use_kernels torch_compile float32 low_cpu_mem_usage max_memory merge_method llama4_linearized_experts use_otel_metrics
loraplus_lr_embedding
dpo_padding_free dpo_use_logits_to_keep dpo_generate_during_eval rl_adapter_ref_model precompute_ref_log_probs
merge_lora dataset_prepared_path dataloader_num_workers dataloader_pin_memory
dataloader_prefetch_factor dataloader_drop_last accelerator_config remove_unused_columns local_rank ddp_timeout
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters greater_is_better tf32 gradient_checkpointing
gradient_checkpointing_kwargs xformers_attention sdp_attention flash_attention eager_attention attn_implementation
deepspeed fsdp fsdp_config include_tokens_per_second is_falcon_derived_model is_llama_derived_model
is_mistral_derived_model model_type tokenizer_type trust_remote_code save_safetensors eval_batch_size streaming
eot_tokens resize_token_embeddings_to_32x torchdistx_path gptq_groupsize gptq_model_v1 push_dataset_to_hub
flash_optimum experimental_skip_move_to_device use_scattermoe use_sonicmoe quantize_moe_experts bnb_config_kwargs
base_model_ignore_patterns total_num_tokens use_ray resources_per_worker eta_min gemma4_hybrid_attn_impl
wandb_entity wandb_watch hub_strategy loss_watchdog_threshold sample_packing_bin_size liger_rope
""",
}
REFUSED = {
    "LLaMA-Factory": f"""{TRAINER_REFUSED}
stage=ppo finetuning_type=freeze finetuning_type=oft template=default mix_strategy=interleave_under
interleave_probs use_dft_loss use_asft_loss use_eaft_loss use_llama_pro mixture_of_depths
train_from_scratch moe_aux_loss_coef use_mca use_kt use_hyper_parallel use_ray add_tokens add_special_tokens
new_special_tokens_config adapter_folder enable_torch_profiler profile_modules shift_attn resize_vocab rope_scaling
model_revision=v2 quantization_bit pissa_init use_galore use_apollo use_badam use_adam_mini
use_muon export_dir tensor_model_parallel_size pipeline_model_parallel_size reward_model tokenized_path
frobnicate micro_batch_size
""",
    "TRL": f"""{TRAINER_REFUSED}
loss_type=dft truncation_mode=keep_end lora_task_type=TOKEN_CLS dataset_kwargs router_aux_loss_coef
lora_target_parameters model_revision=v2 load_in_8bit load_in_4bit max_length=null frobnicate lora_r=8
lora_alpha=8 max_completion_length num_generations reward_funcs reward_model_path dataset_mixer dataset_splits
loss_type=exo_pair loss_type=apo_down
loss_type=sft loss_type=simpo cpo_alpha=1 ld_alpha=0 f_divergence_type=js_divergence use_weighting=true loss_weights=2
sync_ref_model=true reference_free=true rpo_alpha=1 alpha=0.1
""",
    "Axolotl": """
optimizer=muon optim_args optim_target_modules excess_length_strategy=drop rl=grpo rl_beta trl orpo_alpha
kto_desirable_weight kto_undesirable_weight cpo_alpha dpo_label_smoothing dpo_use_weighting dpo_norm_loss rpo_alpha vllm
qat quantization ebft reward_model process_reward_model simpo_gamma use_pose lora_target_parameters gptq
loftq_bits lr_groups lr_quadratic_warmup use_eaft tokens added_tokens_overrides diffusion relora use_onebitllms
reinit_weights shrink_embeddings overrides_of_model_config overrides_of_model_kwargs revision_of_model
model_quantization_config fix_untrained_tokens chat_template_kwargs trainer_cls model_config processor_type
use_comet load_in_8bit load_in_4bit unfrozen_parameters lora_r=8 lora_target_linear=true cosine_constant_lr_ratio
tokenizer_use_mistral_common llmcompressor
neftune_noise_alpha noisy_embedding_alpha rope_scaling loftq_config adapter=dora dpo_beta relora_steps
frobnicate
""",
}


def with_base(tool: str, text: str) -> str:
    """Text of a file: `text`, and the lines of the tool's base whose keys it does not have."""
    given = {line.partition(":")[0] for line in text.splitlines()}
    return "\n".join([*(line for line in BASE[tool].splitlines() if line.partition(":")[0] not in given), text, ""])


def values_of(tmp_path: Path, tool: str, lines: str, *argv: str, suffix: str = "yaml") -> dict[str, object]:
    """Options of a run of two ranks with a file of `tool`; `lines` replace those of its base."""
    path = tmp_path / f"theirs.{suffix}"
    path.write_text(with_base(tool, "\n".join(lines.split("; "))), encoding="utf-8")
    return dict(option_values(parse_args(["--config", str(path), *argv], num_ranks=2)))


def shown(value: object) -> str:
    if isinstance(value, tuple) and value and hasattr(value[0], "split"):
        return " ".join(map(shown_dataset, value))
    return "auto" if value is None else str(getattr(value, "value", value))


def shown_dataset(entry: object) -> str:
    facts = vars(entry)
    columns = ";".join(f"{name}:{column}" for name, column in facts["columns"] or ())
    others = {"split": facts["split"].removeprefix("train"), "subset": facts["subset"], "columns": columns}
    return ",".join([facts["name"], *(f"{name}={value}" for name, value in others.items() if value)])


@pytest.mark.parametrize("tool", TAKEN)
def test_each_key_becomes_an_option(tmp_path: Path, tool: str) -> None:
    wrong = dict[str, object]()
    for line in filter(None, TAKEN[tool].splitlines()):
        lines, _, expected = line.partition(" -> ")
        pairs = dict(pair.split(" ", 1) for pair in expected.split("; "))
        values = values_of(tmp_path, tool, lines)
        if (found := {name: shown(values[name]) for name in pairs}) != pairs:
            wrong[line] = found

    assert wrong == {}


@pytest.mark.parametrize("tool", IGNORED)
def test_each_key_that_changes_nothing_is_ignored_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tool: str
) -> None:
    usual = values_of(tmp_path, tool, "seed: 1")
    caplog.clear()
    caplog.set_level("INFO")
    names = {key: value or "something" for key, _, value in (name.partition("=") for name in IGNORED[tool].split())}
    values = values_of(tmp_path, tool, "; ".join(["seed: 1", *(f"{key}: {value}" for key, value in names.items())]))

    assert values == usual
    (line,) = caplog.messages
    assert line.startswith(
        f"{tmp_path}/theirs.yaml: read as a file of {tool} (docs/user/other_trainers.md); batch_size"
    )
    assert f"; no effect here: {next(iter(names))}, " in line
    assert re.search(r"and \d+ more$", line)
    recipe = next(recipe for recipe in RECIPES if recipe.name == tool)
    for key, value in names.items():
        row = recipe.row(key, value)
        assert row is not None, key
        assert len(row.answer) > 30, "the page says why"


@pytest.mark.parametrize("tool", REFUSED)
def test_each_key_that_asks_for_another_result_is_refused_by_name(tmp_path: Path, tool: str) -> None:
    for name in REFUSED[tool].split():
        key, _, value = name.partition("=")
        with pytest.raises(ConfigError) as caught:
            values_of(tmp_path, tool, f"{key}: {value or 'something'}")

        (problem,) = caught.value.problems
        assert problem.startswith(f"{tmp_path}/theirs.yaml: "), name
        assert f"`{key}" in problem, name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_key_of_a_table_has_a_claim_here(recipe: Recipe) -> None:
    tool = recipe.name
    taken = {line.partition(":")[0] for line in TAKEN[tool].splitlines()}
    claimed = taken | {name.partition("=")[0] for table in (IGNORED, REFUSED) for name in table[tool].split()}
    keys = {name.partition("=")[0] for name in recipe.rows if "*" not in name}

    assert keys - claimed == set()
    assert len(keys) >= (60 if tool == "LLaMA-Factory" else 40)
    assert len(taken & keys) >= 40, "taken ones alone"


TRL_NAMES = """
model_init_kwargs router_aux_loss_coef trust_remote_code chat_template_path dataset_text_field dataset_kwargs
dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free
pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading pad_token
model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout lora_target_modules
lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit
bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name dataset_config dataset_train_split
dataset_test_split dataset_streaming ignore_bias_buffers datasets streaming test_split_size
"""
"""Fields of SFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig beside those of TrainingArguments."""


DPO_NAMES = """
disable_dropout precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type
f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps cpo_alpha simpo_gamma alpha generate_during_eval is_encoder_decoder padding_value
"""
"""Further fields of DPOConfig, CPOConfig and ORPOConfig."""


def test_every_name_that_trl_takes_is_answered() -> None:
    names = {*TRL_NAMES.split(), *DPO_NAMES.split(), *(field.name for field in dataclasses.fields(TrainingArguments))}
    trl = next(recipe for recipe in RECIPES if recipe.name == "TRL")

    assert len(names) >= 150
    assert {name for name in names if trl.row(name) is None} <= set(spellings())


@pytest.mark.parametrize("table", TOOLS)
def test_a_row_names_an_option_that_there_is(table: str) -> None:
    for key, row in read_table(table).items():
        assert row.answer, key
        words = [word.strip("`,.;:()") for word in row.answer.split()]
        assert {word.removeprefix("--") for word in words if word.startswith("--")} <= set(spellings()), key
        assert row.option is None or row.option in spellings(), key


def test_the_page_is_what_the_tables_say() -> None:
    written = (ROOT / "docs" / "user" / "other_trainers.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m mobius.config.recipes > docs/user/other_trainers.md"


def test_a_template_stands_for_a_built_in_one() -> None:
    assert {ours for ours, _ in templates().values()} - {""} <= set(BUILTIN_TEMPLATES)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            f"{BASE['LLaMA-Factory']}{BASE['Axolotl']}",
            ("LLaMA-Factory (model_name_or_path, template, finetuning_type", "Axolotl (base_model, micro_batch_size"),
        ),
        (f"{BASE['TRL']}{BASE['Axolotl']}", ("TRL (model_name_or_path, dataset_name)", "Axolotl (base_model,")),
        (f"{BASE['LLaMA-Factory']}dataset_name: d\n", ("LLaMA-Factory (template,", "TRL (dataset_name)")),
    ],
)
def test_keys_of_two_tools_are_refused_with_both_sets(tmp_path: Path, text: str, parts: tuple[str, str]) -> None:
    (problem,) = problems_of(tmp_path, text)

    assert "this file mixes options of" in problem
    assert all(part in problem for part in parts)
    assert "keep those of one" in problem


def problems_of(tmp_path: Path, text: str, *argv: str) -> list[str]:
    path = tmp_path / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", str(path), *argv], num_ranks=2)
    return list(caught.value.problems)


LORA_SFT = "model_name_or_path: m\ntemplate: qwen3_nothink\ntrust_remote_code: true\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            f"{LORA_SFT}adapter_name_or_path: a\nexport_dir: out\nexport_size: 5\n",
            "`mobius export a out --merge --base m`",
        ),
        (f"{LORA_SFT}export_dir: out\n", "`mobius export m out`"),
        (f"{LORA_SFT}adapter_name_or_path: a\ninfer_backend: huggingface\n", "`mobius chat a --base m`"),
        (f"{LORA_SFT}infer_backend: vllm\n", "`mobius chat m`"),
        (f"{LORA_SFT}", "the file names no dataset to train on; give one with --dataset"),
        (f"{LORA_SFT}stage: ppo\npref_beta: 0.1\ndataset: nowhere\nuse_dora: true\n", "`stage: 'ppo'`: another method"),
        (f"{LORA_SFT}finetuning_type: oft\ndataset: nowhere\n", "`finetuning_type: 'oft'`: another method"),
        (f"{LORA_SFT}stage: ppo\nsave_strategy: best\n", "`stage: 'ppo'`: another method"),
        (f"{LORA_SFT}use_kt: true\ndataset: nowhere\n", "`use_kt: 'true'`: another engine (KTransformers"),
        ("model_name_or_path: m\ntemplate: qwen2_vl\n", "`template: 'qwen2_vl'`: another kind of model"),
        ("model_name_or_path: o/m-8B-AWQ\ntemplate: qwen\ndataset: d\ndataset_dir: ONLINE\n", "a quantized model"),
        ("base_model: m\nrl: grpo\ndatasets: [{path: d, type: rewards.made}]\n", "`rl: 'grpo'`: another method"),
        ("base_model: m\nprocessor_type: AutoProcessor\nadapter: lora\n", "another kind of model"),
        (
            "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\nnum_generations: 9\n",
            "`num_generations: '9'`: another method",
        ),
        (
            "model: m\ntuner_type: lora\nlora_rank: 8\nmax_length: 9\nper_device_train_batch_size: 1\n",
            "a file of ms-swift",
        ),
        ("model: m\nmodel_class: llm\npeft_config: {name: lora}\n", "a file of LLaMA-Factory's v1 trainer"),
        ("compute_environment: LOCAL_MACHINE\n", "a file of accelerate"),
        ('{"zero_optimization": {"stage": 3}}', "a file of DeepSpeed"),
        ("model_name_or_path: m\ndataset_name: d\nlora_r: 8\nlora_alpha: 8\n", "`use_peft: true` trains them"),
        (
            "base_model: m\ndatasets: [{path: d, type: alpaca}]\nlearning_rate: 1e-4\nlora_r: 8\n",
            "`adapter: lora` trains",
        ),
    ],
)
def test_a_file_for_something_else_is_answered_in_one_line(tmp_path: Path, text: str, answer: str) -> None:
    (problem,) = problems_of(tmp_path, text)

    assert answer in problem


OTHER_FORMULAS = [
    ("LLaMA-Factory", "stage: dpo; pref_loss: orpo", ("tokens of the answer + beta x odds loss", "prompt and answer")),
    ("LLaMA-Factory", "stage: dpo; pref_loss: kto_pair", ("sigmoid, hinge, ipo and simpo are",)),
    (
        "LLaMA-Factory",
        "stage: dpo; dpo_label_smoothing: 0.1",
        ("- s logsigmoid(-x);", "+ s logsigmoid(-x)) / (1 - 2 s)"),
    ),
    ("LLaMA-Factory", "stage: dpo; ld_alpha: 0.0", ("it changes the loss of the pairs",)),
    ("LLaMA-Factory", "stage: dpo; pref_bco_weight: 0.5", ("it changes the loss of the pairs",)),
    ("LLaMA-Factory", "stage: dpo; ref_model: r; ref_model_adapters: a", ("give the merged",)),
    ("LLaMA-Factory", "stage: dpo; train_on_prompt: true", ("it is for `stage: sft`",)),
    ("LLaMA-Factory", "stage: dpo; objective: orpo; pref_ftx: 0.5", ("has the cross entropy of the chosen answer",)),
    (
        "LLaMA-Factory",
        "stage: dpo; objective: ppo",
        ("files of other tools are read for sft, dpo, orpo, simpo, reward, kto",),
    ),
    ("LLaMA-Factory", "stage: kto; pref_ftx: 0.5", ("no cross entropy of good answers",)),
    ("TRL", "loss_type: simpo", ("prompt and chosen answer, a mean over all", "mean over each answer's tokens")),
    ("TRL", "loss_type: simpo; cpo_alpha: 0; label_smoothing: 0.1", ("SimPO has none here",)),
    ("TRL", "loss_type: [sigmoid, sft]; loss_weights: [1, 0.5]", ("of a microbatch", "mean over each answer's tokens")),
    ("TRL", "loss_type: sigmoid; cpo_alpha: 1", ("CPO is not available",)),
    ("Axolotl", "rl: simpo", ("prompt and chosen answer, a mean over all", "mean over each answer's tokens")),
    ("Axolotl", "rl: dpo; dpo_label_smoothing: 0.1", ("- s logsigmoid(-x);", "+ s logsigmoid(-x)) / (1 - 2 s)")),
    ("Axolotl", "rl: dpo; trl: {beta: 0.1, num_generations: 4}", ("num_generations cannot be taken; beta can",)),
    ("Axolotl", "rl: dpo; datasets: [{path: a, type: zephyr.nectar}]", ("for dpo: use chatml.argilla, argilla_chat,",)),
    ("Axolotl", "rl: orpo; datasets: [{path: a, type: chatml.ultra}]", ("for orpo: use chat_template.argilla",)),
    ("Axolotl", "rl: kto", ("type chat_template cannot be taken for kto: use chatml.argilla",)),
]


@pytest.mark.parametrize(("tool", "lines", "parts"), OTHER_FORMULAS, ids=[case[1] for case in OTHER_FORMULAS])
def test_another_formula_is_refused_with_both(tmp_path: Path, tool: str, lines: str, parts: tuple[str, ...]) -> None:
    problems = problems_of(tmp_path, with_base(tool, "\n".join(lines.split("; "))))

    assert all(any(part in problem for problem in problems) for part in parts), problems


def test_a_typed_objective_replaces_what_the_file_cannot_say(tmp_path: Path) -> None:
    orpo = values_of(tmp_path, "LLaMA-Factory", "stage: dpo; pref_loss: orpo; pref_beta: 0.2", "--objective", "orpo")
    assert (orpo["objective"], orpo["beta"], orpo["seq_length"]) == ("orpo", 0.2, 4096)
    smoothed = "stage: dpo; dpo_label_smoothing: 0.1"
    robust = ("--loss_type", "robust", "--label_smoothing", "0.1")
    assert values_of(tmp_path, "LLaMA-Factory", smoothed, *robust)["loss_type"] == "robust"
    handbook = values_of(tmp_path, "TRL", "beta: 0.05; max_length: 1000; max_prompt_length: 900", "--objective", "orpo")
    assert (handbook["objective"], handbook["beta"], handbook["seq_length"]) == ("orpo", 0.05, 2000)
    assert values_of(tmp_path, "TRL", "loss_type: simpo", "--sft_weight", "1")["objective"] == "simpo"
    assert values_of(tmp_path, "LLaMA-Factory", "stage: dpo", "--objective", "sft")["seq_length"] == 2048


def test_the_best_checkpoint_of_a_preference_is_by_its_metrics(tmp_path: Path) -> None:
    lines = "stage: dpo; metric_for_best_model: eval_rewards/accuracies; load_best_model_at_end: true; val_size: 8; "
    values = values_of(tmp_path, "LLaMA-Factory", f"{lines}eval_strategy: epoch; save_strategy: epoch")
    assert values["metric_for_best_model"] == "rewards/accuracies"


def test_what_a_pair_changes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    values_of(tmp_path, "TRL", "beta: 0.1; max_prompt_length: 512; label_smoothing: 0.2; max_length: 1024")
    told = [(record.levelname, record.getMessage().partition("theirs.yaml: ")[2]) for record in caplog.records]

    assert "seq_length 2048 = 2 x max_length 1024, as a row holds both answers of a pair" in told[0][1]
    assert {line.partition(":")[0].partition(" has")[0] for level, line in told if level == "WARNING"} == {
        "`beta`",
        "`label_smoothing`",
        "`max_prompt_length`",
    }


def test_a_recipe_of_alignment_handbook_is_read_with_its_template_and_mixture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config_full.yaml"
    path.write_text(
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nmodel_revision: main\ntorch_dtype: bfloat16\n"
        'chat_template: "{% for message in messages %}{{ message.content }}{% endfor %}"\n'
        "dataset_mixture:\n  datasets:\n    - id: o/chats\n      config: default\n      split: train_sft\n"
        "      columns:\n        - messages\n      weight: 1.0\n    - id: o/more\n      weight: 0.001\n"
        "  test_split_size: 1000\n  seed: 0\ndataset_kwargs:\n  add_special_tokens: false\n"
        "do_eval: true\neval_strategy: epoch\nmax_seq_length: 2048\nper_device_train_batch_size: 4\n",
        encoding="utf-8",
    )
    config = parse_args(["--config", str(path)], num_ranks=1)

    assert config.data.chat_template == "{% for message in messages %}{{ message.content }}{% endfor %}"
    first, second = config.data.dataset
    assert (first.name, first.subset, first.split, first.weight) == ("o/chats", "default", "train_sft", 1)
    assert (second.name, second.weight, config.data.val_size) == ("o/more", 0.001, 1000)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "draws other samples in each epoch" in warnings[0]
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(config), encoding="utf-8")
    assert parse_args(["--config", str(saved)], num_ranks=1) == config


def test_a_preference_recipe_of_alignment_handbook_is_read_and_its_optimizer_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config_full.yaml"
    text = (
        "model_name_or_path: alignment-handbook/zephyr-7b-sft-full\ntorch_dtype: null\ndataset_mixture:\n  datasets:\n"
        "    - {id: o/prefs, config: default, split: train_prefs, columns: [chosen, rejected], weight: 1.0}\n"
        "    - {id: o/prefs, config: default, split: test_prefs, columns: [chosen, rejected], weight: 1.0}\n"
        "  test_split_size: 2000\n  seed: 0\nbf16: true\nbeta: 0.01\nloss_type: sigmoid\ndo_eval: true\n"
        "eval_strategy: steps\neval_steps: 100\nhub_model_id: h\nhub_model_revision: v1.0\nlearning_rate: 5.0e-7\n"
        "max_length: 1024\nmax_prompt_length: 512\nnum_train_epochs: 1\nper_device_train_batch_size: 8\n"
    )
    path.write_text(f"{text}optim: adamw_torch\n", encoding="utf-8")
    config = parse_args(["--config", str(path)], num_ranks=1)

    own = config.objective
    assert (own.objective, own.beta, own.loss_type) == ("dpo", 0.01, "sigmoid")
    assert (config.data.seq_length, config.data.packing, config.pipeline.batch_size) == (2048, "off", 8)
    assert [entry.split for entry in config.data.dataset] == ["train_prefs", "test_prefs"]
    (problem,) = problems_of(tmp_path, f"{text}optim: rmsprop\n")
    assert "the optimizer is AdamW" in problem


def test_a_difference_is_told_once_and_the_rest_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    values_of(
        tmp_path,
        "Axolotl",
        "datasets: [{path: a, type: alpaca}, {path: b, type: alpaca}]; adapter: qlora; load_in_4bit: true; "
        "peft_use_dora: true; lora_dropout: 0.1; tf32: true; optimizer: adamw_bnb_8bit; trust_remote_code: true",
    )
    told = [(record.levelname, record.getMessage().partition("theirs.yaml: ")[2]) for record in caplog.records]

    assert [level for level, _ in told] == ["INFO", "WARNING"]
    assert told[0][1].endswith("; no effect here: tf32, optimizer, trust_remote_code")
    assert told[1][1].startswith("`type:")


@pytest.mark.parametrize("own", ["batch_size: 8", "model_path: m", "seq_length: 64", "save_dir: out"])
def test_a_file_of_our_own_with_their_keys_is_told_what_to_use(tmp_path: Path, own: str) -> None:
    problems = problems_of(tmp_path, f"{own}\nmodel_name_or_path: m\ntemplate: llama3\ndataset_dir: data\n")

    assert any("unknown key `template`: use --chat_template" in problem for problem in problems)


def test_what_sfttrainer_writes_as_json_is_read(tmp_path: Path) -> None:
    keys = {"max_length": 64, "per_device_train_batch_size": 2, "bf16": True, "hub_token": None, "warmup_steps": 0.1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys, indent=2), encoding="utf-8")
    values = option_values(parse_args(["--config", str(path), "--dataset", "d"], num_ranks=1))

    assert (values["seq_length"], values["batch_size"], values["warmup_steps"]) == (64, 2, 0.1)
    assert {"seq_length", "batch_size", "learning_rate"} <= given_options(["--config", str(path)])


LAUNCHES = "per_device_train_batch_size: 2; gradient_accumulation_steps: 3; lora_rank: 4"


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "typed", "batch", "chunks"),
    [
        (1, 1, "", 6, 3),
        (4, 1, "", 24, 12),
        (4, 1, "--pipeline_ranks 2", 24, 6),  # two pipelines, each with 12 rows of a step
        (4, 2, "", 24, 6),
        (4, 1, "--batch_size 40", 40, None),
        (1, 1, "--dry_run --num_ranks 8", 48, 24),
        (1, 1, "--preview --nproc_per_node 2", 12, 6),
        (1, 1, "--dry_run", 12, 6),  # two processes without a GPU
    ],
)
def test_a_batch_counts_the_processes_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_ranks: int,
    num_nodes: int,
    typed: str,
    batch: int,
    chunks: int | None,
) -> None:
    monkeypatch.setattr("mobius.config.cli.count_gpus", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = tmp_path / "theirs.yaml"
    path.write_text(BASE["LLaMA-Factory"] + LAUNCHES.replace("; ", "\n"), encoding="utf-8")
    caplog.set_level("INFO")
    words = ["--config", str(path), *typed.split()]
    values = option_values(parse_args(words, num_ranks=num_ranks, num_nodes=num_nodes))

    assert (values["batch_size"], values["num_chunks"]) == (batch, chunks)
    is_told = any(f"batch_size {batch} = per_device_train_batch_size 2 x" in line for line in caplog.messages)
    assert is_told is ("--batch_size" not in typed)


def test_a_typed_option_replaces_what_the_file_cannot_say(tmp_path: Path) -> None:
    assert values_of(tmp_path, "LLaMA-Factory", "template: default", "--chat_template", "llama3")["chat_template"]
    assert values_of(tmp_path, "TRL", "max_length: null", "--seq_length", "64")["seq_length"] == 64
    values = values_of(tmp_path, "LLaMA-Factory", "num_train_epochs: 2", "--num_iterations", "5")
    assert (values["num_iterations"], values["num_train_epochs"]) == (5, None)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("template: qwem", "did you mean qwen"),
        ("cutoff_len: many", "`cutoff_len: 'many'`: it must be a whole number"),
        ("per_device_train_batch_size: two", "`per_device_train_batch_size: 'two'`: it must be a number"),
        ("lr_scheduler_kwargs: abc", "it must be a mapping"),
        ("dataset: d\ndataset_dir: nowhere", "dataset_info.json cannot be read"),
        ("dataset: d\ndataset_dir: REMOTE:a/b", "download that folder"),
        ("dataset: d\ndataset_dir: ~nobody_of_that_name", "dataset_info.json cannot be read"),
    ],
)
def test_a_value_that_is_none_is_told(tmp_path: Path, key: str, part: str) -> None:
    text = with_base("LLaMA-Factory", f"stage: sft\n{key}\n")

    assert any(part in problem for problem in problems_of(tmp_path, text))


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("{path: a, type: sharegpt.load_role}", "use chat_template, alpaca or completion"),
        ("{path: a, type: {field_instruction: q}}", "use chat_template, alpaca or completion"),
        ("{path: a, type: completion, shards: 4}", "shards of a dataset cannot be taken"),
        ("{path: a, type: completion, data_files: b.jsonl}", "give the files themselves"),
        ("{path: a, type: chat_template, message_property_mappings: {role: who}}", "role and content"),
        ("{path: a, type: chat_template, roles_to_train: [user]}", "roles_to_train"),
        ("{path: a, type: alpaca}, {path: b, type: chat_template}", "a run has one chat template"),
        ("a.jsonl", "each entry must be a mapping"),
    ],
)
def test_a_dataset_of_axolotl_that_would_be_another_is_refused(tmp_path: Path, entry: str, part: str) -> None:
    assert any(part in problem for problem in problems_of(tmp_path, with_base("Axolotl", f"datasets: [{entry}]")))


INFO = {
    "plain": {"file_name": "plain.json"},
    "named": {"file_name": "named.json", "columns": {"prompt": "q", "response": "a", "system": "s", "history": "h"}},
    "talks": {"file_name": "talks", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "functions"}},
    "openai": {
        "hf_hub_url": "org/talks",
        "file_name": "unused.json",
        "formatting": "sharegpt",
        "subset": "s",
        "split": "dev",
        "num_samples": 50,
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "tagged": {"file_name": "a.json", "formatting": "sharegpt", "tags": {"user_tag": "Q"}},
    "ranked": {
        "file_name": "a.json",
        "ranking": True,
        "columns": {"prompt": "p", "query": "q", "chosen": "c", "rejected": "rejected"},
    },
    "duels": {
        "file_name": "duels.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "judged": {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "m", "kto_tag": "label"}},
    "pictures": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "photos": {"file_name": "a.json", "formatting": "sharegpt", "columns": {"images": "photos"}},
    "films": {"file_name": "a.json", "columns": {"videos": "videos"}},
    "scripted": {"script_url": "x"},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", "data/plain.json,columns=instruction:instruction;query:input;output:output"),
        ("named", "data/named.json,columns=instruction:q;output:a;history:h;system:s"),
        ("talks", "data/talks,columns=conversations:talk;tools:functions"),
        ("openai", "org/talks,split=dev,subset=s"),
        ("plain, openai", "data/plain.json,columns=instruction:instruction;query:input;output:output org/talks"),
        ("named; stage: pt", "data/named.json,columns=text:q"),
        ("tagged", "`user_tag` is Q; in the data it must be human or user"),
        ("ranked", "ranked has pairs (`ranking`), and the file is for stage: sft"),
        ("ranked; stage: dpo", "data/a.json,columns=instruction:p;query:q;chosen:c;rejected:rejected"),
        ("duels; stage: dpo", "data/duels.json"),
        ("duels; stage: rm", "data/duels.json"),
        (
            "plain; stage: dpo",
            "plain has no pairs (`ranking`) or labels (`kto_tag`), and the file is for stage: dpo or rm",
        ),
        ("judged; stage: kto", "data/a.json,columns=conversations:m;kto_tag:label"),
        ("judged; stage: dpo", "judged has labels (`kto_tag`), and the file is for stage: dpo or rm"),
        ("pictures", "data/mllm_demo.json"),
        ("photos", "data/a.json,columns=conversations:conversations;images:photos"),
        ("films", "films has videos or audio; Mobius trains on text and images"),
        ("scripted", "only file_name and hf_hub_url are read"),
        ("plane", "did you mean plain"),
    ],
)
def test_a_name_of_dataset_info_is_its_file_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO), encoding="utf-8")
    if "`" in expected or " " in expected.partition(".json")[0]:
        with pytest.raises(ConfigError) as caught:
            values_of(tmp_path, "LLaMA-Factory", f"dataset: {name}; dataset_dir: data")
        assert expected in str(caught.value)
        return
    values = values_of(tmp_path, "LLaMA-Factory", f"dataset: {name}; dataset_dir: data")
    assert shown(values["dataset"]).startswith(expected)
    if name == "openai":
        assert "max_samples=50" in str(values["dataset"])


def test_what_the_tool_takes_in_silence_is_left_out_with_a_line_and_the_saved_options_are_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "theirs.yaml"
    unused = "save_strategy: no\nsave_steps: 50\neval_steps: 20\nlora_rank: 4\nmax_new_tokens: 9\n"
    path.write_text(BASE["LLaMA-Factory"] + unused, encoding="utf-8")
    caplog.set_level("INFO")
    config = parse_args(["--config", str(path)], num_ranks=2)
    (line,) = (line for line in caplog.messages if line.startswith("left out, as they have no effect here: "))
    assert set(line.partition(": ")[2].split(", ")) == {
        "--save_steps",
        "--eval_steps",
        "--lora_rank",
        "--max_new_tokens",
    }

    saved = tmp_path / "training_args.yaml"
    saved.write_text(to_yaml(config), encoding="utf-8")
    assert parse_args(["--config", str(saved)], num_ranks=2) == config
    with pytest.raises(
        ConfigError,
        match=r"`--lora_rank` has no effect without LoRA adapters; add --use_lora, or",
    ):
        parse_args(["--config", str(path), "--lora_rank", "4"], num_ranks=2)
