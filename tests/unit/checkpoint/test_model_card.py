"""The card of a model tells what it is made of, is read by the hub's library, and betrays nothing of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from mobius.checkpoint.model_card import CardFacts, Origin, model_card
from mobius.config.config import (
    AdapterConfig,
    Config,
    DataConfig,
    DatasetEntry,
    FinetuningType,
    ModelConfig,
    OptimConfig,
    OutputConfig,
)
from mobius.reporting.trainer_state import TrainerState


def facts(model: str = "Qwen/Qwen3-0.6B", *datasets: DatasetEntry, name: str = "mine") -> CardFacts:
    config = Config(
        model=ModelConfig(model_path=model),
        data=DataConfig(dataset=datasets or (DatasetEntry("tatsu-lab/alpaca", weight=0.5),)),
        optim=OptimConfig(num_iterations=20, learning_rate=3e-5),
        output=OutputConfig(run_name=name),
    )
    state = TrainerState.at_start(config)
    state.global_step, state.epoch, state.num_input_tokens_seen = 20, 1.5, 123_456
    return CardFacts(
        config=config,
        origin=Origin(model, is_pretrained=True),
        num_parameters=596_049_920,
        num_trained=596_049_920,
        num_active=596_049_920,
        first_loss=4.0,
        last_loss=1.25,
        state=state,
        evaluation={"eval_loss": 1.5, "epoch": 1.5},
    )


def test_the_hub_reads_base_model_datasets_and_library() -> None:
    card = ModelCard(model_card(facts()))

    assert card.data.library_name == "transformers"
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert card.data.datasets == ["tatsu-lab/alpaca"]
    assert card.data.pipeline_tag == "text-generation"


def test_what_becomes_of_a_base_that_has_more_than_text_is_told() -> None:
    assert "| other tensors of the base | 23, copied |" in model_card(replace(facts(), others="23, copied"))
    assert "other tensors" not in model_card(facts())


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_a_model_that_no_step_has_changed_is_not_called_fine_tuned(is_pretrained: bool) -> None:
    origin = Origin("Qwen/Qwen3-0.6B", is_pretrained=is_pretrained)
    text = model_card(replace(facts(), is_changed=False, origin=origin))

    assert "20 steps on `tatsu-lab/alpaca` x 0.5 changed no parameter" in text
    assert "fine-tuned" not in text
    assert "Trained from" not in text
    assert ("Fresh weights" in text) != is_pretrained


def test_a_card_of_adapters_tells_what_they_are_beside() -> None:
    given = facts()
    lora = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_target="q_proj")
    text = model_card(replace(given, config=replace(given.config, adapters=lora), num_trained=1024))

    assert "LoRA adapters of `Qwen/Qwen3-0.6B`" in text
    assert ModelCard(text).data.library_name == "peft"
    for row in ("trained parameters | 1,024", "lora_rank | 8", "lora_target | q_proj"):
        assert f"\n| {row} |\n" in text, row
    frozen = replace(given.config, adapters=AdapterConfig(freeze="layers.0-3"))
    text = model_card(replace(given, config=frozen))
    assert "A part of the parameters fine-tuned from" in text
    assert "\n| freeze | layers.0-3 |\n" in text
    assert "lora" not in text


def test_a_local_model_and_data_are_told_by_their_last_name_and_are_no_ids_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/tiny").mkdir(parents=True)
    secret = tmp_path / "clients" / "data.jsonl"

    text = model_card(facts("models/tiny", DatasetEntry(str(secret)), DatasetEntry("../up/b.jsonl")))

    card = ModelCard(text)
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "from `models/tiny` on `data.jsonl`, `b.jsonl`" in text
    assert str(tmp_path) not in text
    assert ".." not in text


def test_datasets_that_were_evaluated_on_are_told_by_their_last_name_too(tmp_path: Path) -> None:
    names = [str(tmp_path / "clients" / "a.jsonl"), str(tmp_path / "others" / "a.jsonl"), "../b|<i>.jsonl"]
    told = {f"eval_{name}_loss": 1.0 + number for number, name in enumerate(names)}
    given = facts()
    data = replace(given.config.data, eval_dataset=tuple(map(DatasetEntry, names)))

    text = model_card(replace(given, config=replace(given.config, data=data), evaluation={"eval_loss": 2.0, **told}))

    for row in ("eval_loss | 2.0", "eval_a.jsonl_loss | 1.0", "eval_a.jsonl_loss | 2.0", "eval_b i .jsonl_loss | 3.0"):
        assert f"\n| {row}000 |\n" in text, row
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("number", "steps"), [(0, []), (1, []), (2, [1, 2]), (41, [*range(2, 42, 3)])])
def test_the_picture_and_a_table_show_how_it_learned(number: int, steps: list[int]) -> None:
    given = facts()
    for step in range(1, number + 1):
        given.state.add({"step": step, "eval_loss": 1 / step, "eval_perplexity": 2.0, "eval_a.jsonl_loss": 9.0})
        given.state.add({"step": step, "loss": 7.0})
    text = model_card(given)

    assert text.count("](training_loss.png)") == 1
    rows = [line.strip("| ").split(" | ") for line in text.partition("evaluation after step")[2].splitlines()[2:]]
    shown = [row for row in rows if len(row) == 4]
    assert shown == [[str(step), f"{1 / step:.4f}", "2.0000", "nan"] for step in steps]
    assert "training_loss.png" not in model_card(replace(given, has_picture=False))


def test_a_shape_without_weights_is_no_base_model() -> None:
    text = model_card(replace(facts(), origin=Origin("Qwen/Qwen3-0.6B", is_pretrained=False)))

    assert "Trained from fresh weights in the shape of `Qwen/Qwen3-0.6B`" in text
    assert ModelCard(text).data.base_model is None


def test_a_name_opens_neither_code_nor_a_tag_nor_the_front_matter() -> None:
    text = model_card(facts("m", DatasetEntry("a`|<script>\n---\nx"), name="x\n<b>|`"))

    assert "<" not in text
    assert "`a script --- x`" in text
    assert "# x b\n" in text
    assert ModelCard(text).data.library_name == "transformers"


def test_a_card_of_a_run_whose_beginning_is_not_known_claims_neither() -> None:
    origin = Origin.from_json(None, model_path="Qwen/Qwen3-0.6B")

    text = model_card(replace(facts(), origin=origin))

    assert "fine-tuned from" not in text
    assert "fresh weights" not in text
    assert "base_model" not in text
    assert "`Qwen/Qwen3-0.6B`" in text
