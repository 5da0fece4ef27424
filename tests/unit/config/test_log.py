"""The first rank talks, the others only warn, and libraries are quiet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mobius.errors import ConfigError, MobiusError

ROOT = Path(__file__).resolve().parents[3]

# A process of its own: logging is set up for a whole process, this one's included.
PROGRAM = """
import logging, sys, warnings
from mobius.log import setup_logging
setup_logging(5)
setup_logging(int(sys.argv[1]))
log = logging.getLogger("mobius.training.trainer")
log.debug("details"); log.info("step %d", 1); log.warning("skipped"); log.error("lost")
logging.getLogger("transformers.modeling_utils").warning("noise")
logging.getLogger("some.library").info("noise")
warnings.warn_explicit("noise", FutureWarning, "x.py", 1, module="torch.nn.modules")
warnings.warn("own")
"""


def output_of(rank: int) -> tuple[str, str]:
    command = [sys.executable, "-c", PROGRAM, str(rank)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout, run.stderr


def test_the_first_rank_prints_plain_lines() -> None:
    out, err = output_of(0)
    assert out.splitlines() == ["step 1", "warning: skipped", "error: lost", "warning: <string>:11: UserWarning: own"]
    assert err == ""


def test_other_ranks_only_warn_and_say_who_they_are() -> None:
    out, err = output_of(2)
    assert out == ""
    assert err.splitlines()[:2] == ["[rank 2] warning: skipped", "[rank 2] error: lost"]
    assert all("noise" not in line for line in err.splitlines())


def test_a_reader_that_has_gone_ends_nothing_and_is_not_complained_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "0"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, "")


def test_every_error_is_a_mobius_error_with_an_exit_code() -> None:
    def below(kind: type[MobiusError]) -> set[type[MobiusError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    codes = {kind.__name__: kind.exit_code for kind in below(MobiusError)}
    assert codes.pop("ConfigError") == 2
    assert len(codes) >= 9
    assert set(codes.values()) == {1}


def test_a_config_error_has_a_line_for_each_problem() -> None:
    error = ConfigError("first", "second", hint="look here")
    assert error.problems == ("first", "second")
    assert str(error) == "first\nsecond\nlook here"
    with pytest.raises(MobiusError):
        raise error
