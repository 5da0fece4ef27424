"""Limits of the system are told by their own names, at the start or where they are met."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from mobius.errors import CheckpointError, GpuMemoryError, HostMemoryError, LimitError
from mobius.process.system_limits import limit_error_from


def said_under(limit: str, soft: int, hard: int, code: str) -> str:
    """Output of `code` in a process of its own under a limit; an error of Mobius is printed with its class."""
    program = f"""
        import resource
        from mobius.errors import MobiusError
        from mobius.process.system_limits import limit_error_from, prepare_limits
        resource.setrlimit(resource.{limit}, ({soft}, {hard}))
        try:
            {code}
            print("good", resource.getrlimit(resource.{limit}))
        except Exception as error:
            told = error if isinstance(error, MobiusError) else limit_error_from(error)
            print(type(told).__name__, told)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    assert said_under("RLIMIT_NOFILE", 32, 600, "prepare_limits(4)") == "good (600, 600)\n"


def test_too_few_open_files_are_told_at_the_start_with_what_is_needed() -> None:
    told = said_under("RLIMIT_NOFILE", 32, 32, "prepare_limits(2)")

    assert told.startswith("LimitError `ulimit -n` allows 32 open files")
    assert "2 rank(s) needs 80" in told


@pytest.mark.parametrize(
    ("limit", "number", "code", "words"),
    [
        ("RLIMIT_NOFILE", 10, "held = [open('/dev/null') for _ in range(20)]", "LimitError.*-n` allows 10 open"),
        ("RLIMIT_AS", 2**29, "held = bytearray(2**30)", "HostMemoryError.*ulimit -v unlimited"),
        (
            "RLIMIT_AS",
            2**29,
            'raise RuntimeError("can\'t start new thread")',
            "LimitError.*thread.*Raise this limit",
        ),
    ],
)
def test_a_limit_that_is_met_later_is_told_by_its_name(limit: str, number: int, code: str, words: str) -> None:
    assert re.search(words, said_under(limit, number, number, code))


def test_the_cause_of_an_error_counts_and_an_answer_of_our_own_stays() -> None:
    def raised(error: Exception, cause: Exception) -> Exception:
        error.__cause__ = cause
        return error

    assert isinstance(limit_error_from(raised(CheckpointError("x"), OSError(24, "Too many open files"))), LimitError)
    assert isinstance(limit_error_from(raised(CheckpointError("x"), MemoryError())), HostMemoryError)
    assert limit_error_from(raised(GpuMemoryError("x"), MemoryError())) is None
    assert limit_error_from(raised(CheckpointError("x"), OSError(13, "Permission denied"))) is None
