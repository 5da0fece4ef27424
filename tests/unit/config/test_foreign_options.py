"""A name from another tool is told what to use here; a name without a counterpart gets no guess."""

from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import nearest_name, spellings
from mobius.config.recipes.answers import SHARED, read_table
from mobius.errors import ConfigError


def problem_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    (problem,) = caught.value.problems
    return problem


def test_no_name_is_both_ours_and_foreign() -> None:
    assert not set(read_table(SHARED)) & set(spellings())


# Words -> what the answer says. Other words follow a name, and are no problem of their own.
REFUSED = """
num_epochs 1 2 -> --num_train_epochs
per_device_train_batch_size 1 2 -> --batch_size
per_device_train_batch_size 10 --num_chunks 5 -> --batch_size
gradient_accumulation_steps 1 2 -> --num_chunks
warmup_ratio 1 2 -> --warmup_steps 0.03
save_freq 1 2 -> --save_steps
evaluation_strategy 1 2 -> --eval_strategy
qlora 1 2 -> not available
sequence_len 1 2 -> --seq_length
adapter 1 2 -> --finetuning_type lora
adapter qlora -> not available (QLoRA)
adapter lora -> use --finetuning_type lora
neftune_noise_alpha 5 -> not available (NEFTune)
hub_token 1 2 -> HF_TOKEN
rlhf_type 1 2 -> not available
dataset_dir 1 2 -> --dataset
dora 1 2 -> --use_dora
use_peft 1 2 -> --finetuning_type lora
freeze_trainable_layers 1 2 -> --freeze embedding,layers.0-15
modules_to_save 1 2 -> --additional_target
max_seq_length 1 2 -> --seq_length
neat_packing 1 2 -> --packing on
dataset_text_field 1 2 -> --columns text=body
template llama3 -> --chat_template
train_on_inputs 1 2 -> --train_on_prompt
dataset_config_name 1 2 -> `subset`
split 1 2 -> `split`
interleave_probs 1 2 -> --dataset a.jsonl b.jsonl:0.3
validation_file 1 2 -> --eval_dataset
val_set_size 1 2 -> --val_size
use_wandb 1 2 -> --report_to wandb
wandb_project 1 2 -> WANDB_PROJECT
test_split_size 1 2 -> use --val_size
micro_batch_size 1 2 -> --batch_size
eos_token 1 2 -> not an option; as a key of a file it is taken without effect, with a warning
fp8 1 2 -> use --matmul_dtype fp8
optim adafactor -> the optimizer is AdamW
stage dpo -> --objective
stage kto -> --objective
stage rm -> --objective
stage ppo -> --objective
stage orpo -> --objective
stage DPO -> --objective
"""
IGNORED = """
gradient_checkpointing -> --recompute
deepspeed ds_z3_config.json -> --use_offload
tf32 true -> fp32
group_by_length -> --packing
greater_is_better=false -> --metric_for_best_model
plot_loss True -> training_loss.png
flash-attn fa2 -> attention
use_liger_kernel -> Liger
use_unsloth true -> Unsloth
ddp_find_unused_parameters false -> nothing
dataloader_num_workers 4 -> --preprocessing_num_workers
optim adamw_torch -> AdamW
stage sft -> is the default
stage pt -> plain text
load_in_4bit false -> asks for nothing
hub_strategy end -> at the end of the run
neftune_noise_alpha none -> asks for nothing
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_name_of_another_tool_is_answered_by_its_value(line: str) -> None:
    words, _, part = line.partition(" -> ")
    name, _, values = words.partition(" ")
    for spelling in (f"--{name}", f"--{name.replace('_', '-')}"):
        problem = problem_of(spelling, *values.split())
        assert f"unknown option `{spelling}`" in problem
        assert "did you mean" not in problem
        assert part in problem
        assert name != "stage" or "leave it out" not in problem


@pytest.mark.parametrize("line", IGNORED.strip().splitlines())
def test_what_changes_nothing_here_is_ignored_with_a_line(caplog: pytest.LogCaptureFixture, line: str) -> None:
    words, _, part = line.partition(" -> ")
    parse_args([*f"--{words}".split(), "--batch_size", "8"])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "is ignored" in record.getMessage()
    assert part in record.getMessage()


def test_keys_of_another_tool_are_ignored_in_a_file_of_our_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("save_dir: out\nstage: sft\nfp16:\nload_in_8bit: false\ndeepspeed: null\nplot_loss: true\n")
    parse_args(["--config", str(file)])
    ignored = [record.getMessage().split("`")[1] for record in caplog.records]
    assert ignored == ["stage", "load_in_8bit", "deepspeed", "plot_loss"]


@pytest.mark.parametrize(
    "name",
    ["min_grad_norm", "adam_beta3", "eval_batch_sizes", "min_length", "steps", "seeds_file"],
)
def test_another_meaning_is_no_misspelling(name: str) -> None:
    assert nearest_name(name) is None
    assert "did you mean" not in problem_of(f"--{name}", "1")


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("batchsize", "batch_size"),
        ("bacth_size", "batch_size"),
        ("BatchSize", "batch_size"),
        ("lerning_rate", "learning_rate"),
        ("learning_rat", "learning_rate"),
        ("use_prefech", "use_prefetch"),
        ("use_ofload", "use_offload"),
        ("num_iteratons", "num_iterations"),
        ("datset", "dataset"),
        ("modelpath", "model_path"),
        ("outputdir", "output_dir"),
    ],
)
def test_a_misspelling_is_still_understood(misspelt: str, meant: str) -> None:
    assert nearest_name(misspelt) == meant
