"""Whole runs that train prompts: what they leave, what peft makes of it, and what goes on from it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from harness.runs import evaluations_of, steps_of, tensors_of
from harness.sessions import resume
from peft import (
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from mobius.commands import run_command
from mobius.config.cli import parse_args
from mobius.data.token_store import virtual_ids
from mobius.errors import MobiusError
from mobius.models.adapter_kinds import open_adapter
from mobius.training.data import RunData
from mobius.training.evaluation.generation import TextGenerator

Run = Callable[..., None]
TOKENS = torch.arange(3, 40).reshape(1, -1)
COMMON = """--num_virtual_tokens 4 --seq_length 24 --learning_rate 2e-2 --warmup_steps 0 --num_iterations 6
    --save_steps 3 --save_total_limit 0 --save_params none"""
PROMPT, P_TUNING, PREFIX = (f"--finetuning_type {kind} {COMMON}" for kind in ("prompt", "p_tuning", "prefix"))


def base_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        PROMPT,
        f"{P_TUNING} --encoder_type lstm --encoder_hidden_size 12 --num_stages 4 --no_prefetch",
        f"{PREFIX} --num_stages 4",
    ],
)
def test_a_run_leaves_what_peft_answers_with_and_resumes_to_the_bit(
    run: Run, workplace: Path, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*options.split(), "--do_predict", "--val_size", "6", "--max_new_tokens", "5")
    assert {path.name for path in Path("out").glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert not Path("out/config.json").exists()
    losses = [step["loss"] for step in steps_of(Path("out"))]

    prompted = PeftModel.from_pretrained(base_model(), "out").eval()
    (vectors,) = load_file("out/adapter_model.safetensors").values()
    assert torch.equal(prompted.prompt_encoder["default"].embedding.weight, vectors)
    assert prompted.peft_config["default"].num_virtual_tokens == 4
    answerer = TextGenerator.of_folder(Path("model"), torch.device("cpu"), adapter=open_adapter(Path("out")))
    ids = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 3, 6)]
    for prompt, answer in zip(ids, answerer.generate(ids, max_new_tokens=5, batch_size=3), strict=True):
        assert answer is not None
        assert answer.tokens.tolist() == likeliest(prompted, prompt, 5)[: len(answer.tokens)]
        assert len(answer.tokens) == 5 or answer.is_finished

    answered = [json.loads(line) for line in Path("out/generated_predictions.jsonl").read_text().splitlines()]
    assert len(answered) == 6
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(answered[0]["prompt"].encode() + b"\n")))
    assert run_command("chat", ["out", "--temperature", "0", "--max_new_tokens", "5"]) == 0
    assert capsys.readouterr().out

    resume("out/checkpoint-3", "--save_dir", "resumed")
    for path in ("adapter_model.safetensors", "checkpoint-6"):
        whole, resumed = (tensors_of(Path(folder, path)) for folder in ("out", "resumed"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert [step["loss"] for step in steps_of(Path("resumed"))] == losses[3:]

    # The vectors go on as prompt tuning, and are evaluated without training; both see the loss that peft sees.
    tuned = f"{PREFIX if options.startswith(PREFIX) else PROMPT} --adapter_path out --num_stages 1".split()
    run(*tuned, "--save_dir", "further", "--save_results", "further.txt", "--val_size", "6", "--eval_on_start")
    begun = evaluations_of(Path("further"))[0][1]
    evaluated = (
        "--no_do_train --do_eval --save_scores --do_predict --max_new_tokens 5 --val_size 6 --save_dir evaluated"
    )
    dropped = ("--learning_rate", "--warmup_steps", "--num_iterations", "--save_steps", "--save_total_limit")
    words = [word for option in _pairs(tuned) if option[0] not in (*dropped, "--save_params") for word in option]
    run(*words, *evaluated.split())
    loss = json.loads(Path("evaluated/eval_results.json").read_text())["eval_loss"]
    assert loss == begun
    again = [json.loads(line) for line in Path("evaluated/generated_predictions.jsonl").read_text().splitlines()]
    assert again == answered

    config = parse_args(
        ["--model_path", "model", "--dataset", "data.jsonl", "--seq_length", "20", "--val_size", "6", "--device", "cpu"]
    )
    data = RunData.of(config, AutoTokenizer.from_pretrained("model"), is_first=True)
    sums = num_targets = 0
    for dataset, indices in data.evaluation_parts():
        for index in indices:
            sample = dataset.tokenized.sample(int(index))
            labels = torch.from_numpy(np.where(sample.is_target, sample.input_ids, -100).astype(np.int64))[None]
            given = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
            number = int((labels != -100).sum())
            with torch.no_grad():
                sums += float(prompted(input_ids=given, labels=labels).loss) * number
            num_targets += number
    assert loss == pytest.approx(sums / num_targets, rel=1e-6)


class RecordingTrainer(Trainer):
    """transformers' loop, which notes the loss of each step."""

    def compute_loss(self, *arguments: Any, **more: Any) -> Any:
        loss = super().compute_loss(*arguments, **more)
        self.losses: list[float] = [*getattr(self, "losses", []), float(loss.detach())]
        return loss


