"""Values that do not fit, alone or together, are one problem that names the options; at the edge they are taken."""

import itertools
import re
from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import Config, LrSchedulerType, OptimConfig, config_from
from mobius.config.lr_schedules import SCHEDULE_ARGUMENTS
from mobius.config.sources import to_yaml
from mobius.config.validation import find_problems, resolve_epochs, validate
from mobius.errors import ConfigError

BEST = "--load_best_model_at_end --eval_strategy steps"
VAL = "--val_size 10 --num_iterations 100"
# Words for a run of 4 ranks, and the options that the problem names.
REFUSED = """
--num_stages 6                                               : num_stages nproc_per_node
--num_stages 3                                               : num_stages
--batch_size 64 --num_chunks 5                               : batch_size num_chunks
--batch_size 2                                               : batch_size num_chunks
--seq_length 15 --num_slices 2                               : seq_length num_slices
--embedding_dim 100 --num_heads 8                            : embedding_dim num_heads
--warmup_steps 3                                             : warmup_steps
--warmup_steps 1.5 --num_iterations 9                        : warmup_steps
--gpu_memory_limit 24 --device cpu                           : gpu_memory_limit device
--save_dir out --save_params ./out                           : save_dir save_params
--cuda_visible_devices 0,x                                   : cuda_visible_devices
--cuda_visible_devices 0,0                                   : cuda_visible_devices
--profile_steps 4-3 --num_iterations 9                       : profile_steps
--profile_steps 0-1                                          : profile_steps
--profile_steps all                                          : profile_steps
--profile_steps 2-3                                          : profile_steps
--tile_tokens some                                           : tile_tokens
--tile_tokens 0                                              : tile_tokens
--tile_tokens 512 --no_offload --recompute none              : tile_tokens recompute
--activation_offloading on --no_offload --recompute none     : activation_offloading recompute
--num_slices 2 --no_offload --recompute none                 : num_slices recompute
--resident_stages some                                       : resident_stages
--resident_stages -1                                         : resident_stages
--resident_stages 2 --no_offload                             : resident_stages no_offload
--compute_order depth_first --activation_offloading on       : compute_order activation_offloading
--compute_order depth_first --num_slices 2                   : compute_order num_slices
--spread_head --compute_order breadth_first                  : spread_head compute_order
--spread_head --num_slices 2                                 : spread_head num_slices
--num_iterations 5 --num_train_epochs 0.5                    : num_iterations num_train_epochs
--num_train_epochs 0                                         : num_train_epochs
--num_train_epochs -1                                        : num_train_epochs
--num_train_epochs 10001                                     : num_train_epochs
--num_train_epochs 2 --warmup_steps 1.5                      : warmup_steps
--num_train_epochs 2 --profile_steps x                       : profile_steps
--val_size 1.5                                               : val_size
--val_size -1                                                : val_size
--val_size 0.1 --eval_dataset a                              : val_size eval_dataset
--train_on_prompt --mask_history                             : train_on_prompt mask_history
--do_predict --val_size 4 --train_on_prompt                  : do_predict train_on_prompt
--preview --dry_run                                          : preview dry_run
--plan p.json --dry_run                                      : plan dry_run
--resume_from_checkpoint c --dry_run                         : resume_from_checkpoint dry_run
--preview 0                                                  : preview
--preview 5000                                               : preview
--preprocessing_num_workers 0                                : preprocessing_num_workers
--master_port 70000                                          : master_port
--report_to tensorboard,comet                                : report_to
--report_to none,wandb                                       : report_to
--seq_length 1                                               : seq_length
--adam_beta2 1                                               : adam_beta2
--max_grad_norm -1                                           : max_grad_norm
--num_heads 0                                                : num_heads
--save_total_limit -1                                        : save_total_limit
--save_steps 1.5                                             : save_steps
--nnodes 2 --rdzv_endpoint a:1                               : nnodes node_rank
--nnodes 2 --node_rank 1                                     : nnodes rdzv_endpoint
--nnodes 2 --node_rank 2 --rdzv_endpoint a:1                 : nnodes node_rank
--nnodes 2 --node_rank 1 --rdzv_endpoint node0               : rdzv_endpoint
--eval_strategy steps                                        : eval_strategy eval_dataset val_size
--do_predict                                                 : do_predict eval_dataset val_size
--no_do_train                                                : no_do_train do_eval do_predict
VAL --load_best_model_at_end                                 : load_best_model_at_end eval_strategy
VAL --eval_strategy no --early_stopping_patience 2           : early_stopping_patience eval_strategy
VAL BEST --eval_steps 30 --save_steps 50                     : load_best_model_at_end eval_steps save_steps
VAL BEST --eval_steps 0.1 --save_steps 0.2 --num_iterations 25 : load_best_model_at_end eval_steps save_steps
VAL BEST --eval_steps 30 --save_steps 0.5                    : load_best_model_at_end eval_steps save_steps
VAL --eval_steps 2.5                                         : eval_steps
--resume_changes learning_rate                               : resume_changes resume_from_checkpoint
--resume_from_checkpoint c --resume_changes seed,rate        : resume_changes
--val_size 10 --no_do_train --do_eval --resume_from_checkpoint c : no_do_train resume_from_checkpoint model_path
--disk_rate 7 --offload_states_to d                          : disk_rate
--disk_rate 7,0 --offload_states_to d                        : disk_rate
--disk_rate 7,2,0 --offload_states_to d                      : disk_rate
--disk_rate 7,2,7,7 --offload_states_to d                    : disk_rate
--disk_rate 7,2                                              : disk_rate
--disk_endurance 1200                                        : disk_endurance
--disk_endurance 1200,0 --offload_states_to c,d              : disk_endurance
--disk_endurance 1,2,3 --offload_states_to c,d               : disk_endurance offload_states_to
--gradients_on_disks                                         : gradients_on_disks
--weights_on_disks                                           : weights_on_disks
--max_disk_writes 0 --offload_states_to d                    : max_disk_writes
--max_disk_writes 9                                          : max_disk_writes
--optimizer_states fp8                                       : optimizer_states
--matmul_dtype fp16                                          : matmul_dtype
--matmul_dtype fp8 --fp32                                    : matmul_dtype dtype
--matmul_dtype int8 --fp16                                   : matmul_dtype dtype
--optimizer_states compact --fp32                            : optimizer_states dtype
--optimizer_states bf16 --use_lora                           : optimizer_states
--use_lora --lora_target_parameters all --lora_dropout 0.1      : lora_target_parameters lora_dropout
--use_lora --lora_target_parameters all --use_dora              : lora_target_parameters use_dora
--use_lora --no_do_train --do_eval --val_size 10             : finetuning_type no_do_train
--use_lora --do_predict --val_size 10 --eval_strategy no     : do_predict merge
--finetuning_type prompt --lora_rank 4                       : lora_rank use_lora
--finetuning_type prompt --optimizer_states bf16             : optimizer_states finetuning_type
--finetuning_type prompt --objective reward                  : finetuning_type objective
--finetuning_type prompt --objective dpo                     : objective adapter_path
--finetuning_type prompt --objective dpo --adapter_path a --reference_model b : objective reference_model
--finetuning_type prompt --num_virtual_tokens 511            : num_virtual_tokens seq_length
--finetuning_type p_tuning --adapter_path a                  : finetuning_type adapter_path
--finetuning_type prompt --no_do_train --do_eval --val_size 10 : adapter_path
"""
TAKEN = """
--cuda_visible_devices GPU-8a1,MIG-77
--max_grad_norm 0 --weight_decay 0 --warmup_steps 0
--use_prefetch --no_offload
--num_stages 32 --num_layers 32
--warmup_steps 2 --num_iterations 2
--profile_steps 2 --num_iterations 2
--num_train_epochs 0.01 --warmup_steps 500 --profile_steps 100-102
--val_size 1
--val_size 0.999
--val_size 500
--val_size 0 --eval_dataset a --eval_strategy epoch
--packing joined --train_on_prompt
--resident_stages 0
--resident_stages all --no_offload
--resident_stages all --recompute none
--resident_stages 7 --recompute none
--recompute elementwise
--compute_order depth_first --activation_offloading off --num_slices 1
--compute_order breadth_first --activation_offloading on --num_slices 2
--spread_head --compute_order depth_first --num_slices 1
VAL --eval_strategy steps --eval_steps 25 --save_steps 50 --load_best_model_at_end
VAL BEST --eval_steps 0.1 --save_steps 0.2
VAL BEST --eval_steps 25 --save_steps 0.5
VAL --eval_strategy epoch --save_strategy epoch --load_best_model_at_end
VAL --eval_strategy steps --eval_steps 0.1 --early_stopping_patience 3
"""


