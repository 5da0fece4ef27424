"""Predicts a step on GPUs one may not have: seconds, waits, memory, and what limits it; needs neither GPU nor torch.

Every number is an estimate from data sheets and from shares measured on H200s (mobius/plan/cards.py). Options that
take several values give a row for each combination, told as soon as it is known. More than one node exists on paper
only.

    python scripts/simulate.py --card H200 RTX4090 --gpus 4 --model 7b --batch_size 64 --seq_length 512
"""

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.config.config import Recompute
from mobius.errors import GpuMemoryError, MobiusError
from mobius.log import drop, printable
from mobius.output.timeline_picture import draw_timeline
from mobius.output.trace import predicted_trace, write_trace
from mobius.plan.cards import CARDS, HOST_BANDWIDTH, PCIE_BYTES, Host, find_card
from mobius.plan.model_files import LLAMA_SHAPES, shape_of_model
from mobius.plan.profile import Profile, ProfileError
from mobius.plan.what_if import Answer, Machine, Run, answer
from mobius.schedule.lanes import WaitCause
from mobius.units import GIB

HEADER = (
    *("model", "GPUs", "PCIe", "GiB", "stages", "chunks", "slots", "resident", "kept", "s/step", "tokens/s", "MFU"),
    *("bubble", "wait: weights", "optimizer", "neighbours", "GPU GiB", "host GiB", "limited by"),
)
WIDEST = {"s/step": "1000.000", "tokens/s": "1,000,000", "MFU": "100 %"}
"""Of columns whose values may be wider than their heads, and are not known when the head is printed."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def number_or_auto(text: str) -> int | None:
    """A whole number above 0, None for auto; argparse turns the ValueError into its message."""
    if text == "auto":
        return None
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", nargs="+", default=["H200"], help=f"one or more of {', '.join(CARDS)}")
    parser.add_argument("--gpus", type=int, default=[4], help="GPUs of a node (default: 4)", nargs="+")
    parser.add_argument(
        "--pcie", type=int, choices=sorted(PCIE_BYTES), nargs="+", help="generation (default: the card's)"
    )
    parser.add_argument(
        "--model", default=["7b"], nargs="+", help=f"{', '.join(LLAMA_SHAPES)}, or a config.json (default: 7b)"
    )
    parser.add_argument("--batch_size", type=int, default=64, help="sequences per step (default: %(default)s)")
    parser.add_argument("--seq_length", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--num_stages", type=number_or_auto, help="(default: auto)")
    parser.add_argument("--num_chunks", type=number_or_auto, help="(default: auto)")
    parser.add_argument("--gpu_memory_limit", type=float, nargs="+", help="GiB of each GPU (default: all of it)")
    parser.add_argument("--no_offload", action="store_true", help="all stages stay on the GPUs")
    parser.add_argument(
        "--resident_stages", type=int, help="of each rank; the others are streamed (default: what pays)"
    )
    parser.add_argument("--recompute", type=Recompute, choices=list(Recompute), default=Recompute.AUTO)
    parser.add_argument("--max_grad_norm", type=float, default=1.0, help="0: no clipping (default: %(default)s)")
    parser.add_argument("--no_overlap_optimizer", action="store_true")
    parser.add_argument("--cores", type=int, default=16, help="CPU cores per GPU (default: %(default)s)")
    parser.add_argument(
        "--host_bandwidth", type=float, default=HOST_BANDWIDTH / 1e9,
        help="GB/s of a node's CPU memory (default: %(default)g, a server of 64 cores)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, help="a profile that was measured, in place of estimates", metavar="FILE"
    )
    parser.add_argument("--nodes", type=int, default=1, help="on paper: one ring through all of them")
    parser.add_argument("--node_link", type=float, default=25.0, help="GB/s between nodes (default: %(default)g)")
    parser.add_argument(
        "--output", type=Path, help="picture of the predicted step, FILE.png or FILE.svg", metavar="FILE"
    )
    parser.add_argument("--trace", type=Path, help="the predicted steps as a trace.json", metavar="FILE")
    return parser.parse_args(argv)


def machines_and_runs(arguments: argparse.Namespace) -> list[tuple[str, Machine, Run]]:
    """Every combination of what was given several times, with the model's name."""
    host = Host(arguments.cores, arguments.host_bandwidth * 1e9)
    combinations = itertools.product(
        arguments.model, arguments.card, arguments.gpus, arguments.pcie or [None], arguments.gpu_memory_limit or [None]
    )
    found = []
    for model, card, gpus, pcie, limit in combinations:
        machine = Machine(find_card(card), gpus, host, pcie, arguments.nodes, arguments.node_link)
        run = Run(
            shape_of_model(model),
            arguments.batch_size,
            arguments.seq_length,
            arguments.num_stages,
            arguments.num_chunks,
            gpu_memory_limit=limit,
            use_offload=not arguments.no_offload,
            num_resident=arguments.resident_stages,
            recompute=arguments.recompute,
            clips=arguments.max_grad_norm > 0,
            overlaps_optimizer=not arguments.no_overlap_optimizer,
        )
        found.append((model, machine, run))
    return found


def begin_row(model: str, machine: Machine, run: Run) -> list[str]:
    """What was asked for."""
    gpus = f"{machine.num_ranks} x {machine.card.name}"
    generation = min(machine.card.pcie, machine.pcie or machine.card.pcie)
    limit = machine.card.memory_gb if run.gpu_memory_limit is None else run.gpu_memory_limit
    return [Path(model).name, gpus, str(generation), f"{limit:g}"]


