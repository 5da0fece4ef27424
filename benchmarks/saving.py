"""Times saves: steps without them and beside them, what training stands still for, and the first step of a resumed run.

    python benchmarks/saving.py 7b --num_layers 16 --folder /data -- --num_stages 32 --num_chunks 4
    python benchmarks/saving.py 7b --num_layers 16 --no_room --resume

Weights and tokens are random; checkpoints go to a new folder in --folder, which is removed at the end, and needs room
for two. The disk is measured first, by as many files at once as there are processes, each synced. Saves begin as soon
after one another as it can write them, by that rate: `--save_steps` follows from it and from steps without saves.

`--no_room` limits host memory to what the run needs without copies: a rank with stages on its GPU then has one buffer,
for its largest stage, and others write their stages from where they are. What a disk or a time limit does not allow is
told before it is tried.
`--resume` compares the start of a run from weights with that of one from the last checkpoint, their files out of the
page cache. What stands behind ` -- ` goes to every run.
"""

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from benchmark import gpu_names
from launch import end_runs_when_terminated, split_words
from make_model import SIZES, num_parameters, write_config
from service import Service
from sweep_results import print_table

WARMUP = 2
SAVED_BYTES = 12
"""Bytes of a parameter in a checkpoint: its weight, what master weights have beyond it, and two moments in fp32."""
WEIGHT_BYTES = 2
LEAST_STEPS = 8
"""Fewer steps between two saves would tell no median."""
SPARED = 1.1
"""Time between two saves over what the disk takes for one."""
FILLED = 1.01
"""Bytes that a checkpoint takes on the disk over those of its tensors."""
MOST_SAVES = 3
PROBE_BYTES, CHUNK_BYTES = 4 * 10**9, 2**26
TITLES = ["steps", "number", "median s", "tokens/s", "lost", "host GiB"]
WANTED_LOST, WANTED_STANDSTILL, WANTED_SHARE, WANTED_START = 0.03, 0.5, 1.15, 1.2


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second of the folder that checkpoints go to, all processes together."""

    write: float
    read: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind ` -- ` is `mobius_options`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--num_layers", type=int, help="another number of layers than the size's own")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--gpus", type=int, help="processes, one per GPU (default: all GPUs)")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints' one (default: that of temporary files)")
    parser.add_argument("--steps", type=int, default=10, help=f"without saves, of which {WARMUP} are not timed")
    parser.add_argument("--seconds", type=float, default=100, help="of the steps beside saves, about; sets how many")
    parser.add_argument("--saves", type=int, default=MOST_SAVES, help="at the most (default: %(default)s)")
    parser.add_argument("--no_room", action="store_true", help="for copies of all stages")
    parser.add_argument("--resume", action="store_true", help="time the start from a checkpoint, too")
    parser.add_argument("--run_seconds", type=float, default=400, help="after which a run is ended")
    own, options = split_words(argv)
    arguments = parser.parse_args(own)
    if arguments.steps < WARMUP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARMUP + 2} are needed for a median")
    if arguments.saves < 1:
        parser.error(f"--saves {arguments.saves}: at least 1 is needed")
    if arguments.folder is not None and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is no folder: name one that is there")
    arguments.gpus = arguments.gpus or max(1, len(gpu_names()))
    arguments.mobius_options = options
    return arguments


def measure_disk(folder: Path, *, num_bytes: int, num_files: int) -> DiskRates:
    """Write `num_bytes` in all into `folder`, sync them, and read them back from the disk; they are removed again."""
    chunk = os.urandom(min(CHUNK_BYTES, num_bytes // num_files))
    files = [folder / f"probe-{number}" for number in range(num_files)]
    chunks = max(1, num_bytes // num_files // len(chunk))

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(chunks):
                file.write(chunk)
            os.fsync(file.fileno())

    def read(path: Path) -> None:
        target = bytearray(len(chunk))
        with path.open("rb", buffering=0) as file:
            while file.readinto(target):
                pass

    def rate(work: Callable[[Path], None]) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(num_files) as threads:
            for _ in threads.map(work, files):
                pass
        return num_files * chunks * len(chunk) / (time.perf_counter() - start)

    try:
        written = rate(write)
        for path in files:
            drop_page_cache(path)
        return DiskRates(written, rate(read))
    finally:
        for path in files:
            path.unlink(missing_ok=True)


def drop_page_cache(path: Path) -> None:
    """Take a file, or those of a folder, out of the page cache; they are on the disk. Memory's own files stay there."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def save_interval(num_bytes: float, rate: float, step_seconds: float, seconds: float, most: int) -> tuple[int, int]:
    """Steps from a save to the next one, and the number of saves that `seconds` have time for: one to `most`."""
    steps = max(LEAST_STEPS, math.ceil(SPARED * num_bytes / rate / step_seconds))
    return steps, min(most, max(1, int(seconds / (steps * step_seconds)) - 1))


