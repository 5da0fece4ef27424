"""One benchmark run of Mobius on random tokens, for benchmark.py or torchrun. It leaves its numbers only, unless told.

torchrun --nproc_per_node 4 benchmarks/worker.py OUTPUT.json [--torch_adamw] [--lengths FILE] [--share_gpu]
    [the options of main.py]

Without --lengths rows are full; with it samples have these token counts (a JSON list) and share rows as --packing says.
With --trace, the trace and its picture go to --save_dir. Weights are random and made on the GPU, which takes seconds
where transformers' own initialization takes minutes. With --share_gpu all ranks are on the first GPU (shared_gpu.py).
With `--serve FOLDER` it makes one run after the other without starting anew, as the folder tells (service.py).
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mobius.process.ranks import Ranks, prepare_environment

prepare_environment()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from shared_gpu import share_first_gpu  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402

from mobius.config.cli import parse_args  # noqa: E402
from mobius.config.config import Config, Packing  # noqa: E402
from mobius.data.batches import TrainingBatches  # noqa: E402
from mobius.data.mixture import WeightedSamples  # noqa: E402
from mobius.data.token_store import TokenizedDataset  # noqa: E402
from mobius.distributed.node_checks import join_replicas  # noqa: E402
from mobius.errors import MobiusError  # noqa: E402
from mobius.hardware.host_memory import huge_page_share  # noqa: E402
from mobius.models.families import load_model_config  # noqa: E402
from mobius.process.log import setup_logging  # noqa: E402
from mobius.training.data import packed_rows  # noqa: E402
from mobius.training.reporting import log_disk_rates, recordings_of  # noqa: E402
from mobius.training.run_setup import RunSetup, complete_run, draft_run  # noqa: E402
from mobius.training.session import open_session  # noqa: E402
from mobius.units import GIB  # noqa: E402

POLL_SECONDS = 0.05


def main() -> None:
    """One run as the command line says, or several as a folder does."""
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[1]), sys.argv[2:])


def serve(folder: Path) -> None:
    """Make the runs that `folder` tells."""
    is_first = Ranks.from_environment().is_first
    for output, options in run_requests(folder):
        temporary = output.with_suffix(".part")
        try:
            run(temporary, options)
        except RefusedError as error:
            if is_first:  # all of them would write into the same file
                temporary.write_text(json.dumps({"refused": str(error)}))
        clean_up()
        if is_first:  # which has written it, and has cleaned up
            temporary.replace(output)


def run_requests(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Where each run's output goes, and its options: 0.json, 1.json, ... when they appear, while the parent lives."""
    for number in itertools.count():
        order = folder / f"{number}.json"
        while not order.exists():
            time.sleep(POLL_SECONDS)
        told = json.loads(order.read_text())
        # Process groups of an earlier run have left their keys at the store of that port.
        os.environ["MASTER_PORT"], os.environ["BENCHMARK_START"] = told["port"], told["start"]
        yield folder / f"{number}.out", told["options"]


class RefusedError(MobiusError):
    """The planner refuses the run, each rank by itself: nothing is loaded, and no rank waits for another."""


def clean_up() -> None:
    """Give back what a run has left, and let the next one's peaks be its own."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(1.0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set


def run(output: Path, words: Sequence[str]) -> None:
    """Train and write one JSON object: the metrics of every step, and the seconds before the first."""
    own, options = take_own(words)
    ranks = Ranks.from_environment()
    setup_logging(ranks.rank)
    # Steps are durable by what saves a run's checkpoints, and here is none.
    more = ["--durable_steps", "off"] if "--offload_states_to" in options else []
    config = parse_args([*options, *more], num_ranks=ranks.num_ranks)
    ranks = ranks.split_into_pipelines(config.launch.pipeline_ranks)
    folder = Path(config.model.model_path)
    clock = StartClock()
    model_config = load_model_config(folder, config.model)
    samples = make_samples(config, own.lengths, model_config.vocab_size)
    batches = make_batches(config, samples, is_packed=own.lengths is not None)
    run_setup = make_blueprint(config, ranks, model_config, batches)
    device = run_setup.device
    recordings = recordings_of(run_setup, Path(config.output.save_dir))
    if config.output.trace:
        Path(config.output.save_dir).mkdir(parents=True, exist_ok=True)
    clock.ends("plan")

    def on_part_done(part: str, _: RunSetup) -> None:
        clock.ends(part)
        if part == "weights" and device.type == "cuda":  # what making them took does not count
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    source = RandomWeights(device)
    session = open_session(run_setup, folder, source=source, recordings=recordings, on_part_done=on_part_done)
    trainer = session.trainer(batches, has_kernel=not own.torch_adamw)
    clock.ends("trainer")
    load_seconds, loaded = seconds_since_launch(), time.monotonic()
    steps = [dataclasses.asdict(metrics) for metrics in trainer.train()]
    if ranks.is_first:
        told: dict[str, object] = {"steps": steps, "load_seconds": load_seconds, "huge_page_share": huge_page_share()}
        told |= {"start": clock.seconds, "plan": dataclasses.asdict(facts_of(session.run_setup))}
        output.write_text(json.dumps(told))
    log_disk_rates(session, since=loaded)  # for later plans
    session.write_recordings()
    session.all_ranks.barrier()
    session.close()


def take_own(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that main.py does not have, and the others; the GPU is from here on as is asked for."""
    own, options = own_parser().parse_known_args(words)
    if own.share_gpu:
        share_first_gpu()
    return own, options


