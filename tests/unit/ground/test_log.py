"""The first rank talks, the others only warn, and libraries are quiet."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mobius.process.log import printable

ROOT = Path(__file__).resolve().parents[3]

# A process of its own: logging is set up for a whole process, this one's included.
PROGRAM = """
import logging, sys, warnings
from mobius.process.log import RANK_ZERO_ONLY, setup_logging
setup_logging(5)
setup_logging(int(sys.argv[1]), is_verbose=len(sys.argv) > 2)
log = logging.getLogger("mobius.training.trainer")
log.debug("details"); log.info("step %d", 1); log.warning("skipped"); log.error("lost")
log.warning("the same on all", extra=RANK_ZERO_ONLY)
logging.getLogger("transformers.modeling_utils").warning("noise")
logging.getLogger("some.library").info("noise")
warnings.warn_explicit("noise", FutureWarning, "x.py", 1, module="torch.nn.modules")
warnings.warn("own")
"""


def output_of(rank: int, *options: str) -> tuple[str, str]:
    command = [sys.executable, "-c", PROGRAM, str(rank), *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout, run.stderr


def test_the_first_rank_prints_plain_lines() -> None:
    out, err = output_of(0)
    assert out.splitlines() == [
        *("step 1", "warning: skipped", "error: lost", "warning: the same on all"),
        "warning: <string>:12: UserWarning: own",
    ]
    assert err == ""


def test_details_are_printed_where_they_are_wanted_and_on_the_first_rank_only() -> None:
    assert output_of(0, "verbose")[0].splitlines()[:2] == ["details", "step 1"]
    assert output_of(2, "verbose") == output_of(2)


def test_other_ranks_only_warn_and_say_who_they_are() -> None:
    out, err = output_of(2)
    assert out == ""
    assert err.splitlines()[:2] == ["[rank 2] warning: skipped", "[rank 2] error: lost"]
    assert all("noise" not in line and "the same on all" not in line for line in err.splitlines())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\0c\x7f\x9b31m", "a\\rb\\x00c\\x7f\\x9b31m"),
        ("safe\u202egnp.exe\u2066", "safe\\u202egnp.exe\\u2066"),
        ("half \ud83d of a pair", "half \\ud83d of a pair"),
        ("two\nlines,\ta tab, 模型, é, 🙂", "two\nlines,\ta tab, 模型, é, 🙂"),
    ],
)
def test_control_characters_are_shown_and_not_sent(text: str, shown: str) -> None:
    assert printable(text, io.StringIO()) == shown


def test_a_reader_that_has_gone_ends_nothing_and_is_not_complained_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "0"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(("rank", "is_terminal", "is_shown"), [(0, True, True), (0, False, False), (1, True, False)])
def test_a_bar_of_long_work_is_on_the_first_ranks_terminal_only(rank: int, is_terminal: bool, is_shown: bool) -> None:
    program = f"""
import sys
from mobius.process import log
sys.stderr.isatty = lambda: {is_terminal}
log.PROGRESS_BAR_DELAY_SECONDS = 0.0
log.setup_logging({rank})
with log.progress_bar("planning", " plans", 3) as bar:
    bar.update(2)
    bar.refresh()
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("planning:  67%" in run.stderr and "2/3" in run.stderr) == is_shown
    assert is_shown or run.stderr == ""
