"""Datasets are typed as words, or written in YAML as words and mappings, and mean the same after being written down."""

import random
import time
from pathlib import Path

import pytest

from mobius.config.cli import parse_args
from mobius.config.config import Config, DatasetEntry, EvalStrategy
from mobius.config.options import config_from, options
from mobius.config.yaml_file import to_yaml
from mobius.errors import ConfigError


def problems_of(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    return caught.value.problems


def read(folder: Path, text: str) -> Config:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return parse_args(["--config", str(folder / "run.yaml")])


def problems_in(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    return caught.value.problems


def names(config: Config) -> list[tuple[str, float]]:
    return [(entry.name, entry.weight) for entry in config.data.dataset]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--dataset", "a.jsonl"], [("a.jsonl", 1.0)]),
        (
            ["--dataset", "a.jsonl", "b.parquet:0.3", "hub/id:2.0"],
            [("a.jsonl", 1.0), ("b.parquet", 0.3), ("hub/id", 2.0)],
        ),
        (["--dataset=a.jsonl:.5"], [("a.jsonl", 0.5)]),
        (["--dataset", "a:3", "--no_offload"], [("a", 3.0)]),
        (["--dataset", "a:1e-2", "b:2e2", "c:+1."], [("a", 0.01), ("b", 200.0), ("c", 1.0)]),
        (["--dataset", "a:b", "c:", "d:0x1", "e:1_000", "f:1,5", "g:e5"],
         [("a:b", 1.0), ("c:", 1.0), ("d:0x1", 1.0), ("e:1_000", 1.0), ("f:1,5", 1.0), ("g:e5", 1.0)]),
        (["--dataset", "a:b:2"], [("a:b", 2.0)]),
        (["--dataset", ":2"], [(":2", 1.0)]),
        (["--dataset", "-3", "a:２"], [("-3", 1.0), ("a:２", 1.0)]),
        (["--dataset", "a", "b", "--dataset", "c"], [("c", 1.0)]),
        (["--seed", "1", "--dataset", "a", "a"], [("a", 1.0), ("a", 1.0)]),
    ],
    ids=str,
)  # fmt: skip
def test_words_behind_the_option_are_datasets_with_or_without_a_weight(
    argv: list[str], expected: list[tuple[str, float]]
) -> None:
    assert names(parse_args(argv)) == expected


def test_a_file_whose_name_ends_like_a_weight_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(parse_args(["--dataset", "night:2", "night:2:3"])) == [("night", 2.0), ("night:2", 3.0)]
    (tmp_path / "night:2").touch()
    config = parse_args(["--dataset", "night:2", "night:2:3", "~/night:2"])
    assert names(config) == [("night:2", 1.0), ("night:2", 3.0), ("~/night:2", 1.0)]
    text = to_yaml(config)
    (tmp_path / "night:2").unlink()
    assert read(tmp_path, text) == config


def test_only_a_list_takes_more_than_one_word() -> None:
    assert "`b` belongs to no option" in problems_of("--model_path", "a", "b")[0]
    assert "`b` belongs to no option" in problems_of("--dataset=a", "b")[0]
    assert problems_of("--datasset", "a", "b") == ("unknown option `--datasset`; did you mean `--dataset`?",)
    assert problems_of("--dataset", "--eval_dataset") == (
        "`--dataset` has no value; text is needed",
        "`--eval_dataset` has no value; text is needed",
    )


def test_datasets_to_evaluate_on_are_words_without_weights(tmp_path: Path) -> None:
    assert parse_args([]).data.eval_dataset is None
    assert parse_args(["--eval_dataset", "a", "b"]).data.eval_dataset == (DatasetEntry("a"), DatasetEntry("b"))
    (problem,) = problems_of("--eval_dataset", "a", "b.jsonl:0.5")
    assert problem.startswith("`--eval_dataset` 'b.jsonl' has the weight 0.5")
    assert problems_in(tmp_path, "eval_dataset: [{path: a, weight: 2}]")[0].startswith("`--eval_dataset` 'a' has the")
    assert "line 1: `eval_dataset: None`; text is needed" in problems_in(tmp_path, "eval_dataset: [a, null]")[0]
    assert read(tmp_path, "eval_dataset: null").data.eval_dataset is None


