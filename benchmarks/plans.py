"""Checks automatic plans on one GPU: drawn settings, each planned by `auto` and run for a few steps under its limit.

    python benchmarks/plans.py RESULTS.jsonl [--settings 40] [--seed 0] [--seconds 540] [--workers 5] [--only WORDS...]
    python benchmarks/plans.py RESULTS.jsonl --report

Weights and tokens are random. For each setting a line is appended to RESULTS.jsonl: the plan, its predicted bytes, what
the rehearsal measured, the most that torch allocated and reserved, predicted seconds and those of the median step. A
setting that is on record for this GPU is skipped, so that several calls share the work; no setting begins later than
--seconds after the start. Workers plan and compile at the same time, as far as their limits fit on the GPU together;
what is timed has GPU and host to itself: all other workers stand still. The report counts what ran out of memory,
exceeded its limit, or is further from its prediction than the bounds say.
"""

import argparse
import dataclasses
import fcntl
import json
import logging
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from mobius.ranks import Ranks, cache_folder, prepare_environment

prepare_environment()  # before torch is imported

import torch  # noqa: E402
from make_model import write_config  # noqa: E402
from worker import clean_up, make_batches, make_samples  # noqa: E402

from mobius.config.cli import parse_args  # noqa: E402
from mobius.errors import GpuMemoryError, MobiusError  # noqa: E402
from mobius.log import setup_logging  # noqa: E402
from mobius.messages.transport import SingleRankTransport  # noqa: E402
from mobius.models.families import load_model_config  # noqa: E402
from mobius.planning.measured_plan import is_to_be_measured, measured_profile  # noqa: E402
from mobius.planning.run_setup import RunSetup, make_run_setup  # noqa: E402
from mobius.training.data import packed_rows  # noqa: E402
from mobius.training.session import open_session  # noqa: E402
from mobius.units import GIB  # noqa: E402

BYTES_BOUND, SECONDS_BOUND = 0.05, 0.10
"""Shares by which reserved bytes and seconds may differ from the plan's."""
STEPS = 4
"""Of which the first is left out."""
TOKENS_OF_A_STEP = (16_384, 32_768, 65_536)
LENGTHS = (512, 1024, 2048, 4096, 8192)
LIMITS: dict[str, tuple[float | None, ...]] = {
    "1b-20": (4, 5, 6, 8, 10, 14, 20, None),
    "7b-8": (6, 8, 10, 12, 16, 24, None),
}
CONTEXT_GIB = 1.0
"""GPU memory of a process outside of its limit."""
HOST_GIB = {"8b-8": 48}
"""Host memory that a run may take, where it is not `USUAL_HOST_GIB`."""
USUAL_HOST_GIB = 32
"""Stated, because a machine whose memory grows on demand has little free at the start."""
LAYERS = {"1b-20": 20, "7b-8": 8, "7b-4": 4, "8b-8": 8}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run whose numbers are left to the planner."""

    shape: str
    seq_length: int
    batch_size: int
    limit: float | None
    """GiB of the GPU."""
    clips: bool = False
    is_packed: bool = False
    """Whether rows hold several samples."""
    is_lora: bool = False

    @property
    def name(self) -> str:
        marks = [
            word for word, is_on in (("clip", self.clips), ("packed", self.is_packed), ("lora", self.is_lora)) if is_on
        ]
        limit = "no limit" if self.limit is None else f"{self.limit:g} GiB"
        return " ".join([self.shape, f"{self.batch_size}x{self.seq_length}", limit, *marks])

    def options(self, model: Path) -> list[str]:
        """Words of main.py's command line."""
        words = ["--model_path", str(model), "--num_stages", "auto", "--num_chunks", "auto"]
        words += ["--seq_length", str(self.seq_length), "--batch_size", str(self.batch_size)]
        words += ["--max_grad_norm", "1" if self.clips else "0", "--num_iterations", str(STEPS)]
        words += [
            "--host_memory_limit",
            str(HOST_GIB.get(self.shape, USUAL_HOST_GIB)),
            *(["--use_lora"] if self.is_lora else []),
        ]
        return words if self.limit is None else [*words, "--gpu_memory_limit", f"{self.limit:g}"]

    def lengths(self, folder: Path) -> Path | None:
        """File with the token counts of samples; None: rows are full."""
        if not self.is_packed:
            return None
        drawn = random.Random(0)
        counts = [max(8, int(self.seq_length * min(1.0, drawn.lognormvariate(-2.2, 0.8)))) for _ in range(20_000)]
        file = folder / f"lengths-{self.name.replace(' ', '-')}.json"
        file.write_text(json.dumps(counts))
        return file


