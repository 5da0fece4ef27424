"""A look at the data shows what a run would be trained on, without its weights."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from harness.runs import TOKENIZER
from transformers import AutoTokenizer

from mobius.config.cli import parse_args
from mobius.errors import DataError
from mobius.process.ranks import Ranks, allows_colour
from mobius.training.data import read_data
from mobius.training.preview_run import run_preview

Preview = Callable[..., str]
MODEL = Path("only_tokenizer")


@pytest.fixture
def preview(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Preview:
    """Everything that a preview writes to a standard output that is a file, as text."""
    shutil.copytree(TOKENIZER, MODEL)

    def show(*arguments: str, ranks: Ranks | None = None) -> str:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stdout", stream)
        options = f"--model_path {MODEL} --dataset data.jsonl --seq_length 64 --batch_size 4 --num_chunks 2".split()
        run_preview(parse_args([*options, "--preview", *arguments]), ranks or Ranks(0, 1, 0))
        return stream.getvalue()

    return show


def write(name: str, *records: Mapping[str, object]) -> str:
    Path(name).write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return name


def qa(question: str, answer: str) -> dict[str, str]:
    return {"prompt": question, "completion": answer}


def cells(text: str, name: str) -> list[str]:
    """The line of a table that begins with `name`, cut where there are two spaces or more."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {name}  "))
    return re.split(r" {2,}", line.strip())


def test_as_many_samples_as_wanted_are_shown_spread_over_the_datasets(preview: Preview) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(name, *(qa(f"{name[0]} {number}?", f"{number}.") for number in range(9)))
    text = preview("5", "--dataset", "a.jsonl", "b.jsonl")
    assert text.count("a.jsonl, sample ") == 3
    assert text.count("b.jsonl, sample ") == 2
    assert text.count("  target | ") == 5
    assert preview("5", "--dataset", "a.jsonl", "b.jsonl") == text
    assert preview("5", "--dataset", "a.jsonl", "b.jsonl", "--seed", "1") != text


def test_no_more_samples_are_shown_than_there_are(preview: Preview) -> None:
    text = preview("9", "--dataset", write("a.jsonl", qa("One?", "Yes."), qa("Two?", "No.")))
    assert text.count("a.jsonl, sample ") == 2


def test_the_table_tells_what_became_of_every_record(preview: Preview) -> None:
    write("a.jsonl", qa("One?", "Yes."), qa("Two?", ""), qa("", ""), qa("Long? " * 90, "No."), qa("Three?", "No."))
    text = preview("--dataset", "a.jsonl")
    assert cells(text, "a.jsonl")[1:8] == ["prompt-completion", *"5", "3", "1", "1", "1", "3"]
    assert "  dropped: 1 without an answer\n" in text
    for told in (
        "1 of 5 records are empty",
        "1 of 5 records without an answer were dropped",
        "1 of 5 records are longer than",
    ):
        assert f"  warning: {told}" in text


def test_an_epoch_is_shared_by_tokens_and_weight(preview: Preview) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(name, *(qa(f"Is {number} so?", "Yes.") for number in range(10, 20)))
    text = preview("--dataset", "a.jsonl", "b.jsonl:3")
    assert cells(text, "a.jsonl")[-2:] == ["1", "25.0 %"]
    assert cells(text, "b.jsonl")[-2:] == ["3", "75.0 %"]


def test_a_step_is_told_with_and_without_packing(preview: Preview) -> None:
    write("a.jsonl", *(qa(f"Is {number} so?", "Yes.") for number in range(100, 180)))
    text = preview("--dataset", "a.jsonl", "--num_train_epochs", "3")
    packed, single = cells(text, "packed"), cells(text, "one sample in a row")
    assert single[1] == "4"
    assert int(packed[1]) > 4 * 3
    tokens = int(cells(text, "a.jsonl")[8].replace(",", "")) / 80
    assert int(single[2].replace(",", "")) == pytest.approx(4 * tokens, abs=1)
    assert single[-1] == "20.0"
    assert "--num_train_epochs 3 takes" in text


def test_an_empty_mixture_is_refused_before_anything_is_shown(preview: Preview) -> None:
    write("a.jsonl", qa("One?", "Yes."))
    with pytest.raises(DataError, match="an empty mixture"):
        preview("--dataset", "a.jsonl:0.001", "--num_train_epochs", "1")
    assert isinstance(sys.stdout, io.StringIO)
    assert sys.stdout.getvalue() == ""


def test_samples_of_an_earlier_dataset_are_told(preview: Preview) -> None:
    write("a.jsonl", *(qa(f"Is {number} so?", "Yes.") for number in range(10, 20)))
    write("b.jsonl", *(qa(f"Is {number} so?", "Yes.") for number in range(17, 40)))
    text = preview("--dataset", "a.jsonl", "b.jsonl")
    assert "  warning: 3 samples of b.jsonl are in an earlier dataset too, with the same tokens" in text
    assert "earlier dataset" not in preview("--dataset", "b.jsonl")


def test_what_a_sample_of_joined_text_is_is_told(preview: Preview) -> None:
    write("a.jsonl", *({"text": f"Line {number}. " * 30} for number in range(8)))
    write("b.jsonl", qa("One?", "Yes."))
    told = "  text is joined: a sample is a row of documents, which may be split anywhere"
    assert told in preview("--dataset", "a.jsonl", "b.jsonl")
    assert told not in preview("--dataset", "a.jsonl", "b.jsonl", "--packing", "on")
    assert told not in preview("--dataset", "b.jsonl")


def test_plain_text_is_joined_and_has_one_way(preview: Preview) -> None:
    write("a.jsonl", *({"text": f"Line {number}. " * 30} for number in range(8)))
    text = preview("--dataset", "a.jsonl")
    assert cells(text, "plain text, joined")[1] == "4"
    assert "one sample in a row" not in text


