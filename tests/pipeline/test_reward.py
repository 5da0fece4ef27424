"""Steps of a reward model equal those of transformers' model, in loss and every gradient; so does what is saved."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.packed_rows import make_packed_batch
from harness.pipelines import FAMILIES, Pipeline, assert_near
from harness.runs import TOKENIZER, assert_equal_tensors, steps_of, tensors_of
from harness.sequence_steps import LENGTH, NEAR, ROWS, WAYS
from harness.small_run import Run
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from mobius.checkpoint.export_command import export
from mobius.config.config import Config, ModelConfig
from mobius.config.objective import ObjectiveConfig, ObjectiveName
from mobius.engine.step_inputs import StepBatch
from mobius.errors import MobiusError
from mobius.models.loss import EXISTS, TargetRows
from mobius.models.peft_folder import AdapterFolder
from mobius.models.reward_head import set_head
from mobius.objectives.registry import make_objective
from mobius.objectives.sequences import SequenceObjective
from mobius.schedule.spec import ComputeOrder
from mobius.training.evaluation.generation import TextGenerator

pytest_plugins = ["harness.small_run"]

REWARD = ObjectiveConfig(objective=ObjectiveName.REWARD, center_rewards=0.1)


def reward_model(family: str) -> PreTrainedModel:
    """A tiny reward model with random weights; its padding token 1 ends some sequences."""
    torch.manual_seed(0)
    config = FAMILIES[family](num_hidden_layers=6)
    set_head(config, Config(model=ModelConfig(model_path="m"), objective=REWARD), pad_token_id=1)
    config._attn_implementation = "sdpa"
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def pairs(num_microbatches: int, objective: SequenceObjective) -> StepBatch:
    """Rows of pairs with margins; the first sequence of each row ends with a padding token."""
    batch, most = make_packed_batch(ROWS, LENGTH, num_microbatches), max(map(len, ROWS)) + 1
    places, exists = torch.full_like(batch.input_ids, most), torch.zeros(len(ROWS), most)
    for number, row in enumerate(ROWS):
        places[number, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        exists[number, : len(row)] = 1
        batch.input_ids[number, row[0] - 1] = 1
    margins = torch.rand(len(ROWS), most, generator=torch.Generator().manual_seed(3))
    margins[:, 1::2] = margins[:, 0 : most - 1 : 2]
    values = {EXISTS: exists, "margin": margins}
    counts = objective.counts(TargetRows(batch.labels, {}, values, places))
    return replace(batch, sequence_values=values, sequences=places, counts=counts)


def plain_step(model: PreTrainedModel, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step by transformers' model on each sequence alone."""
    model.zero_grad()
    losses = list[Tensor]()
    for number, row in enumerate(ROWS):
        ends = torch.tensor([0, *row]).cumsum(0).tolist()
        scores = [model(batch.input_ids[number : number + 1, a:b]).logits[0, 0] for a, b in pairwise(ends)]
        for place in range(0, len(row), 2):
            chosen, rejected = scores[place], scores[place + 1]
            margin = batch.sequence_values["margin"][number, place]
            losses.append(-(chosen - rejected - margin).sigmoid().log() + 0.1 * (chosen + rejected) ** 2)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "num_ranks", "stages_per_rank", "num_microbatches", "num_slots"),
    [("llama-tied", *way) for way in WAYS] + [(name, *WAYS[2]) for name in ("qwen2", "qwen3", "gemma3-softcap")],
)
def test_a_step_is_that_of_transformers_model(
    family: str, num_ranks: int, stages_per_rank: int, num_microbatches: int, num_slots: int | None
) -> None:
    objective = make_objective(REWARD)
    assert isinstance(objective, SequenceObjective)
    model, batch = reward_model(family), pairs(num_microbatches, objective)
    pipeline = Pipeline(model, num_ranks, stages_per_rank, num_microbatches, num_slots, objective=objective)
    assert_near(pipeline.step(batch), plain_step(model, batch), **NEAR)


