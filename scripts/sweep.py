"""How far `auto` is from the best setting that a sweep finds, and how far predictions are from what is measured.

    python scripts/sweep.py choice --gpus 4 --output sweep.jsonl        # auto beside stages, chunks and residency swept
    python scripts/sweep.py prediction --gpus 4 --output sweep.jsonl    # predicted and measured memory and seconds
    python scripts/sweep.py report --output sweep.jsonl                 # both tables, of all runs on record

`choice` starts from what auto has chosen and changes one thing at a time, keeping what is faster: the number of stages,
then of chunks, then residency; first what is nearest, then the same with what is farther. Every run is a few steps of
scripts/benchmark_worker.py on random weights and tokens, by median without the first two; the same processes make all
of them unless one fails or --new_processes is given. A setting ends at --runs runs or --seconds seconds; what was not
tried is told. SETTING... takes only those whose name contains one of the words.
`report` runs nothing: of each setting it takes the last auto run and what was tried after it, so that settings may be
swept by several commands and nothing is compared with another machine's numbers.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark import gpu_names
from benchmark_launch import RunResult, end_runs_when_terminated
from benchmark_service import Service
from make_model import SIZES, write_config

WARM_UP = 2
OUTER_STAGES = 2
ERROR_LINES = 2
NEAREST = {"stages": 1, "chunks": 2, "resident": 4}
"""How many of each are tried before anything farther is."""


@dataclass(frozen=True)
class Options:
    """What a run is given of what can be swept; None leaves it to the planner."""

    num_stages: int | None = None
    num_chunks: int | None = None
    resident: int | None = None

    def words(self) -> list[str]:
        """As main.py takes them."""
        given = {"num_stages": self.num_stages, "num_chunks": self.num_chunks, "resident_stages": self.resident}
        return [
            word for name, value in given.items() for word in (f"--{name}", "auto" if value is None else str(value))
        ]

    def __str__(self) -> str:
        values = ("auto" if value is None else value for value in (self.num_stages, self.num_chunks, self.resident))
        return "{} stages, {} chunks, {} resident".format(*values)


@dataclass(frozen=True)
class Setting:
    """What is asked for; the rest is the planner's, or swept."""

    size: str
    batch_size: int
    seq_length: int
    limit: float | None
    """GiB of each GPU."""
    clips: bool = False
    num_chunks: int | None = None
    """None: what `auto` chooses."""

    @property
    def name(self) -> str:
        limit = "no limit" if self.limit is None else f"{self.limit:g} GiB"
        return f"{self.size} {self.batch_size}x{self.seq_length} {limit}{' clip' if self.clips else ''}"

    def options(self) -> list[str]:
        """As main.py takes them."""
        options = ["--batch_size", str(self.batch_size), "--seq_length", str(self.seq_length)]
        options += ["--max_grad_norm", "1" if self.clips else "0"]
        return options if self.limit is None else [*options, "--gpu_memory_limit", f"{self.limit:g}"]


CHOICE = (
    Setting("7b", 64, 512, 12),
    Setting("7b", 64, 512, 24),
    Setting("7b", 64, 512, 24, clips=True),
    Setting("7b", 64, 512, 48),
    Setting("7b", 64, 512, None),
    Setting("13b", 64, 128, 48),
    Setting("1b", 64, 512, 8),
    Setting("1b", 32, 2048, 16),
)
PREDICTION = (
    Setting("1b", 64, 128, 8, num_chunks=4),
    Setting("1b", 64, 512, 8, clips=True, num_chunks=8),
    Setting("1b", 32, 1024, 12, num_chunks=8),
    Setting("1b", 16, 4096, 16, num_chunks=16),
    Setting("7b", 64, 128, 12, num_chunks=4),
    Setting("7b", 64, 512, 16, num_chunks=8),
    Setting("7b", 64, 512, 24, clips=True, num_chunks=8),
    Setting("7b", 32, 1024, 32, num_chunks=8),
    Setting("7b", 32, 2048, 48, num_chunks=8),
    Setting("7b", 16, 4096, 64, num_chunks=16),
    Setting("13b", 64, 128, 24, num_chunks=4),
    Setting("13b", 64, 512, 32, num_chunks=8),
    Setting("13b", 32, 1024, 48, num_chunks=8),
    Setting("13b", 16, 2048, 64, clips=True, num_chunks=8),
)


