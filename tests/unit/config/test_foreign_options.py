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


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("num_epochs", "--num_train_epochs"),
        ("per_device_train_batch_size", "--batch_size"),
        ("gradient_accumulation_steps", "--num_chunks"),
        ("warmup_ratio", "--warmup_steps 0.03"),
        ("save_freq", "--save_steps"),
        ("evaluation_strategy", "--eval_strategy"),
        ("qlora", "not available"),
        ("sequence_len", "--seq_length"),
        ("adapter", "--finetuning_type lora"),
        ("neftune_noise_alpha", "not available"),
        ("hub_token", "HF_TOKEN"),
        ("rlhf_type", "not available"),
        ("dataset_dir", "--dataset"),
        ("use_dora", "not available"),
        ("use_peft", "--finetuning_type lora"),
        ("freeze_trainable_layers", "--freeze embedding,layers.0-15"),
        ("modules_to_save", "--additional_target"),
        ("max_seq_length", "--seq_length"),
        ("neat_packing", "--packing on"),
        ("dataset_text_field", "--columns text=body"),
        ("template", "--chat_template"),
        ("train_on_inputs", "--train_on_prompt"),
        ("dataset_config_name", "`subset`"),
        ("split", "`split`"),
        ("interleave_probs", "--dataset a.jsonl b.jsonl:0.3"),
        ("validation_file", "--eval_dataset"),
        ("val_set_size", "--val_size"),
        ("use_wandb", "--report_to wandb"),
        ("wandb_project", "WANDB_PROJECT"),
        ("test_split_size", "use --val_size"),
        ("micro_batch_size", "--batch_size"),
        ("eos_token", "not an option; as a key of a file it is taken as nothing, with a warning"),
        ("fp8", "use --matmul_dtype fp8"),
    ],
)
def test_a_name_of_another_tool_is_answered(name: str, part: str) -> None:
    for spelling in (f"--{name}", f"--{name.replace('_', '-')}"):
        problem = problem_of(spelling, "1", "2")
        assert f"unknown option `{spelling}`" in problem
        assert "did you mean" not in problem
        assert part in problem


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--gradient_checkpointing", "--recompute"),
        ("--deepspeed ds_z3_config.json", "--use_offload"),
        ("--tf32 true", "fp32"),
        ("--group_by_length", "--packing"),
        ("--greater_is_better=false", "--metric_for_best_model"),
        ("--plot_loss True", "training_loss.png"),
        ("--flash-attn fa2", "attention"),
        ("--use_liger_kernel", "Liger"),
        ("--use_unsloth true", "Unsloth"),
        ("--ddp_find_unused_parameters false", "nothing"),
        ("--dataloader_num_workers 4", "--preprocessing_num_workers"),
        ("--optim adamw_torch", "AdamW"),
        ("--stage sft", "only method"),
        ("--stage pt", "plain text"),
        ("--load_in_4bit false", "asks for nothing"),
        ("--hub_strategy end", "at the end of the run"),
        ("--neftune_noise_alpha none", "asks for nothing"),
    ],
)
def test_what_changes_nothing_here_is_ignored_with_a_line(
    caplog: pytest.LogCaptureFixture, words: str, part: str
) -> None:
    parse_args([*words.split(), "--batch_size", "8"])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "is ignored" in record.getMessage()
    assert part in record.getMessage()


@pytest.mark.parametrize("stage", ["dpo", "kto", "rm", "ppo", "orpo", "DPO"])
def test_another_method_of_training_is_refused(stage: str) -> None:
    problem = problem_of("--stage", stage)
    assert "Mobius does supervised fine-tuning" in problem
    assert "leave it out" not in problem


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--adapter qlora", "not available (QLoRA)"),
        ("--adapter lora", "use --finetuning_type lora"),
        ("--optim adafactor", "the optimizer is AdamW"),
        ("--template llama3", "--chat_template"),
        ("--neftune_noise_alpha 5", "NEFTune"),
    ],
)
def test_the_value_decides_on_the_answer(words: str, part: str) -> None:
    assert part in problem_of(*words.split())


def test_keys_of_another_tool_in_a_file_of_our_own_are_answered_in_their_lines_or_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "### model\nmodel_name_or_path: m\ntrust_remote_code: true\n### method\nstage: sft\ndo_train: true\n"
        "finetuning_type: full\ndeepspeed: ds_z3_config.json\ntemplate: llama3\ncutoff_len: 2048\nmax_samples: 1000\n"
        "preprocessing_num_workers: 16\ndataloader_num_workers: 4\nsave_dir: out\nlogging_steps: 10\n"
        "save_steps: 500\n"
        "plot_loss: true\noverwrite_output_dir: true\nsave_only_model: false\nreport_to: none\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-5\n"
        "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\nddp_timeout: 180000000\n"
        "resume_from_checkpoint: null\nval_size: 0.1\nper_device_eval_batch_size: 1\neval_strategy: steps\n"
        "eval_steps: 500\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        parse_args(["--config", str(file)])
    problems = caught.value.problems
    meant = ("template", "per_device_train_batch_size", "gradient_accumulation_steps", "warmup_ratio")
    assert [problem.split("`")[1] for problem in problems] == list(meant)
    assert not [problem for problem in problems if "did you mean" in problem or problem.endswith("`")]

    kept = [line for line in file.read_text().splitlines() if line.split(":")[0] not in meant]
    file.write_text(
        "\n".join([*kept, "fp16:", "load_in_8bit: false", "deepspeed: null"]).replace("deepspeed: ds", "fsdp: ds")
    )
    parse_args(["--config", str(file)])
    ignored = [record.getMessage().split("`")[1] for record in caplog.records]
    assert ignored == [
        *("trust_remote_code", "stage", "fsdp", "dataloader_num_workers", "plot_loss", "ddp_timeout"),
        *("per_device_eval_batch_size", "load_in_8bit", "deepspeed"),
    ]


def test_an_answer_counts_as_given_so_that_nothing_else_is_complained_about() -> None:
    problem_of("--per_device_train_batch_size", "10", "--num_chunks", "5")


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
