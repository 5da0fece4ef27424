"""Every option has a setting in which it acts; in one where it would not, it is refused by name."""

from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import EvalStrategy, options
from mobius.errors import ConfigError

VAL = "--val_size 9"
ALONE = f"--no_do_train {VAL}"
ANSWERS = f"{ALONE} --do_predict"
LORA, PROMPT, P_TUNING, PREFIX = (
    "--use_lora",
    *(f"--finetuning_type {kind}" for kind in ("prompt", "p_tuning", "prefix")),
)
NODES = "--nnodes 2 --node_rank 0 --rdzv_endpoint a:1"

# Option -> what is typed where it acts, and in which modes it would not act: each alone makes it a mistake. What is
# refused when the data are opened is in tests/unit/data; what train.sh reads is below.
TABLE: dict[str, tuple[str, list[str]]] = {
    "model_path": ("--model_path m", []),
    "num_layers": ("--num_layers 2", []),
    "embedding_dim": ("--embedding_dim 64", []),
    "ff_dim": ("--ff_dim 64", []),
    "num_heads": ("--num_heads 4", []),
    "dtype": ("--dtype fp16", []),
    "matmul_dtype": ("--matmul_dtype int8", []),
    "dequantize_base": ("--dequantize_base", [LORA, f"{ALONE} --do_eval"]),
    "dataset": ("--dataset a.jsonl", []),
    "seq_length": ("--seq_length 64", []),
    "packing": ("--packing on", [ANSWERS]),
    "max_samples": ("--max_samples 5", []),
    "columns": ("--columns text=a", []),
    "chat_template": ("--chat_template chatml", []),
    "default_system": ("--default_system s", []),
    "train_on_prompt": ("--train_on_prompt", []),
    "train_on_all_turns": ("--train_on_all_turns", []),
    "mask_history": ("--mask_history", []),
    "val_size": (f"{VAL} --eval_strategy epoch", []),
    "eval_dataset": ("--eval_dataset a", ["--eval_strategy no"]),
    "preprocessing_num_workers": ("--preprocessing_num_workers 2", []),
    "preview": ("--preview 2", []),
    "objective": ("--objective dpo", []),
    "beta": ("--beta 0.2 --objective dpo", ["--objective sft"]),
    "desirable_weight": ("--desirable_weight 2 --objective kto", ["--objective dpo"]),
    "undesirable_weight": ("--undesirable_weight 2 --objective kto", ["--objective dpo"]),
    "loss_type": ("--loss_type ipo --objective dpo", ["--objective orpo"]),
    "label_smoothing": ("--label_smoothing 0.1 --loss_type robust --objective dpo", ["--objective simpo"]),
    "reference_model": ("--reference_model m --objective dpo", ["--objective orpo"]),
    "simpo_gamma": ("--simpo_gamma 1 --objective simpo", ["--objective dpo"]),
    "sft_weight": ("--sft_weight 0.1 --objective dpo", ["--objective orpo"]),
    "policy_loss": ("--policy_loss gspo --objective policy", ["--objective dpo"]),
    "epsilon_low": ("--epsilon 0.1 --objective policy", ["--objective dpo"]),
    "epsilon_high": ("--epsilon_high 0.28 --objective policy", ["--objective dpo"]),
    "scale_rewards": ("--scale_rewards batch --objective policy", ["--objective policy --policy_loss rloo"]),
    "importance_cap": ("--importance_cap 3 --objective policy", ["--objective policy --policy_loss rloo"]),
    "kl_weight": ("--kl_weight 0.1 --objective policy", ["--objective policy --policy_loss rloo"]),
    "teacher_model": ("--teacher_model t --objective distill", ["--objective dpo"]),
    "top_k_logprobs": ("--top_k_logprobs 8 --objective distill --teacher_model t", ["--objective dpo"]),
    "divergence": ("--divergence js --objective distill --teacher_model t", ["--objective dpo"]),
    "temperature": ("--temperature 2 --objective distill --teacher_model t", ["--objective sft"]),
    "save_scores": (f"--save_scores --do_eval {VAL}", [VAL]),
    "center_rewards": ("--center_rewards 0.1 --objective reward", ["--objective dpo"]),
    "batch_size": ("--batch_size 4", []),
    "num_chunks": ("--num_chunks 2", []),
    "num_rounds": ("--num_rounds 2", [ANSWERS]),
    "num_slices": ("--num_slices 2", [ANSWERS]),
    "num_stages": ("--num_stages 4", []),
    "compute_order": ("--compute_order depth_first", [f"{ALONE} --do_eval"]),
    "spread_head": ("--spread_head", [f"{ALONE} --do_eval"]),
    "use_prefetch": ("--no_prefetch", []),
    "use_offload": ("--no_offload", []),
    "resident_stages": ("--resident_stages 1", ["--no_offload", ANSWERS]),
    "recompute": ("--recompute linear", [f"{ALONE} --do_eval"]),
    "activation_offloading": ("--activation_offloading on", ["--no_offload --recompute none", f"{ALONE} --do_eval"]),
    "compile": ("--compile on", [ANSWERS]),
    "overlap_optimizer": ("--no_overlap_optimizer", []),
    "optimizer_states": ("--optimizer_states compact", [LORA, f"{ALONE} --do_eval"]),
    "disk_rate": ("--disk_rate 7,2 --offload_states_to disk", []),
    "disk_endurance": ("--disk_endurance 1200 --offload_states_to disk", []),
    "max_disk_writes": ("--max_disk_writes 300 --offload_states_to disk", []),
    "gradients_on_disks": (
        "--gradients_on_disks --offload_states_to disk",
        ["--offload_states_to disk --no_overlap_optimizer", "--offload_states_to disk --max_grad_norm 0"],
    ),
    "weights_on_disks": ("--weights_on_disks --offload_states_to disk", []),
    "durable_steps": ("--durable_steps on --offload_states_to disk", []),
    "offload_states_to": ("--offload_states_to disk", [LORA, f"{ALONE} --do_eval", "--no_offload"]),
    "reduce_dtype": ("--reduce_dtype bf16 --pipeline_ranks 2", ["", f"{ALONE} --do_eval"]),
    "fp32_gradients": ("--fp32_gradients", [LORA, f"{ALONE} --do_eval"]),
    "copy_messages": ("--no_copy_messages", []),
    "cross_mapping": ("--no_cross_mapping", []),
    "device": ("--device cpu", []),
    "gpu_memory_limit": ("--gpu_memory_limit 4", ["--device cpu"]),
    "host_memory_limit": ("--host_memory_limit 4", []),
    "tile_tokens": ("--tile_tokens 64", ["--no_offload --recompute none", ANSWERS]),
    "loss_chunk_tokens": ("--loss_chunk_tokens 64", [ANSWERS]),
    "num_iterations": ("--num_iterations 9", [f"{ALONE} --do_eval"]),
    "num_train_epochs": ("--num_train_epochs 3", [f"{ALONE} --do_eval"]),
    "learning_rate": ("--learning_rate 1e-3", [f"{ALONE} --do_eval"]),
    "lr_scheduler_type": ("--lr_scheduler_type linear", [f"{ALONE} --do_eval"]),
    "lr_scheduler_kwargs": (
        "--lr_scheduler_kwargs num_cycles=3 --lr_scheduler_type cosine_with_restarts",
        ["--lr_scheduler_type linear", "--lr_scheduler_type constant_with_warmup"],
    ),
    "warmup_steps": ("--warmup_steps 1", [f"{ALONE} --do_eval"]),
    "weight_decay": ("--weight_decay 0.1", [f"{ALONE} --do_eval"]),
    "adam_beta1": ("--adam_beta1 0.8", [f"{ALONE} --do_eval"]),
    "adam_beta2": ("--adam_beta2 0.95", [f"{ALONE} --do_eval"]),
    "adam_epsilon": ("--adam_epsilon 1e-6", [f"{ALONE} --do_eval"]),
    "max_grad_norm": ("--max_grad_norm 2", [f"{ALONE} --do_eval"]),
    "seed": ("--seed 1", []),
    "finetuning_type": ("--finetuning_type lora", [f"{ALONE} --do_eval"]),
    "lora_rank": (f"--lora_rank 4 {LORA}", [""]),
    "base_dtype": (f"--base_dtype nf4 {LORA}", [""]),
    "lora_alpha": (f"--lora_alpha 4 {LORA}", [""]),
    "lora_rank_pattern": (f"--lora_rank_pattern q_proj=2 {LORA}", [""]),
    "lora_alpha_pattern": (f"--lora_alpha_pattern q_proj=2 {LORA}", [""]),
    "lora_target": (f"--lora_target q_proj {LORA}", [""]),
    "lora_target_parameters": (f"--lora_target_parameters all {LORA}", [""]),
    "use_rslora": (f"--use_rslora {LORA}", [""]),
    "lora_dropout": (f"--lora_dropout 0.1 {LORA}", [""]),
    "use_dora": (f"--use_dora {LORA}", [""]),
    "loraplus_lr_ratio": (f"--loraplus_lr_ratio 16 {LORA}", [""]),
    "additional_target": (f"--additional_target head {LORA}", [""]),
    "num_virtual_tokens": (f"--num_virtual_tokens 5 {PREFIX}", ["", LORA]),
    "prompt_init_text": (f"--prompt_init_text a {PROMPT}", ["", P_TUNING, PREFIX, f"{PROMPT} --adapter_path a"]),
    "encoder_type": (f"--encoder_type lstm {P_TUNING}", [PROMPT, PREFIX]),
    "encoder_hidden_size": (f"--encoder_hidden_size 8 {P_TUNING}", [PROMPT, PREFIX]),
    "freeze": ("--freeze head", [LORA, PROMPT, f"{ALONE} --do_eval"]),
    "adapter_path": (f"--adapter_path a {LORA}", [""]),
    "merge": (f"--merge {LORA}", ["", PROMPT]),
    "save_params": ("--save_params a.pt", [f"{ALONE} --do_eval"]),
    "save_results": ("--save_results a.txt", [f"{ALONE} --do_eval"]),
    "save_dir": ("--save_dir a", []),
    "overwrite_output_dir": ("--overwrite_output_dir", []),
    "export_as": ("--export_as text", [LORA, PROMPT, f"{ALONE} --do_eval"]),
    "push_to_hub": ("--push_to_hub", [f"{ALONE} --do_eval"]),
    "hub_model_id": ("--hub_model_id a --push_to_hub", [""]),
    "hub_private_repo": ("--hub_private_repo --push_to_hub", [""]),
    "logging_steps": ("--logging_steps 2", [f"{ALONE} --do_eval"]),
    "report_to": ("--report_to wandb", [ANSWERS]),
    "run_name": ("--run_name a", [ANSWERS]),
    "verbose": ("--verbose", []),
    "trace": ("--trace", [f"{ALONE} --do_eval"]),
    "profile_steps": ("--profile_steps 1", [f"{ALONE} --do_eval"]),
    "save_strategy": ("--save_strategy epoch", [f"{ALONE} --do_eval"]),
    "save_steps": ("--save_steps 10", ["--save_strategy no", "--save_strategy epoch", f"{ALONE} --do_eval"]),
    "save_total_limit": ("--save_total_limit 3", ["--save_strategy no", f"{ALONE} --do_eval"]),
    "save_only_model": ("--save_only_model", ["--save_strategy no", f"{ALONE} --do_eval"]),
    "resume_from_checkpoint": ("--resume_from_checkpoint true", [f"{ALONE} --do_eval"]),
    "resume_changes": ("--resume_changes seed --resume_from_checkpoint true", [""]),
    "max_run_time": ("--max_run_time 10", [f"{ALONE} --do_eval"]),
    "watchdog_minutes": ("--watchdog_minutes 5", [ANSWERS]),
    "eval_strategy": (f"--eval_strategy epoch {VAL}", ["", f"{ALONE} --do_eval"]),
    "eval_steps": (
        f"--eval_steps 10 {VAL}",
        ["", f"{VAL} --eval_strategy epoch", f"{VAL} --eval_strategy no", f"{ALONE} --do_eval"],
    ),
    "eval_on_start": (f"--eval_on_start {VAL}", ["", f"{ALONE} --do_eval"]),
    "do_train": (f"--no_do_train --do_eval {VAL}", [""]),
    "do_eval": (f"--do_eval {VAL}", [""]),
    "metric_for_best_model": (
        f"--metric_for_best_model perplexity {VAL}",
        ["", f"{VAL} --eval_strategy no", f"{ALONE} --do_eval"],
    ),
    "load_best_model_at_end": (
        f"--load_best_model_at_end --eval_strategy steps {VAL}",
        [f"{VAL} --eval_strategy no", f"{ALONE} --do_eval"],
    ),
    "early_stopping_patience": (
        f"--early_stopping_patience 2 {VAL}",
        [f"{VAL} --eval_strategy no", f"{ALONE} --do_eval"],
    ),
    "do_predict": (f"--do_predict {VAL}", [""]),
    "max_new_tokens": (f"--max_new_tokens 9 --do_predict {VAL}", ["", VAL]),
    "max_predict_samples": (f"--max_predict_samples 9 --do_predict {VAL}", ["", VAL]),
    "dry_run": ("--dry_run", []),
    "num_ranks": ("--num_ranks 4 --dry_run", [""]),
    "card": ("--card H200 --dry_run", [""]),
    "pcie": ("--pcie 4 --dry_run", [""]),
    "host_cores": ("--host_cores 8 --dry_run", [""]),
    "host_bandwidth": ("--host_bandwidth 60 --dry_run", [""]),
    "node_link": (f"--node_link 3 --dry_run {NODES}", ["", "--dry_run"]),
    "plan_output": ("--plan_output p.json --dry_run", [""]),
    "plan": ("--plan p.json", ["--dry_run"]),
    "pipeline_ranks": ("--pipeline_ranks 1", []),
}
OF_TRAIN_SH = {
    "cuda_visible_devices": "--cuda_visible_devices 0,1",
    "master_port": "--master_port 29600",
    "nproc_per_node": "--nproc_per_node 3",
    "nnodes": f"{NODES}",
    "node_rank": f"{NODES.replace('rank 0', 'rank 1')}",
    "rdzv_endpoint": f"{NODES}",
    "max_restarts": "--max_restarts 2",
}