@dataclass(frozen=True)
class Result:
    """One run."""

    options: Options
    step_seconds: float | None
    """None if it failed."""
    plan: dict[str, Any]
    """What benchmark_worker.py tells of the plan."""
    gpu_gib: float | None
    host_gib: float | None
    problem: str | None
    start_host_gib: dict[str, float] = field(default_factory=dict)
    """Of the first rank's process, at the end of each part of its start."""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Of these parts."""
    all_step_seconds: list[float] = field(default_factory=list)


Measure = Callable[[Options], Result]


def result_of(options: Options, run: RunResult) -> Result:
    """From what a worker wrote; of a run that failed, its last lines."""
    if run.problem is not None:
        last = " ".join(run.log_end.splitlines()[-ERROR_LINES:])
        return Result(options, None, {}, None, None, f"{run.problem}: {last}")
    steps = run.output["steps"]
    seconds = [step["step_seconds"] for step in steps]
    return Result(
        options,
        statistics.median(seconds[WARM_UP:] or seconds),
        run.output["plan"],
        steps[-1]["reserved_gpu_memory_gib"],
        steps[-1]["peak_host_memory_gib"],
        None,
        run.output["start_host_gib"],
        run.output["start"],
        seconds,
    )


def stage_numbers(num_layers: int, num_ranks: int, chosen: int) -> list[int]:
    """Others that are worth a run: with the outer two apart, a layer per stage, half and a quarter of that."""
    apart = -(-(num_layers + OUTER_STAGES) // num_ranks) * num_ranks
    most = num_layers // num_ranks * num_ranks
    wanted = [apart, most, *(most // part // num_ranks * num_ranks for part in (2, 4))]
    return [number for number in dict.fromkeys(wanted) if number >= num_ranks and number != chosen]


def chunk_numbers(batch_size: int, num_ranks: int, chosen: int) -> list[int]:
    """The divisors of the batch next to the chosen one, twice below and above at most."""
    divisors = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
    near = [number for number in divisors if chosen / 4 < number < chosen * 4 and number != chosen]
    return sorted(near, key=lambda number: abs(number - chosen))[:3]


def residencies(stages_per_rank: int, chosen: Sequence[int]) -> list[int]:
    """The planner's most, on every rank, then all, one more, which is often refused, one less, and none."""
    middle = max(chosen, default=0)
    wanted = (middle, stages_per_rank, middle + 1, middle - 1, 0)
    return [number for number in dict.fromkeys(wanted) if 0 <= number <= stages_per_rank]


def sweep(measure: Measure, auto: Result, *, num_layers: int, batch_size: int, num_ranks: int) -> Iterator[Result]:
    """Runs from what auto has chosen on, one thing changed at a time, each time from the fastest so far."""
    best, tried = auto, set()

    def measured(options: Options) -> Iterator[Result]:
        nonlocal best
        if options not in tried:
            tried.add(options)
            result = measure(options)
            best = faster(best, result)
            yield result

    for near in (True, False):
        part = {name: slice(most) if near else slice(most, None) for name, most in NEAREST.items()}
        for number in stage_numbers(num_layers, num_ranks, auto.plan["num_stages"])[part["stages"]]:
            yield from measured(Options(number, best.plan["num_chunks"]))
        for number in chunk_numbers(batch_size, num_ranks, auto.plan["num_chunks"])[part["chunks"]]:
            yield from measured(Options(best.plan["num_stages"], number))
        stages, chunks = best.plan["num_stages"], best.plan["num_chunks"]
        for number in residencies(stages // num_ranks, best.plan["resident"])[part["resident"]]:
            yield from measured(Options(stages, chunks, number))


def faster(one: Result, other: Result) -> Result:
    """That with fewer seconds; a failed run is never it."""
    if one.step_seconds is None:
        return other
    return other if other.step_seconds is not None and other.step_seconds < one.step_seconds else one


class Runs:
    """Makes the runs of one setting, and writes a line for each."""

    def __init__(self, setting: Setting, arguments: argparse.Namespace, model: Path, service: Service) -> None:
        self._setting, self._arguments, self._model, self._service = setting, arguments, model, service

    def measure(self, options: Options) -> Result:
        """A few steps with `options`."""
        arguments = self._arguments
        words = ["--model_path", str(self._model), "--num_iterations", str(arguments.steps)]
        words += [*self._setting.options(), *options.words(), *arguments.mobius_options]
        result = result_of(options, self._service.run(words, timeout_seconds=arguments.run_seconds))
        print(f"  {result.options}: {describe(result)}", flush=True)
        if arguments.output is not None:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"setting": self._setting.name, **asdict(result)}) + "\n")
        return result


