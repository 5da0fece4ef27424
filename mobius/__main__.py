"""The program: `mobius`, `python -m mobius` and main.py, alone or under torchrun; see --help."""

import logging
import os
import sys
import threading
import time
from typing import NoReturn

from mobius.errors import MobiusError, TransportError
from mobius.interruption import Interruption, SavedAndStopped, Standing, end_with_launcher
from mobius.log import setup_logging
from mobius.ranks import Ranks, prepare_environment
from mobius.system_limits import met_limit, prepare_limits

ECHO_SECONDS = 3.0
"""Time for the first rank, which tells an error that all share, to end the others before they tell it too."""


def main() -> None:
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

        config = parse_args(sys.argv[1:], num_ranks=ranks.num_ranks, num_nodes=ranks.num_nodes)
        if config.planning.dry_run:
            from mobius.planning.dry_run import run_dry

            sys.exit(0 if run_dry(config, ranks, given=given_options(sys.argv[1:])) else 1)
        ranks = ranks.cut(config.launch.pipeline_ranks)
        if config.data.preview is not None:
            from mobius.training.preview_run import run_preview

            run_preview(config, ranks, given=given_options(sys.argv[1:]))
            sys.exit(0)
        from mobius.training.run import run_training

        run_training(config, ranks, given=given_options(sys.argv[1:]), standing=standing)
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
        logging.getLogger("mobius").exception("rank %d ends with an error of Mobius itself:", rank)
        _end_now(1)


def _end_with(error: MobiusError, rank: int, ranks: Ranks | None) -> NoReturn:
    """Tell the error, and end."""
    setup_logging(rank)
    _tell_other_nodes(ranks, error)
    if rank != 0:
        time.sleep(ECHO_SECONDS)
    logging.getLogger("mobius").error("%s", "\n".join([str(error), *getattr(error, "__notes__", [])]))
    _end_now(error.exit_code)


def _end_with_thread(thread: threading.ExceptHookArgs) -> None:
    """End the run where a limit of the system has ended a library's thread: others would wait for it for ever."""
    if thread.exc_value is not None and (limit := met_limit(thread.exc_value)) is not None:
        logging.getLogger("mobius").error("%s", limit)
        _end_now(limit.exit_code)
    threading.__excepthook__(thread)


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


if __name__ == "__main__":
    main()
