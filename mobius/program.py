"""Main function of a process: parses options, runs what they select, and handles the end of the process."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mobius.errors import ConfigError, MobiusError, PlanError, TransportError
from mobius.process.log import setup_logging
from mobius.process.ranks import Ranks, is_restart, is_started_by_train_sh, prepare_environment, report_to_launcher
from mobius.process.requirements import missing_packages
from mobius.process.signal_handling import RunStatus, SavedAndStopped, SignalHandler, die_with_launcher
from mobius.process.system_limits import limit_error_from, prepare_limits

if TYPE_CHECKING:
    from mobius.config.config import Config

DUPLICATE_ERROR_SECONDS = 3.0
"""Seconds that other ranks wait with an error: if all ranks have it, rank 0 reports the error and ends them
meanwhile."""


def run_program(*, is_command: bool = False) -> None:
    """Parse, train, and turn an error that the user can fix into one message and an exit code.

    `is_command`: the words in sys.argv belong to a subcommand.
    """
    gc.disable()  # until everything is imported
    prepare_environment()
    rank, ranks = 0, None
    run_status = RunStatus()
    signal_handler = SignalHandler(run_status)
    try:
        ranks = Ranks.from_environment()
        rank = ranks.rank
        die_with_launcher()
        prepare_limits(ranks.num_local)
        threading.excepthook = _exit_on_thread_error
        signal_handler.watch(is_first=ranks.is_first)
        setup_logging(rank)
        # Imported after the signal handlers are set, because Ctrl-C may come while they load.
        from mobius.config.cli import parse_args

        config = parse_args(
            sys.argv[1:],
            num_ranks=ranks.num_ranks,
            num_nodes=ranks.num_nodes,
            is_command=is_command,
            is_without_train_sh=not is_started_by_train_sh(),
        )
        setup_logging(rank, is_verbose=config.output.verbose)
        _run_command(config, ranks, sys.argv[1:], run_status, is_command=is_command)
        signal_handler.restore_handlers()
    except SavedAndStopped as stopped:
        signal_handler.exit_after_save(str(stopped))
    except MobiusError as error:
        signal_handler.await_pending_signal()
        _exit_with_error(limit_error_from(error) or error, rank, ranks)
    except Exception as error:
        signal_handler.await_pending_signal()
        if (limit := limit_error_from(error)) is not None:
            _exit_with_error(limit, rank, ranks)
        _post_failure(ranks, error)
        if isinstance(error, ModuleNotFoundError) and (message := missing_packages(error)) is not None:
            _exit_with_message(rank, message, ConfigError)
        logging.getLogger("mobius").exception("rank %d ends because of a bug in Mobius:", rank)
        report_to_launcher(f"{type(error).__name__}: {error}", type(error).__name__)
        _exit_now(1)


def _run_command(
    config: "Config",
    ranks: Ranks,
    words: Sequence[str],
    run_status: RunStatus,
    *,
    is_command: bool,
) -> None:
    """Plan, preview or train, depending on the options; a plan that does not fit ends the process."""
    from mobius.config.cli import given_options

    given = given_options(words)
    if config.planning.dry_run:
        from mobius.planner.forecast import run_dry

        _collect_garbage()
        if not run_dry(config, ranks, given=given, words=words, is_command=is_command):
            report_to_launcher("the run does not fit", PlanError.__name__)
            sys.exit(PlanError.exit_code)
        return
    ranks = ranks.split_into_pipelines(config.launch.pipeline_ranks)
    if config.data.preview is not None:
        from mobius.training.preview_run import run_preview

        _collect_garbage()
        run_preview(config, ranks, given=given)
        return
    if ranks.is_first and not is_restart():
        from mobius.config.earlier_results import refuse_taken_names

        refuse_taken_names(config)
    from mobius.training.run import run_training

    _collect_garbage()
    run_training(config, ranks, given=given, run_status=run_status)


def _collect_garbage() -> None:
    """Start garbage collection, except of imported objects; it is off before, as it took a fifth of import time."""
    gc.freeze()
    gc.enable()


def _exit_with_error(error: MobiusError, rank: int, ranks: Ranks | None) -> NoReturn:
    """Report an error that the user can fix to other nodes and to the user, then exit."""
    _post_failure(ranks, error)
    _exit_with_message(rank, "\n".join([str(error), *getattr(error, "__notes__", [])]), type(error))


def _exit_on_thread_error(thread: threading.ExceptHookArgs) -> None:
    """End the run if a system limit has ended a library's thread: other threads would wait for it forever."""
    if thread.exc_value is not None and (limit := limit_error_from(thread.exc_value)) is not None:
        logging.getLogger("mobius").error("%s", limit)
        report_to_launcher(str(limit), type(limit).__name__)
        _exit_now(limit.exit_code)
    threading.__excepthook__(thread)


def _exit_with_message(rank: int, message: str, kind: type[MobiusError]) -> NoReturn:
    """Exit with an error; if all ranks have the error, the launcher stops them after rank 0 has printed the message."""
    setup_logging(rank)
    if rank != 0:
        # torchrun sends SIGTERM when it has a failure to report; it would list this rank's end as another failure.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(DUPLICATE_ERROR_SECONDS)
    logging.getLogger("mobius").error("%s", message)
    report_to_launcher(message, kind.__name__)
    _exit_now(kind.exit_code)


def _post_failure(ranks: Ranks | None, error: Exception) -> None:
    """Post this failure for ranks that wait at the launcher's store, unless it came from another rank."""
    if ranks is not None and ranks.num_nodes > 1 and not isinstance(error, TransportError):
        from mobius.distributed.rendezvous import post_failure

        post_failure(ranks, str(error) if isinstance(error, MobiusError) else f"{type(error).__name__}: {error}")


def _exit_now(exit_code: int) -> NoReturn:
    """Exit without Python's cleanup, which can wait for a GPU that waits for a neighbour, so that no rank would end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
