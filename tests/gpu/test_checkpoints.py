"""Checkpoints, resumed runs and evaluation on GPUs, deterministic kernels; with `-m gpu` on a CPU, the same there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness.runs import ROOT, VOCAB, environment, free_port, make_checkpoint, make_dataset
from harness.samples import row_of
from harness.sessions import Record, SavedSession, differing, random_samples, saved_state
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
HIDDEN = 1024 if HAS_GPU else 32
"""Wide enough that copying a stage takes longer than the host takes to begin the next step's updates."""
STEPS, SAVED = 7, (2, 4, 5)
OPTIONS = f"""--device {DEVICE} --bf16 --compile off --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 64
    --recompute full --num_iterations {STEPS} --learning_rate 1e-3"""
MODES = {
    "streamed": "--resident_stages 0",
    "streamed, unclipped": "--resident_stages 0 --max_grad_norm 0",
    "mixed": "--resident_stages 2",
    "resident": "--no_offload",
    "resident, unclipped": "--no_offload --max_grad_norm 0",
}
PACKED = {"packed": 30, "full rows": 64}
"""Longest sample: of 30 tokens several share a row of 64."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    if HIDDEN > 32:
        config = AutoConfig.from_pretrained(folder, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, head_dim=128)
        config.num_attention_heads, config.num_key_value_heads = HIDDEN // 128, 2
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def kind(model: Path, mode: str, packing: str) -> SavedSession:
    more = "--packing off" if packing == "full rows" else ""
    return SavedSession(model, f"{OPTIONS} {MODES[mode]} {more}", PACKED[packing])


def assert_same(found: Record, expected: Record) -> None:
    assert found.numbers == {step: expected.numbers[step] for step in found.numbers}
    assert not differing(found.final, expected.final)


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_is_its_step_to_the_bit_and_so_is_the_run_that_goes_on_from_it(
    model: Path, tmp_path: Path, mode: str
) -> None:
    """With room for all copies and without; the next steps' updates follow at once, and nothing else waits."""
    runs = kind(model, mode, "packed")
    expected = runs.run(noted_steps=SAVED)
    for is_tight in (False, True):
        folder = tmp_path / f"tight-{is_tight}"
        saving = runs.run(save_dir=folder, saved_steps=SAVED, is_tight=is_tight)
        assert saving.had_room == (not is_tight)
        assert_same(saving, expected)
        for step in SAVED:
            found = saved_state(folder / f"checkpoint-{step}", expected.states[step])
            assert not differing(found, expected.states[step]), f"step {step}, tight: {is_tight}"
    resumed = runs.run(resumed=tmp_path / "tight-True" / "checkpoint-4")
    assert sorted(resumed.numbers) == [5, 6, 7]
    assert_same(resumed, expected)


@pytest.mark.parametrize(("saved_by", "goes_on"), [("streamed", "mixed"), ("resident", "streamed")])
def test_a_run_goes_on_where_other_stages_stay_on_the_device(
    model: Path, tmp_path: Path, saved_by: str, goes_on: str
) -> None:
    expected = kind(model, saved_by, "packed").run(save_dir=tmp_path, saved_steps=(4,))
    resumed = kind(model, goes_on, "packed").run(resumed=tmp_path / "checkpoint-4")
    for step, (loss, norm) in resumed.numbers.items():
        assert loss == pytest.approx(expected.numbers[step][0], rel=1e-3)
        assert norm == pytest.approx(expected.numbers[step][1], rel=2e-2)


@pytest.mark.parametrize("mode", ["streamed, unclipped", "mixed", "resident"])
def test_evaluations_change_no_bit_of_training(model: Path, mode: str) -> None:
    runs = kind(model, mode, "packed")
    assert_same(runs.run(evaluates=True), runs.run())


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_an_evaluation_is_that_of_the_plain_model(model: Path, mode: str, packing: str) -> None:
    """bf16 on both sides; each sample by itself in the plain model."""
    runs = kind(model, mode, packing)
    with runs._opened(None, None) as (session, _, _):
        found = runs.evaluator(session).evaluate()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(DEVICE).eval()
    samples, losses, hits = random_samples(9, runs.longest, seed=5), 0.0, 0
    for index in range(len(samples)):
        tokens, is_target = (torch.from_numpy(each.copy()).to(DEVICE) for each in row_of(samples.sample(index)))
        with torch.no_grad():
            logits = plain(input_ids=tokens.long().unsqueeze(0)).logits[0, :-1].float()
        wanted = is_target[1:].bool()
        losses += float(F.cross_entropy(logits[wanted], tokens[1:][wanted].long(), reduction="sum"))
        hits += int((logits.argmax(-1) == tokens[1:])[wanted].sum())
    assert found.num_samples == 9
    assert found.loss == pytest.approx(losses / found.num_targets, rel=2e-3)
    assert abs(found.metrics["token_accuracy"] - hits / found.num_targets) <= 2 / found.num_targets
    assert plain.config.vocab_size == VOCAB


def start_main(folder: Path, num_ranks: int, save_dir: str, words: Sequence[str]) -> list[float]:
    """A whole run on so many devices; its losses."""
    words = [*words, "--save_dir", save_dir, "--save_params", "none", "--save_results", f"{save_dir}.txt"]
    launcher = f"-m torch.distributed.run --nproc_per_node {num_ranks} --master_port {free_port()}".split()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:num_ranks]
    result = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "main.py"), "--device", DEVICE, *words],
        cwd=folder,
        env={**environment(folder / "cache"), "CUDA_VISIBLE_DEVICES": ",".join(shown)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    out = folder / save_dir
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_go_on_as_one_and_as_two_again(tmp_path: Path) -> None:
    """By CUDA_VISIBLE_DEVICES alone; the number of processes follows it."""
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl", 200)
    options = """--model_path model --dataset data.jsonl --bf16 --num_stages 4 --num_chunks 2 --batch_size 4
        --seq_length 96 --num_iterations 12 --learning_rate 1e-3 --save_steps 4 --save_total_limit 0 --compile off"""
    expected = start_main(tmp_path, 2, "two", options.split())
    one = start_main(tmp_path, 1, "one", ["--resume_from_checkpoint", "two/checkpoint-4"])
    again = start_main(tmp_path, 2, "again", ["--resume_from_checkpoint", "one/checkpoint-8"])
    assert (len(expected), len(one), len(again)) == (12, 8, 4), "another folder has the steps that were made there"
    assert one == pytest.approx(expected[4:], rel=1e-3)
    assert again == pytest.approx(expected[8:], rel=1e-3)


@pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_that_are_killed_end_as_the_one_that_was_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "kill_and_resume.py"), "--kills", "4", "--launched", "0"]
    result = subprocess.run(
        [*command, "--device", DEVICE, "--folder", str(tmp_path)],
        env=environment(tmp_path / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
