"""What a user can get wrong is told before anything is trained, in one message, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from mobius.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GpuMemoryError,
    HostMemoryError,
    MobiusError,
    PlanError,
)
from mobius.training import stages

Run = Callable[..., None]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, and no GPU even on a machine that has some; the libraries read their variables while imported."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def write_lines(name: str, *records: object) -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))


def write_broken_line() -> None:
    write_lines("broken.jsonl", {"text": "one"}, {"text": "two"})
    with Path("broken.jsonl").open("a") as file:
        file.write('{"text": "three\n')


def write_pickled_model() -> None:
    Path("pickled").mkdir()
    (Path("pickled") / "config.json").write_text((Path("model") / "config.json").read_text())
    (Path("pickled") / "pytorch_model.bin").touch()


def write_bare_model(name: str, *, vocab_size: int | None, has_tokenizer: bool) -> None:
    """A folder with the tiny model's configuration, changed, and without weights."""
    Path(name).mkdir()
    settings = json.loads((Path("model") / "config.json").read_text())
    if vocab_size is not None:
        settings["vocab_size"] = vocab_size
    (Path(name) / "config.json").write_text(json.dumps(settings))
    for file in ("tokenizer.json", "tokenizer_config.json") if has_tokenizer else ():
        (Path(name) / file).symlink_to((Path("model") / file).resolve())


def write_older_results() -> None:
    Path("out").mkdir()
    (Path("out") / "config.json").write_text("{}")


def write_a_file_in_the_way() -> None:
    Path("file").write_text("not a folder")


def nothing() -> None:
    """The mistake is in the arguments alone."""


@dataclass(frozen=True)
class Mistake:
    """What the user did, and what the message must say (regular expressions, all of them)."""

    arguments: str
    error: type[MobiusError]
    message: tuple[str, ...]
    prepare: Callable[[], None] = nothing


MISTAKES = {
    "more stages than can be": Mistake("--num_stages 7", PlanError, (r"--num_stages 7", r"4 layers", r"6 or less")),
    "a model that is nowhere": Mistake(
        "--model_path nobody/nothing",
        CheckpointError,
        (r"--model_path nobody/nothing", r"/here/nobody/nothing", r"/hub", r"hf download nobody/nothing"),
    ),
    "a folder that does not exist": Mistake(
        "--model_path ./models/llama", CheckpointError, (r"--model_path \./models/llama", r"no folder .*/models/llama")
    ),
    "weights that are pickled": Mistake(
        "--model_path pickled", CheckpointError, (r"pytorch_model\.bin", r"save_pretrained"), write_pickled_model
    ),
    "a model without a tokenizer": Mistake(
        "--model_path bare",
        CheckpointError,
        (r"--model_path", r"bare has no tokenizer"),
        lambda: write_bare_model("bare", vocab_size=None, has_tokenizer=False),
    ),
    "a tokenizer with more tokens than the model": Mistake(
        "--model_path narrow",
        CheckpointError,
        (r"--model_path", r"4096 tokens", r"only 100 \(vocab_size\)"),
        lambda: write_bare_model("narrow", vocab_size=100, has_tokenizer=True),
    ),
    "more layers than the checkpoint has": Mistake("--num_layers 9", MobiusError, (r"--num_layers 9", r"4 layers")),
    "a dataset that is nowhere": Mistake(
        "--dataset some-body/some.set",
        DataError,
        (r"--dataset some-body/some\.set", r"/here/some-body/some\.set", r"hf download --repo-type dataset"),
    ),
    "a file that does not exist": Mistake(
        "--dataset missing.jsonl", DataError, (r"--dataset missing\.jsonl", r"/here/missing\.jsonl")
    ),
    "an empty dataset": Mistake(
        "--dataset empty.jsonl",
        DataError,
        (r"--dataset empty\.jsonl", r"empty"),
        lambda: write_lines("empty.jsonl"),
    ),
    "a broken line": Mistake(
        "--dataset broken.jsonl", DataError, (r"broken\.jsonl, line 3", r"broken JSON"), write_broken_line
    ),
    "columns of no known format": Mistake(
        "--dataset odd.jsonl",
        DataError,
        (r"odd\.jsonl, line 1", r"question", r"prompt"),
        lambda: write_lines("odd.jsonl", {"question": "a", "reply": "b"}),
    ),
    "prompts that leave no room for a target": Mistake(
        "--dataset long.jsonl --seq_length 8",
        DataError,
        (r"--dataset long\.jsonl", r"no record has a token to train on", r"--seq_length 8"),
        lambda: write_lines("long.jsonl", *[{"prompt": "many words " * 40, "completion": ""}] * 3),
    ),
    "conversations without an answer": Mistake(
        "--dataset questions.jsonl",
        DataError,
        (r"--dataset questions\.jsonl", r"no record has a token to train on"),
        lambda: write_lines("questions.jsonl", *[{"messages": [{"role": "user", "content": "Who?"}]}] * 3),
    ),
    "too little host memory": Mistake(
        "--host_memory_limit 0.1",
        HostMemoryError,
        (r"need \d+\.\d MiB of host memory", r"parameters x 16 bytes", r"102\.4 MiB is available"),
    ),
    "CUDA where there is none": Mistake("--device cuda", GpuMemoryError, (r"torch sees 0", r"--device cpu")),
    "results of an earlier run": Mistake(
        "", CheckpointError, (r"--save_dir .*/out", r"--overwrite_output_dir"), write_older_results
    ),
    "a parameter file of an earlier run": Mistake(
        "--save_params file", CheckpointError, (r"--save_params file exists",), write_a_file_in_the_way
    ),
    "a folder that cannot be made": Mistake(
        "--save_dir file/out", CheckpointError, (r"--save_dir .*/file/out", r"cannot write"), write_a_file_in_the_way
    ),
    "a report that cannot be written": Mistake(
        "--save_results file/result.txt",
        CheckpointError,
        (r"--save_results file/result\.txt", r"cannot write"),
        write_a_file_in_the_way,
    ),
}


