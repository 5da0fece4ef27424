"""Shows the schedule of a pipeline as a text grid, as action lists or as a picture; needs no GPU.

python scripts/show_schedule.py --num_ranks 4 --num_stages 8 --num_chunks 4 --output docs/images/schedule.png
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.errors import MobiusError, ScheduleError
from mobius.process.log import printable, redirect_to_devnull
from mobius.reporting.pictures import draw_schedule
from mobius.schedule.build import build_schedule
from mobius.schedule.render import render_text
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ComputeOrder, ScheduleSpec


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show the schedule of one training step.")
    parser.add_argument("--num_ranks", type=int, default=4, help="GPUs (default: %(default)s)")
    parser.add_argument(
        "--num_stages", type=int, default=8, help="stages, a multiple of the GPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--num_chunks", type=int, default=4, help="microbatches per step, slices counted (default: %(default)s)"
    )
    parser.add_argument("--num_rounds", type=int, default=1, help="parts of a step (default: %(default)s)")
    parser.add_argument("--depth_first", action="store_true", help="interleaved 1F1B, with a slot for each stage")
    parser.add_argument("--spread_head", action="store_true", help="all GPUs compute the head, depth-first")
    parser.add_argument("--num_slices", type=int, default=1, help="slices of a sequence (default: %(default)s)")
    parser.add_argument("--no_prefetch", action="store_true", help="one weight slot per GPU instead of two")
    parser.add_argument("--no_offload", action="store_true", help="all weights stay on the GPU")
    parser.add_argument(
        "--resident_stages", type=int, default=0, help="stages per GPU, the first, that stay (default: %(default)s)"
    )
    parser.add_argument(
        "--stashed_stages",
        type=int,
        default=0,
        help="stages per GPU, the first, whose activations wait on the host (default: %(default)s)",
    )
    parser.add_argument("--actions", action="store_true", help="print each rank's action list too")
    parser.add_argument("--output", type=Path, help="write a picture, FILE.png or FILE.svg", metavar="FILE")
    return parser.parse_args(argv)


def make_schedule(arguments: argparse.Namespace) -> Schedule:
    num_ranks, num_stages = arguments.num_ranks, arguments.num_stages
    if num_ranks < 1:
        raise ScheduleError(f"--num_ranks {num_ranks}: at least 1 is needed")
    if num_stages < 1 or num_stages % num_ranks:
        below = num_stages // num_ranks * num_ranks
        nearest = [str(n) for n in (below, below + num_ranks) if n > 0]
        allowed = (
            f"it must be a multiple of --num_ranks {num_ranks}, such as {' or '.join(nearest or [str(num_ranks)])}"
        )
        raise ScheduleError(f"--num_stages {num_stages}: {allowed}")
    num_resident = arguments.resident_stages
    if not 0 <= num_resident <= num_stages // num_ranks:
        raise ScheduleError(f"--resident_stages {num_resident}: each GPU has {num_stages // num_ranks} stages")
    is_resident = arguments.no_offload or num_resident * num_ranks == num_stages
    num_streamed = num_stages // num_ranks - num_resident
    num_slots = 0 if is_resident else num_streamed if arguments.depth_first else 1 if arguments.no_prefetch else 2
    num_offloading_activations = arguments.stashed_stages
    if not 0 <= num_offloading_activations <= num_stages // num_ranks:
        raise ScheduleError(
            f"--stashed_stages {num_offloading_activations}: each GPU has {num_stages // num_ranks} stages"
        )
    return build_schedule(
        ScheduleSpec(
            num_ranks,
            num_stages,
            arguments.num_chunks,
            (num_slots,) * num_ranks,
            frozenset(range(num_stages if is_resident else num_resident * num_ranks)),
            num_rounds=arguments.num_rounds,
            num_slices=arguments.num_slices,
            order=ComputeOrder.DEPTH_FIRST if arguments.depth_first else ComputeOrder.BREADTH_FIRST,
            spreads_head=arguments.spread_head,
            offloaded_activation_stages=frozenset(range(min(num_offloading_activations * num_ranks, num_stages - 1))),
        )
    )


def format_actions(schedule: Schedule) -> str:
    lines = []
    for rank, actions in enumerate(schedule.actions):
        lines += ["", f"rank {rank}"]
        lines += [f"  {action.to_text(schedule.spec.chain_length)}" for action in actions]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        schedule = make_schedule(arguments)
        text = render_text(schedule, line_width=shutil.get_terminal_size((200, 24)).columns)
        print(printable(text, sys.stdout))
        if arguments.actions:
            print(format_actions(schedule))
        if arguments.output is not None:
            draw_schedule(schedule, arguments.output)
            print(printable(f"\npicture written to {arguments.output}", sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this Python complains once more when it flushes at exit.
        redirect_to_devnull(sys.stdout)
    except (MobiusError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: a picture needs {error.name}: pip install {error.name}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
