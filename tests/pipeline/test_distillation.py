"""A student learns a teacher's most likely tokens: as plain training does, in every layout, resumed, or refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.runs import assert_equal_tensors, make_checkpoint, run_main, tensors_of
from harness.small_run import SMALL, Run, run, saved_inputs, workplace  # noqa: F401
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mobius.config.cli import parse_args
from mobius.errors import CheckpointError
from mobius.training.data import RunData

NUMBER = 8
DISTILL = f"""--objective distill --teacher_model teacher --top_k_logprobs {NUMBER} --learning_rate 1e-3
    --warmup_steps 0 --lr_scheduler_type constant --adam_epsilon 1e-4 --save_params none --save_results auto
    --save_strategy no""".split()
WHOLE = ["--packing", "off", "--batch_size", "24", "--seq_length", "64", "--sft_weight", "0.5", "--temperature", "2"]
"""A step is an epoch."""


@pytest.fixture
def teacher(workplace: Path) -> Path:  # noqa: F811
    """A teacher of another depth that is sure of some tokens."""
    make_checkpoint(workplace / "teacher", num_layers=2)
    for path in (workplace / "teacher").glob("*.safetensors"):
        values = {name: value * 30 if name == "lm_head.weight" else value for name, value in load_file(path).items()}
        save_file(values, path, metadata={"format": "pt"})
    return workplace / "teacher"


def steps(folder: str | Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def samples_of(options: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    """Tokens of each sample, and whether each is a target."""
    config = parse_args([*SMALL.split(), *options], num_ranks=1)
    data = RunData.of(config, AutoTokenizer.from_pretrained("model"), is_first=True).prepared.training[0].tokenized
    samples = [data.sample(index) for index in range(len(data))]
    return [(torch.tensor(np.array(each.input_ids)).long(), torch.tensor(np.array(each.is_target))) for each in samples]


def logits_of(model: PreTrainedModel, ids: Tensor, is_target: Tensor) -> Tensor:
    return model(input_ids=ids[None]).logits[0, :-1][is_target[1:]].float()


def plain_losses(options: Sequence[str], num_steps: int) -> tuple[list[float], PreTrainedModel]:
    """Train on the whole data in each step, over all K + 1 events in plain torch."""
    samples, number = samples_of(options), NUMBER
    student, teacher_model = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in ("model", "teacher")
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    losses, count = [], sum(int(is_target[1:].sum()) for _, is_target in samples)
    for _ in range(num_steps):
        total = torch.zeros(())
        for ids, is_target in samples:
            with torch.no_grad():
                top = torch.softmax(logits_of(teacher_model, ids, is_target) / 2, -1).topk(number)
            logits = logits_of(student, ids, is_target)
            own = torch.softmax(logits / 2, -1).gather(-1, top.indices)
            pairs = [torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1).log() for each in (top.values, own)]
            divergence = F.kl_div(pairs[1], pairs[0], log_target=True, reduction="sum")
            total = (
                total + (divergence + 0.5 * F.cross_entropy(logits, ids[1:][is_target[1:]], reduction="sum")) / count
            )
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, student


def test_a_student_learns_as_in_plain_training(run: Run, teacher: Path) -> None:  # noqa: F811
    run(*DISTILL, *WHOLE)

    losses, student = plain_losses([*DISTILL, *WHOLE], 3)
    logged = steps("out")
    # The teacher's log-probabilities are kept in fp16.
    assert [step["loss"] for step in logged] == pytest.approx(losses, rel=2e-4)
    assert losses[-1] < losses[0]
    for step in logged:
        assert step["loss"] == pytest.approx(step["divergence"] + 0.5 * step["cross_entropy"], rel=1e-6)
    for name, value in student.state_dict().items():
        found = tensors_of(Path("out"))[name]
        torch.testing.assert_close(found, value, rtol=0, atol=2e-4 * float(value.abs().max()) + 1e-6)


def test_layouts_learn_alike_from_the_numbers_of_one_teacher(
    run: Run,  # noqa: F811
    teacher: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    options = [*DISTILL, "--packing", "on", "--batch_size", "4", "--seq_length", "64"]
    run(*options, "--save_dir", "first")
    (numbers,) = Path("../cache/mobius/teachers").iterdir()
    assert "tokens of each" in caplog.text
    loss = [step["loss"] for step in steps("first")]

    for name, layout in {
        "resident": "--no_offload --num_stages 1 --num_chunks 1",
        "rounds": "--resident_stages 0 --num_stages 4 --num_chunks 4 --num_rounds 2 --recompute full",
        "slices": "--num_slices 2 --num_chunks 2",
        "chunks": "--loss_chunk_tokens 24 --compute_order depth_first",
    }.items():
        caplog.clear()
        run(*options, "--save_dir", name, *layout.split())
        assert "the numbers of an earlier run are used" in caplog.text
        assert [step["loss"] for step in steps(name)] == pytest.approx(loss, rel=1e-5), name
    assert list(Path("../cache/mobius/teachers").iterdir()) == [numbers]


@pytest.mark.parametrize("how", ["--num_stages 2", pytest.param("--pipeline_ranks 1", marks=pytest.mark.extended)])
def test_two_processes_learn_as_one(run: Run, teacher: Path, how: str) -> None:  # noqa: F811
    """Both models run in process groups, one after the other."""
    options = [*DISTILL, "--packing", "on", "--batch_size", "4", "--seq_length", "64", "--eval_strategy", "epoch"]
    options += ["--val_size", "6", "--num_chunks", "2", "--num_stages", "2"]
    run(*options, "--save_dir", "alone")
    ranks = run_main(2, Path.cwd(), *SMALL.split(), *options, "--save_dir", "both", *how.split())
    assert ranks.returncode == 0, ranks.stdout
    assert [step["loss"] for step in steps("both")] == pytest.approx(
        [step["loss"] for step in steps("alone")], rel=1e-5
    )
    assert evaluation_of("both") == pytest.approx(evaluation_of("alone"), rel=1e-4)


def evaluation_of(folder: str) -> dict[str, float]:
    names = ("loss", "divergence", "cross_entropy", "perplexity", "token_accuracy")
    entry = [entry for entry in history_of(folder) if "eval_loss" in entry][-1]
    assert entry["eval_loss"] == pytest.approx(entry["eval_divergence"], rel=1e-6)
    return {name: entry[f"eval_{name}"] for name in names}


def history_of(folder: str) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = json.loads(Path(folder, "trainer_state.json").read_text())["log_history"]
    return history


def test_a_resumed_student_asks_its_teacher_again(run: Run, teacher: Path) -> None:  # noqa: F811
    options = [*DISTILL[:-2], "--save_strategy", "steps", "--save_steps", "1", "--batch_size", "2"]
    run(*options)
    shutil.copytree("out", "uninterrupted")
    shutil.rmtree("../cache/mobius/teachers")
    run("--resume_from_checkpoint", "out/checkpoint-2", *options)
    assert_equal_tensors(Path("out"), Path("uninterrupted"))


def test_what_cannot_teach_is_refused(
    run: Run,  # noqa: F811
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree("teacher", "empty", ignore=shutil.ignore_patterns("*.safetensors*"))
    with pytest.raises(CheckpointError, match=r"--teacher_model empty: .* holds no weights"):
        run(*DISTILL, "--teacher_model", "empty")
    words = json.loads(Path("teacher/tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.get)[1000:1002]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    shutil.copytree("teacher", "other")
    Path("other/tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match=r"--teacher_model other: its tokenizer has other tokens"):
        run(*DISTILL, "--teacher_model", "other")
    monkeypatch.setattr("mobius.training.teacher.free_disk_bytes", lambda _: 99)
    with pytest.raises(CheckpointError, match=r"targets need .* in .*: 99 bytes is free. Lower --top_k_logprobs"):
        run(*DISTILL)
    assert not list(Path("../cache/mobius/teachers").glob("*"))
    assert not Path("out/metrics.jsonl").exists()


def test_answers_of_a_student_are_read_back_to_the_same_prompts(run: Run) -> None:  # noqa: F811
    run(
        "--no_do_train",
        "--do_predict",
        "--eval_dataset",
        "data.jsonl",
        "--max_predict_samples",
        "3",
        "--max_new_tokens",
        "4",
    )
    columns = ["--dataset", "out/generated_predictions.jsonl", "--columns", "prompt=prompt,completion=predict"]
    answers, samples = samples_of([*columns, "--seq_length", "64"]), samples_of(["--seq_length", "64"])
    assert len(answers) == 3
    for (ids, is_target), (own, is_own) in zip(answers, samples, strict=False):
        assert ids[~is_target].tolist() == own[~is_own].tolist()
