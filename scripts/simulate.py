"""Predicts a step on GPUs one may not have: seconds, waits, memory, and what limits it; needs no GPU.

Every number is an estimate from data sheets and from shares measured on H200s (mobius/planner/gpu_specs.py). It takes
the options of main.py, and those below. Options that take several values give a row for each combination, printed as
soon as it is known. With --nodes, --batch_size is that of each node, and lines say whether another node pays.

    python scripts/simulate.py --card H200 RTX4090 --gpus 4 --model_path 7b --batch_size 64 --seq_length 512
"""

import argparse
import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from mobius.config.cli import given_options, parse_args
from mobius.config.config import MatmulDtype, ModelConfig, Packing
from mobius.config.validation import validate
from mobius.errors import MobiusError, PlanError
from mobius.log import printable, redirect_to_devnull
from mobius.models.blocks import ModelParts
from mobius.models.families import load_planned_config
from mobius.models.published_shapes import SHORT_NAMES
from mobius.planner.fit import DoesNotFitError
from mobius.planner.gpu_specs import GPU_SPECS, HOST_BANDWIDTH, PCIE_BYTES, GpuSpec, Host, find_gpu_spec
from mobius.planner.memory_estimates import estimated_layer, largest_gpu_estimate
from mobius.planner.plan_table import ROWS_AS_PLANNED
from mobius.planner.profile import Profile, ProfileError
from mobius.planner.remedies import gpu_refusal
from mobius.planner.request import NODE_LINK, Machine, PlanRequest
from mobius.planner.solver import PlanResult, solve
from mobius.planner.step_prediction import Resource, predict_step_seconds, with_faster
from mobius.reporting.pictures import draw_timeline
from mobius.reporting.trace import predicted_trace, write_trace
from mobius.schedule.build import build_unchecked
from mobius.schedule.lanes import WaitCause
from mobius.schedule.partition import ModelShape
from mobius.units import GIB, format_columns