@pytest.mark.parametrize("weight", ["0", "-0.5", "nan", "inf", "-inf", "1001", "1e999", "0e5", "9" * 5000])
def test_a_weight_that_is_none_is_told(weight: str) -> None:
    (problem,) = problems_of("--dataset", "a.jsonl", f"b.jsonl:{weight}")
    assert problem.startswith("`--dataset` 'b.jsonl': its weight is ")
    assert "it must be above 0" in problem
    assert len(problem) < 200


def test_a_weight_may_be_a_thousand_and_no_more() -> None:
    (entry,) = parse_args(["--dataset", "a.jsonl:1000"]).data.dataset
    assert entry.weight == 1000
    (problem,) = problems_of("--dataset", "a.jsonl:1e5")
    assert "its weight is 100000; it must be above 0 and below 1001" in problem


def test_every_wrong_word_is_told_but_not_a_thousand() -> None:
    assert [problem.split("'")[1] for problem in problems_of("--dataset", "a:0", "b", "c\0", "d:-1")] == [
        "a", "c\\x00", "d",
    ]  # fmt: skip
    assert len(problems_of("--dataset", *["a:0"] * 500)) == 5
    (problem,) = problems_of("--dataset", *["a"] * 1001)
    assert problem == "`--dataset` names 1001 datasets; 1000 can be mixed. Give a folder that holds the files"


