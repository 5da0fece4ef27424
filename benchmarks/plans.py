"""Checks automatic plans on one GPU: drawn settings, each planned by `auto` and run for a few steps under its limit.

    python benchmarks/plans.py RESULTS.jsonl [--settings 40] [--seed 0] [--seconds 540] [--workers 4] [--only WORDS...]
    python benchmarks/plans.py RESULTS.jsonl --report

Weights and tokens are random. For each setting a line is appended to RESULTS.jsonl: the plan, its predicted bytes, what
the rehearsal measured, the most that torch allocated and reserved, predicted seconds and those of the median step. A
setting that is on record for this GPU is skipped, so that several calls share the work; no setting begins later than
--seconds after the start. Workers plan and compile at the same time, as far as their limits fit on the GPU together;
what is timed has GPU and host to itself: all other workers stand still. A worker keeps its host memory, and what it has
compiled and measured, for its next settings, and prefers settings like those it has had. The report counts what ran out
of memory, exceeded its limit, or is further from its prediction than the bounds say.
"""

import argparse
import dataclasses
import fcntl
import json
import logging
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from mobius.process.ranks import Ranks, cache_folder, prepare_environment, set_cuda_max_connections

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
prepare_environment()  # before torch is imported
set_cuda_max_connections()

import torch  # noqa: E402
from make_model import write_config  # noqa: E402
from worker import clean_up, make_batches, make_samples  # noqa: E402

