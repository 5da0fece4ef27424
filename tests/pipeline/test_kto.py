"""Runs of KTO equal plain torch on each answer alone, KL included; step 1 is exact; a resumed run goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.runs import TOKENIZER, steps_of, tensors_of
from harness.small_run import Run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mobius.errors import MobiusError

pytest_plugins = ["harness.small_run"]

NUM_RECORDS, NUM_STEPS, RATE, BETA = 8, 5, 1e-3, 0.3
OPTIONS = (
    *("--objective", "kto", "--beta", str(BETA), "--dataset", "judged.jsonl", "--seq_length", "64"),
    *("--save_params", "none", "--save_results", "auto", "--desirable_weight", "1.5", "--num_iterations", "5"),
    *("--learning_rate", str(RATE), "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
)
ROWS = ("--packing", "off", "--batch_size", str(NUM_RECORDS))
"""Each step has all records."""


def write_records(path: Path) -> list[dict[str, object]]:
    texts = [f" {number} is {number + 1} and more" if number % 3 else " no" for number in range(NUM_RECORDS)]
    records: list[dict[str, object]] = [
        {"prompt": f"Count to {number}.", "completion": text, "label": number % 3 > 0}
        for number, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def numbers_of(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def evaluations() -> list[dict[str, float]]:
    history = json.loads(Path("whole/trainer_state.json").read_text())["log_history"]
    names = ("eval_loss", "eval_kl", "eval_rewards/margins", "eval_logps/chosen")
    return [{name: entry[name] for name in names} for entry in history if "eval_loss" in entry]


def logp(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + answer])).logits[0, :-1].log_softmax(-1)
    return logits[len(prompt) - 1 :].gather(-1, torch.tensor(answer).unsqueeze(-1)).sum()


def plain_training(records: list[dict[str, object]]) -> list[tuple[float, float]]:
    """Loss and KL of each step by TRL 1.16's formulas, in the order of the records."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    prompts, answers = list[list[int]](), list[list[int]]()
    for record in records:
        prompts.append(tokenizer(str(record["prompt"]))["input_ids"])
        whole = tokenizer(str(record["prompt"]) + str(record["completion"]))["input_ids"]
        assert whole[: len(prompts[-1])] == prompts[-1]
        answers.append([*whole[len(prompts[-1]) :], tokenizer.eos_token_id])
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    steps = list[tuple[float, float]]()
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            pairs = [*zip(prompts, answers[-1:] + answers[:-1], strict=True)]
            kl = torch.stack([logp(model, *pair) - logp(before, *pair) for pair in pairs]).mean().clamp(min=0)
        losses = list[Tensor]()
        for prompt, answer, record in zip(prompts, answers, records, strict=True):
            ratio = logp(model, prompt, answer) - logp(before, prompt, answer).detach()
            good, bad = 1.5 * (1 - torch.sigmoid(BETA * (ratio - kl))), 1 - torch.sigmoid(BETA * (kl - ratio))
            losses.append(good if record["label"] else bad)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), kl.item()))
    return steps


def test_steps_are_those_of_plain_torch(run: Run, workplace: Path) -> None:
    records = write_records(Path("judged.jsonl"))
    run(*OPTIONS, *ROWS)
    found = [(row["loss"], row["kl"]) for row in numbers_of("out")]
    expected = plain_training(records)
    assert max(kl for _, kl in expected) > 0.05
    for own, plain in zip(found, expected, strict=True):
        assert own == pytest.approx(plain, rel=1e-4, abs=1e-5)


def test_the_first_step_is_exact_packed_and_streamed_alike(run: Run, workplace: Path) -> None:
    """KL and rewards are exactly 0, so a loss is half of its weight; stages in slots or resident give the same bits."""
    write_records(Path("judged.jsonl"))
    for folder, options in {"slots": ("--packing", "on"), "resident": ("--packing", "on", "--no_offload")}.items():
        run(*OPTIONS, *options, "--save_dir", folder)
    first, *others = numbers_of("slots")
    assert (first["kl"], first["rewards/chosen"], first["rewards/margins"]) == (0.0, 0.0, 0.0)
    names = ("loss", "kl", "grad_norm", "rewards/chosen", "logps/rejected")
    assert [[row[name] for name in names] for row in (first, *others)] == [
        [row[name] for name in names] for row in numbers_of("resident")
    ]
    assert any(row["kl"] > 0 for row in others)


def test_a_resumed_run_goes_on_exactly_and_evaluates(run: Run, workplace: Path) -> None:
    write_records(Path("judged.jsonl"))
    more = ("--eval_dataset", "judged.jsonl", "--do_eval", "--eval_strategy", "steps", "--eval_steps", "2")
    run(*OPTIONS, *more, "--save_steps", "2", "--save_dir", "whole")
    steps, evaluated, tensors = steps_of(Path("whole")), evaluations(), tensors_of(Path("whole"))
    assert len(evaluated) == 3
    assert evaluated[-1]["eval_kl"] > 0
    run(*OPTIONS, *more, "--save_steps", "2", "--save_dir", "whole", "--resume_from_checkpoint", "whole/checkpoint-2")
    assert steps_of(Path("whole")) == steps
    assert evaluations() == evaluated
    assert all(torch.equal(each, tensors_of(Path("whole"))[name]) for name, each in tensors.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loss_type", "ipo"), "kto and apo_zero_unpaired are the losses of kto"),
        (("--objective", "dpo", "--loss_type", "kto"), "kto and apo_zero_unpaired are the losses of kto"),
        (("--num_slices", "2"), "complete sequences"),
    ],
)
def test_what_kto_lacks_is_refused(run: Run, workplace: Path, options: tuple[str, ...], message: str) -> None:
    write_records(Path("judged.jsonl"))
    with pytest.raises(MobiusError, match=message):
        run(*OPTIONS, *options)