def typed(name: str) -> str:
    """The words of the option itself."""
    words = TABLE[name][0].split()
    return " ".join(words[: 1 if words[1:2] and words[1].startswith("--") else 2])


def test_the_table_has_every_option() -> None:
    assert TABLE.keys() | OF_TRAIN_SH.keys() == options().keys()


@pytest.mark.parametrize("name", TABLE)
def test_an_option_is_taken_where_it_acts(name: str) -> None:
    config = parse_args(TABLE[name][0].split(), num_ranks=4)
    value = getattr(getattr(config, options()[name].section), name)
    assert value != options()[name].default


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, modes) in TABLE.items() for mode in modes])
def test_an_option_is_refused_where_it_would_not_act(name: str, mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(f"{typed(name)} {mode}".split(), num_ranks=4)
    assert f"--{name}" in str(caught.value).replace("--no_do_train", "--do_train")
    (_,) = caught.value.problems


@pytest.mark.parametrize("mode", ["", f"{ALONE} --do_eval", ANSWERS, "--dry_run", "--save_strategy no", "--device cpu"])
def test_a_file_that_lists_every_default_is_taken_in_every_mode(tmp_path: Path, mode: str) -> None:
    mine = {word.removeprefix("--").removeprefix("no_") for word in mode.split()}
    lines = []
    for name, option in options().items():
        if name not in mine and not (option.is_optional and option.default is None) and not option.is_list:
            lines.append(f"{name}: {getattr(option.default, 'value', option.default)}")
    file = tmp_path / "all.yaml"
    file.write_text("\n".join(lines).replace("True", "true").replace("False", "false"))
    parse_args(["--config", str(file), *mode.split()], num_ranks=4)


def test_a_typed_mode_leaves_out_what_a_files_options_were_for(tmp_path: Path) -> None:
    file = tmp_path / "training.yaml"
    file.write_text("num_iterations: 50\nsave_steps: 10\nlearning_rate: 0.1\nval_size: 9\neval_steps: 5\ntrace: true\n")
    assert parse_args(["--config", str(file)]).evaluation.eval_strategy is EvalStrategy.STEPS
    parse_args(["--config", str(file), "--no_do_train", "--do_eval"])
    parse_args(["--config", str(file), "--save_strategy", "no"])
    with pytest.raises(ConfigError, match=r"`--save_steps` has no effect"):
        parse_args(["--config", str(file), "--save_strategy", "no", "--save_steps", "7"])


@pytest.mark.parametrize(
    ("words", "strategy", "line"),
    [
        ("--val_size 9", "epoch", "`--val_size` without `--eval_strategy`"),
        ("--eval_dataset a", "epoch", "`--eval_dataset` without `--eval_strategy`"),
        ("--eval_dataset a --eval_steps 20", "steps", "every 20 steps"),
        ("--val_size 9 --eval_steps 0.1", "steps", "0.1 of the run"),
        ("--val_size 9 --do_eval", "no", ""),
        ("--val_size 9 --do_eval --eval_steps 20", "steps", "every 20 steps"),
        ("--val_size 9 --eval_on_start", "no", ""),
        ("--val_size 9 --do_predict", "no", ""),
        ("--val_size 9 --eval_strategy no", "no", ""),
        ("--val_size 9 --eval_strategy steps", "steps", ""),
        ("--val_size 9 --no_do_train --do_eval", "no", ""),
    ],
)
def test_data_to_evaluate_on_are_evaluated_on_and_a_line_says_when(
    caplog: pytest.LogCaptureFixture, words: str, strategy: str, line: str
) -> None:
    assert parse_args(words.split()).evaluation.eval_strategy == strategy
    assert [line in record.getMessage() for record in caplog.records] == ([True] if line else [])


@pytest.mark.parametrize("name", OF_TRAIN_SH)
def test_what_only_train_sh_reads_is_refused_by_ranks_that_it_did_not_start(tmp_path: Path, name: str) -> None:
    words = OF_TRAIN_SH[name].split()
    parse_args(words, num_ranks=4)
    for look in ("--dry_run", "--preview"):
        parse_args([*words, look], num_ranks=4, is_without_train_sh=True)
    with pytest.raises(ConfigError, match=rf"`--{name}` has no effect on ranks that are already started.*train\.sh"):
        parse_args(words, num_ranks=4, is_without_train_sh=True)


def test_a_files_options_for_train_sh_are_noticed_where_the_start_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text('cuda_visible_devices: "0,2,1,3"\nmaster_port: 29502\nnproc_per_node: 4\n')
    parse_args(["--config", str(file)], num_ranks=4, is_without_train_sh=True)
    (record,) = caplog.records
    assert "cuda_visible_devices: 0,2,1,3 is for `bash train.sh`" in record.getMessage()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1,3")
    parse_args(["--config", str(file)], num_ranks=4, is_without_train_sh=True)
    assert len(caplog.records) == 1