def saves_that_fit(number: int, num_bytes: float, free: float) -> int:
    """As many saves as `number`, or one where there is room for one: a second one is written beside the first.

    Ends the program where there is none.
    """
    needed = FILLED * num_bytes
    if free < needed:
        sys.exit(
            f"a checkpoint takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: use fewer --num_layers or "
            "another --folder"
        )
    return number if free >= 2 * needed else 1


def check_time(seconds: float, most: float) -> None:
    """End the program where a run of so many seconds would be ended by --run_seconds."""
    if seconds > most:
        sys.exit(
            f"the run with saves takes {seconds:.0f} s, and --run_seconds is {most:.0f}: raise it, or use fewer "
            "--num_layers"
        )


def standstills(steps: Sequence[float], median: float, every: int) -> list[float]:
    """Seconds above `median` of each `every` steps, added up."""
    windows = [steps[start : start + every] for start in range(0, len(steps), every)]
    return [sum(max(0.0, step - median) for step in window) for window in windows]


def part_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of some steps of a run."""
    seconds = [step["step_seconds"] for step in steps]
    return {
        "number": len(steps),
        "median": statistics.median(seconds),
        "tokens": sum(step["num_tokens"] for step in steps) / sum(seconds),
        "host": max(step["peak_host_memory_gib"] for step in steps),
    }


def line(name: str, found: Mapping[str, float], tokens: float) -> list[str]:
    """The row of some steps; `tokens` are those per second without saves."""
    lost = f"{1 - found['tokens'] / tokens:.1%}"
    return [
        name,
        str(found["number"]),
        f"{found['median']:.4f}",
        f"{found['tokens']:,.0f}",
        lost,
        f"{found['host']:.2f}",
    ]


def verdict(what: str, value: float, most: float, look: str) -> str:
    """A sentence that compares `value` with what is wanted at the most."""
    word = "at most" if value <= most else "MORE THAN"
    return f"{what}: {format(value, look)}, {word} {format(most, look)}"


def tell_saves(
    plain: Mapping[str, Any], saved: Mapping[str, Any], rates: DiskRates, every: int, has_room: bool
) -> None:
    """Print the table of steps, the saves and what of them is wanted."""
    alone = plain["steps"][WARMUP:]
    before, beside = saved["steps"][WARMUP:every], saved["steps"][every:]
    parts = {"without saves": alone, "before the first save": before, "from the first save on": beside}
    found = {name: part_of(steps) for name, steps in parts.items()}
    tokens, median = found["without saves"]["tokens"], found["before the first save"]["median"]
    print_table([TITLES, *(line(name, part, tokens) for name, part in found.items())])
    told = saved["saved"]
    print(told["describes"])
    for save in told["saves"]:
        rate = save["num_bytes"] / save["seconds"]
        print(
            f"save after step {save['step']}: {save['num_bytes'] / 1e9:.2f} GB in {save['seconds']:.2f} s, "
            f"{rate / 1e9:.2f} GB/s, {rate / rates.write:.2f} of the disk's; "
            f"updates waited {save['waited_seconds']:.3f} s"
        )
    still = standstills([step["step_seconds"] for step in beside], median, every)
    noise = standstills([step["step_seconds"] for step in before], median, every)
    steady = noise[0] / len(before) * every
    print(
        f"standstill per save, s: {[round(each, 3) for each in still]}; {steady:.3f} in as many steps before the first"
    )
    more = found["from the first save on"]["host"] - found["without saves"]["host"]
    print(f"host memory: {more:+.2f} GiB; one stage of each rank takes {told['stage_gib']:.2f} GiB")
    if has_room:
        lost = 1 - found["from the first save on"]["tokens"] / found["before the first save"]["tokens"]
        print(verdict("tokens/s lost beside saves", lost, WANTED_LOST, ".1%"))
        print(verdict("standstill of the worst save, s", max(still), WANTED_STANDSTILL, ".3f"))
    else:
        share = max(still) / (told["saves"][0]["num_bytes"] / rates.write)
        print(verdict("standstill of the worst save over bytes / disk rate", share, WANTED_SHARE, ".2f"))
        print(verdict("host memory beyond a run without saves, GiB", more, told["stage_gib"], ".2f"))


def first_step_seconds(told: Mapping[str, Any]) -> float:
    """Seconds from a run's start to the end of its first step, without its imports, which are always the same ones."""
    return float(told["load_seconds"] - told["start"]["imports"] + told["steps"][0]["step_seconds"])