def losses_by_transformers(model: PeftModel, rows: list[dict[str, torch.Tensor]], num_steps: int) -> list[float]:
    settings = TrainingArguments(
        output_dir="plain",
        per_device_train_batch_size=4,
        max_steps=num_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = RecordingTrainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize(("kind", "peft_config"), [("prompt", PromptTuningConfig), ("prefix", PrefixTuningConfig)])
def test_steps_have_the_losses_of_transformers_and_peft_and_a_prompt_goes_on_in_both(
    run: Run, workplace: Path, kind: str, peft_config: type[PeftConfig]
) -> None:
    number, length = 4, 20
    words = f"--finetuning_type {kind} --num_iterations 20 --learning_rate 1e-2 --lr_scheduler_type constant"
    words += " --warmup_steps 0 --packing off --seq_length 24 --save_strategy no --save_params none"
    settings: Any = peft_config(task_type="CAUSAL_LM", num_virtual_tokens=number)
    torch.manual_seed(9)
    projected = {"prefix_projection": True, "encoder_hidden_size": 12} if kind == "prefix" else {}
    get_peft_model(base_model(), replace(settings, **projected)).save_pretrained("begun")
    prompted = get_peft_model(base_model(), settings)
    set_peft_model_state_dict(prompted, load_file("begun/adapter_model.safetensors"))
    run(*words.split(), "--adapter_path", "begun")

    typed = f"--model_path model --dataset data.jsonl --device cpu --batch_size 4 --num_virtual_tokens {number} {words}"
    batches = RunData.of(parse_args(typed.split()), AutoTokenizer.from_pretrained("model"), is_first=True).batches
    rows = []
    for batch in (next(batches) for _ in range(20)):
        assert (batch.input_ids[:, :number] == virtual_ids(number)).all()
        assert batch.row_lengths is not None
        places = np.arange(length)[None] < np.array(batch.row_lengths)[:, None] - number
        for tokens, labels, is_token in zip(batch.input_ids, batch.labels, places, strict=True):
            own = {"input_ids": tokens[number:], "labels": labels[number:], "attention_mask": is_token.astype(np.int64)}
            rows.append({name: torch.from_numpy(value.copy()) for name, value in own.items()})
    found = [step["loss"] for step in steps_of(Path("out"))]
    assert found == pytest.approx(losses_by_transformers(prompted, rows, 20), rel=1e-6)
    assert found[-1] < found[0]

    run(*words.replace("20", "3").split(), "--adapter_path", "out", "--save_dir", "further", "--save_results", "none")
    further = get_peft_model(base_model(), settings)
    set_peft_model_state_dict(further, load_file("out/adapter_model.safetensors"))
    found = [step["loss"] for step in steps_of(Path("further"))]
    assert found == pytest.approx(losses_by_transformers(further, rows, 3), rel=1e-6)


def test_a_prompt_begins_with_the_words_of_a_text_as_in_peft(run: Run, workplace: Path) -> None:
    text = "Count to nine, and from there to ten again"
    run(*PROMPT.replace("2e-2", "1e-30").split(), "--prompt_init_text", text)
    settings = PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=4,
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text=text,
        tokenizer_name_or_path="model",
    )
    expected = get_peft_model(base_model(), settings).prompt_encoder["default"].embedding.weight
    prompted = PeftModel.from_pretrained(base_model(), "out")
    assert torch.equal(prompted.prompt_encoder["default"].embedding.weight, expected)
    assert prompted.peft_config["default"].prompt_tuning_init_text == text