from mobius.config.cli import parse_args  # noqa: E402
from mobius.data.batches import TrainingBatches  # noqa: E402
from mobius.distributed.transport import SingleRankTransport  # noqa: E402
from mobius.engine import host_arena  # noqa: E402
from mobius.errors import GpuMemoryError  # noqa: E402
from mobius.hardware.host_memory import own_host_bytes  # noqa: E402
from mobius.models.families import load_model_config  # noqa: E402
from mobius.planner import planning, timer  # noqa: E402
from mobius.planner.measured_plan import plan_by_measurement  # noqa: E402
from mobius.process.log import setup_logging  # noqa: E402
from mobius.training.data import packed_rows  # noqa: E402
from mobius.training.run_setup import RunSetup, complete_run, draft_run  # noqa: E402
from mobius.training.session import Session, open_session  # noqa: E402
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
POOL_GIB = 20
"""Host memory that a worker keeps."""
MORE_HOST_GIB, ALL_MORE_HOST_GIB = {"1b-20": 3, "7b-8": 9, "7b-4": 0, "8b-8": 22}, 28
"""What a setting may take beyond it, and all settings together: four workers on 128 GiB."""
HUGE_PAGE = 2**21
IDLE_SECONDS = 3.0
"""After which the GPU counts as idle, whatever its driver says."""
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
    def kind(self) -> tuple[object, ...]:
        """Settings of one kind compile nearly the same."""
        return self.shape, self.seq_length, self.is_packed, self.is_lora

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
    """Normal values in bf16, repeated from a small table: made as fast as memory is read."""

    def __init__(self) -> None:
        self._table = (torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
        self._values = self._table

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The value of parameter `name`; vectors, which are norms, are ones."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        number = math.prod(shape)
        if number > len(self._values):
            self._values = self._table.repeat(-(-number // len(self._table)))
        return self._values[:number].view(shape)


class HostPool:
    """Host memory for all settings of a worker: touching and page-locking new memory takes seconds for each of them."""

    def __init__(self, num_bytes: int) -> None:
        self._map, self._lock, self._unlock = host_arena.map_zeros, host_arena.lock_pages, host_arena.unlock_pages
        self._memory, self._taken = self._map(num_bytes, torch.uint8), 0
        self._lock(self._memory)
        vars(host_arena).update(map_zeros=self.zeros, lock_pages=self.lock, unlock_pages=self.unlock)
        vars(planning).update(own_host_bytes=lambda: own_host_bytes() - num_bytes)

    def clear(self) -> None:
        """Give all to the next setting; nothing may use it any more."""
        self._taken = 0

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """As `map_zeros`, in the pool while there is room."""
        start, end = self._taken, self._taken + num_elements * dtype.itemsize
        if end > self._memory.numel():
            return self._map(num_elements, dtype)
        self._taken = -(-end // HUGE_PAGE) * HUGE_PAGE
        return self._memory[start:end].zero_().view(dtype)

    def lock(self, tensor: torch.Tensor) -> None:
        """As `lock_pages`; the pool is page-locked."""
        if not self._has(tensor):
            self._lock(tensor)

    def unlock(self, tensor: torch.Tensor) -> None:
        """As `unlock_pages`; the pool stays page-locked."""
        if not self._has(tensor):
            self._unlock(tensor)

    def _has(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._memory.data_ptr() < self._memory.numel()


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
            wait_until_idle()
            yield
        finally:
            for process in others:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGCONT)


def wait_until_idle() -> None:
    """Wait until the GPU has done what workers that stand still had enqueued, which takes up to a step of theirs."""
    end = time.monotonic() + IDLE_SECONDS
    while _is_busy() and time.monotonic() < end:
        time.sleep(0.02)


def _is_busy() -> bool:
    try:
        return torch.cuda.utilization() > 0
    except Exception:  # without nvidia-ml-py, or where the driver does not tell
        return True


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Within it no other worker is within the same name."""
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def share(folder: Path, name: str, wanted: float, total: float) -> Iterator[None]:
    """Within it `wanted` of `total` GiB are this worker's; waits until other workers leave as much."""
    file = folder / f"{name}.json"

    def change(own: float | None) -> bool:
        with locked(folder, name):
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


@contextmanager
def memory_shares(folder: Path, setting: Setting) -> Iterator[None]:
    """Within it the setting has its host memory and its part of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    wanted = total if setting.limit is None else setting.limit + CONTEXT_GIB
    with share(folder, "host", MORE_HOST_GIB[setting.shape], ALL_MORE_HOST_GIB), share(folder, "gpu", wanted, total):
        yield


def facts_of(run_setup: RunSetup) -> dict[str, Any]:
    """The plan and its predictions."""
    plan, found, need = run_setup.plan, run_setup.result, run_setup.result.gpu_estimates[0]
    numbers = {"stages": plan.num_stages, "chunks": plan.num_chunks, "rounds": plan.num_rounds}
    return {
        "plan": {**numbers, **dataclasses.asdict(plan.use_of(0))},
        "predicted_gib": need.total / GIB,
        "parts": need.describe(),
        "limit_gib": ((found.request.gpu_bytes or 0) + found.request.reserve_bytes) / GIB,
        "predicted_seconds": None if found.step_time_prediction is None else found.step_time_prediction.step_seconds,
    }


def compile_layers(run_setup: RunSetup) -> None:
    """Compile what will be measured while other workers go on, by a short measurement that does not count."""
    profiles = cache_folder() / "profiles"
    known, part_seconds = set(profiles.glob("*")), timer.PART_SECONDS
    timer.PART_SECONDS = 0.0
    plan_by_measurement(run_setup.result, run_setup.parts, run_setup.rank_context, SingleRankTransport())
    timer.PART_SECONDS = part_seconds
    for path in set(profiles.glob("*")) - known:
        path.unlink()


def measure(
    setting: Setting, folder: Path, pool: HostPool, source: RepeatedWeights, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Plan and run one setting; what became of it, and the numbers."""
    model = folder / setting.shape
    config = parse_args([*setting.options(model), *more], num_ranks=1)
    start, marks = time.perf_counter(), dict[str, float]()
    model_config = load_model_config(model, config.model)
    samples = make_samples(config, setting.lengths(folder), model_config.vocab_size)
    batches = make_batches(config, samples, is_packed=setting.is_packed)
    result: dict[str, Any] = {"marks": marks}
    with ExitStack() as measuring, _Listener(measuring) as listener:

        def passed(part: str) -> None:
            marks[part] = time.perf_counter() - start
            if part == "measuring":
                measuring.close()

        try:
            draft = draft_run(config, Ranks(0, 1, 0), model_config)
            run_setup = complete_run(draft, config, packed=packed_rows(batches))
        except GpuMemoryError as error:
            return {"outcome": "refused", "text": str(error)}
        passed("plan")
        compile_layers(run_setup)
        passed("compile")
        pool.clear()
        measuring.enter_context(timed(folder))
        passed("turn")
        try:
            session = open_session(run_setup, model, source=source, on_part_done=lambda part, _: passed(part))
            result |= facts_of(session.run_setup)
            measuring.callback(session.close)
            steps = run_steps(session, batches, folder, passed)
            result |= {"outcome": "ran", "seconds": statistics.median(steps[1:]), "steps": steps}
        except (torch.OutOfMemoryError, GpuMemoryError) as error:
            result |= {"outcome": "out of memory", "text": str(error)[:400]}
        stats = torch.cuda.memory_stats()
        result["allocated_gib"] = stats["allocated_bytes.all.peak"] / GIB
        result["reserved_gib"] = stats["reserved_bytes.all.peak"] / GIB
        result["rehearsal"] = [line for line in listener.lines if line.startswith("rehearsal:")]
    return result


def run_steps(session: Session, batches: TrainingBatches, folder: Path, passed: Callable[[str], None]) -> list[float]:
    """Seconds of every step, while all other workers stand still."""
    trainer = session.trainer(batches)
    with timed(folder):
        passed("second turn")
        steps = [step.step_seconds for step in trainer.train()]
    passed("steps")
    return steps


class _Listener(logging.Handler):
    """Collects the lines of the program's log, and lets the other workers go on when the machine has been measured."""

    def __init__(self, measuring: ExitStack) -> None:
        super().__init__(logging.DEBUG)
        self.lines, self._measuring = list[str](), measuring

    def __enter__(self) -> Self:
        logging.getLogger("mobius").setLevel(logging.DEBUG)  # which tells what was measured
        logging.getLogger("mobius").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("mobius").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line."""
        self.lines.append(text := record.getMessage())
        if text.startswith(("profile measured in", "host measured in")):
            self._measuring.close()


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


def take_next(folder: Path, settings: Sequence[Setting], had: Sequence[Setting]) -> Setting | None:
    """The next setting that no worker takes: of a kind that this worker `had`, else of one that none had, else any.

    Those without a limit come last, because they wait until no other worker has memory of the GPU.
    """
    with locked(folder, "next"):
        file = folder / "taken.json"
        taken: list[str] = json.loads(file.read_text()) if file.exists() else []
        left = [each for each in settings if each.name not in taken]
        if not left:
            return None
        left = [each for each in left if each.limit is not None] or left
        own, others = {each.kind for each in had}, {each.kind for each in settings if each.name in taken}
        found = min(left, key=lambda each: (each.kind not in own, each.kind in others))
        file.write_text(json.dumps([*taken, found.name]))
    return found


def run_worker(arguments: argparse.Namespace, settings: Sequence[Setting], folder: Path) -> None:
    """Run settings that no other worker has taken, one after the other, and append a line for each."""
    (folder / f"{os.getpid()}.worker").touch()
    device, had = torch.cuda.get_device_name(), list[Setting]()
    pool, source = HostPool(POOL_GIB * GIB), RepeatedWeights()
    while time.time() < arguments.until and (setting := take_next(folder, settings, had)) is not None:
        had.append(setting)
        with memory_shares(folder, setting):
            if time.time() > arguments.until:
                break
            begun = time.monotonic()
            try:
                result = measure(setting, folder, pool, source, arguments.options)
            except Exception as error:  # other settings go on
                result = {"outcome": "failed", "text": f"{error}\n{traceback.format_exc()}"}
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
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], help="words of the settings' names")
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