def tree(folder: Path) -> dict[str, str | None]:
    """Every path below `folder` with its text, None for a folder or what is linked."""
    paths = {path for path in folder.rglob("*") if not path.is_relative_to(folder / "model")}
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() and not path.is_symlink() else None
        for path in paths
    }


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_before_training_and_leaves_nothing_behind(
    mistake: Mistake, run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    monkeypatch.setattr(stages, "allocate_memory", refuse_to_allocate)
    mistake.prepare()
    before = tree(workplace)

    with pytest.raises(mistake.error) as caught:
        run(*mistake.arguments.split())

    for pattern in mistake.message:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in: {caught.value}"
    assert "start-up" not in caplog.text
    assert tree(workplace) == before


PIPES = {
    "config.yaml": ("--config config.yaml", ConfigError),
    "plan.json": ("--plan plan.json", PlanError),
    "records.jsonl": ("--dataset records.jsonl", DataError),
    "records/train.jsonl": ("--dataset records", DataError),
    "template.jinja": ("--chat_template template.jinja", DataError),
}
"""Path of a file that is given -> options that give it, and the error."""


@pytest.mark.parametrize("path", PIPES)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(path: str, run: Run, workplace: Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).unlink(missing_ok=True)
    os.mkfifo(path)
    options, error = PIPES[path]

    def end(*_: object) -> NoReturn:
        raise AssertionError("it waits for the pipe")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    try:
        with pytest.raises(error):
            run(*options.split())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refuse_to_allocate(*_: object, **__: object) -> NoReturn:
    """Stands in the arena's place: large memory must not be taken before everything else was found in order."""
    raise AssertionError("memory was allocated before the mistake was found")


@pytest.mark.parametrize("option", ["--save_dir file/out", "--save_results file/result.txt"])
def test_an_output_that_cannot_be_written_is_found_before_the_data_is_read(
    option: str, run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    write_a_file_in_the_way()

    with pytest.raises(CheckpointError, match="file"):
        run("--dataset", "missing.jsonl", *option.split())

    assert "data   " not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
            r"no tensor 'model\.layers\.2\.mlp\.up_proj",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            r"'model\.norm\.weight' has shape \(31,\), but the configuration needs \(32,\)",
        ),
    ],
    ids=["missing", "mis-shaped"],
)
def test_a_wrong_tensor_is_named_and_leaves_nothing_behind(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, run: Run, workplace: Path
) -> None:
    write_bare_model("wrong", vocab_size=None, has_tokenizer=True)
    tensors: dict[str, torch.Tensor] = {}
    for shard in Path("model").glob("*.safetensors"):
        tensors.update(load_file(shard))
    change(tensors)
    save_file(tensors, Path("wrong") / "model.safetensors")
    before = {path.name for path in workplace.iterdir()}

    with pytest.raises(CheckpointError, match=message):
        run("--model_path", "wrong")

    assert {path.name for path in workplace.iterdir()} == before


def test_an_older_checkpoint_is_as_it_was_after_a_refused_run_that_would_have_replaced_it(
    run: Run, workplace: Path
) -> None:
    run()
    weights = (workplace / "out" / "model.safetensors").read_bytes()

    with pytest.raises(DataError):
        run("--overwrite_output_dir", "--dataset", "missing.jsonl")

    assert (workplace / "out" / "model.safetensors").read_bytes() == weights
    assert not list(workplace.glob("*.partial"))


def test_after_a_refusal_the_same_command_with_the_mistake_mended_runs(run: Run, workplace: Path) -> None:
    with pytest.raises(DataError):
        run("--dataset", "missing.jsonl")

    run()

    assert (workplace / "out" / "config.json").is_file()
