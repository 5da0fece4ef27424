"""The benchmark of evaluation runs a small model on a CPU, and its ratio is what its numbers say."""

import json
from pathlib import Path

import evaluation
import pytest
from harness.forked import HANG_SECONDS


def told(step_seconds: list[float], evaluations: list[tuple[int, float]]) -> dict[str, object]:
    steps = [{"num_tokens": 100, "step_seconds": each, "peak_gpu_memory_gib": None} for each in step_seconds]
    return {
        "steps": steps,
        "evaluations": [{"num_tokens": tokens, "seconds": each, "gpu_gib": 2.0} for tokens, each in evaluations],
    }


def test_the_first_steps_the_last_and_the_first_evaluation_do_not_count() -> None:
    training, judged = evaluation.rates(told([9, 9, 1, 2, 3, 9], [(1600, 80), (1600, 4), (1600, 8), (1600, 5)]))
    assert training == {"tokens": 50, "seconds": 2, "gpu": 0}
    assert judged == {"tokens": 320, "seconds": 100 / 320, "gpu": 2}
    assert evaluation.line("evaluation", judged, training["tokens"]) == ["evaluation", "0.312", "320", "6.40", "2.00"]


@pytest.mark.parametrize(("ratio", "text"), [(2.4, "at least"), (2.39, "less than")])
def test_the_verdict_compares_with_what_is_wanted(ratio: float, text: str) -> None:
    assert evaluation.verdict(ratio) == f"evaluation is {ratio:.2f} times as fast, {text} 2.4"


@pytest.mark.parametrize("words", ["--steps 3", "--evaluations 1"])
def test_nothing_that_is_timed_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluation.parse(["tiny", *words.split()])
    assert "are needed for one that is timed" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.extended), True])
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
