"""What a run leaves and says that does not end well: nothing useless under the final name, nothing complete lost."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from safetensors.torch import load_file, save_file

from mobius.checkpoint.model_folder import write_params_file
from mobius.checkpoint.saved_stage import OpenRun
from mobius.checkpoint.trained_weights import check_trained_weights
from mobius.engine.stage_memory import parts_of
from mobius.errors import CheckpointError, MobiusError, NonFiniteLossError, NoResultError
from mobius.models.layout import StageLayout
from mobius.process.signal_handling import RunStatus
from mobius.reporting.events import StepMetrics
from mobius.training.loop import TrainingLoop

Run = Callable[..., None]


def write_model(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """A folder with the tiny model, whose weights went through `change`."""
    Path(name).mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (Path(name) / file).symlink_to((Path("model") / file).resolve())
    tensors: dict[str, torch.Tensor] = {}
    for shard in Path("model").glob("*.safetensors"):
        tensors.update(load_file(shard))
    change(tensors)
    save_file(tensors, Path(name) / "model.safetensors")


def metrics_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def overflowing(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"].fill_(3e38)


@pytest.mark.parametrize("clipping", ["1", "0"], ids=["clipped", "not clipped"])
def test_a_run_in_which_no_step_was_taken_fails_and_saves_nothing(run: Run, workplace: Path, clipping: str) -> None:
    write_model("model-inf", overflowing)

    with pytest.raises(NoResultError) as raised:
        run("--model_path", "model-inf", "--max_grad_norm", clipping)

    message = str(raised.value)
    assert message.startswith("none of the 3 steps was taken")
    assert f"{workplace / 'out' / 'metrics.jsonl'}" in message
    assert [row["skipped_steps"] for row in metrics_in(workplace / "out")] == [1, 2, 3]
    assert not list(workplace.glob("out/**/*.safetensors"))
    assert not (workplace / "finetune_params.pt").exists()


def test_a_run_that_ends_with_weights_that_are_not_finite_fails_and_replaces_nothing(run: Run, workplace: Path) -> None:
    run()
    older = (workplace / "out" / "model.safetensors").read_bytes()

    with pytest.raises(NoResultError, match=r"weights of stage\(s\) 0, 1 are not finite.*--learning_rate") as raised:
        run("--overwrite_output_dir", "--dtype", "fp16", "--learning_rate", "1e6", "--lr_scheduler_type", "constant")

    assert raised.value.exit_code not in (MobiusError.exit_code, 2, 130)
    assert (workplace / "out.replaced" / "model.safetensors").read_bytes() == older
    assert any(str(workplace / "out.replaced") in note for note in raised.value.__notes__)
    with pytest.raises(CheckpointError, match=r"results in .*out\.replaced was interrupted; .*out has no result"):
        run("--overwrite_output_dir")
    assert (workplace / "out.replaced" / "model.safetensors").read_bytes() == older


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_all_ranks_refuse_a_weight_that_is_not_finite_on_one_of_them(value: float) -> None:
    def session(transport: LocalTransport) -> OpenRun:
        layout = StageLayout.of({"a": (3, 4), "b": (5,)})
        weights = torch.zeros(layout.num_units, dtype=torch.bfloat16)
        if transport.rank == 1:
            layout.views(weights)["b"][2] = value
        state = SimpleNamespace(layout=layout, weights=weights)
        memory = {transport.rank: SimpleNamespace(state=state, parts=parts_of)}
        run_setup = SimpleNamespace(plan=SimpleNamespace(num_stages=2))
        return cast(OpenRun, SimpleNamespace(run_setup=run_setup, transport=transport, memory=memory))

    def work(transport: LocalTransport) -> str:
        with pytest.raises(NoResultError) as raised:
            check_trained_weights(session(transport), num_updates=1, num_steps=1, folder=Path("out"))
        return str(raised.value)

    first, second = run_rank_threads(2, work)
    assert first == second
    assert "weights of stage(s) 1 are not finite" in first


@pytest.mark.parametrize(
    "options",
    ["--dtype bf16 --learning_rate 1e-12", "--dtype fp32 --learning_rate 1e-30", "--use_lora --learning_rate 1e-60"],
)
def test_a_run_that_changed_no_parameter_says_so(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture, options: str
) -> None:
    run(*options.split(), "--num_stages", "2", "--save_params", "none")

    (told,) = (record for record in caplog.records if "no parameter was changed" in record.getMessage())
    assert told.levelname == "WARNING"
    assert "by 3 steps" in told.getMessage()
    card = (workplace / "out" / "README.md").read_text()
    assert "changed no parameter" in card
    assert "fine-tuned" not in card


@pytest.mark.parametrize("options", ["--dtype bf16", "--use_lora"])
def test_a_run_that_changed_parameters_says_nothing_of_it(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture, options: str
) -> None:
    run(*options.split(), "--save_params", "none", "--learning_rate", "1e-3")

    assert not [text for text in caplog.messages if "no parameter was changed" in text]
    assert "changed no parameter" not in (workplace / "out" / "README.md").read_text()


@pytest.mark.parametrize("options", ["--save_steps 1 --save_total_limit 0", "--save_steps 9", "--save_strategy no"])
def test_a_folder_that_is_removed_while_the_run_is_at_it_has_all_results_in_the_end(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: str
) -> None:
    after_step = TrainingLoop._after_step

    def removed(loop: TrainingLoop, metrics: StepMetrics, *more: Any) -> Any:
        if metrics.step == 2:
            if loop.saver is not None:
                loop.saver.finish()
            shutil.rmtree(loop.output.save_dir)
        return after_step(loop, metrics, *more)

    monkeypatch.setattr(TrainingLoop, "_after_step", removed)

    run(*options.split())

    out = workplace / "out"
    assert {"training_args.yaml", "plan.json", "metrics.jsonl", "trainer_log.jsonl", "trainer_state.json"} <= {
        path.name for path in out.iterdir()
    }
    assert [row["step"] for row in metrics_in(out)] == [1, 2, 3]
    assert len((out / "trainer_log.jsonl").read_text().splitlines()) == 3
    assert load_file(out / "model.safetensors")
    assert "was removed during the run" in caplog.text


@pytest.mark.parametrize(
    "options", ["--no_do_train --do_eval --val_size 4", "--no_do_train --do_predict --val_size 4", "--use_lora"]
)
def test_what_is_no_whole_model_never_replaces_the_model_that_it_is_of(run: Run, workplace: Path, options: str) -> None:
    shutil.copytree(workplace / "model", workplace / "out")
    before = sorted(path.name for path in (workplace / "out").iterdir())

    with pytest.raises(CheckpointError, match=r"--save_dir out holds the model that --model_path out names"):
        run("--model_path", "out", "--overwrite_output_dir", *options.split())

    assert sorted(path.name for path in (workplace / "out").iterdir()) == before


@pytest.mark.grid
@pytest.mark.parametrize("mask", [0o077, 0o022], ids=oct)
@pytest.mark.parametrize("options", ["--val_size 4 --do_predict --max_new_tokens 2 --trace", "--use_lora --merge"])
def test_all_that_a_run_leaves_follows_the_umask(run: Run, workplace: Path, mask: int, options: str) -> None:
    before = os.umask(mask)
    try:
        run("--save_steps", "1", "--report_to", "tensorboard", *options.split())
    finally:
        os.umask(before)

    cache = workplace.parent / "cache"  # made before the run
    left = [path for path in workplace.parent.rglob("*") if not path.is_symlink() and path != workplace]
    left = [path for path in left if path != cache and cache not in path.parents]
    assert sum(path.suffix == ".safetensors" for path in left) > 3
    wrong = {
        path.relative_to(workplace.parent).as_posix(): oct(path.stat().st_mode)
        for path in left
        if path.stat().st_mode & 0o666 != 0o666 & ~mask
    }
    assert wrong == {}


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """A disk that is full: the system writes up to `num_bytes` of a file and refuses the rest."""
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)


def test_a_disk_that_is_full_for_the_single_file_leaves_the_model_in_its_place(
    run: Run, workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    run()
    whole = (workplace / "finetune_params.pt").read_bytes()
    sizes = (workplace / "out" / "model.safetensors").stat().st_size, len(whole)
    assert sizes[0] + 1000 < sizes[1], "room for the one and not for the other"
    caplog.clear()

    with no_file_longer_than(sum(sizes) // 2), pytest.raises(CheckpointError) as raised:
        run("--overwrite_output_dir", "--save_dir", "second", "--learning_rate", "1e-3")

    problem, rest = str(raised.value).splitlines()
    assert "--save_params: cannot write finetune_params.pt: " in problem
    assert "File too large" in problem
    assert f"write_params_file(Path('{workplace / 'finetune_params.pt'}'), Path(" in problem
    assert rest.startswith(f"The model itself is complete and checked: {workplace / 'second'}")
    assert (workplace / "finetune_params.pt").read_bytes() == whole, "an older file stays"
    assert not list(workplace.glob("*.partial"))
    assert (workplace / "test_result.txt").stat().st_size > 0
    assert any(message.startswith("model saved to ") for message in caplog.messages)
    exec(problem.partition('python -c "')[2].rpartition('"')[0], {})  # the way out that the message tells
    assert (workplace / "finetune_params.pt").read_bytes() != whole
    saved = load_file(workplace / "second" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in torch.load("finetune_params.pt").items())


def test_a_report_and_a_single_file_that_cannot_be_written_are_told_together_beside_the_saved_model(
    run: Run, workplace: Path
) -> None:
    for name in ("finetune_params.pt", "test_result.txt"):  # what takes the name that is written to first
        (workplace / f"{name}.partial").mkdir()

    with pytest.raises(CheckpointError) as raised:
        run()

    lines = str(raised.value).splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["--save_params", "--save_results"]
    assert (workplace / "out" / "config.json").is_file()
    write_params_file(workplace / "params.pt", workplace / "out")


def test_config_json_is_the_last_file_to_come(run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has it is complete; what is torn has none, and the next run may remove it."""

    def find_a_wrong_tensor(folder: Path, *_: object, **__: object) -> None:
        assert list(folder.glob("*.safetensors"))
        assert not (folder / "config.json").exists()
        raise CheckpointError("a wrong tensor")

    with monkeypatch.context() as patch:
        patch.setattr("mobius.checkpoint.export.verify_folder", find_a_wrong_tensor)
        with pytest.raises(CheckpointError, match="a wrong tensor"):
            run()

    assert not list(workplace.glob("out*/**/config.json"))


