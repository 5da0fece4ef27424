"""Owns the processes of a run: runs torchrun, but waits while ranks save, and prints one line about a crashed rank.

It does not own the launch itself: arguments are torchrun's, and the ranks print their own errors. torchrun adds forty
lines of traceback, above which the cause is hard to find. It also kills ranks 30 s after it forwards a signal, and
restarts them after an interruption. Here signals go to the ranks, which end by themselves:

    Ctrl-C, SIGTERM   to every rank: it saves and ends, or ends at once if it cannot; SIGHUP of a closed terminal, too
    the second        to every rank: it ends at once
    the third         every rank is killed
    a rank has died   the others end; up to --max_restarts times all start again

After an interruption, the first rank says what was saved or lost.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C or SIGTERM; the ranks use the same code."""
FINAL_EXIT_CODES = (2, 3, INTERRUPTED_EXIT_CODE)
"""Exit codes after which a restart would not help: a wrong option, nothing to save, an interruption."""
STALLED_EXIT_CODE = 75
"""Exit code of ranks that ended because the run made no progress; after a restart it may continue."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DUPLICATE_SIGNAL_SECONDS = 2.0
"""Longest time within which one press of Ctrl-C may arrive twice: from the terminal and from a forwarding program."""


class SignalForwarder:
    """Sends signals to the running ranks, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._processes: list[int] = []
        self._idle = ""
        self._last = -DUPLICATE_SIGNAL_SECONDS
        self._heeded: list[signal.Signals] = []

    def watch(self) -> None:
        """Handle signals, except those that were already ignored when this process started, as for a background job."""
        self._heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.install_handlers()
        self.exit_on_signal("interrupted before the ranks started: nothing is left")

    def install_handlers(self) -> None:
        """Install our signal handlers.

        torchrun replaces them whenever it starts ranks, so this is called after each such start.
        """
        for number in self._heeded:
            signal.signal(number, self._forward)

    def forward_to(self, processes: Sequence[int]) -> None:
        """Forward signals to these processes from now on."""
        self._processes = list(processes)

    def exit_on_signal(self, text: str) -> None:
        """End this process, which has no ranks, with `text` if a signal comes from now on."""
        self._processes, self._idle = [], text

    def ignore(self) -> None:
        """Ignore further signals: while Python exits, it would print an extra report for each."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _forward(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            from mobius.process.signal_handling import redirect_closed_terminal

            redirect_closed_terminal()
        if now - self._last > DUPLICATE_SIGNAL_SECONDS:
            self.count, self._last = self.count + 1, now
        if not self._processes:
            sys.stderr.write(f"{self._idle}\n")
            sys.stderr.flush()
            os._exit(INTERRUPTED_EXIT_CODE)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number if self.count < 3 else signal.SIGKILL)


class RanksEndedError(Exception):
    """The ranks have ended, and do not start again."""

    def __init__(self, rank: int, code: int, *, is_told: bool) -> None:
        """`is_told`: the rank has already printed a message about an error that the user can fix."""
        super().__init__(f"rank {rank}: {code}")
        self.rank, self.code, self.is_told = rank, code, is_told


def main(argv: Sequence[str]) -> int:
    """Run torchrun to its end; returns the exit code of the rank that ended first, 128 + N if signal N ended it."""
    interruptions = SignalForwarder()
    interruptions.watch()
    # Imported only now, because Ctrl-C may come during the seconds of these imports.
    from mobius.process.ranks import mark_launcher_as_patient, prepare_environment
    from mobius.process.signal_handling import stop_with_caller

    stop_with_caller()
    prepare_environment()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher import api
    from torch.distributed.run import get_args_parser, run

    from mobius.errors import TransportError

    arguments = get_args_parser().parse_args(list(argv))
    if arguments.master_port == 0:
        arguments.master_port = free_port()
    logging.disable(logging.ERROR)
    mark_launcher_as_patient()
    try:
        post_failure = join_nodes(arguments)
        agent = api.LocalElasticAgent  # type: ignore[attr-defined]
        api.LocalElasticAgent = patient_agent(agent, interruptions, post_failure)  # type: ignore[assignment,attr-defined]
        run(arguments)
    except TransportError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except RanksEndedError as end:
        interruptions.ignore()
        if end.is_told:
            return exit_code(end.code)
        return report_exit(end.rank, end.code, is_interrupted=interruptions.count > 0)
    except SignalException as error:  # a signal while ranks start, or a closed terminal
        interruptions.ignore()
        return report_exit(0, -error.sigval, is_interrupted=True)
    return 0


def free_port() -> int:
    """A free port, chosen by the system before the ranks start because all of them must know it.

    Another program may take it before they do.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def join_nodes(arguments: Any) -> Callable[[int, str], None]:
    """Meet the launchers of the other nodes, if torchrun's arguments name several nodes; raises TransportError.

    Returns a function that reports a failure to the ranks of all nodes; it takes the number of restarts so far and the
    text.
    """
    from torch.distributed.run import config_from_args

    config, *_ = config_from_args(arguments)
    if config.max_nodes == 1 or config.min_nodes != config.max_nodes or config.rdzv_backend != "static":
        return lambda restarts, text: None
    from mobius.distributed.node_rendezvous import RENDEZVOUS_SECONDS, Node, NodeRendezvous
    from mobius.distributed.rendezvous import post_failure_at

    own = Node(socket.gethostname(), config.max_nodes, config.nproc_per_node)
    node, seconds = int(config.rdzv_configs["rank"]), float(config.rdzv_configs.get("timeout", RENDEZVOUS_SECONDS))

    def report(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    store = NodeRendezvous(config.rdzv_endpoint, node, own, seconds=seconds, report=report).join()
    return lambda restarts, text: post_failure_at(store, restarts, f"node {node} ({own.host}): {text}")


def patient_agent(
    agent_class: type,
    interruptions: SignalForwarder,
    post_failure: Callable[[int, str], None] = lambda restarts, text: None,
) -> type:
    """Agent of torchrun that leaves signals to the ranks, and restarts them only if that can help.

    For the ranks of other nodes, it calls `post_failure` with a line about the rank that ended on this node.
    """
    from mobius.process.ranks import has_told_user, keep_ignored_signals

    class PatientAgent(agent_class):
        num_restarts = 0

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            keep_ignored_signals([s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN])
            started: dict[int, Any] = super()._start_workers(worker_group)
            interruptions.forward_to(list(started.values()))
            interruptions.install_handlers()
            return started

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if not result.is_failed():
                return result
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            limit = worker_group.spec.max_restarts
            is_end = bool(interruptions.count) or failure.exitcode in FINAL_EXIT_CODES or self.num_restarts == limit
            # Other nodes may restart their ranks, which would then wait for the ranks of this node.
            for restarts in range(self.num_restarts, (limit if is_end else self.num_restarts) + 1):
                post_failure(restarts, describe_failure(rank, failure.exitcode))
            if is_end:
                raise RanksEndedError(rank, failure.exitcode, is_told=has_told_user(failure.error_file_data))
            self.num_restarts += 1
            interruptions.exit_on_signal("interrupted before the ranks started again: their checkpoints are kept")
            line = describe_failure(rank, failure.exitcode)
            sys.stderr.write(f"{line}; they start again ({self.num_restarts} of {limit} times)\n")
            return result

    return PatientAgent


def report_exit(rank: int, code: int, *, is_interrupted: bool) -> int:
    """Print what the ranks did not print themselves; returns the exit code. A negative `code` is a signal's number."""
    if is_interrupted and -code in SIGNALS:
        sys.stderr.write("interrupted before the ranks were ready, or after they were done\n")
    elif code != INTERRUPTED_EXIT_CODE and not (is_interrupted and code < 0):
        sys.stderr.write(describe_failure(rank, code) + "\n")
        return exit_code(code)
    return INTERRUPTED_EXIT_CODE


def describe_failure(rank: int, code: int) -> str:
    """Line for the user; `code` is negative if a signal ended the process."""
    if code == STALLED_EXIT_CODE:
        return "the run stood still: above, each rank reports where it was; all ranks have ended"
    if code >= 0:
        return f"rank {rank} ended first, with exit code {code}; all ranks were stopped"
    line = f"rank {rank} ended first, by {signal.Signals(-code).name}; all ranks were stopped"
    if -code == signal.SIGKILL:
        line += " (usually by the system, because CPU memory was full: `dmesg` shows it)"
    return line


def exit_code(code: int) -> int:
    """Exit code of a process as a shell would report it."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