def test_preferences_see_the_prompt_before_each_answer(run: Run, workplace: Path) -> None:
    pairs = [{"prompt": f"Say {n}.", "chosen": f"It is {n}." * (n % 3 + 1), "rejected": f"No, {n}."} for n in range(12)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    common = "--finetuning_type prompt --seq_length 96 --packing on"
    begun = f"{common} --objective simpo --dataset pairs.jsonl --num_virtual_tokens 4 --learning_rate 1e-2"
    run(*begun.split(), "--warmup_steps", "0", "--save_strategy", "no")
    prompted = PeftModel.from_pretrained(base_model(), "out").eval()

    words = f"{common} --adapter_path out --objective dpo --no_do_train --do_eval --save_scores --save_dir scored"
    run(*words.split(), "--dataset", "pairs.jsonl", "--eval_dataset", "pairs.jsonl")
    found = [json.loads(line) for line in Path("scored/scores.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained("model")
    for pair, scores in zip(pairs, found, strict=True):
        for side, logp in zip(("chosen", "rejected"), scores["logps"], strict=True):
            first = len(tokenizer(pair["prompt"]).input_ids)
            ids = torch.tensor([[*tokenizer(pair["prompt"] + pair[side]).input_ids, tokenizer.eos_token_id]])
            with torch.no_grad():
                logits = prompted(input_ids=ids).logits[0, 4 + first - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, first:, None]).sum()
            assert logp == pytest.approx(float(expected), rel=1e-5)

    words = f"{common} --adapter_path out --objective dpo --dataset pairs.jsonl --learning_rate 1e-2 --warmup_steps 0"
    words += " --save_dir preferred --save_strategy no --save_params none --save_results none"
    run(*words.split())
    first, *_, last = [json.loads(line) for line in Path("preferred/metrics.jsonl").read_text().splitlines()]
    assert first["loss"] == pytest.approx(math.log(2), rel=2e-7)
    assert last["rewards/margins"] > 0


def test_what_does_not_fit_a_prompt_is_refused_with_one_message(
    run: Run, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*PROMPT.replace("--num_iterations 6", "--num_iterations 3").split())
    fields = json.loads(Path("out/adapter_config.json").read_text())
    (own,) = load_file("out/adapter_model.safetensors").values()

    def folder(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
        Path(name).mkdir()
        Path(name, "adapter_config.json").write_text(json.dumps({**fields, **config}))
        save_file(tensors, Path(name, "adapter_model.safetensors"))
        return name

    refused = {
        folder("lora", {"peft_type": "LORA", "r": 4, "lora_alpha": 4}, {}): 'kind "LORA", not a prompt',
        folder("none", {}, {"other": own}): r"must hold one matrix, 'prompt_embeddings'",
        folder("wide", {}, {"prompt_embeddings": torch.zeros(4, 48)}): r"vectors of width 48, the model has 32",
        folder("five", {}, {"prompt_embeddings": torch.zeros(5, 32)}): r"num_virtual_tokens 5, the run has 4",
        folder("long", {}, {"prompt_embeddings": torch.zeros(23, 32)}): r"23 vectors, which leave no room .* 24",
        folder("nan", {}, {"prompt_embeddings": own * torch.nan}): r"not finite|NaN|nan",
    }
    for name, message in refused.items():
        words = PROMPT.replace("--num_virtual_tokens 4 ", "") if name == "long" else PROMPT
        with pytest.raises(MobiusError, match=message):
            run(*words.split(), "--adapter_path", name, "--save_dir", "refused", "--save_results", "none")
    with pytest.raises(MobiusError, match="out holds a prompt, not an adapter"):
        run("--use_lora", "--adapter_path", "out", "--save_dir", "refused", "--save_results", "none")
    prefix = folder("prefix", {"peft_type": "PREFIX_TUNING"}, {"prompt_embeddings": torch.zeros(4, 48)})
    for words, name, message in (
        (PROMPT, prefix, "prefix holds a prefix, not a prompt. Continue it with --finetuning_type prefix"),
        (PREFIX, "out", "out holds a prompt, not a prefix. Continue it with --finetuning_type prompt"),
        (PREFIX, "lora", 'kind "LORA", not a prefix'),
        (PREFIX, prefix, r"has 48 numbers for a virtual token, but the keys and values of the model's layers are \d+"),
    ):
        with pytest.raises(MobiusError, match=message):
            run(*words.split(), "--adapter_path", name, "--save_dir", "refused", "--save_results", "none")
    with pytest.raises(MobiusError, match="num_virtual_tokens"):
        resume("out/checkpoint-3", "--save_dir", "resumed", "--num_virtual_tokens", "5")
    for name, kind in (("out", "prompt"), (prefix, "prefix")):
        with pytest.raises(MobiusError, match=rf"holds a trained {kind}.*--finetuning_type {kind} --adapter_path"):
            run("--model_path", name, "--save_dir", "refused", "--save_results", "none")
        assert run_command("export", [name, "merged", "--merge"]) == 2
        assert f"holds a {kind}, which is no part of the weights and cannot be merged" in capsys.readouterr().err


def likeliest(model: PeftModel, prompt: npt.NDArray[np.int32], number: int) -> list[int]:
    """The likeliest tokens after `prompt`, each by a forward of everything before it."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    for _ in range(number):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def _pairs(words: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for word in words:
        found.append([word]) if word.startswith("--") else found[-1].append(word)
    return found
