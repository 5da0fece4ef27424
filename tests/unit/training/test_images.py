"""Whole runs with images: features by the frozen tower, kept by content, and a model that answers as measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.runs import evaluations_of, run_main, steps_of
from harness.sessions import resume
from harness.vision_models import make_vision_folder, pictures, processed
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from mobius.chat.conversation import Conversation
from mobius.errors import ConfigError, DataError, MobiusError
from mobius.training.evaluation.generation import GREEDY, TextGenerator

Run = Callable[..., None]
SIZES = (8, 16), (12, 40), (40, 16), (24, 24)
OPTIONS = """--model_path whole --dataset data.json --eval_dataset other.json --seq_length 64 --learning_rate 1e-3
    --warmup_steps 0 --num_iterations 3 --save_params none --save_results none"""
EVALUATION = "--model_path whole --eval_dataset data.json --seq_length 64 --no_do_train --do_eval"


def record(images: Sequence[int], answer: str) -> dict[str, Any]:
    asked = "<image>" * len(images) + ("What do you see?" if images else "Say something.")
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [f"pictures/{number}.png" for number in images]}


OTHERS = [record([0], "one"), record([2, 3], "a red one and a blue one"), record([], "no picture"), record([1], "w")]


@pytest.fixture
def shown(workplace: Path) -> list[Any]:
    """Save a model with a tower, pictures, and data with one, two or no pictures in a record; return the pictures."""
    made = pictures(*SIZES)
    make_vision_folder(workplace / "whole")
    (workplace / "pictures").mkdir()
    for number, picture in enumerate(made):
        Image.fromarray(picture).save(workplace / "pictures" / f"{number}.png")
    data = [record([number % 4], f"picture {number}") for number in range(8)]
    data += [record([1, 3], "two pictures"), record([], "nothing to see")] * 2
    (workplace / "data.json").write_text(json.dumps(data))
    (workplace / "other.json").write_text(json.dumps(OTHERS))
    return made


def question_of(each: Mapping[str, Any], made: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Text of a question, and the arguments of the model for its pictures."""
    own = [made[int(Path(path).stem)] for path in each["images"]]
    asked, given = each["messages"][0]["content"], dict[str, Any]()
    if own:
        pixels, grids = processed(own)
        for grid in grids:
            tokens = "<|image_pad|>" * (int(grid.prod()) // 4)
            asked = asked.replace("<image>", f"<|vision_start|>{tokens}<|vision_end|>", 1)
        given = {"pixel_values": pixels, "image_grid_thw": grids}
    return f"[user]\n{asked}\n[assistant]\n", given


def loss_by_transformers(folder: str, records: Sequence[Mapping[str, Any]], made: Sequence[Any]) -> float:
    """Mean loss of the answers' tokens by the class that loads the whole model."""
    model, tokenizer = AutoModelForMultimodalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, number = 0.0, 0
    for each in records:
        prompt, given = question_of(each, made)
        answer = each["messages"][1]["content"] + tokenizer.eos_token
        before, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, prompt + answer))
        labels = torch.tensor([[-100] * len(before) + ids[len(before) :]])
        kinds = (torch.tensor([ids]) == model.config.image_token_id).int()
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=labels, mm_token_type_ids=kinds, **given).loss
        total, number = total + float(loss) * (len(ids) - len(before)), number + len(ids) - len(before)
    return total / number


