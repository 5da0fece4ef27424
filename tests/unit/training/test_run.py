"""What a run of one rank shows and leaves: milestones in order, every file, and a model that loads and generates."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mobius.engine.state_files import Visit
from mobius.errors import ConfigError, PlanError
from mobius.process.activity import Activity
from mobius.reporting.events import StepMetrics
from mobius.reporting.pictures import draw_training

Run = Callable[..., None]

SAVED_FILES = {
    "README.md",
    "all_results.json",
    "config.json",
    "events.jsonl",
    "generation_config.json",
    "metrics.jsonl",
    "model.safetensors",
    "plan.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "train_results.json",
    "trainer_log.jsonl",
    "trainer_state.json",
    "training_args.yaml",
    "training_loss.png",
}


def metrics_of(workplace: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (workplace / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_every_file_and_nothing_else(run: Run, workplace: Path) -> None:
    before = {path.name for path in workplace.iterdir()}

    run()

    assert {path.name for path in workplace.iterdir()} - before == {"out", "finetune_params.pt", "test_result.txt"}
    saved = {path.name for path in (workplace / "out").iterdir()}
    assert saved >= SAVED_FILES
    assert saved - SAVED_FILES <= {"special_tokens_map.json", "chat_template.jinja"}


def test_the_saved_model_loads_and_generates(run: Run, workplace: Path, saved_inputs: Path) -> None:
    run("--learning_rate", "1e-3")

    model = AutoModelForCausalLM.from_pretrained("out")
    tokenizer = AutoTokenizer.from_pretrained("out")
    prompt = tokenizer("Count to", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape == (1, prompt["input_ids"].shape[1] + 5)
    assert isinstance(tokenizer.decode(generated[0], skip_special_tokens=True), str)
    assert GenerationConfig.from_pretrained("out").eos_token_id is not None

    original = AutoModelForCausalLM.from_pretrained(saved_inputs / "model")
    single_file = torch.load("finetune_params.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, original.get_parameter(name)), f"{name} was not trained"
        assert torch.equal(single_file[name], parameter)


def test_the_metrics_have_a_line_per_step_with_every_number(run: Run, workplace: Path) -> None:
    run("--logging_steps", "3")

    rows = metrics_of(workplace)
    fields = {field.name for field in dataclasses.fields(StepMetrics)} - {"numbers"}
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() == fields
        assert isinstance(row["loss"], float)
        assert 7 < row["loss"] < 10, "the logarithm of 4096 tokens is 8.3"
        assert isinstance(row["wait_seconds"], dict)
        assert row["wait_seconds"].keys() == {"weights", "optimizer", "neighbours", "activations"}
        assert row["peak_gpu_memory_gib"] is None
        assert row["loss_scale"] is None
        assert row["skipped_steps"] == 0


def test_waiting_for_a_buffer_of_states_on_disks_counts_for_the_optimizer(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Visit.room

    def late(visit: Visit) -> torch.Tensor:
        time.sleep(0.2)
        return taken(visit)

    monkeypatch.setattr(Visit, "room", late)
    run("--dtype", "bf16", "--offload_states_to", "disk", "--max_grad_norm", "0", "--resident_stages", "0")
    # Of two stages, once for the gradients.
    assert all(row["wait_seconds"]["optimizer"] > 0.4 for row in metrics_of(workplace))  # type: ignore[index]


def test_the_results_tell_settings_time_with_the_optimizer_and_memory(run: Run, workplace: Path) -> None:
    run("--learning_rate", "2e-5")

    text = (workplace / "test_result.txt").read_text()
    training = re.search(r"training, optimizer included +([\d.]+) s", text)
    assert training
    seconds = [float(str(row["step_seconds"])) for row in metrics_of(workplace)]
    assert float(training[1]) == pytest.approx(sum(seconds), abs=0.01)
    assert re.search(r"seconds per step, median +[\d.]+ s", text)
    assert re.search(r"^0 +cpu +- +- +- +[\d.]+ GiB$", text, re.MULTILINE), "one line of memory per rank"
    assert "host memory of all ranks together" in text
    assert "learning_rate: 2.0e-05" in text
    assert "2 stages on 1 rank(s)" in text


def test_the_resolved_settings_and_the_plan_are_saved_with_the_model(run: Run, workplace: Path) -> None:
    run("--num_stage", "4")

    settings = yaml.safe_load((workplace / "out" / "training_args.yaml").read_text())
    assert (settings["num_stages"], settings["dtype"], settings["adam_beta2"]) == (4, "fp32", 0.999)
    plan = json.loads((workplace / "out" / "plan.json").read_text())
    assert [(span["first_layer"], span["end_layer"]) for span in plan["cuts"]] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_milestones_come_in_order(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mobius")

    run()

    milestones = [
        r"^model +model \(llama\), ",
        r"^data +data\.jsonl ",
        r"^training +3 steps of 4 rows x 16 tokens, .* in 2 microbatches of 2, on cpu",
        r"^step 1/3  loss ",
        r"^step 2/3  loss ",
        r"^step 3/3  loss ",
        r"^model saved to .*/out",
        r"^模型已保存到 finetune_params\.pt",
        r"^results saved to test_result\.txt",
        r"^talk to it: mobius chat out$",
    ]
    messages = [record.getMessage() for record in caplog.records]
    places = []
    for pattern in milestones:
        found = [index for index, message in enumerate(messages) if re.search(pattern, message)]
        assert len(found) == 1, (pattern, messages)
        places += found
    assert places == sorted(places)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_the_closing_line_counts_the_start_as_the_table_does(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mobius")

    run()

    (startup,), (loading,) = (
        re.findall(pattern, caplog.text, re.MULTILINE) for pattern in (r"start-up +([\d.]+) s", r"loading ([\d.]+) s")
    )
    assert float(loading) == pytest.approx(float(startup), abs=0.5)


def test_the_first_step_every_second_and_the_last_are_shown(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mobius")

    run("--logging_steps", "2")

    steps = [record.getMessage()[:8] for record in caplog.records if record.getMessage().startswith("step ")]
    assert steps == ["step 1/3", "step 2/3", "step 3/3"]


@pytest.mark.parametrize("memory", ["--use_offload", "--no_offload"])
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_trains_and_is_saved_in_its_format(
    run: Run, workplace: Path, saved_inputs: Path, name: str, dtype: torch.dtype, memory: str
) -> None:
    run("--dtype", name, memory, "--learning_rate", "1e-3", "--warmup_steps", "0", "--lr_scheduler_type", "constant")

    rows = metrics_of(workplace)
    losses = [float(str(row["loss"])) for row in rows]
    assert all(7 < loss < 10 for loss in losses)
    if dtype is torch.float16:
        assert all(float(str(row["loss_scale"])) >= 1 for row in rows)
    assert json.loads((workplace / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    model = AutoModelForCausalLM.from_pretrained("out")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {value.dtype for value in torch.load("finetune_params.pt", weights_only=True).values()} == {dtype}
    original = AutoModelForCausalLM.from_pretrained(saved_inputs / "model").to(dtype)
    moved = [not torch.equal(p, original.get_parameter(name)) for name, p in model.named_parameters()]
    assert sum(moved) > len(moved) // 2


def test_streamed_and_resident_stages_train_alike(run: Run, workplace: Path) -> None:
    losses = []
    for memory in (["--use_offload", "--use_prefetch"], ["--use_offload", "--no_prefetch"], ["--no_offload"]):
        run(*memory, "--overwrite_output_dir", "--learning_rate", "1e-3")
        losses.append([row["loss"] for row in metrics_of(workplace)])

    assert losses[0] == losses[1] == losses[2]
    assert len(set(map(str, losses[0]))) == 3, "the loss moves"


def test_a_run_goes_on_from_what_another_residency_saved(run: Run, workplace: Path) -> None:
    """Nothing that is saved tells where stages were: fine-tuning a saved model again gives the same losses and bits."""
    results = []
    for first, second in (("0", "0"), ("1", "all"), ("all", "1")):
        arguments = ("--overwrite_output_dir", "--learning_rate", "1e-3", "--num_iterations", "2")
        run("--resident_stages", first, "--save_dir", "first", *arguments)
        run("--resident_stages", second, "--model_path", "first", *arguments)
        losses = [row["loss"] for row in metrics_of(workplace)]
        results.append((losses, torch.load("finetune_params.pt", weights_only=True)))

    losses, parameters = results[0]
    for other_losses, others in results[1:]:
        assert other_losses == losses
        assert all(torch.equal(others[name], value) for name, value in parameters.items())


def test_the_plan_that_is_saved_tells_what_stays(run: Run, workplace: Path) -> None:
    for residency, expected, slots in (("auto", [], [2]), ("1", [0], [1]), ("all", [0, 1], [0])):
        run("--resident_stages", residency, "--overwrite_output_dir", "--num_iterations", "1")
        plan = json.loads((workplace / "out" / "plan.json").read_text())
        assert (plan["resident"], plan["slots"]) == (expected, slots)


def test_more_resident_stages_than_there_are_leave_nothing_behind(run: Run, workplace: Path) -> None:
    with pytest.raises(PlanError, match="--resident_stages 3: each rank has 2"):
        run("--resident_stages", "3")
    assert not (workplace / "out").exists()


def test_a_model_without_weights_starts_from_the_seed(run: Run, workplace: Path) -> None:
    fresh = workplace / "fresh"
    fresh.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (fresh / name).symlink_to(workplace / "model" / name)
    losses = []
    for seed in ("1", "1", "2"):
        run("--model_path", "fresh", "--seed", seed, "--overwrite_output_dir", "--num_iterations", "1")
        losses.append(metrics_of(workplace)[0]["loss"])

    assert losses[0] == losses[1] != losses[2]


def test_trackers_state_and_card_are_left_and_no_secret_of_the_environment_is_told(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    names = ("HF_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY", "SOME_PASSWORD")
    secrets = {name: f"a-secret-{name}-0123456789" for name in names}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)

    run("--report_to", "tensorboard", "--run_name", "first try")

    saved = [path for path in workplace.rglob("*") if path.is_file() and path.name not in ("data.jsonl",)]
    assert [path.name for path in saved if path.name.startswith("events.out")]
    everything = b"".join(path.read_bytes() for path in saved) + caplog.text.encode()
    assert [name for name, secret in secrets.items() if secret.encode() in everything] == []
    assert b"first try" in (workplace / "out" / "README.md").read_bytes()
    state = json.loads((workplace / "out" / "trainer_state.json").read_text())
    losses = [row["loss"] for row in metrics_of(workplace)]
    assert [entry["loss"] for entry in state["log_history"] if "loss" in entry] == losses
    assert state["num_input_tokens_seen"] == sum(int(str(row["num_tokens"])) for row in metrics_of(workplace))
    closing = [text for text in caplog.messages if text.startswith(("trained 3 steps", "time: ", "memory: "))]
    assert len(closing) == 3


def test_a_picture_that_cannot_be_drawn_costs_a_warning_not_the_model(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mobius.training.reporting.draw_training", draw_training)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    run()

    assert (workplace / "out" / "config.json").exists()
    assert not (workplace / "out" / "training_loss.png").exists()
    assert "training_loss.png is not written" in caplog.text
    assert "training_loss.png" not in (workplace / "out" / "README.md").read_text()


def test_a_hang_while_the_picture_is_drawn_would_be_told_as_that(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = list[Activity](), list[str]()

    def make() -> Activity:
        made.append(Activity())
        return made[-1]

    monkeypatch.setattr("mobius.training.run.Activity", make)
    monkeypatch.setattr("mobius.training.reporting.draw_training", lambda *_, **__: told.extend(made[0].describe()))
    run("--save_steps", "1")

    assert "at the picture of the training and the model card" in told[0]


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_read(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mobius.reporting.trackers.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="--report_to wandb.*pip install wandb"):
        run("--report_to", "wandb", "--model_path", "absent")
