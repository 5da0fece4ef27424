"""A save that fails on one rank, and the script that kills runs at random moments: it sees what differs or is left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import kill_and_resume
import pytest
from harness.forked import Ranks
from harness.runs import environment, make_checkpoint, make_dataset
from kill_and_resume import TrialError, compare
from started_ranks import StartedRun, descendants, forked, left_in_shared_memory, wait_until

FULL_FOR_THE_FIRST = """
import os
import mobius.checkpoint.saver as saving
def no_space(save_dir, num_bytes, check=saving.check_disk_space):
    check(save_dir, 10**18 if os.environ["RANK"] == "0" else num_bytes)
saving.check_disk_space = no_space
"""


def test_a_save_that_the_first_rank_cannot_begin_is_told_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl")
    options = """--device cpu --fp32 --model_path model --dataset data.jsonl --num_stages 4 --num_chunks 2
        --batch_size 4 --seq_length 32 --num_iterations 3 --save_steps 2 --save_params none --save_dir saved"""
    ranks = Ranks(
        "harness.late_ranks",
        "faulty_main",
        [FULL_FOR_THE_FIRST, *options.split()],
        num_ranks=2,
        folder=tmp_path,
        environment=environment(tmp_path / "cache"),
    )

    code, output = ranks.wait(), ranks.output()
    assert code == 0, output
    (warning,) = re.findall("^.*warning.*$", output, re.MULTILINE)
    assert re.search(r"warning: checkpoint of step 2 is not saved, and training goes on: .* needs .* is free", warning)
    assert not list(tmp_path.glob("saved/checkpoint-*"))


def test_which_launcher_has_saved_a_checkpoint_makes_no_other_run_of_it(tmp_path: Path) -> None:
    manifest = dict.fromkeys(("step", "num_parameters", "dtype", "has_optimizer", "training", "metric"), 3)
    path, states = tmp_path / "checkpoint.json", []
    for data in ({"launch": "7 at 1.00 s", "epoch": 1}, {"launch": None, "epoch": 1}, {"launch": None, "epoch": 2}):
        path.write_text(json.dumps({**manifest, "data": data}))
        states.append(kill_and_resume.state_of(tmp_path))

    compare("a checkpoint", states[0], states[1])
    with pytest.raises(TrialError, match="data: {'epoch': 1} expected, {'epoch': 2} found"):
        compare("a checkpoint", states[1], states[2])


def test_the_script_tells_what_differs() -> None:
    compare("a run", {"steps": [1], "a.weight": "00"}, {"steps": [1], "a.weight": "00"})

    with pytest.raises(TrialError, match=r"a run: 1 of 2 things differ:\n  a.weight: 00 expected, 01 found"):
        compare("a run", {"steps": [1], "a.weight": "00"}, {"steps": [1], "a.weight": "01"})
    with pytest.raises(TrialError, match=r"b: None expected, 1 found"):
        compare("a run", {}, {"b": 1})


def test_the_script_finds_a_process_that_outlives_its_parent(tmp_path: Path) -> None:
    """In a process of its own: from then on it inherits orphans."""
    output = tmp_path / "output.txt"
    output.touch()

    def work() -> None:
        from started_ranks import inherit_orphans

        inherit_orphans()
        parent = forked(lambda: forked(lambda: time.sleep(60), tmp_path, output), tmp_path, output)
        codes: dict[int, int] = {}
        started = StartedRun(output, {"rank 0": parent}, codes)
        assert wait_until(started.is_over, 20)
        (orphan,) = descendants()
        os.kill(orphan, signal.SIGKILL)
        assert wait_until(lambda: not descendants(), 20)

    _, status = os.waitpid(forked(work, tmp_path, output), 0)
    assert os.waitstatus_to_exitcode(status) == 0, output.read_text()


def test_the_script_finds_what_is_left_in_shared_memory_unless_somebody_has_it_open() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    path = Path("/dev/shm", f"mobius-test-{os.getpid()}")
    try:
        with path.open("w"):
            assert path.name not in left_in_shared_memory(before)
        assert path.name in left_in_shared_memory(before)
    finally:
        path.unlink()


def test_the_script_tells_a_save_of_now_from_what_an_earlier_start_left(tmp_path: Path) -> None:
    out, started = tmp_path / "out", StartedRun(tmp_path / "output.txt")
    (out / "checkpoint-3.partial").mkdir(parents=True)
    phases = []
    for line in ("", "tokenizing: 1 %", "data      ", "start-up  "):
        with started.output_file.open("a") as file:
            file.write(f"{line}\n")
        phases.append(kill_and_resume.phase_of(out, started))
    (out / "checkpoint-3.partial").rename(out / "checkpoint-3")
    phases.append(kill_and_resume.phase_of(out, started))
    (out / "final.partial").mkdir()
    phases.append(kill_and_resume.phase_of(out, started))

    assert phases == ["starting", "tokenizing", "starting", "saving", "training", "exporting"]