KNOWN_SETTINGS = (
    Setting("7b-8", 512, 64, 12, clips=True, is_packed=True),
    Setting("1b-20", 2048, 32, 4),
    Setting("1b-20", 2048, 32, 4, clips=True),
    Setting("7b-4", 512, 64, 10, clips=True, is_packed=True),
    Setting("7b-4", 512, 64, 18, clips=True, is_packed=True),
    Setting("1b-20", 2048, 32, 6),
    Setting("1b-20", 2048, 32, 10),
    Setting("8b-8", 131_072, 1, 24),
)
"""Two that ran out of memory once, their neighbours, and a sequence whose seconds were 18 % off."""


class RepeatedWeights:
    """Normal values, repeated from a small table: made as fast as memory is read, on the host as a checkpoint's are."""

    def __init__(self) -> None:
        self._table = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02
        self._values = self._table

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The value of parameter `name`; vectors, which are norms, are ones."""
        if len(shape) == 1:
            return torch.ones(shape)
        number = math.prod(shape)
        if number > len(self._values):  # a larger tensor of the same values; touching new memory takes seconds
            self._values = self._table.repeat(-(-number // len(self._table)))
        return self._values[:number].view(shape)


def draw_settings(number: int, seed: int) -> list[Setting]:
    """So many different settings: those of `KNOWN_SETTINGS` first, the others drawn."""
    drawn, settings = random.Random(seed), list(KNOWN_SETTINGS)
    while len(settings) < number:
        shape, length = drawn.choice(list(LIMITS)), drawn.choice(LENGTHS)
        kind = drawn.choice(["full", "full", "packed", "lora"])
        setting = Setting(
            shape,
            length,
            max(1, drawn.choice(TOKENS_OF_A_STEP) // length),
            drawn.choice(LIMITS[shape]),
            clips=drawn.random() < 0.5,
            is_packed=kind == "packed",
            is_lora=kind == "lora",
        )
        if setting not in settings:
            settings.append(setting)
    return settings[:number]


@contextmanager
def timed(folder: Path) -> Iterator[None]:
    """Within it all other workers stand still, so that what is timed has GPU and host to itself."""
    with locked(folder, "timed"):
        others = [int(file.stem) for file in folder.glob("*.worker") if int(file.stem) != os.getpid()]
        try:
            for process in others:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGSTOP)
            yield
        finally:
            for process in others:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGCONT)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Within it no other worker is within the same name."""
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def gpu_share(folder: Path, limit: float | None) -> Iterator[None]:
    """Within it `limit` GiB of the GPU are this worker's, or all of them; waits until other workers leave as much."""
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    wanted, file = total if limit is None else limit + CONTEXT_GIB, folder / "shares.json"

    def change(own: float | None) -> bool:
        with locked(folder, "shares"):
            taken: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
            taken.pop(str(os.getpid()), None)
            if own is not None and taken and sum(taken.values()) + own > total:
                return False
            if own is not None:
                taken[str(os.getpid())] = own
            file.write_text(json.dumps(taken))
            return True

    while not change(wanted):
        time.sleep(0.5)
    try:
        yield
    finally:
        change(None)


def facts_of(run_setup: RunSetup) -> dict[str, Any]:
    """The plan and its predictions."""
    plan, found, need = run_setup.plan, run_setup.result, run_setup.result.gpu_estimates[0]
    numbers = {"stages": plan.num_stages, "chunks": plan.num_chunks, "rounds": plan.accumulation_rounds}
    return {
        "plan": {**numbers, **dataclasses.asdict(plan.use_of(0))},
        "predicted_gib": need.total / GIB,
        "parts": need.describe(),
        "limit_gib": ((found.request.gpu_bytes or 0) + found.request.reserve_bytes) / GIB,
        "predicted_seconds": None if found.step_time_prediction is None else found.step_time_prediction.step_seconds,
    }


def compile_layers(run_setup: RunSetup) -> None:
    """Compile what will be measured while other workers go on, by a measurement that does not count."""
    if is_to_be_measured(run_setup):
        measured_profile(run_setup, SingleRankTransport())
        shutil.rmtree(cache_folder() / "profiles")


