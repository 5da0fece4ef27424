"""How far `auto` is from the best setting that a sweep finds, and how far predictions are from what is measured.

    python benchmarks/sweep.py choice --gpus 4 --output sweep.jsonl      # auto beside stages, chunks, residency swept
    python benchmarks/sweep.py prediction --gpus 4 --output sweep.jsonl  # predicted and measured memory and seconds
    python benchmarks/sweep.py report --output sweep.jsonl               # both tables, of all runs on record

`choice` starts from what auto has chosen and changes one thing at a time, keeping what is faster: the number of stages,
then of chunks, then residency; first what is nearest, then the same with what is farther. Every run is a few steps of
benchmarks/worker.py on random weights and tokens, by median without the first and the last; the same processes
make all of them unless one fails or --new_processes is given. A setting ends at --runs runs or --seconds seconds; what
was not tried is told. SETTING... takes only those whose name contains one of the words.
`report` runs nothing: of each setting it takes the last auto run and what was tried after it, so that settings may be
swept by several commands and nothing is compared with another machine's numbers.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from benchmark import gpu_names
from launch import end_runs_when_terminated, split_words
from make_model import SIZES, fields_of, write_config
from service import Service
from sweep_results import TITLES, Result, choice_row, describe, faster, prediction_cells, print_table, report, result_of
from sweep_settings import CHOICE, PREDICTION, Options, Setting

OUTER_STAGES = 2
NEAREST = {"stages": 1, "chunks": 2, "resident": 4}
"""How many of each are tried before anything farther is."""

Measure = Callable[[Options], Result]


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


def compare_choice(setting: Setting, arguments: argparse.Namespace, measure: Measure) -> list[str]:
    """The row of one setting: auto, the best found, and how far auto is from it."""
    start, auto = time.monotonic(), measure(Options())
    if auto.step_seconds is None:
        return [setting.name, "-", "-", "-", "-", auto.problem or "failed"]
    layers = arguments.layers or fields_of(setting.size)["num_hidden_layers"]
    results, note = [auto], "whole sweep"
    for result in sweep(measure, auto, num_layers=layers, batch_size=setting.batch_size, num_ranks=arguments.gpus):
        results.append(result)
        if len(results) >= arguments.runs or time.monotonic() - start > arguments.seconds:
            note = "ended early"
            break
    return choice_row(setting.name, results, note)


def compare_prediction(setting: Setting, arguments: argparse.Namespace, measure: Measure) -> list[str]:
    """The row of one setting: GPU and host memory and seconds, predicted and measured.

    With stages given nothing but the host is measured at the start, as in most runs: that saves half a minute.
    """
    apart, *_ = stage_numbers(arguments.layers or fields_of(setting.size)["num_hidden_layers"], arguments.gpus, 0)
    result = measure(Options(apart, setting.num_chunks))
    if result.step_seconds is None:
        return [setting.name, *["-"] * 3, result.problem or "failed"]
    return [setting.name, *prediction_cells(result)]


MODES = {"choice": (CHOICE, compare_choice), "prediction": (PREDICTION, compare_prediction)}


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
    own, options = split_words(argv)
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
    settings, compare = MODES[arguments.mode]
    words, rows = arguments.setting, [TITLES[arguments.mode]]
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


if __name__ == "__main__":
    main()