def test_ranks_that_share_the_head_find_the_same_gradients() -> None:
    objective = make_objective(REWARD)
    assert isinstance(objective, SequenceObjective)
    model, batch = reward_model("llama"), pairs(4, objective)
    pipeline = Pipeline(model, 2, 2, 4, None, spreads_head=True, order=ComputeOrder.DEPTH_FIRST, objective=objective)
    assert_near(pipeline.step(batch), plain_step(model, batch), **NEAR)


def write_pairs(path: Path) -> None:
    texts = [(f"Count to {n}.", f" {n} is good", " bad " * (n % 4 + 1)) for n in range(16)]
    records = [dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in texts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


OPTIONS = ("--objective", "reward", "--dataset", "pairs.jsonl", "--seq_length", "64")
MORE = ("--save_params", "none", "--save_results", "auto")


def test_the_saved_model_has_the_same_scores_in_transformers(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The result of a language model is trained again as a reward model: its evaluation is transformers'."""
    caplog.set_level(logging.INFO)
    write_pairs(Path("pairs.jsonl"))
    run(*OPTIONS, "--save_dir", "out")
    assert "the head score.weight of the reward model is new, from --seed; lm_head.weight is left out" in caplog.text
    assert "load it: AutoModelForSequenceClassification.from_pretrained('out')" in caplog.text
    stored = tensors_of(Path("out"))
    assert stored["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in stored
    assert "lm_head.weight" not in torch.load("finetune_params.pt", weights_only=True)
    model = AutoModelForSequenceClassification.from_pretrained("out", dtype=torch.float32)
    assert (type(model).__name__, model.config.num_labels) == ("LlamaForSequenceClassification", 1)
    model.load_state_dict(torch.load("finetune_params.pt", weights_only=True))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    assert model.config.pad_token_id == pad
    alone = ("--no_do_train", "--do_eval", "--eval_dataset", "pairs.jsonl", "--save_dir", "judged")
    run(*OPTIONS, *MORE, "--model_path", "out", *alone)
    assert caplog.text.count("is new, from --seed") == 1
    assert eval_loss(Path("judged")) == pytest.approx(plain_loss(model), rel=1e-5)


def test_an_adapter_has_the_head_and_the_same_scores_in_peft(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run with LoRA, its merged model, and a resumed run; the head is trained in full and starts as without LoRA."""
    caplog.set_level(logging.INFO)
    write_pairs(Path("pairs.jsonl"))
    lora = ("--use_lora", "--learning_rate", "1e-2", "--num_iterations", "4", "--save_steps", "2")
    run(*OPTIONS, *MORE, *lora, "--merge", "--eval_dataset", "pairs.jsonl", "--save_dir", "out")
    assert "load it: AutoModelForSequenceClassification.from_pretrained('out', num_labels=1)" in caplog.text
    fields = json.loads(Path("out/adapter_config.json").read_text())
    assert (fields["task_type"], fields["modules_to_save"]) == ("SEQ_CLS", ["score"])
    plain = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1, dtype=torch.float32)
    adapted, merged = PeftModel.from_pretrained(plain, "out").eval(), model_of("out/merged")
    expected = eval_loss(Path("out"))
    assert plain_loss(adapted) == pytest.approx(expected, rel=1e-5)
    assert plain_loss(model_of("out", num_labels=1)) == pytest.approx(expected, rel=1e-5)
    assert plain_loss(merged) == pytest.approx(expected, rel=1e-5)
    caplog.clear()
    export(["out", "again", "--merge"])
    assert_equal_tensors(Path("out/merged"), Path("again"))
    assert json.loads(Path("again/config.json").read_text()) == json.loads(Path("out/merged/config.json").read_text())
    assert "is new" not in caplog.text
    run(*OPTIONS, *MORE, *lora, "--save_dir", "rest", "--resume_from_checkpoint", "out/checkpoint-2")
    assert "is new" not in caplog.text
    assert steps_of(Path("rest"))[-2:] == steps_of(Path("out"))[2:]
    assert_equal_tensors(Path("rest"), Path("out"))
    with_margins = Path("pairs.jsonl").read_text().replace("}", ', "margin": 0.5}', 3)
    Path("margins.jsonl").write_text(with_margins)
    one = ("--objective", "dpo", "--dataset", "margins.jsonl", "--num_iterations", "1", "--save_steps", "9")
    run(*OPTIONS, *MORE, *lora, *one, "--save_dir", "dpo")
    assert "3 pairs have a `margin`, which only --objective reward uses" in caplog.text
    for objective, adapter, message in (("dpo", "out", "out is a reward model"), ("reward", "dpo", "has no head of a")):
        with pytest.raises(MobiusError, match=message):
            run(*OPTIONS, *MORE, *lora, "--objective", objective, "--adapter_path", adapter, "--save_dir", "no")
    with pytest.raises(MobiusError, match="out is a reward model: it gives scores, and generates no answers"):
        TextGenerator.of_folder(Path("model"), torch.device("cpu"), adapter=AdapterFolder(Path("out")))


def model_of(folder: str, **options: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **options)


def eval_loss(folder: Path) -> float:
    return float(json.loads((folder / "eval_results.json").read_text())["eval_loss"])


def plain_loss(model: Any) -> float:
    """Mean loss over the pairs of the file, by transformers' model on each sequence alone."""
    tokenizer, losses = AutoTokenizer.from_pretrained(TOKENIZER), list[float]()
    for line in Path("pairs.jsonl").read_text().splitlines():
        record = json.loads(line)
        scores = list[Tensor]()
        for side in ("chosen", "rejected"):
            answer = tokenizer(record[side], add_special_tokens=False)["input_ids"]
            tokens = [*tokenizer(record["prompt"])["input_ids"], *answer]
            with torch.no_grad():
                scores.append(model(torch.tensor([[*tokens, tokenizer.eos_token_id]])).logits[0, 0])
        losses.append(float(-(scores[0] - scores[1]).sigmoid().log()))
    return sum(losses) / len(losses)


def test_a_resumed_run_goes_on_exactly(run: Run, workplace: Path) -> None:
    write_pairs(Path("pairs.jsonl"))
    run(*OPTIONS, *MORE, "--num_iterations", "4", "--save_steps", "2", "--save_dir", "whole")
    last = ("--num_iterations", "4", "--save_dir", "rest", "--resume_from_checkpoint", "whole/checkpoint-2")
    run(*OPTIONS, *MORE, *last)
    assert steps_of(Path("rest"))[-2:] == steps_of(Path("whole"))[2:]
    assert all(torch.equal(each, tensors_of(Path("rest"))[name]) for name, each in tensors_of(Path("whole")).items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--save_scores", "--do_eval", "--val_size", "2"), "a reward model gives no log-probabilities"),
        (("--objective", "dpo", "--model_path", "reward"), "is a reward model: it has no head that predicts tokens"),
        (("--model_path", "labels"), "is a classifier with 3 labels"),
    ],
)
def test_another_head_is_refused(run: Run, workplace: Path, options: tuple[str, ...], message: str) -> None:
    write_pairs(Path("pairs.jsonl"))
    for name, labels in (("reward", 1), ("labels", 3)):
        fields = json.loads(Path("model/config.json").read_text()) | {
            "architectures": ["LlamaForSequenceClassification"],
            "id2label": {str(label): f"LABEL_{label}" for label in range(labels)},
        }
        Path(name).mkdir()
        for path in Path("model").glob("tokenizer*"):
            (Path(name) / path.name).write_bytes(path.read_bytes())
        (Path(name) / "config.json").write_text(json.dumps(fields))
    with pytest.raises(MobiusError, match=message):
        run(*OPTIONS, *options)


def test_a_family_without_reward_models_is_refused(run: Run, workplace: Path) -> None:
    write_pairs(Path("pairs.jsonl"))
    fields = json.loads(Path("model/config.json").read_text()) | {"model_type": "cohere", "architectures": None}
    Path("cohere").mkdir()
    for path in Path("model").glob("tokenizer*"):
        (Path("cohere") / path.name).write_bytes(path.read_bytes())
    (Path("cohere") / "config.json").write_text(json.dumps(fields))
    with pytest.raises(MobiusError, match="transformers has no reward model of the family 'cohere'"):
        run(*OPTIONS, "--model_path", "cohere")
