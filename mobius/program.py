"""The life of a process of the program: the options, what they ask for, and how it ends."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

from mobius.errors import ConfigError, MobiusError, TransportError
from mobius.interruption import Interruption, SavedAndStopped, Standing, end_with_launcher
from mobius.log import setup_logging
from mobius.ranks import Ranks, is_started_by_train_sh, prepare_environment, report_to_launcher
from mobius.requirements import missing_packages
from mobius.system_limits import met_limit, prepare_limits

if TYPE_CHECKING:
    from mobius.config.config import Config

ECHO_SECONDS = 3.0
"""Time for the first rank, which tells an error that all share, to end the others before they tell it too."""


def run_program() -> None:
    """Parse, train, and turn an error that the user can mend into one message and an exit code."""
    prepare_environment()
    rank, ranks = 0, None
    standing = Standing()
    interruption = Interruption(standing)
    try:
        ranks = Ranks.from_environment()
        rank = ranks.rank
        end_with_launcher()
        prepare_limits(ranks.num_local)
        threading.excepthook = _end_with_thread
        interruption.watch(speaks=ranks.is_first)
        setup_logging(rank)
        # Imported behind the watch, because Ctrl-C may come while they load.
        from mobius.config.cli import given_options, parse_args

        config = parse_args(
            sys.argv[1:],
            num_ranks=ranks.num_ranks,
            num_nodes=ranks.num_nodes,
            is_without_train_sh=not is_started_by_train_sh(),
        )
        _do(config, ranks, given_options(sys.argv[1:]), standing)
        interruption.stand_down()
    except SavedAndStopped as stopped:
        interruption.leave(str(stopped))
    except MobiusError as error:
        interruption.goes_first()
        _end_with(met_limit(error) or error, rank, ranks)
    except Exception as error:
        interruption.goes_first()
        if (limit := met_limit(error)) is not None:
            _end_with(limit, rank, ranks)
        _tell_other_nodes(ranks, error)
        if isinstance(error, ModuleNotFoundError) and (message := missing_packages(error)) is not None:
            _end_with_message(rank, message, ConfigError.exit_code)
        logging.getLogger("mobius").exception("rank %d ends with an error of Mobius itself:", rank)
        report_to_launcher(f"{type(error).__name__}: {error}")
        _end_now(1)


def _do(config: "Config", ranks: Ranks, given: Collection[str], standing: Standing) -> None:
    """Plan, preview or train, as the options say; what only shows something ends the process."""
    if config.planning.dry_run:
        from mobius.planning.dry_run import run_dry

        sys.exit(0 if run_dry(config, ranks, given=given) else 1)
    ranks = ranks.cut(config.launch.pipeline_ranks)
    if config.data.preview is not None:
        from mobius.training.preview_run import run_preview

        run_preview(config, ranks, given=given)
        sys.exit(0)
    from mobius.training.run import run_training

    run_training(config, ranks, given=given, standing=standing)


def _end_with(error: MobiusError, rank: int, ranks: Ranks | None) -> NoReturn:
    """Tell other nodes and the user an error of theirs, and end."""
    _tell_other_nodes(ranks, error)
    _end_with_message(rank, "\n".join([str(error), *getattr(error, "__notes__", [])]), error.exit_code)


def _end_with_thread(thread: threading.ExceptHookArgs) -> None:
    """End the run where a limit of the system has ended a library's thread: others would wait for it for ever."""
    if thread.exc_value is not None and (limit := met_limit(thread.exc_value)) is not None:
        logging.getLogger("mobius").error("%s", limit)
        report_to_launcher(str(limit))
        _end_now(limit.exit_code)
    threading.__excepthook__(thread)


def _end_with_message(rank: int, message: str, exit_code: int) -> NoReturn:
    """End with an error that the first rank says, if it has it too: the launcher stops the others before they do."""
    setup_logging(rank)
    if rank != 0:
        # torchrun has a failure to report when it sends this, and would list this end as another one.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(ECHO_SECONDS)
    logging.getLogger("mobius").error("%s", message)
    report_to_launcher(message)
    _end_now(exit_code)


def _tell_other_nodes(ranks: Ranks | None, error: Exception) -> None:
    """Let ranks that wait for this one at the launcher's store know; what they had from others they know already."""
    if ranks is not None and ranks.num_nodes > 1 and not isinstance(error, TransportError):
        from mobius.messages.meeting import leave_word

        leave_word(ranks, str(error) if isinstance(error, MobiusError) else f"{type(error).__name__}: {error}")


def _end_now(exit_code: int) -> NoReturn:
    """End without the usual cleaning up: it can wait for a GPU that waits for a neighbour, and then no rank ends."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