DEFAULT_OPTIONS = {
    "model_path": "7b",
    "num_stages": "auto",
    "num_chunks": "auto",
    "batch_size": "64",
    "seq_length": "512",
}
"""Options of main.py that have another default here."""
HEADER = (
    *("model", "GPUs", "PCIe", "GiB", "products", "stages", "chunks", "slots", "resident", "kept", "s/step"),
    *(
        "tokens/s",
        "MFU",
        "bubble",
        "wait: weights",
        "optimizer",
        "neighbours",
        "activations",
        "GPU GiB",
        "host GiB",
        "limited by",
    ),
)
WIDEST = {"s/step": "1000.000", "tokens/s": "1,000,000", "MFU": "100 %"}
"""Widest values of columns that may be wider than their heads, and are not known when the head is printed."""
PAYS, GOAL = 0.75, 0.95
"""Shares of the number of nodes that a speed-up must reach, so that each node is worth it, and so that it is good."""
FASTEST = 64
"""Maximum speed-up of the link that is considered."""
TRIES = 10
"""Halvings of the range in which the link is searched: to half a percent."""
INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells have it."""


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the words that are options of main.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--card", nargs="+", default=["H200"], help=f"one or more of {', '.join(GPU_SPECS)}")
    parser.add_argument("--gpus", type=int, default=[4], help="GPUs of a node (default: 4)", nargs="+")
    parser.add_argument(
        "--pcie", type=int, choices=sorted(PCIE_BYTES), nargs="+", help="generation (default: the card's)"
    )
    parser.add_argument(
        "--model_path", "--model", nargs="+",
        help=f"{', '.join(SHORT_NAMES)}, or a model as main.py takes it (default: 7b)",
    )  # fmt: skip
    parser.add_argument(
        "--matmul_dtype", nargs="+", help=f"one or more of {', '.join(MatmulDtype)} (default: bf16)", metavar="FORMAT"
    )
    parser.add_argument("--gpu_memory_limit", nargs="+", help="GiB of each GPU (default: all of it)")
    parser.add_argument("--cores", type=int, default=16, help="CPU cores per GPU (default: %(default)s)")
    parser.add_argument(
        "--host_bandwidth", type=float, default=HOST_BANDWIDTH / 1e9,
        help="GB/s of a node's CPU memory (default: %(default)g, a server of 64 cores)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path, help="a profile that was measured, in place of estimates", metavar="FILE"
    )
    parser.add_argument(
        "--nodes", type=int, default=[1], nargs="+", help="nodes, each of which is a pipeline of its own (default: 1)"
    )
    parser.add_argument(
        "--node_link", type=float, default=[NODE_LINK], nargs="+",
        help=f"GB/s of each node's link, in each direction (default: {NODE_LINK:g})",
    )  # fmt: skip
    parser.add_argument("--batch_size", type=int, nargs="+", help="sequences per step and node (default: 64)")
    parser.add_argument(
        "--output", type=Path, help="picture of the predicted step, FILE.png or FILE.svg", metavar="FILE"
    )
    parser.add_argument("--trace", type=Path, help="the predicted steps as a trace.json", metavar="FILE")
    return parser.parse_known_args(argv)


def make_requests(arguments: argparse.Namespace, words: Sequence[str]) -> list[PlanRequest]:
    """The question of every combination of what was given several times."""
    given = given_options(words)
    usual = [word for name, value in DEFAULT_OPTIONS.items() if name not in given for word in (f"--{name}", value)]
    combinations = itertools.product(
        options_of("--model_path", arguments.model_path),
        arguments.card,
        arguments.gpus,
        arguments.pcie or [None],
        options_of("--gpu_memory_limit", arguments.gpu_memory_limit),
        options_of("--batch_size", arguments.batch_size),
        options_of("--matmul_dtype", arguments.matmul_dtype),
        links_of(arguments.nodes, arguments.node_link),
    )
    found = []
    for model, card, gpus, pcie, limit, rows, products, (nodes, link) in combinations:
        if model and Path(model[-1]).name == "config.json":  # its folder is meant
            model = [*model[:-1], str(Path(model[-1]).parent)]
        machine = Machine(
            gpus,
            find_gpu_spec(card),
            host=Host(arguments.cores, arguments.host_bandwidth * 1e9, pcie),
            num_replicas=nodes,
            num_nodes=nodes,
            node_link=link,
        )
        config = parse_args([*usual, *words, *model, *limit, *rows, *products])
        pipeline = replace(config.pipeline, batch_size=nodes * config.pipeline.batch_size)
        config = replace(config, pipeline=pipeline)
        validate(config, machine.num_ranks, nodes)
        found.append(PlanRequest.of(config, shape_of(config.model), machine))
    return found


def links_of(nodes: Sequence[int], links: Sequence[float]) -> list[tuple[int, float]]:
    """Numbers of nodes with their links; one node, which others are compared with, comes first and has none."""
    wrong = [*(number for number in nodes if number < 1), *(link for link in links if not 0 < link < math.inf)]
    if wrong:
        raise PlanError(f"--nodes and --node_link must be above 0, not {wrong[0]:g}.")
    return [(1, NODE_LINK), *itertools.product([number for number in nodes if number > 1], links)]


def options_of(name: str, values: Sequence[str] | Sequence[int] | None) -> list[list[str]]:
    """The words of an option of main.py, once for each of its values."""
    return [[name, str(value)] for value in values] if values else [[]]


@functools.cache
def shape_of(model: ModelConfig) -> ModelShape:
    """The sizes of a model."""
    return ModelParts(load_planned_config(model)[0], torch.device("cpu"), matmul_dtype=model.matmul_dtype).shape()


def begin_row(request: PlanRequest) -> list[str]:
    """The first cells: what was asked for."""
    machine, limit = request.machine, request.config.pipeline.gpu_memory_limit
    card = card_of(request)
    generation = min(card.pcie, machine.host.pcie or card.pcie)
    memory = card.memory_gb if limit is None else limit
    return [
        Path(request.config.model.model_path).name,
        f"{machine.num_nodes} x " * (machine.num_nodes > 1) + f"{machine.num_ranks} x {card.name}",
        str(generation),
        f"{memory:g}",
        request.config.model.matmul_dtype,
    ]


def card_of(request: PlanRequest) -> GpuSpec:
    """The card that a row is for."""
    assert request.machine.gpu_spec is not None
    return request.machine.gpu_spec


def row_of(found: PlanResult) -> list[str]:
    """One line of the table."""
    plan, predicted = found.plan, found.step_time_prediction
    if predicted is None:
        raise PlanError("no step is predicted: the cards' rates are for formats of two bytes (bf16, fp16).")
    numbers = [number for number in plan.slots if number > 0]
    fewest, most = min(numbers, default="-"), max(numbers, default="-")
    slots = str(most) if fewest == most else f"{fewest}-{most}"
    waits = [f"{predicted.worst_wait(cause):.3f}" for cause in WaitCause]
    return [
        *begin_row(found.request),
        str(plan.num_stages),
        str(plan.num_microbatches),
        slots,
        str(len(plan.resident)),
        str(len(plan.saved_activation_stages)),
        f"{predicted.step_seconds:.3f}",
        f"{found.tokens_per_second:,.0f}",
        f"{100 * found.mfu:.0f} %",
        f"{100 * predicted.bubble:.0f} %",
        *waits,
        f"{largest_gpu_estimate(found.gpu_estimates).total / GIB:.1f}",
        f"{found.host_estimate.total / GIB:.0f}",
        f"{predicted.bottleneck} ({100 * predicted.gain:.0f} % by 10 % more)",
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

    def begin(self, model: str, gpus: str) -> None:
        """Say it in the line below the table."""
        self._write(f"row {self.num_done + 1} of {self.num_rows}: {model} on {gpus}")

    def end(self) -> None:
        """Make room for what is printed next."""
        self._write("")

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")  # back to the line's start, and clear it
            sys.stderr.flush()


@dataclass(frozen=True)
class NodeScaling:
    """A step on several nodes, and one on a single node with as many tokens per node."""

    result: PlanResult
    alone: PlanResult

    @property
    def nodes(self) -> int:
        return self.result.request.machine.num_nodes

    @property
    def speed_up(self) -> float:
        """Tokens per second divided by those of one node."""
        return self.result.tokens_per_second / self.alone.tokens_per_second

    @property
    def verdict(self) -> str:
        """Whether another node pays, in words."""
        if self.speed_up < 1:
            return "does not pay: slower than one node"
        return "pays" if self.speed_up >= PAYS * self.nodes else "pays little"

    def needed_link(self, goal: float = GOAL) -> float | None:
        """GB/s with which the speed-up of the same plan would be `goal` times the number of nodes.

        At least what there is; None if no usual link would do.
        """
        wanted, profile = self.alone.step_seconds / goal, self.result.profile
        assert profile is not None

        def seconds(factor: float) -> float:
            faster = with_faster(profile, Resource.REPLICAS, factor)
            return predict_step_seconds(self.result.plan, self.result.request, faster)

        if seconds(FASTEST) > wanted:
            return None
        low, high = 0.0, math.log2(FASTEST)
        for _ in range(TRIES):
            middle = (low + high) / 2
            low, high = (low, middle) if seconds(2**middle) <= wanted else (middle, high)
        return self.result.request.machine.node_link * 2**high

    def describe(self) -> str:
        """One line: the speed-up, what limits it, and what would be needed for more."""
        prediction = self.result.step_time_prediction
        assert prediction is not None
        text = f"{self.speed_up:.2f} x one node: {self.verdict}; limited by {prediction.bottleneck}"
        if self.speed_up >= GOAL * self.nodes:
            return text
        link = self.needed_link()
        if link is None:
            return f"{text}; no link gives {GOAL * self.nodes:.3g} x with this plan: more tokens per step may"
        return f"{text}; {GOAL * self.nodes:.3g} x needs {link:.3g} GB/s, or more tokens per step"


@dataclass
class TableNotes:
    """Lines for below the table, and the answer that a picture is drawn of."""

    last: PlanResult | None = None
    details: list[str] = field(default_factory=list)
    alone: PlanResult | None = None
    """The last answer for one node."""
    worths: list[NodeScaling] = field(default_factory=list)

    def compare(self, found: PlanResult, name: str) -> None:
        """Lay an answer for several nodes beside that for one, which came before."""
        request = found.request
        if request.machine.num_nodes == 1:
            self.alone = found
        elif self.alone is not None:
            worth = NodeScaling(found, self.alone)
            tokens = f"{request.step_tokens:,} tokens per step and node"
            self.worths.append(worth)
            self.details.append(f"{name}, {request.machine.node_link:g} GB/s, {tokens}: {worth.describe()}")


def print_rows(cases: Sequence[PlanRequest], table: Table, progress: Progress, measured: Profile | None) -> TableNotes:
    """Predict one case after the other, and print what comes out."""
    told = TableNotes()
    for request in cases:
        asked = begin_row(request)
        name = " ".join([*asked[:2], *(asked[-1:] if request.shape.quantized else ())])
        progress.begin(*asked[:2])
        try:
            row = [*asked, "the card has no such products"]
            if request.config.model.matmul_dtype in card_of(request).matmul_dtypes:
                found = solve(request, layer=estimated_layer, profile=measured)
                row = row_of(found)
                told.last = found
                told.compare(found, name)
                cut = " ".join(str(len(cut.layers)) for cut in found.plan.cuts)
                told.details.append(f"{name}: layers per stage: {cut}")
        except DoesNotFitError as error:
            told.alone = told.alone if request.machine.num_nodes > 1 else None
            row = [*asked, "does not fit, see below"]
            told.details.append(f"{name}: does not fit: {gpu_refusal(error)}")
        finally:
            progress.end()
        progress.num_done += 1
        table.print_row(row)
    return told


def print_worths(worths: Sequence[NodeScaling]) -> None:
    """A table of speed-ups over one node: a row for each number of nodes and link, a column for each batch."""
    batches = list(dict.fromkeys(worth.result.request.step_tokens for worth in worths))
    rows = [["nodes", "GB/s", *(f"{tokens:,} tokens" for tokens in batches)]]
    cells = {
        (w.nodes, w.result.request.machine.node_link, w.result.request.step_tokens): f"{w.speed_up:.2f}" for w in worths
    }
    for nodes, link in dict.fromkeys(key[:2] for key in cells):
        rows.append([str(nodes), f"{link:g}", *(cells.get((nodes, link, tokens), "-") for tokens in batches)])
    print(f"\ntokens per second over those of one node, by tokens per step and node\n{format_columns(rows)}")


def draw(found: PlanResult, arguments: argparse.Namespace) -> None:
    """Write the picture and the trace file of the predicted step."""
    assert found.step_time_prediction is not None
    trace = predicted_trace(found.step_time_prediction, build_unchecked(found.plan), device=card_of(found.request).name)
    if arguments.trace is not None:
        write_trace(arguments.trace, trace)
        print(f"trace written to {arguments.trace}")
    if arguments.output is not None:
        draw_timeline(trace, arguments.output, step=trace.steps[-1])
        print(f"picture written to {arguments.output}")


def run(arguments: argparse.Namespace, words: Sequence[str], progress: Progress) -> bool:
    """Print the table and what belongs to it; whether anything fits."""
    measured = Profile.from_json(arguments.profile.read_text()) if arguments.profile else None
    cases = make_requests(arguments, words)
    progress.num_rows = len(cases)
    table = Table([begin_row(case) for case in cases])
    table.print_row(HEADER)
    told = print_rows(cases, table, progress, measured)
    if told.last is not None and told.last.profile is not None:
        print(f"\n{told.last.profile.describe()}")
    print(printable("\n".join(dict.fromkeys(told.details)), sys.stdout))
    if len(told.worths) > 1 and len({tuple(begin_row(each.alone.request)) for each in told.worths}) == 1:
        print_worths(told.worths)
    if measured is None and cases[0].config.data.packing in (Packing.AUTO, Packing.ON):
        print(ROWS_AS_PLANNED)
    if told.last is not None and (arguments.output or arguments.trace):
        draw(told.last, arguments)
    sys.stdout.flush()
    return told.last is not None


def main(argv: list[str] | None = None) -> int:
    """Parse, print, and turn what a user can mend into a line and an exit code."""
    arguments, words = parse_arguments(argv)
    progress = Progress(num_rows=0)
    try:
        return 0 if run(arguments, words, progress) else 1
    except KeyboardInterrupt:
        print(f"stopped: {progress.num_done} of {progress.num_rows} rows were computed", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # the reader (head, less) has seen enough
        redirect_to_devnull(sys.stdout)
        return 0
    except (MobiusError, ProfileError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