def measure(setting: Setting, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Plan and run one setting; what became of it, and the numbers."""
    model = folder / setting.shape
    config = parse_args([*setting.options(model), *more], num_ranks=1)
    ranks, start, marks = Ranks(0, 1, 0), time.perf_counter(), dict[str, float]()
    model_config = load_model_config(model, config.model)
    samples = make_samples(config, setting.lengths(folder), model_config.vocab_size)
    batches = make_batches(config, samples, is_packed=setting.is_packed)
    device, told, measuring = torch.device("cuda"), list[str](), ExitStack()
    logging.getLogger("mobius").setLevel(logging.DEBUG)  # which tells what was measured
    logging.getLogger("mobius").addHandler(handler := _Listener(told, measuring))

    def passed(part: str) -> None:
        marks[part] = time.perf_counter() - start
        if part == "measuring":
            measuring.close()

    try:
        run_setup = make_run_setup(config, ranks, model_config, packed=packed_rows(batches))
    except GpuMemoryError as error:
        return {"outcome": "refused", "text": str(error)}
    passed("plan")
    compile_layers(run_setup)
    passed("compile")
    measuring.enter_context(timed(folder))

    try:
        session = open_session(run_setup, model, source=RepeatedWeights(), on_part_done=passed)
    except (torch.OutOfMemoryError, GpuMemoryError) as error:
        measuring.close()
        return {"outcome": "out of memory", "text": str(error)[:400], "marks": marks, "rehearsal": told}
    result: dict[str, Any] = {"rehearsal": [line for line in told if line.startswith("rehearsal:")], "marks": marks}
    result |= facts_of(session.run_setup)
    try:
        trainer = session.trainer(batches)
        with timed(folder):
            steps = list(trainer.train())
        result |= {"outcome": "ran", "seconds": statistics.median([step.step_seconds for step in steps[1:]])}
    except (torch.OutOfMemoryError, GpuMemoryError) as error:
        result |= {"outcome": "out of memory", "text": str(error)[:400]}
    passed("steps")
    stats = torch.cuda.memory_stats(device)
    result["allocated_gib"] = stats["allocated_bytes.all.peak"] / GIB
    result["reserved_gib"] = stats["reserved_bytes.all.peak"] / GIB
    session.close()
    logging.getLogger("mobius").removeHandler(handler)
    return result


class _Listener(logging.Handler):
    """Collects the lines of the program's log, and lets the other workers go on when the machine has been measured."""

    def __init__(self, lines: list[str], measuring: ExitStack) -> None:
        super().__init__(logging.DEBUG)
        self._lines, self._measuring = lines, measuring

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line."""
        self._lines.append(text := record.getMessage())
        if text.startswith(("measured in", "host measured in")):
            self._measuring.close()


_TORCH_FRAMES = ("output_code", "runtime_wrappers", "utils.py", "function.py", "module.py", "stateless", "_ops")


def explain(setting: Setting, folder: Path, more: Sequence[str]) -> None:
    """Print who holds memory when the setting's peak, or its end, comes: bytes by the place that allocated them."""
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python", context="alloc")
    print({k: v for k, v in measure(setting, folder, more).items() if k != "marks"})
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, tuple[int, str]] = {}
    total, most, at_most = 0, 0, dict[int, tuple[int, str]]()
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            frames = [f"{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in event["frames"]]
            live[event["addr"]] = (event["size"], " < ".join(frames[:22]))
            total += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in live:
            total -= live.pop(event["addr"])[0]
        if total > most + 2**20:
            most, at_most = total, dict(live)
    by_place: dict[str, list[int]] = {}
    for size, place in at_most.values():
        place = " < ".join(
            f
            for f in place.split(" < ")
            if not f.startswith(
                (
                    "output_code",
                    "runtime_wrappers",
                    "utils.py",
                    "function.py",
                    "module.py",
                    "stateless",
                    "eval_frame",
                    "_ops",
                )
            )
        )
        by_place.setdefault(place, []).append(size)
    print(f"peak of what was recorded: {most / GIB:.2f} GiB")
    for place, sizes in sorted(by_place.items(), key=lambda item: -sum(item[1]))[:30]:
        print(f"  {sum(sizes) / GIB:7.3f} GiB in {len(sizes):3d} x {max(sizes) / 2**20:7.1f} MiB  {place}")


def report(results: Sequence[dict[str, Any]]) -> bool:
    """Print the table and its sums; whether every setting that was not refused kept its bounds."""
    print("plan: stages/chunks/rounds; resident, saving activations, offloading them, slots. GiB; s per step.")
    away_bytes, away_seconds, out, failed = [], [], 0, 0
    for each in sorted(results, key=lambda result: result["name"]):
        if each["outcome"] == "refused":
            print(f"{each['name']:38} refused")
            continue
        if each["outcome"] == "failed":
            failed += 1
            print(f"{each['name']:38} failed: {each['text'][:200]}")
            continue
        if each["outcome"] != "ran":
            out += 1
            print(f"{each['name']:38} OUT OF MEMORY {each.get('plan')} predicted {each.get('predicted_gib')}")
            continue
        plan = each["plan"]
        saving, offloading = plan["num_saving_activations"], plan["num_offloading_activations"]
        uses = f"{plan['num_resident']}r{saving}k{offloading}s{plan['num_slots']}"
        text = f"{plan['stages']}/{plan['chunks']}/{plan['rounds']} {uses}{' again' if each.get('rehearsal') else ''}"
        bytes_away = each["reserved_gib"] / each["predicted_gib"] - 1
        predicted = each["predicted_seconds"]
        seconds_away = None if predicted is None else each["seconds"] / predicted - 1
        away_bytes.append((abs(bytes_away), each["reserved_gib"] > each["limit_gib"]))
        away_seconds += [] if seconds_away is None else [abs(seconds_away)]
        print(
            f"{each['name']:38} {text:24} {each['limit_gib']:6.2f} {each['predicted_gib']:6.2f} "
            f"alloc {each['allocated_gib']:6.2f} res {each['reserved_gib']:6.2f} ({bytes_away:+.1%}) "
            f"{predicted or 0:6.3f} {each['seconds']:6.3f} ({seconds_away or 0:+.1%})"
        )
    over = sum(is_over for _, is_over in away_bytes)
    far, slow = sum(share > BYTES_BOUND for share, _ in away_bytes), sum(s > SECONDS_BOUND for s in away_seconds)
    refused = sum(each["outcome"] == "refused" for each in results)
    print(f"{len(away_bytes)} ran, {out} ran out of memory, {refused} refused, {failed} failed, {over} over the limit")
    print(
        f"{far} with bytes further off than {BYTES_BOUND:.0%}, {slow} with seconds further off than {SECONDS_BOUND:.0%}"
    )
    return not (out or failed or over or far or slow)


def take_next(folder: Path) -> int:
    """The number of the next setting, which no other worker takes."""
    with locked(folder, "next"):
        file = folder / "next"
        number = int(file.read_text()) if file.exists() else 0
        file.write_text(str(number + 1))
    return number


def run_worker(arguments: argparse.Namespace, settings: Sequence[Setting], folder: Path) -> None:
    """Run settings that no other worker has taken, one after the other, and append a line for each."""
    (folder / f"{os.getpid()}.worker").touch()
    device = torch.cuda.get_device_name()
    while (number := take_next(folder)) < len(settings) and time.time() < arguments.until:
        setting = settings[number]
        if arguments.explain:
            explain(setting, folder, arguments.options)
            clean_up()
            continue
        with gpu_share(folder, setting.limit):
            begun = time.monotonic()
            try:
                result = measure(setting, folder, arguments.options)
            except MobiusError as error:
                result = {"outcome": "failed", "text": str(error)}
            clean_up()
        result |= {"device": device, "name": setting.name, "took": time.monotonic() - begun}
        with arguments.results.open("a") as file:
            file.write(json.dumps(result) + "\n")


def run_workers(arguments: argparse.Namespace, settings: Sequence[Setting]) -> None:
    """Run all settings, in this process or in several that share the GPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape, layers in LAYERS.items():
            write_config(folder / shape, shape.split("-")[0], layers)
        if arguments.workers == 1:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            run_worker(arguments, settings, folder)
            return
        (folder / "settings.json").write_text(json.dumps([dataclasses.asdict(setting) for setting in settings]))
        command = [sys.executable, __file__, *sys.argv[1:]]
        where = [f"--folder={folder}", f"--until={arguments.until}"]
        # Caches of its own: a worker that stands still may hold a lock, and what one has measured others measure again.
        workers = [
            subprocess.Popen(
                [command[0], command[1], *where, *command[2:]],
                start_new_session=True,
                env={
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor-{part}",
                    "XDG_CACHE_HOME": f"{folder}/cache-{part}",
                },
            )
            for part in range(arguments.workers)
        ]
        try:
            for worker in workers:
                worker.wait()
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The lines on record."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def parse() -> argparse.Namespace:
    """The command line; `folder` and `until` are for workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540, help="after which no setting begins")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="words of the settings' names")
    parser.add_argument("--explain", action="store_true", help="who holds memory at the peak of each setting")
    parser.add_argument("--report", action="store_true", help="the table of what is on record")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="more options of main.py")
    return parser.parse_args()


def main() -> None:
    """Run what is not on record, then report; the exit code says whether all bounds were kept."""
    arguments = parse()
    setup_logging(0)
    if arguments.folder is not None:
        told = json.loads((arguments.folder / "settings.json").read_text())
        run_worker(arguments, [Setting(**each) for each in told], arguments.folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers are ended
    arguments.until = time.time() + arguments.seconds
    if not arguments.report:
        done = {(result["device"], result["name"]) for result in read_results(arguments.results)}
        device = torch.cuda.get_device_name()
        settings = [
            setting
            for setting in draw_settings(arguments.settings, arguments.seed)
            if (device, setting.name) not in done and all(word in setting.name for word in arguments.only)
        ]
        run_workers(
            arguments, sorted(settings, key=lambda each: each.limit or math.inf)
        )  # what fits side by side first
    results, kept = read_results(arguments.results), True
    for device in sorted({result["device"] for result in results}):
        print(f"== {device}")
        kept = report([result for result in results if result["device"] == device]) and kept
    sys.exit(not kept)


if __name__ == "__main__":
    main()