def describe(result: Result) -> str:
    """A run in a line."""
    if result.step_seconds is None:
        return result.problem or "failed"
    plan = result.plan
    predicted = "" if plan["step_seconds"] is None else f", predicted {plan['step_seconds']:.3f}"
    chosen = f"{plan['num_stages']} stages, {plan['num_chunks']} chunks, resident {plan['resident']}"
    return f"{result.step_seconds:.3f} s{predicted}; {chosen}, kept {plan['kept']}, slots {plan['slots']}"


def compare_choice(setting: Setting, arguments: argparse.Namespace, measure: Measure) -> list[str]:
    """The row of one setting: auto, the best found, and how far auto is from it."""
    start, auto = time.monotonic(), measure(Options())
    if auto.step_seconds is None:
        return [setting.name, "-", "-", "-", "-", auto.problem or "failed"]
    layers = arguments.layers or SIZES[setting.size][2]
    results, note = [auto], "whole sweep"
    for result in sweep(measure, auto, num_layers=layers, batch_size=setting.batch_size, num_ranks=arguments.gpus):
        results.append(result)
        if len(results) >= arguments.runs or time.monotonic() - start > arguments.seconds:
            note = "ended early"
            break
    return choice_row(setting.name, results, note)


def choice_row(name: str, results: Sequence[Result], note: str = "") -> list[str]:
    """Of runs of one setting, the first of them auto's."""
    auto, best = results[0], functools.reduce(faster, results)
    if auto.step_seconds is None or best.step_seconds is None:
        return [name, "-", "-", "-", "-", auto.problem or "failed"]
    chosen = f"{auto.plan['num_stages']} / {auto.plan['num_chunks']} / {max(auto.plan['resident'], default=0)}"
    off = auto.step_seconds / best.step_seconds - 1
    found = "auto" if best is auto else str(best.options)
    return [name, chosen, f"{auto.step_seconds:.3f}", f"{best.step_seconds:.3f} ({found})", f"{off:+.1%}",
            f"{len(results)} runs{note and ', '}{note}"]  # fmt: skip


def compare_prediction(setting: Setting, arguments: argparse.Namespace, measure: Measure) -> list[str]:
    """The row of one setting: GPU and host memory and seconds, predicted and measured.

    With stages given nothing but the host is measured at the start, as in most runs: that saves half a minute.
    """
    apart, *_ = stage_numbers(arguments.layers or SIZES[setting.size][2], arguments.gpus, 0)
    result = measure(Options(apart, setting.num_chunks))
    if result.step_seconds is None:
        return [setting.name, *["-"] * 3, result.problem or "failed"]
    return [setting.name, *prediction_cells(result)]


def prediction_cells(result: Result) -> list[str]:
    """GPU and host memory and seconds, predicted and measured, and what the prediction went by."""
    plan = result.plan
    return [
        beside(plan["gpu_gib"], result.gpu_gib),
        beside(plan["host_gib"] or None, result.host_gib),
        beside(plan["step_seconds"], result.step_seconds),
        plan["basis"] or "no estimate",
    ]