def test_ten_steps_in_a_row_that_are_not_finite_end_the_run_and_their_metrics_are_named(
    run: Run, workplace: Path
) -> None:
    write_model("model-inf", overflowing)

    with pytest.raises(NonFiniteLossError, match="10 steps in a row") as raised:
        run("--model_path", "model-inf", "--num_iterations", "20")

    (note,) = raised.value.__notes__
    assert f"{workplace / 'out' / 'metrics.jsonl'}" in note
    assert len(metrics_in(workplace / "out")) == 9, "the tenth step has no numbers: it ends the run"
    assert not list(workplace.glob("out/**/*.safetensors"))


def test_settings_that_cannot_be_written_are_told_before_training(run: Run, workplace: Path) -> None:
    with no_file_longer_than(10), pytest.raises(CheckpointError, match=r"--save_dir .*cannot write.*File too large"):
        run()

    assert not (workplace / "out").exists()


def test_a_trace_that_cannot_be_written_does_not_lose_the_model(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mobius.reporting.recordings.write_part", refuse)

    run("--trace")

    assert (workplace / "out" / "config.json").is_file()
    assert any("No space left on device" in message for message in caplog.messages)


def test_what_an_interruption_would_say_follows_the_run(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, texts = workplace / "out", list[str]()
    run("--num_iterations", "1")

    def note(self: RunStatus, text: str, *, clean_up: Callable[[], None] | None = None) -> None:
        texts.append(text)

    monkeypatch.setattr(RunStatus, "set_status", note)
    run("--overwrite_output_dir", "--num_iterations", "2", "--save_strategy", "no")

    assert texts.pop(0) == "before the first step: nothing was trained, and nothing is left"
    assert texts[0] == f"before the first step: nothing was trained, and {out} is as it was"
    for text, where in zip(texts[1:4], ("in step 1", "after step 1", "after step 2"), strict=True):
        assert text.startswith(f"{where} of 2: training is lost")
        assert text.endswith(f"{out / 'metrics.jsonl'}, and the older results are in {out}.replaced")
    assert re.search(rf"checked model was moved to {out}: .* in {out}/final\.partial", texts[4])
    saved = f"after the last step: the model is complete and checked in {out}"
    assert texts[5:] == [
        f"{saved}; finetune_params.pt was not written",
        f"{saved} and in finetune_params.pt; test_result.txt was not written",
    ]