def test_steps_are_told_as_epochs(preview: Preview) -> None:
    write("a.jsonl", *(qa(f"Is {number} so?", "Yes.") for number in range(100, 140)))
    text = preview("--dataset", "a.jsonl", "--packing", "off", "--num_iterations", "5")
    assert "  --num_iterations 5 makes 0.5 epochs" in text


def test_a_step_that_takes_more_than_an_epoch_is_told(preview: Preview) -> None:
    write("a.jsonl", *(qa(f"Is {number} so?", "Yes.") for number in range(100, 110)))
    options = ("--dataset", "a.jsonl", "--packing", "off", "--batch_size")
    assert "  warning: a step takes 2 epochs: samples repeat in it" in preview(*options, "20")
    assert "samples repeat" not in preview(*options, "10")


def test_held_out_samples_are_not_trained_on_and_repeats_are_told(preview: Preview) -> None:
    records = [qa(f"Is {number} so?", "Yes.") for number in range(100, 120)]
    text = preview("--dataset", write("a.jsonl", *records, *records), "--val_size", "10")
    assert "  validation: 10 of 40 samples are held out (--val_size)" in text
    assert "samples of the validation are trained on too" in text
    text = preview("--dataset", write("b.jsonl", *records), "--val_size", "10")
    assert "trained on too" not in text


RECORDS = [qa(f"Is {number} so?", "Yes.") for number in range(100, 140)]


@pytest.mark.parametrize(
    ("training", "evaluation", "options", "told"),
    [
        ([RECORDS[:20]], [], "", []),
        ([RECORDS[:20]], RECORDS[20:], "", []),
        ([RECORDS[:20]], RECORDS[:20], "", ["20 samples of the validation are trained on too"]),
        ([RECORDS[:20]], RECORDS[19:30], "", ["1 samples of the validation are trained on too"]),
        (
            [RECORDS * 2],
            [],
            "--val_size 40",
            ["t0.jsonl: 40 of 80 samples repeat", "samples of the validation are trained on too"],
        ),
        ([RECORDS, RECORDS], [], "", ["40 samples of t1.jsonl are in an earlier dataset too"]),
        ([RECORDS[:10]], [], "--packing off --batch_size 30", ["a step takes 3 epochs: samples repeat in it"]),
        ([[*RECORDS, RECORDS[0]]], [], "", []),
    ],
)
def test_a_run_warns_of_repeated_samples_without_a_preview(
    training: list[list[dict[str, str]]],
    evaluation: list[dict[str, str]],
    options: str,
    told: list[str],
    workplace: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = [write(f"t{number}.jsonl", *records) for number, records in enumerate(training)]
    chosen = ["--eval_dataset", write("e.jsonl", *evaluation), "--eval_strategy", "epoch"] if evaluation else []
    given = ["--model_path", "model", "--seq_length", "64", "--batch_size", "4", "--num_chunks", "2", *options.split()]
    config, tokenizer = parse_args([*given, "--dataset", *names, *chosen]), AutoTokenizer.from_pretrained(TOKENIZER)
    read_data(config, Ranks(0, 2, 0), tokenizer)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    warnings = [warning for warning in warnings if "without `--eval_strategy`" not in warning]
    assert len(warnings) == len(told)
    assert all(text in warning for text, warning in zip(told, warnings, strict=True))
    caplog.clear()
    read_data(config, Ranks(1, 2, 1), tokenizer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "the first rank says it for all"


def test_a_dataset_to_evaluate_on_is_counted_by_itself(preview: Preview) -> None:
    write("a.jsonl", *(qa(f"Is {number} so?", "Yes.") for number in range(10)))
    write("e.jsonl", qa("Is 3 so?", "Yes."), qa("Other?", "No."))
    text = preview("--dataset", "a.jsonl", "--eval_dataset", "e.jsonl")
    assert cells(text, "e.jsonl")[-1] == "-"
    assert "  validation: 2 samples of e.jsonl" in text
    assert "warning: 1 samples of the validation are trained on too" in text


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("vocab_size", 4000, "the model only 4,000 (vocab_size): a run is refused"),
        ("vocab_size", 32_000, "the model 32,000 (vocab_size): is it another model's?"),
        ("eos_token_id", 7, "eos_token_id is 2 in the tokenizer and 7 in only_tokenizer/config.json"),
        ("eos_token_id", [5, 2], None),
        ("vocab_size", 4160, None),
    ],
)
def test_a_tokenizer_of_another_model_is_told(preview: Preview, field: str, value: object, told: str | None) -> None:
    path = MODEL / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    text = preview()
    assert told in text if told else "another model's" not in text


def test_a_tokenizer_alone_will_do(preview: Preview) -> None:
    (MODEL / "config.json").unlink()
    assert "another model's" not in preview("--dataset", write("a.jsonl", qa("One?", "Yes."), qa("Two?", "No.")))


def test_nothing_is_left_on_the_disk(preview: Preview) -> None:
    before = set(Path().iterdir())
    preview()
    assert set(Path().iterdir()) == before


def test_only_the_first_rank_shows_anything(preview: Preview) -> None:
    assert preview(ranks=Ranks(1, 2, 1)) == ""


def test_data_that_a_run_refuses_is_refused(preview: Preview) -> None:
    with pytest.raises(DataError, match="no record has a token to train on"):
        preview("--dataset", write("a.jsonl", qa("One?", "")))


@pytest.mark.parametrize(
    ("variables", "allowed"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_are_left_out_where_they_are_not_wanted(
    variables: dict[str, str], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert allows_colour() is allowed
