"""Predicts a step on GPUs one may not have: seconds, waits, memory, and what limits it; needs neither GPU nor torch.

Every number is an estimate from data sheets and from shares measured on H200s (mobius/planner/cards.py). Options that
take several values give a row for each combination. More than one node exists on paper only.

    python scripts/simulate.py --card H200 RTX4090 --gpus 4 --model 7b --batch_size 64 --seq_length 512
"""

import argparse
import importlib.util
import itertools
import sys
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.config import Recompute
from mobius.errors import GpuMemoryError, MobiusError
from mobius.log import drop
from mobius.planner.budget import GIB
from mobius.planner.cards import CARDS, HOST_BANDWIDTH, PCIE_BYTES, Host, find_card
from mobius.planner.model_files import LLAMA_SHAPES, shape_of_model
from mobius.planner.profile import Profile, ProfileError
from mobius.planner.step_tasks import WaitFor
from mobius.planner.what_if import Answer, Machine, Run, answer

HEADER = (
    *("model", "GPUs", "PCIe", "GiB", "stages", "chunks", "slots", "resident", "kept", "s/step", "tokens/s", "MFU"),
    *("bubble", "wait: weights", "optimizer", "neighbours", "GPU GiB", "host GiB", "limited by"),
)


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
    waits = [
        f"{prediction.worst_wait(cause):.3f}" for cause in (WaitFor.WEIGHTS, WaitFor.OPTIMIZER, WaitFor.NEIGHBOURS)
    ]
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


def format_table(rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; a short row is a line of its own behind its first cells."""
    widths = [max([len(row[c]) for row in rows if len(row) == len(HEADER)], default=0) for c in range(len(HEADER))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)


def describe_stages(found: Answer) -> str:
    """How the layers are cut, in a line."""
    sizes = [len(span.layers) for span in found.candidate.spans]
    cut = "evenly" if max(sizes) - min(sizes) <= 1 else "unevenly"
    return f"layers per stage, {cut}: {' '.join(map(str, sizes))}"


def draw(found: Answer, arguments: argparse.Namespace) -> None:
    """The picture and the trace file of the predicted step; only these import torch, which takes seconds."""
    from mobius.training.predicted_timeline import predicted_trace
    from mobius.training.timeline import write_trace
    from mobius.training.timeline_picture import draw_timeline

    candidate = found.candidate
    trace = predicted_trace(candidate.prediction, candidate.schedule, device=found.machine.card.name)
    if arguments.trace is not None:
        write_trace(arguments.trace, trace)
        print(f"trace written to {arguments.trace}")
    if arguments.output is not None:
        draw_timeline(trace, arguments.output, step=trace.steps[-1])
        print(f"picture written to {arguments.output}")


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    arguments = parse_arguments(argv)
    rows: list[list[str]] = [list(HEADER)]
    details: list[str] = []
    last: Answer | None = None
    try:
        measured = Profile.from_json(arguments.profile.read_text()) if arguments.profile else None
        for model, machine, run in machines_and_runs(arguments):
            try:
                last = answer(machine, run, measured=measured)
            except GpuMemoryError as error:
                details.append(f"{' '.join(begin_row(model, machine, run)[:2])}: does not fit: {error}")
                continue
            rows.append(row_of(model, last))
            details += [f"{' '.join(rows[-1][:2])}: {describe_stages(last)}", *last.choice.notices]
        if last is not None:
            print(format_table(rows))
            print(f"\n{last.candidate.profile.describe()}")
        print("\n".join(dict.fromkeys(details)))
        if last is not None and (arguments.output or arguments.trace):
            draw(last, arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        drop(sys.stdout)
    except (MobiusError, ProfileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if last is not None else 1


if __name__ == "__main__":
    sys.exit(main())
