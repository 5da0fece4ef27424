"""Owns how a failed run ends on the screen: torchrun, but with one line about the rank that ended first.

Does not own the launch itself: arguments are torchrun's, and the ranks print their own errors. torchrun adds forty
lines of its own traceback to them, and the cause is hard to find above it. After Ctrl-C it says nothing: the first rank
does.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM, as that of the ranks."""


def main(argv: Sequence[str]) -> int:
    """Run torchrun to its end; returns the exit code of the rank that ended first, 128 + N if signal N ended it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_before_ranks)
    # Only now: Ctrl-C may come into the seconds that the imports take.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_torchrun

    logging.disable(logging.ERROR)
    try:
        run_torchrun(list(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(describe_failure(rank, failure.exitcode) + "\n")
        return exit_code(failure.exitcode)
    except SignalException:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one would interrupt Python's own end, which tells it
        return INTERRUPTED
    return 0


def _end_before_ranks(_number: int, _frame: object) -> None:
    """Until torchrun takes the signals over, which it does when it starts the ranks."""
    sys.stderr.write("interrupted before the ranks started: nothing is left\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def describe_failure(rank: int, code: int) -> str:
    """The line for the user; `code` is negative where a signal ended the process."""
    if code >= 0:
        return f"rank {rank} ended first, with exit code {code}; all ranks were stopped"
    line = f"rank {rank} ended first, by {signal.Signals(-code).name}; all ranks were stopped"
    if -code == signal.SIGKILL:
        line += " (usually the system, out of CPU memory: `dmesg` tells)"
    return line


def exit_code(code: int) -> int:
    """A process's exit code as a shell would report it."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