def words_of(line: str) -> list[str]:
    return line.replace("VAL", VAL).replace("BEST", BEST).split()


def problem_of(words: list[str], num_ranks: int = 4, num_nodes: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(words, num_ranks=num_ranks, num_nodes=num_nodes)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_does_not_fit_is_one_problem_that_names_the_options(line: str) -> None:
    words, names = line.rsplit(" : ", 1)
    problem = problem_of(words_of(words))
    assert [name for name in names.split() if f"--{name}" not in problem] == [], problem
    assert len(problem) < 300


@pytest.mark.parametrize("line", TAKEN.strip().splitlines())
def test_values_at_the_edge_are_taken(line: str) -> None:
    parse_args(words_of(line), num_ranks=4)


def test_a_problem_tells_what_was_given_why_not_and_what_to_change() -> None:
    """One message of each class."""
    expected = {
        "--num_heads 0": "`--num_heads` is 0; it must be at least 1",
        "--val_size 1.5": "`--val_size` is 1.5; it must be a whole number of samples, or a number below 1 for a share",
        "--tile_tokens some": "`--tile_tokens` is 'some'; it must be auto, off, or a number from 1 on",
        "--batch_size many": "`--batch_size many`: it must be a whole number at least 1",
        "--num_iterations 5 --num_train_epochs 0.5": (
            "`--num_iterations` 5 and `--num_train_epochs` 0.5: both set the length of the run; remove one"
        ),
        "--resident_stages 2 --no_offload": (
            "`--resident_stages` 2 and `--no_offload`: the first streams the other stages, the second streams none; "
            "remove one"
        ),
        "--batch_size 64 --num_chunks 5": (
            "`--batch_size` 64 and `--num_chunks` 5: 64 has no 5 equal microbatches; use --num_chunks 4 or 8, or "
            "--batch_size 60 or 65"
        ),
        "--warmup_steps 3": "`--warmup_steps` 3: the run has 2 steps; use at most 2",
        "--gpu_memory_limit 24 --device cpu": "`--gpu_memory_limit` has no effect with `--device cpu`; remove it",
    }
    assert {words: problem_of(words.split()) for words in expected} == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_defaults_are_valid(num_ranks: int) -> None:
    validate(Config(), num_ranks)


def test_spaces_and_long_texts_are_taken() -> None:
    values = {"cuda_visible_devices": "0, 2,1,3", "profile_steps": "1 - 2", "default_system": "~nobody/" + "x" * 5000}
    assert find_problems(config_from(values)) == []


def test_the_number_of_ranks_is_only_judged_where_it_is_known() -> None:
    config = config_from({"num_stages": 6})
    assert [len(find_problems(config, num_ranks=num_ranks)) for num_ranks in (None, 4)] == [0, 1]


@pytest.mark.parametrize(
    ("words", "fitting", "other", "names"),
    [
        ("--warmup_steps 8 --profile_steps 9-10", 10, 7, ["warmup_steps", "profile_steps"]),
        (f"{BEST} --val_size 10 --eval_steps 0.1 --save_steps 0.2", 100, 25, ["save_steps"]),
        (
            "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs num_decay_steps=50",
            *(51, 40, ["lr_scheduler_kwargs"]),
        ),
    ],
)
def test_the_steps_of_epochs_are_judged_once_they_are_known(
    words: str, fitting: int, other: int, names: list[str]
) -> None:
    config = parse_args([*words.split(), "--num_train_epochs", "2"])
    assert resolve_epochs(config, fitting).optim.num_steps == fitting
    with pytest.raises(ConfigError) as caught:
        resolve_epochs(config, other)
    assert [problem.split("`")[1] for problem in caught.value.problems] == [f"--{name}" for name in names]


def test_a_share_of_warm_up_is_one_of_the_steps_that_epochs_make() -> None:
    config = resolve_epochs(config_from({"num_train_epochs": 3.0, "warmup_steps": 0.1}), 200)
    assert config.optim.num_warmup_steps == 20


def test_a_run_of_epochs_is_written_down_as_it_was_asked_for(tmp_path: Path) -> None:
    """Its number of steps would not end it in the same rows."""
    config = config_from({"num_train_epochs": 2.5})
    text = to_yaml(resolve_epochs(config, 240))
    (tmp_path / "training_args.yaml").write_text(text)
    assert text == to_yaml(config)
    assert parse_args(["--config", str(tmp_path / "training_args.yaml")]) == config


@pytest.mark.parametrize(("num_chunks", "fitting"), [("4", "12 or 24"), ("auto", "15 or 18")])
def test_a_batch_that_replicas_cannot_share_is_refused(num_chunks: str, fitting: str) -> None:
    words = ["--batch_size", "16", "--num_stages", "4", "--num_chunks", num_chunks]
    assert f"use --batch_size {fitting}," in problem_of(words, num_ranks=6, num_nodes=3)
    parse_args(words, num_ranks=8, num_nodes=4)


def test_replicas_have_their_weights_in_memory() -> None:
    words = ["--batch_size", "16", "--offload_states_to", "d", "--weights_on_disks"]
    assert "replicas send each other updated weights from CPU memory" in problem_of(words, num_ranks=4, num_nodes=2)
    parse_args(words, num_ranks=4)


def test_changes_are_a_list_of_names() -> None:
    config = parse_args(["--resume_from_checkpoint", "c", "--resume_changes", "learning_rate, num_iterations"])
    assert config.saving.changes == ("learning_rate", "num_iterations")


def test_who_only_judges_needs_no_dataset_to_train_on() -> None:
    judged = ["--eval_dataset", "test.jsonl", "--do_predict"]
    data = parse_args(["--no_do_train", *judged]).data
    assert data.dataset == data.eval_dataset
    for others in (["--no_do_train", "--dataset", "xsum", *judged], judged):
        assert parse_args(others).data.dataset[0].name == "xsum"


@pytest.mark.parametrize(
    ("kind", "arguments", "part"),
    [
        ("cosine", {"min_lr": "1e-6"}, "'min_lr' has no effect"),
        ("linear", {"power": "2"}, "'power' has no effect"),
        ("cosine_with_min_lr", {}, "min_lr, min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": "1e-6", "min_lr_rate": "0.1"}, "needs one of"),
        ("cosine_with_min_lr", {"min_lr": "1"}, "min_lr is 1"),
        ("cosine_with_min_lr", {"min_lr": "-1"}, "min_lr is '-1'"),
        ("cosine_with_min_lr", {"min_lr_rate": "much"}, "min_lr_rate is 'much'"),
        ("cosine_with_restarts", {"num_cycles": "1.5"}, "num_cycles is '1.5'"),
        ("warmup_stable_decay", {}, "num_decay_steps=100"),
        ("warmup_stable_decay", {"num_decay_steps": "10"}, "at most 7"),
        ("warmup_stable_decay", {"num_decay_steps": "2", "decay_type": "steep"}, "'steep'"),
        ("polynomial", {"lr_end": "nan"}, "lr_end is 'nan'"),
        ("polynomial", {"lr_end": "1"}, "lr_end is 1"),
    ],
)
def test_arguments_that_a_course_does_not_take_are_refused(kind: str, arguments: dict[str, str], part: str) -> None:
    config = OptimConfig(
        learning_rate=3e-4,
        lr_scheduler_type=LrSchedulerType(kind),
        lr_scheduler_kwargs=tuple(arguments.items()) or None,
        num_iterations=10,
        warmup_steps=4,
    )
    (problem,) = find_problems(Config(optim=config))
    assert part in problem


def test_a_polynomial_that_would_end_above_its_peak_is_refused() -> None:
    config = OptimConfig(learning_rate=1e-8, lr_scheduler_type=LrSchedulerType.POLYNOMIAL)
    assert len(find_problems(Config(optim=config))) == 1


def test_every_argument_says_what_it_may_be() -> None:
    arguments = itertools.chain.from_iterable(each.values() for each in SCHEDULE_ARGUMENTS.values())
    assert all(re.search("number at|number above|one of", each.expectation) for each in arguments)