def tell_starts(fresh: Mapping[str, Any], resumed: Mapping[str, Any], extra_bytes: float, rate: float) -> None:
    """Print how much later a resumed run's first step ends."""
    first, other = first_step_seconds(fresh), first_step_seconds(resumed)
    for name, told in {"fresh": fresh, "resumed": resumed}.items():
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in told["start"].items())
        print(
            f"{name} start, from the imports to the end of the first step: {first_step_seconds(told):.2f} s ({parts})"
        )
    most = first + WANTED_START * extra_bytes / rate
    print(f"read beyond the weights: {extra_bytes / 1e9:.2f} GB, {extra_bytes / rate:.2f} s at the disk's rate")
    print(verdict("first resumed step ends after, s", other, most, ".2f"))


class Runs:
    """Makes the runs of this benchmark; each has new processes, so that its memory is its own."""

    def __init__(self, service: Service, arguments: argparse.Namespace, folder: Path) -> None:
        """Checkpoints go to `folder`."""
        self._service, self._arguments, self._folder = service, arguments, folder

    def run(self, name: str, model: Path, num_steps: int, words: Sequence[str]) -> dict[str, Any]:
        """One run; ends the program where it fails."""
        given = self._arguments
        shared = ["--model_path", str(model), "--num_iterations", str(num_steps), "--batch_size", str(given.batch_size)]
        shared += ["--seq_length", str(given.seq_length), "--save_dir", str(self._folder), *given.mobius_options]
        told = self._service.run([*shared, *words], timeout_seconds=given.run_seconds)
        if told.problem is not None:
            sys.exit(f"{name}: {told.problem}\n{told.log_end}")
        found: dict[str, Any] = told.output
        print(f"{name}: {told.seconds:.0f} s", [round(step["step_seconds"], 4) for step in found["steps"]], flush=True)
        return found

    def resumed(self, newest: Path, num_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """A run from the weights in `newest`, and one that goes on from it; two steps each."""
        alone = ["--save_strategy", "no"]
        drop_page_cache(newest)
        fresh = self.run("from weights", newest, 2, [*alone, "--stored_weights"])
        drop_page_cache(newest)
        return fresh, self.run("resumed", newest, num_steps + 2, [*alone, "--resume", str(newest)])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the disk, run without and with saves, and print what they cost."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    end_runs_when_terminated()
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // arguments.gpus))}
    num_bytes = SAVED_BYTES * num_parameters(arguments.size, arguments.num_layers)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        most_saves = saves_that_fit(arguments.saves, num_bytes, shutil.disk_usage(folder).free)
        rates = measure_disk(folder, num_bytes=min(PROBE_BYTES, num_bytes), num_files=arguments.gpus)
        print(f"disk: {rates.write / 1e9:.2f} GB/s written and synced, {rates.read / 1e9:.2f} GB/s read", flush=True)
        model = folder / arguments.size
        write_config(model, arguments.size, arguments.num_layers)
        with Service(num_ranks=arguments.gpus, environment=environment, is_always_new=True) as service:
            runs = Runs(service, arguments, folder / "run")
            plain = runs.run("without saves", model, arguments.steps, ["--save_strategy", "no"])
            print(plain["plan"])
            step_seconds = statistics.median(step["step_seconds"] for step in plain["steps"][WARMUP:])
            every, number = save_interval(num_bytes, rates.write, step_seconds, arguments.seconds, most_saves)
            print(f"a checkpoint has {num_bytes / 1e9:.2f} GB; {number} saves, one every {every} steps", flush=True)
            waits = number * num_bytes / rates.write if arguments.no_room else 0.0
            check_time(plain["load_seconds"] + every * (number + 1) * step_seconds + waits, arguments.run_seconds)
            words = ["--saves", "--save_steps", str(every), "--save_total_limit", "1"]
            if arguments.no_room:
                words += ["--host_memory_limit", f"{plain['planned_host_gib'] * 1.001:.6f}"]
            saved = runs.run("with saves", model, every * (number + 1), words)
            tell_saves(plain, saved, rates, every, not arguments.no_room)
            if arguments.resume:
                newest = Path(saved["saved"]["newest"])
                fresh, resumed = runs.resumed(newest, saved["saved"]["saves"][-1]["step"])
                held = sum(file.stat().st_size for file in newest.glob("optimizer*.safetensors"))
                tell_starts(fresh, resumed, held, rates.read)


if __name__ == "__main__":
    main()