def test_yaml_takes_a_name_a_list_and_mappings(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
dataset:
  - a.jsonl
  - b.parquet:0.3
  - path: c:2
    weight: 2
    max_samples: 100
    columns: {prompt: document, completion: "my, = summary"}
    split: validation
    subset: en
  - {name: d, columns: "prompt=x, completion = y"}
  - dataset: e
    max_samples:
eval_dataset:
  path: f
  split: test
columns:
  prompt: article
  completion: highlights
""",
    )
    assert config.data.dataset == (
        DatasetEntry("a.jsonl"),
        DatasetEntry("b.parquet", 0.3),
        DatasetEntry("c:2", 2.0, 100, (("prompt", "document"), ("completion", "my, = summary")), "validation", "en"),
        DatasetEntry("d", columns=(("prompt", "x"), ("completion", "y"))),
        DatasetEntry("e"),
    )
    assert config.data.eval_dataset == (DatasetEntry("f", split="test"),)
    assert config.data.columns == (("prompt", "article"), ("completion", "highlights"))
    assert read(tmp_path, to_yaml(config)) == config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dataset: []", ["line 1", "`dataset: [...]`", "a list of 1 to 1000"]),
        ("dataset:", ["line 1", "`dataset: None`", "text"]),
        ("seed: 1\ndataset:\n- a\n- 12", ["line 4", "`dataset: 12`", "text in quotes"]),
        ("dataset:\n- [a]", ["line 1", "`dataset: [...]`", "texts and mappings"]),
        ("dataset: &a [*a]", ["line 1", "`dataset: [...]`"]),
        ("dataset: {}", ["line 1", "without `path`"]),
        ("dataset:\n- a\n- weight: 2", ["line 3", "without `path`"]),
        ("dataset:\n- path: a\n  weigth: 2", ["line 3", "unknown key `weigth` of a dataset", "`weight`"]),
        ("dataset:\n- path: a\n  probability: 2", ["line 3", "`probability`", "did you mean `weight`?"]),
        ("dataset:\n- path: a\n  zzz: 2", ["line 3", "`zzz`", "a dataset has path,", "subset"]),
        ("dataset:\n- path: a\n  weight: '2'", ["line 3", "`weight: '2'`", "a number above 0"]),
        ("dataset:\n- path: a\n  weight: [2]", ["line 3", "`weight: [...]`", "a number above 0"]),
        ("dataset:\n- path: a\n  weight: 0", ["`--dataset` 'a': its weight is 0", "above 0"]),
        ("dataset:\n- path: a\n  weight: -1", ["its weight is -1"]),
        ("dataset:\n- path: a\n  weight: .nan", ["its weight is nan"]),
        ("dataset:\n- path: a\n  max_samples: 0", ["`--dataset` 'a': its max_samples is 0", "at least 1"]),
        ("dataset:\n- path: a\n  max_samples: 1.5", ["line 3", "`max_samples: 1.5`", "a whole number"]),
        ("dataset:\n- path: a\n  split:", ["line 3", "`split: None`", "text"]),
        ("dataset:\n- path: a\n  path: b", ["line 3", "`path` is already set on line 2"]),
        ("dataset:\n- path: a\n  name: b", ["line 3", "`path` and `name`", "keep one"]),
        ("dataset:\n- path: 7", ["line 2", "`path: 7`", "text in quotes"]),
        ("dataset:\n- path: {a: b}", ["line 2", "`path: {...}`", "text"]),
        ("dataset:\n- path: a\n  [b]: c", ["line 3", "`[...]`", "a key of a dataset"]),
        ("dataset:\n- path: a\n  <<: {weight: 2}", ["line 3", "unknown key `<<`"]),
        ("dataset: &a {path: b, columns: *a}", ["line 1", "`columns: {...}` in `columns`"]),
        ("dataset: {path: a, columns: prompt}", ["line 1", "`columns`: 'prompt' is no pair KEY=COLUMN"]),
        ("columns: {prompt: 1}", ["line 1", "`prompt: 1` in `columns`"]),
        ("columns:\n  prompt:", ["line 2", "`prompt: ` in `columns`"]),
        ("columns: {prompt: a, prompt: b}", ["line 1", "`prompt` is already set"]),
        ("columns: {}", ["line 1", "`columns` has 0"]),
        ("columns: [a]", ["line 1", "`columns: [...]`", "text such as prompt=document"]),
        ("columns: 12", ["line 1", "`columns: 12`", "text such as prompt=document"]),
        ("columns: a=b,a=c", ["line 1", "`columns`: 'a' is given 2 times"]),
        ('dataset: [{path: "a\\0b"}]', ["`--dataset` 'a\\x00b'", "NUL"]),
        ('dataset: [{path: a, split: "\\ud800"}]', ["`--dataset` 'a': its split", "half of a character"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_mistake_in_yaml_is_told_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    (problem,) = problems_in(tmp_path, text)
    for part in parts:
        assert part in problem
    assert len(problem) < 400 + len(str(tmp_path))


def test_each_wrong_dataset_is_told(tmp_path: Path) -> None:
    problems = problems_in(tmp_path, "dataset:\n- 1\n- a\n- {weight: x, max_samples: y}\n- {zzz: 1}\n")
    assert [problem.partition(": ")[0][-6:] for problem in problems] == ["line 2", "line 4", "line 4", "line 5"]
    many = problems_in(tmp_path, "dataset:\n" + "- 1\n" * 900 + "nonsense: 1\nsecond: 2\n")
    assert len(many) == 101
    assert many[-1].endswith("line 902: the rest was not read, for there are 100 problems")


def test_aliases_may_be_used_and_cannot_multiply(tmp_path: Path) -> None:
    config = read(tmp_path, "columns: &c {prompt: x, completion: y}\ndataset: [{path: a, columns: *c}, {path: b}]\n")
    assert config.data.dataset[0].columns == config.data.columns == (("prompt", "x"), ("completion", "y"))
    wide = ", ".join(f"k{number}: v" for number in range(10_000))
    start = time.perf_counter()
    problems_in(tmp_path, f"columns: &c {{{wide}}}\ndataset: [{', '.join(['{path: a, columns: *c}'] * 900)}]\n")
    problems_in(tmp_path, f"dataset: [&a {{{wide}}}, {', '.join(['*a'] * 900)}]\n")
    problems_in(tmp_path, f"dataset: [&a {{path: b}}, {', '.join(['*a'] * 30_000)}]\n")
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prompt=document,completion=summary", (("prompt", "document"), ("completion", "summary"))),
        (" text = the body ", (("text", "the body"),)),
        ("text=a=b", (("text", "a=b"),)),
    ],
)
def test_columns_are_pairs(text: str, expected: tuple[tuple[str, str], ...]) -> None:
    assert options()["columns"].from_words([text]) == parse_args(["--columns", text]).data.columns == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prompt", [["'prompt' is no pair KEY=COLUMN"]]),
        ("prompt=", [["'prompt='"]]),
        ("=a", [["'=a'"]]),
        ("a=b,", [["'' is no pair"]]),
        ("a=b,c,a=d", [["'c' is no pair"], ["'a' is given 2 times"]]),
        ("x," * 50_000, [["'x'"]] * 5),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_pair_is_told(text: str, parts: list[list[str]]) -> None:
    problems = problems_of("--columns", text)
    assert len(problems) == len(parts)
    for problem, expected in zip(problems, parts, strict=True):
        assert all(part in problem for part in [*expected, "`--columns "])
        assert len(problem) < 300


PIECES = ("a", "b.jsonl", "x/y", ":", "0.5", "3", "=", ",", " ", "#", "é模型", "'", '"', "- ", "\n", "null", "yes", "~")


def drawn_text(rng: random.Random) -> str:
    while True:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4)))
        if text.strip().strip("-") and not text.startswith("~"):
            return text


def drawn_dataset(rng: random.Random, *, is_weighted: bool) -> DatasetEntry:
    entry = DatasetEntry(drawn_text(rng))
    changes: dict[str, object] = {
        "max_samples": rng.randint(1, 10**9),
        "columns": tuple({drawn_text(rng): drawn_text(rng) for _ in range(rng.randint(1, 3))}.items()),
        "split": drawn_text(rng),
        "subset": drawn_text(rng),
        **({"weight": rng.choice([rng.uniform(0, 9), 1e-7, 987.654321])} if is_weighted else {}),
    }
    chosen = rng.sample(sorted(changes), rng.choice([0, 0, 1, 3]))
    return DatasetEntry(entry.name, **{name: changes[name] for name in chosen if name in changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(100))
def test_drawn_datasets_read_back_unchanged(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = config_from(
        {
            "dataset": tuple(drawn_dataset(rng, is_weighted=True) for _ in range(rng.randint(1, 3))),
            "eval_dataset": (judged := rng.choice([None, (drawn_dataset(rng, is_weighted=False),)])),
            "eval_strategy": EvalStrategy.NO if judged is None else EvalStrategy.EPOCH,
            "columns": rng.choice([None, ((drawn_text(rng), drawn_text(rng)),)]),
            "default_system": rng.choice([None, drawn_text(rng)]),
            "preview": (number := rng.choice([None, 7])),
            "preview_output": None if number is None else "lengths.png",
            "num_train_epochs": rng.choice([None, 1e-3, 2.5]),
            "preprocessing_num_workers": rng.choice([None, 3]),
        }
    )
    assert read(tmp_path, to_yaml(config)) == config


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        ([DatasetEntry("a.jsonl")], "dataset: a.jsonl\n"),
        ([DatasetEntry("a.jsonl"), DatasetEntry("b")], "dataset:\n- a.jsonl\n- b\n"),
        ([DatasetEntry("a", 0.5), DatasetEntry("b")], "dataset:\n- path: a\n  weight: 0.5\n- b\n"),
        ([DatasetEntry("a:2")], "dataset:\n- path: a:2\n"),
    ],
)
def test_a_mapping_is_written_only_where_it_is_needed(entries: list[DatasetEntry], line: str) -> None:
    assert line in to_yaml(config_from({"dataset": tuple(entries)}))
