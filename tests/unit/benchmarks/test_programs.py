"""Smoke tests: the benchmarks that a CPU can run, each on its smallest model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import evaluation
import pytest
import replicas
import saving
import sliced_attention
import sweep
import torch
from harness.forked import HANG_SECONDS
from replicas import TITLES
from sliced_attention import Work

from mobius.models.slice_pieces import AttentionKernel

SIZES = {"length": 70, "heads": 4, "key_heads": 2, "head_size": 16, "repeats": 1}
SLICES = ["--slices", "32", "16", *(word for name, number in SIZES.items() for word in (f"--{name}", str(number)))]


def test_a_pass_over_slices_is_a_pass_over_the_whole() -> None:
    arguments = sliced_attention.parse([*SLICES, "--dtype", "float32"])
    work = Work(arguments, AttentionKernel.CPU, torch.device("cpu"), 16)
    work.forward()
    query, key, value = (torch.cat(own, dim=2) for own in (work.queries, work.keys, work.values))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    actual = torch.cat([output for output, _ in work.outputs], dim=1)
    assert torch.allclose(actual, expected.transpose(1, 2), atol=1e-6)
    work.backward()
    assert not work.cache.gradient_sum_views(slice(None), slice(None))[0].any(), "all gradients are taken"


def output_of(step_seconds: list[float], evaluations: list[tuple[int, float]]) -> dict[str, object]:
    steps = [{"num_tokens": 100, "step_seconds": each, "peak_gpu_memory_gib": None} for each in step_seconds]
    return {
        "steps": steps,
        "evaluations": [{"num_tokens": tokens, "seconds": each, "gpu_gib": 2.0} for tokens, each in evaluations],
    }


def test_the_first_steps_the_last_and_the_first_evaluation_do_not_count() -> None:
    training, judged = evaluation.rates(output_of([9, 9, 1, 2, 3, 9], [(1600, 80), (1600, 4), (1600, 8), (1600, 5)]))
    assert training == {"tokens": 50, "seconds": 2, "gpu": 0}
    assert judged == {"tokens": 320, "seconds": 100 / 320, "gpu": 2}
    assert evaluation.line("evaluation", judged, training["tokens"]) == ["evaluation", "0.312", "320", "6.40", "2.00"]


@pytest.mark.extended  # a benchmark
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_small_model_is_timed_by_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_packed: bool
) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([5, 9, 16, 3, 12] * 8))
    words = ["tiny", "--gpus", "2", "--batch_size", "4", "--seq_length", "16", "--steps", "4", "--evaluations", "2"]
    words += ["--run_seconds", str(HANG_SECONDS), *(["--lengths", str(lengths)] if is_packed else [])]
    options = "--device cpu --compile off --num_stages 4 --num_chunks 2"
    evaluation.main([*words, "--", *options.split()])
    _, _, titles, _, training, judged, verdict = capsys.readouterr().out.splitlines()[-7:]
    assert titles == "| what | s/batch | tokens/s | ratio | GPU GiB |"
    rates = [float(line.split("|")[3].replace(",", "")) for line in (training, judged)]
    assert training.split("|")[4].strip() == "1.00"
    # Both rates are printed as whole numbers, the ratio with two digits.
    least, most = (rates[1] - 0.5) / (rates[0] + 0.5), (rates[1] + 0.5) / (rates[0] - 0.5)
    assert least - 0.005 <= float(judged.split("|")[4]) <= most + 0.005
    assert verdict.startswith("evaluation is ")


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("kind", ["--no_room --resume", ""])
@pytest.mark.extended  # a quarter of a minute each
def test_a_small_model_saves_beside_its_steps_in_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    small = "--num_layers 2 --gpus 2 --batch_size 4 --seq_length 16 --steps 4 --seconds 0.1"
    words = ["tiny", *small.split(), "--folder", str(tmp_path), "--run_seconds", str(HANG_SECONDS), *kind.split()]
    options = "--device cpu --compile off --num_stages 2 --num_chunks 2"
    saving.main([*words, "--", *options.split()])
    printed = capsys.readouterr().out
    parameters = 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 2 * 32000 * 64 + 64
    assert f"a checkpoint has {12 * parameters / 1e9:.2f} GB; 1 saves, one every" in printed
    assert f": {12 * parameters / 1e9:.2f} GB in " in printed
    assert ("standstill of the worst save over bytes / disk rate" in printed) == bool(kind)
    assert ("first resumed step ends after" in printed) == bool(kind)
    assert not list(tmp_path.iterdir())


WORDS = "tiny --ranks 2 --batch_size 8 --seq_length 32 --num_chunks 4"


@pytest.mark.extended  # a benchmark
@pytest.mark.usefixtures("forked_starts")
def test_replicas_are_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--steps 3 --elements 200000 --case 2 -- --device cpu --num_stages 2"
    monkeypatch.setattr(sys, "argv", ["replicas.py", *WORDS.split(), *options.split()])
    with pytest.raises(SystemExit) as ended:
        replicas.main()
    printed = capsys.readouterr().out
    assert not ended.value.code, printed
    link = json.loads(next(line for line in printed.splitlines() if line.startswith("links")).removeprefix("links"))
    assert link.keys() == {"sums in float32", "sums in bfloat16", "weights"}
    assert all(rate > 0 for rate in link.values())
    row = [cell.strip() for cell in printed.splitlines()[-1].strip("|").split("|")]
    shown = dict(zip(TITLES, row, strict=True))
    assert float(shown["s/step"]) > 0
    assert shown["sums GB/s"] == f"{link['sums in bfloat16']:.2f}"
    assert 10 < float(shown["loss"]) < 11  # log(32000) is 10.4


@pytest.mark.extended
def test_a_whole_run_of_the_smallest_model_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    trial = ["--size", "tiny", "--gpus", "1", "--no_limit", "--steps", "1", "--runs", "2", "--output", str(output)]
    small = ["--device", "cpu", "--fp32", "--batch_size", "4", "--seq_length", "16", "--compile", "off"]

    sweep.main(["choice", "13b", *trial, "--", *small])

    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["problem"] for row in rows] == [None, None], capsys.readouterr().out
    assert rows[0]["plan"]["num_stages"] == 4
    assert rows[1]["options"]["num_stages"] == 6
    table = "| tiny 64x128 no limit | 4 / "
    assert table in capsys.readouterr().out

    sweep.main(["report", "--output", str(output)])

    printed = capsys.readouterr().out
    assert table in printed
    assert printed.count("| tiny 64x128 no limit | ") == 3  # of choice, and a prediction for each run