def beside(predicted: float | None, measured: float | None) -> str:
    """`predicted / measured (off by)`."""
    if predicted is None or not measured:
        return "-"
    return f"{predicted:.3g} / {measured:.3g} ({predicted / measured - 1:+.1%})"


MODES = {
    "choice": (
        CHOICE,
        compare_choice,
        ["setting", "auto: stages / chunks / resident", "auto, s", "best found, s", "auto off by", "runs"],
    ),
    "prediction": (
        PREDICTION,
        compare_prediction,
        ["setting", "GPU GiB: predicted / reserved", "host GiB: predicted / peak", "s per step", "by"],
    ),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*MODES, "report"])
    parser.add_argument("setting", nargs="*", help="words of the settings' names (default: all)")
    parser.add_argument("--gpus", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--layers", type=int, help="another number of layers than the sizes' own, for a trial")
    parser.add_argument("--size", choices=SIZES, help="of all settings, for a trial")
    parser.add_argument("--no_limit", action="store_true", help="leave the GPU memory limits out, for a CPU")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--runs", type=int, default=12, help="of one setting at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for one setting; no run begins behind them")
    parser.add_argument("--run_seconds", type=float, default=180, help="after which a run is ended")
    parser.add_argument(
        "--new_processes", action="store_true", help="for every run: host memory is its own, starts longer"
    )
    parser.add_argument("--output", type=Path, help="JSON-lines file that each run is appended to")
    own, options = list(argv), []
    if "--" in own:
        cut = own.index("--")
        own, options = own[:cut], own[cut + 1 :]
    arguments = parser.parse_args(own)
    if arguments.mode == "report" and not (arguments.output and arguments.output.is_file()):
        parser.error(f"report: --output {arguments.output} is no file; name the one that the runs were appended to")
    arguments.mobius_options = options
    arguments.gpus = arguments.gpus or max(1, len(gpu_names()))
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure setting after setting, and print the table at the end."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    if arguments.mode == "report":
        report(arguments.output, arguments.setting)
        return
    settings, compare, titles = MODES[arguments.mode]
    words = arguments.setting
    rows = [titles]
    end_runs_when_terminated()
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // arguments.gpus))}
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(num_ranks=arguments.gpus, environment=threads, is_always_new=arguments.new_processes) as service,
    ):
        for setting in settings:
            if words and not any(word in setting.name for word in words):
                continue
            size = arguments.size or setting.size
            limit = None if arguments.no_limit else setting.limit
            model = Path(folder, size)
            if not model.exists():
                write_config(model, size, arguments.layers)
            print(setting.name, flush=True)
            own = replace(setting, size=size, limit=limit)
            rows.append(compare(own, arguments, Runs(own, arguments, model, service).measure))
    print_table(rows)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """In Markdown; the first row has the titles."""
    titles, *others = rows
    lines = [titles, ["---"] * len(titles), *others]
    print("", *("| " + " | ".join(row) + " |" for row in lines), sep="\n")


def report(path: Path, words: Sequence[str]) -> None:
    """The tables of `choice` and `prediction` from the runs in `path`."""
    by_setting: dict[str, list[Result]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        name, options = record.pop("setting"), Options(**record.pop("options"))
        if words and not any(word in name for word in words):
            continue
        if options == Options():
            by_setting[name] = []  # another sweep of it has begun
        by_setting.setdefault(name, []).append(Result(options, **record))
    chosen, predicted = [MODES["choice"][2]], [["setting", "options", *MODES["prediction"][2][1:]]]
    for name, results in by_setting.items():
        if results[0].options == Options() and len(results) > 1:
            chosen.append(choice_row(name, results))
        done = [result for result in results if result.step_seconds is not None]
        predicted += [[name, str(result.options), *prediction_cells(result)] for result in done]
    print_table(chosen)
    print_table(predicted)


if __name__ == "__main__":
    main()