def answer_by_transformers(folder: str, each: Mapping[str, Any], made: Sequence[Any]) -> str:
    """Greedy answer of five tokens to a question."""
    model, tokenizer = AutoModelForMultimodalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt, given = question_of(each, made)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    kinds = (ids == model.config.image_token_id).int()
    found = model.generate(input_ids=ids, mm_token_type_ids=kinds, max_new_tokens=5, do_sample=False, **given)
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("packing", ["off", "on"])
def test_a_run_with_images_gives_a_whole_model_that_answers_as_measured(
    run: Run, shown: list[Any], packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run(*OPTIONS.split(), "--packing", packing, "--do_eval", "--do_predict", "--max_new_tokens", "5")
    assert "4 images, 31 tokens: 0 read from" in caplog.text
    assert "4 made by the frozen tower" in caplog.text
    ((_, loss, _),) = evaluations_of(Path("out"))
    assert loss == pytest.approx(loss_by_transformers("out", OTHERS, shown), abs=2e-6)
    assert abs(loss - loss_by_transformers("whole", OTHERS, shown)) > 0.01, "training changed the answers"
    lines = map(json.loads, Path("out/generated_predictions.jsonl").read_text().splitlines())
    assert [line["predict"] for line in lines] == [answer_by_transformers("out", each, shown) for each in OTHERS]
    before, after = load_file("whole/model.safetensors"), load_file("out/model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == ("visual" in name), name


def test_ranks_and_an_interruption_do_not_change_a_bit(shown: list[Any], workplace: Path) -> None:
    for name, num_ranks, more in (("one", 1, "--save_steps 2"), ("two", 2, ""), ("replicas", 2, "--pipeline_ranks 1")):
        options = f"{OPTIONS} --dtype fp32 --batch_size 4 --num_stages 2 --num_chunks 2 --packing off --save_dir {name}"
        done = run_main(num_ranks, workplace, *f"{options} {more} --do_eval".split())
        assert done.returncode == 0, done.stdout
    resume("one/checkpoint-2", "--save_dir", "resumed")
    assert steps_of(Path("resumed")) == steps_of(Path("one"))[2:]
    assert steps_of(Path("one")) == steps_of(Path("two"))
    assert evaluations_of(Path("one")) == evaluations_of(Path("two"))
    pairs = zip(steps_of(Path("one")), steps_of(Path("replicas")), strict=True)
    assert all(own["loss"] == pytest.approx(other["loss"], rel=1e-6) for own, other in pairs)


def test_features_are_kept_for_a_tower_and_the_content_of_an_image(
    run: Run, shown: list[Any], workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def numbers() -> str:
        caplog.clear()
        with caplog.at_level("INFO"):
            run(*EVALUATION.split(), "--save_dir", f"out{len(list(workplace.iterdir()))}")
        (line,) = (each for each in caplog.messages if each.startswith("images"))
        return line

    assert ": 0 read from" in numbers()
    Path("pictures/1.png").rename("pictures/5.png")
    Path("pictures/1.png").write_bytes(Path("pictures/5.png").read_bytes())
    first = numbers()
    assert ": 4 read from" in first, "another time of the file, the same content"
    tensors = load_file("whole/model.safetensors")
    name = "model.visual.merger.linear_fc2.weight"
    save_file(tensors | {name: tensors[name] * 2}, "whole/model.safetensors", metadata={"format": "pt"})
    assert ": 0 read from" in numbers(), "features of another tower are not read"
    Path("pictures/1.png").write_bytes(Path("pictures/2.png").read_bytes())
    with pytest.raises(MobiusError, match=r"1.png has changed since its dataset was tokenized"):
        numbers()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--model_path model", "`images` is not empty, but a model of the family 'llama' reads text only"),
        ("--do_predict --export_as text", "--do_predict: the data have images, and the result is saved as a text"),
    ],
)
def test_what_cannot_use_images_is_refused(run: Run, shown: list[Any], options: str, told: str) -> None:
    with pytest.raises(MobiusError) as caught:
        run(*OPTIONS.split(), *options.split())
    assert told in str(caught.value)


def test_a_folder_without_its_processor_is_refused(run: Run, shown: list[Any]) -> None:
    Path("whole/preprocessor_config.json").unlink()
    with pytest.raises(MobiusError, match=r"has no preprocessor_config.json"):
        run(*OPTIONS.split())


def test_a_chat_is_about_the_images_shown_so_far(shown: list[Any]) -> None:
    generator = TextGenerator.of_folder(Path("whole"), torch.device("cpu"), sees=True)
    conversation = Conversation(generator, GREEDY, max_new_tokens=5)
    with pytest.raises(DataError, match=r"there is no image .*none.png"):
        conversation.show("none.png")
    conversation.show("pictures/3.png")
    each = record([3], "")
    first = conversation.ask("What do you see?", lambda _: None)
    assert first == answer_by_transformers("whole", each, shown)
    prompt, given = question_of(each, shown)
    asked = f"{prompt}{first}{generator.tokenizer.eos_token}\n[user]\nAnd now?\n[assistant]\n"
    ids = generator.tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids
    kinds = (ids == generator.model.config.image_token_id).int()
    found = generator.model.generate(input_ids=ids, mm_token_type_ids=kinds, max_new_tokens=5, do_sample=False, **given)
    expected = generator.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    assert conversation.ask("And now?", lambda _: None) == expected


def test_a_model_that_reads_text_is_shown_no_image(workplace: Path) -> None:
    conversation = Conversation(TextGenerator.of_folder(Path("model"), torch.device("cpu")), {}, max_new_tokens=5)
    with pytest.raises(ConfigError, match="the model is loaded for text"):
        conversation.show("a.png")


def draw(digit: int, generator: np.random.Generator) -> Image.Image:
    """A digit somewhere in a picture of 16 x 16 pixels, in light colours on dark ones."""
    picture = Image.new("RGB", (16, 16), tuple(generator.integers(0, 90, 3).tolist()))
    place = int(generator.integers(2, 7)), int(generator.integers(-3, 1))
    colour, font = tuple(generator.integers(160, 256, 3).tolist()), ImageFont.load_default(size=14)
    ImageDraw.Draw(picture).text(place, str(digit), font=font, fill=colour)
    return picture


def train_tower(folder: Path, generator: np.random.Generator, *, num_steps: int) -> None:
    """Train the tower of the model in `folder` alone, with a linear classifier of digits behind its features."""
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    tower, classifier = model.base_model.visual, torch.nn.Linear(4 * 32, 10)
    optimizer = torch.optim.AdamW([*tower.parameters(), *classifier.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    for _ in range(num_steps):
        digits = generator.integers(0, 10, 128)
        pixels, grids = processed([np.asarray(draw(int(digit), generator)) for digit in digits])
        features = model.base_model.get_image_features(pixels, grids, return_dict=True).pooler_output
        scores = classifier(torch.stack([*features]).flatten(1))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(digits)).backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)


@pytest.mark.extended
def test_a_text_learns_to_read_digits_through_a_frozen_tower(run: Run, workplace: Path) -> None:
    generator = np.random.default_rng(0)
    make_vision_folder(Path("whole"))
    train_tower(Path("whole"), generator, num_steps=400)
    Path("digits").mkdir()
    for name, number in (("train", 1500), ("test", 200)):
        records = list[dict[str, Any]]()
        for place in range(number):
            digit, path = int(generator.integers(0, 10)), f"digits/{name}{place}.png"
            draw(digit, generator).save(path)
            turns = [{"role": "user", "content": "<image>Which digit?"}, {"role": "assistant", "content": str(digit)}]
            records.append({"messages": turns, "images": [path]})
        Path(f"{name}.json").write_text(json.dumps(records))
    options = """--model_path whole --dataset train.json --eval_dataset test.json --do_predict --max_new_tokens 4
        --seq_length 32 --batch_size 48 --num_chunks 1 --num_iterations 200 --packing off --num_stages 1
        --learning_rate 3e-3 --warmup_steps 0 --save_params none --save_results none"""
    run(*options.split())
    assert json.loads(Path("out/predict_results.json").read_text())["predict_exact_match"] > 90, "chance is 10"
