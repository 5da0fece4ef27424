"""The what-if script: a table without torch, refusals as lines, a picture and a trace where they are wanted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mobius.planner.cards import CARDS, estimate_profile
from mobius.planner.model_files import shape_of_model
from mobius.planner.profile import Source
from mobius.training.timeline import read_trace

ROOT = Path(__file__).parents[3]
SMALL = ["--model", "1b", "--batch_size", "8", "--gpus", "2", "--num_stages", "4", "--num_chunks", "4"]


def simulate(*arguments: str, without_torch: bool = False) -> subprocess.CompletedProcess[str]:
    program = [str(ROOT / "scripts" / "simulate.py")]
    if without_torch:
        hide = "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        program = ["-c", hide + "runpy.run_path(sys.argv[0], run_name='__main__')", *program]
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_table_has_a_row_per_combination_and_needs_no_torch() -> None:
    finished = simulate(*SMALL, "--card", "H200", "4090", "--pcie", "3", "4", without_torch=True)
    assert finished.returncode == 0, finished.stderr
    rows = [line for line in finished.stdout.splitlines() if line.strip().startswith("1b ")]
    assert len(rows) == 4 + 2  # the table, and per card how the layers are cut
    assert "estimated" in finished.stdout


def test_a_machine_that_is_too_small_is_a_line_beside_those_that_are_not() -> None:
    finished = simulate(*SMALL, "--gpu_memory_limit", "0.5", "8")
    assert finished.returncode == 0, finished.stderr
    assert "does not fit" in finished.stdout
    assert simulate(*SMALL, "--gpu_memory_limit", "0.5").returncode == 1


def test_a_wrong_card_is_one_line_with_the_known_ones() -> None:
    finished = simulate(*SMALL, "--card", "B12")
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: the card 'B12' is not known")
    assert "Traceback" not in finished.stderr


def test_the_predicted_step_is_drawn_and_written_like_a_measured_one(tmp_path: Path) -> None:
    picture, file = tmp_path / "step.png", tmp_path / "trace.json"
    finished = simulate(*SMALL, "--resident_stages", "0", "--output", str(picture), "--trace", str(file))
    assert finished.returncode == 0, finished.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    trace = read_trace(file)
    assert trace.facts.is_predicted
    assert trace.steps == [1, 2, 3]
    lanes = trace.lane_seconds(3)[0]
    assert {"compute", "load", "offload", "optimizer"} <= lanes.keys()


def test_a_measured_profile_takes_the_place_of_estimates_if_it_is_of_this_run(tmp_path: Path) -> None:
    shape = shape_of_model("1b")
    profile = estimate_profile(CARDS["H200"], shape, microbatch_tokens=1024, seq_length=512, num_ranks=2)
    file = tmp_path / "profile.json"
    file.write_text(replace(profile, source=Source.MEASURED, basis="2 x here").to_json())

    finished = simulate(*SMALL, "--profile", str(file))
    assert "measured: 2 x here" in finished.stdout, finished.stderr

    other = simulate(*SMALL, "--profile", str(file), "--seq_length", "1024")
    assert other.returncode == 2
    assert "the profile is of another run" in other.stderr
    file.write_text("{}")
    assert simulate(*SMALL, "--profile", str(file)).stderr.startswith("error: not a profile")