def own_parser() -> argparse.ArgumentParser:
    """The options that main.py does not have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--torch_adamw", action="store_true")
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--share_gpu", action="store_true")
    return parser


def make_blueprint(config: Config, ranks: Ranks, model_config: PretrainedConfig, batches: TrainingBatches) -> RunSetup:
    """The plan of a model; raises RefusedError with the planner's reason."""
    try:
        replica_rendezvous = join_replicas(config, ranks)
        draft = draft_run(config, ranks, model_config, replica_rendezvous=replica_rendezvous)
        return complete_run(draft, config, packed=packed_rows(batches))
    except MobiusError as error:
        raise RefusedError(str(error)) from error


class StartClock:
    """Time of the start on this rank, part by part; "imports" is all that came before the first part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ends("imports")

    def ends(self, part: str) -> None:
        """Say that `part` has ended now."""
        self.seconds[part] = seconds_since_launch() - sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class PlanFacts:
    """Plan and predictions of a run, to be laid beside what was measured."""

    num_stages: int
    num_chunks: int
    resident: list[int]
    """Resident stages of each rank, as rank 0 supposes."""
    kept: list[int]
    """Stages of each rank that keep their activations."""
    slots: list[int]
    order: str
    """Order of forwards and backwards, with the rounds."""
    waits: list[dict[str, float]]
    """Predicted seconds that compute waits, by rank and cause."""
    step_seconds: float | None
    """Predicted; None where nothing is known of the device's speed."""
    gpu_gib: float
    """Predicted for the fullest rank."""
    host_gib: float
    """Predicted for all ranks; 0 where they compute on the CPU."""


def facts_of(run_setup: RunSetup) -> PlanFacts:
    """The plan of a run, for the record."""
    found, plan, predicted = run_setup.result, run_setup.plan, run_setup.result.step_time_prediction
    uses = [plan.use_of(rank) for rank in range(plan.num_ranks)]
    waits = () if predicted is None else predicted.waits
    return PlanFacts(
        num_stages=plan.num_stages,
        num_chunks=plan.num_microbatches,
        resident=[use.num_resident for use in uses],
        kept=[use.num_saving_activations for use in uses],
        slots=[use.num_slots for use in uses],
        order=f"{plan.order}, {plan.num_rounds} rounds",
        waits=[{str(cause): value for cause, value in each.items()} for each in waits],
        step_seconds=None if predicted is None else predicted.step_seconds,
        gpu_gib=max(need.total for need in found.gpu_estimates) / GIB,
        host_gib=0.0 if run_setup.device.type == "cpu" else found.host_estimate.total / GIB,
    )


class RandomWeights:
    """Normal values of the width that transformers gives Llama, and ones for vectors (norms); made on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The value of parameter `name`, the same however the model is cut."""
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, device=self._device).normal_(0, 0.02, generator=generator)


def seconds_since_launch() -> float:
    """Seconds since benchmark.py started this run; 0 where something else did."""
    now = time.monotonic()
    return now - float(os.environ.get("BENCHMARK_START", now))


def make_samples(config: Config, lengths: Path | None, vocab_size: int) -> TokenizedDataset:
    """Random tokens, every one a target: full rows, or samples of `lengths`, which are cut to a row."""
    length = config.data.seq_length
    counts = [length] * config.pipeline.batch_size if lengths is None else json.loads(lengths.read_text())
    offsets = np.concatenate([[0], np.cumsum(np.minimum(counts, length))]).astype(np.int64)
    tokens = np.random.default_rng(0).integers(0, vocab_size, offsets[-1], dtype=np.int32)
    return TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets)


def make_batches(config: Config, samples: TokenizedDataset, *, is_packed: bool) -> TrainingBatches:
    """Batches of `samples`, which share rows if the configuration says so and `is_packed` does not forbid it."""
    return TrainingBatches(
        [WeightedSamples(samples, 1.0)],
        batch_size=config.pipeline.batch_size,
        seq_length=config.data.seq_length,
        pad_token_id=0,
        seed=config.optim.seed,
        is_packed=is_packed and config.data.packing is not Packing.OFF,
    )


if __name__ == "__main__":
    try:
        main()
    except MobiusError as error:
        sys.exit(str(error))