def row_of(model: str, found: Answer) -> list[str]:
    """One line of the table."""
    candidate, prediction = found.candidate, found.candidate.prediction
    fitting = candidate.fitting
    numbers = [number for number in fitting.slots if number > 0]
    fewest, most = min(numbers, default="-"), max(numbers, default="-")
    slots = str(most) if fewest == most else f"{fewest}-{most}"
    waits = [f"{prediction.worst_wait(cause):.3f}" for cause in WaitCause]
    return [
        *begin_row(model, found.machine, found.run),
        str(candidate.num_stages),
        str(candidate.num_chunks),
        slots,
        str(len(fitting.resident)),
        str(len(fitting.graph_stages)),
        f"{prediction.step_seconds:.3f}",
        f"{found.tokens_per_second:,.0f}",
        f"{100 * found.mfu:.0f} %",
        f"{100 * prediction.bubble:.0f} %",
        *waits,
        f"{found.gpu_bytes / GIB:.1f}",
        f"{found.host_bytes / GIB:.0f}",
        f"{found.limit} ({100 * found.gain:.0f} % by 10 % more)",
    ]


class Table:
    """Prints rows as they come, in columns whose widths are settled by then."""

    def __init__(self, asked: Sequence[Sequence[str]]) -> None:
        """`asked` are the first cells of all rows (`begin_row`)."""
        self._widths = [max(len(name), len(WIDEST.get(name, ""))) for name in HEADER]
        for cells in asked:
            self._widths[: len(cells)] = map(max, self._widths, map(len, cells))

    def print_row(self, cells: Sequence[str]) -> None:
        """Print a line; a short one ends early. The last column goes as far as its text does."""
        padded = [cell.rjust(width) for cell, width in zip(cells, self._widths, strict=False)]
        print(printable("  ".join([*padded[:-1], cells[-1]]), sys.stdout), flush=True)


@dataclass
class Progress:
    """Says on a terminal which row is being computed, and nothing to a file or pipe."""

    num_rows: int
    num_done: int = 0

    def begin(self, model: str, machine: Machine) -> None:
        """Say it in the line below the table."""
        self._write(f"row {self.num_done + 1} of {self.num_rows}: {model} on {machine.num_ranks} x {machine.card.name}")

    def end(self) -> None:
        """Make room for what is printed next."""
        self._write("")

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")  # back to the line's start, and clear it
            sys.stderr.flush()


@dataclass
class Told:
    """What is said below the table, and what a picture is drawn of."""

    last: Answer | None = None
    details: list[str] = field(default_factory=list)


def print_rows(
    cases: Sequence[tuple[str, Machine, Run]], table: Table, progress: Progress, measured: Profile | None
) -> Told:
    """Predict one case after the other, and print what comes out."""
    told = Told()
    for model, machine, run in cases:
        asked = begin_row(model, machine, run)
        name = " ".join(asked[:2])
        progress.begin(asked[0], machine)
        try:
            last = told.last = answer(machine, run, measured=measured)
            row = row_of(model, last)
            told.details += [f"{name}: {describe_stages(last)}", *last.choice.notices]
        except GpuMemoryError as error:
            row = [*asked, "does not fit, see below"]
            told.details.append(f"{name}: does not fit: {error}")
        finally:
            progress.end()
        progress.num_done += 1
        table.print_row(row)
    return told


def describe_stages(found: Answer) -> str:
    """How the layers are cut, in a line."""
    sizes = [len(span.layers) for span in found.candidate.spans]
    cut = "evenly" if max(sizes) - min(sizes) <= 1 else "unevenly"
    return f"layers per stage, {cut}: {' '.join(map(str, sizes))}"


def draw(found: Answer, arguments: argparse.Namespace) -> None:
    """Write the picture and the trace file of the predicted step, where they are wanted."""
    candidate = found.candidate
    trace = predicted_trace(candidate.prediction, candidate.schedule, device=found.machine.card.name)
    if arguments.trace is not None:
        write_trace(arguments.trace, trace)
        print(f"trace written to {arguments.trace}")
    if arguments.output is not None:
        draw_timeline(trace, arguments.output, step=trace.steps[-1])
        print(f"picture written to {arguments.output}")


def run(arguments: argparse.Namespace, progress: Progress) -> bool:
    """Print the table and what belongs to it; whether anything fits."""
    measured = Profile.from_json(arguments.profile.read_text()) if arguments.profile else None
    cases = machines_and_runs(arguments)
    progress.num_rows = len(cases)
    table = Table([begin_row(*case) for case in cases])
    table.print_row(HEADER)
    told = print_rows(cases, table, progress, measured)
    if told.last is not None:
        print(f"\n{told.last.candidate.profile.describe()}")
    print(printable("\n".join(dict.fromkeys(told.details)), sys.stdout))
    if told.last is not None and (arguments.output or arguments.trace):
        draw(told.last, arguments)
    sys.stdout.flush()
    return told.last is not None


def main(argv: list[str] | None = None) -> int:
    """Parse, print, and turn what a user can mend into a line and an exit code."""
    arguments = parse_arguments(argv)
    progress = Progress(num_rows=0)
    try:
        return 0 if run(arguments, progress) else 1
    except KeyboardInterrupt:
        print(f"stopped: {progress.num_done} of {progress.num_rows} rows were computed", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        drop(sys.stdout)
        return 0
    except (MobiusError, ProfileError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
