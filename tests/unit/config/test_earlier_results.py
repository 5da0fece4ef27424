"""Names that results of an earlier run have: refused before anything is imported or read, with a safe way first."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness.runs import ROOT

from mobius.checkpoint.run_folder import OutputFolder
from mobius.config.cli import parse_args
from mobius.config.earlier_results import SETTINGS, output_files, refuse_taken_names
from mobius.errors import CheckpointError

PARAMS = "--save_params finetune_params.pt exists. Use --save_params none (the model is in --save_dir), or another name"
RESULTS = "--save_results test_result.txt exists. Use --save_results auto (a file in --save_dir), or another name"


@pytest.fixture
def earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "save_ckpt").mkdir()
    for name in (*SETTINGS, "config.json", "model.safetensors"):
        (tmp_path / "save_ckpt" / name).touch()
    for name in ("finetune_params.pt", "test_result.txt"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "folder", "lines"),
    [
        ([str(ROOT / "main.py"), "--save_dir", "second"], "", [PARAMS, RESULTS]),
        (["-m", "mobius.config.launch", "{here}", "--save_dir", "second"], "", [PARAMS, "--save_results"]),
        (["-m", "mobius", "train", "--device", "cpu"], "save_ckpt exists and is not empty. Choose another folder", []),
        (
            ["-c", "import mobius; mobius.finetune('m', 'a.jsonl', save_dir='save_ckpt', device='cpu')"],
            "save_ckpt exists and is not empty. Choose another folder",
            [],
        ),
    ],
    ids=["main.py", "train.sh", "mobius train", "Python"],
)
def test_a_second_run_is_refused_before_torch_is_imported(
    words: list[str], folder: str, lines: list[str], earlier_run: Path
) -> None:
    yaml = earlier_run / "mine.yaml"
    yaml.write_text("device: cpu\nsave_results: test_result.txt\n")
    given = [word.format(here=earlier_run) if word.startswith("{") else word for word in words]
    more = ["--config", str(yaml)] if "mobius.config.launch" in words else []
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *given, *more],
        cwd=earlier_run,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(earlier_run)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    lines_of_run = run.stdout.splitlines()
    assert run.returncode != 0
    assert not any(line.endswith((" torch", " transformers")) for line in lines_of_run)
    text = "\n".join(line for line in lines_of_run if not line.startswith("import time:"))
    assert folder in text
    for line in lines:
        assert line in text
    for line in text.splitlines():
        safe, _, dangerous = line.partition("--overwrite_output_dir")
        assert not dangerous or "another" in safe, "the safe way is told first"


def test_with_the_defaults_of_commands_a_second_run_needs_another_folder_only(earlier_run: Path) -> None:
    refuse_taken_names(parse_args(["--save_dir", "second"], is_command=True))
    refuse_taken_names(parse_args(["--save_dir", "second", "--save_params", "none", "--save_results", "none"]))
    with pytest.raises(CheckpointError, match="save_ckpt exists and is not empty"):
        refuse_taken_names(parse_args([], is_command=True))
    refuse_taken_names(parse_args(["--overwrite_output_dir"]))


def test_what_a_killed_run_left_and_what_resumes_is_judged_later(earlier_run: Path) -> None:
    refuse_taken_names(parse_args(["--resume_from_checkpoint", "true"]))
    words = ["--save_params", "none", "--save_results", "none"]
    for name in ("config.json", "model.safetensors"):
        (earlier_run / "save_ckpt" / name).unlink()
    refuse_taken_names(parse_args(words))
    (earlier_run / "save_ckpt" / "final.partial").mkdir()
    (earlier_run / "save_ckpt" / "final.partial" / "config.json").touch()
    refuse_taken_names(parse_args(words))


def test_a_folder_that_a_run_is_writing_to_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_args([], is_command=True)
    output = OutputFolder(tmp_path / "save_ckpt", overwrite=False, files=output_files(config))
    output.prepare({})
    output.write_settings(dict.fromkeys(SETTINGS, ""))
    output.begin()
    (tmp_path / "save_ckpt" / "checkpoint-1").mkdir()
    (tmp_path / "save_ckpt" / "checkpoint-1" / "checkpoint.json").write_text('{"save_number": 1}')
    with pytest.raises(CheckpointError, match="another run is still writing there"):
        refuse_taken_names(config)
    output.close()
    with pytest.raises(CheckpointError, match="holds the checkpoints of an earlier run"):
        refuse_taken_names(config)
