"""Tokenizes a dataset and tells time and memory; with `--kill-at`, also what a killed run leaves for the next one.

    python benchmarks/make_dataset.py large.jsonl --gigabytes 1
    python benchmarks/tokenizing.py large.jsonl --workers 2
    python benchmarks/tokenizing.py large.jsonl --workers 2 --kill-at 0.5

Memory is what Linux tells of the processes (resident set), read twenty times a second: of all together, and of the
largest one. Pages that processes share count in each. The cache is a temporary folder beside the dataset.
"""

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SECONDS_BETWEEN = 0.05


def prepare(dataset: str, tokenizer: str, cache: str, workers: int, seq_length: int) -> None:
    """Tokenize `dataset` as a run does."""
    from transformers import AutoTokenizer

    from mobius.config.config import DataConfig
    from mobius.config.options import DatasetEntry
    from mobius.data.datasets import prepare_data
    from mobius.log import setup_logging

    setup_logging(0)
    config = DataConfig((DatasetEntry(dataset),), seq_length=seq_length, preprocessing_num_workers=workers)
    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    (prepared,) = prepare_data(config, loaded, cache_dir=Path(cache)).training
    print(f"{len(prepared.tokenized):,} rows of {len(prepared.tokenized.input_ids):,} tokens: {prepared.counts}")


class Measured:
    """A process that prepares, watched until it ends; `kill_at` is the number of finished records to kill it at."""

    def __init__(self, arguments: tuple[object, ...], cache: Path, kill_at: int | None) -> None:
        start = time.monotonic()
        process = multiprocessing.get_context("spawn").Process(target=prepare, args=arguments)
        process.start()
        self.peak_bytes = self.largest_bytes = self.num_processes = 0
        while process.is_alive():
            assert process.pid is not None
            sizes = [resident_bytes(pid) for pid in (process.pid, *children(process.pid))]
            self.peak_bytes = max(self.peak_bytes, sum(sizes))
            self.largest_bytes = max(self.largest_bytes, *sizes)
            self.num_processes = max(self.num_processes, len(sizes))
            if kill_at is not None and finished_records(cache) >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
            process.join(SECONDS_BETWEEN)
        self.seconds, self.exit_code = time.monotonic() - start, process.exitcode

    def __str__(self) -> str:
        return (
            f"exit code {self.exit_code} after {self.seconds:.0f} s; at most {self.peak_bytes / 2**20:,.0f} MiB in "
            f"{self.num_processes} processes, {self.largest_bytes / 2**20:,.0f} MiB in one"
        )


def resident_bytes(pid: int) -> int:
    """The resident set of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def children(pid: int) -> list[int]:
    """The processes that a process and its threads have started."""
    try:
        listed = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for each in listed for child in each]


def finished_records(cache: Path) -> int:
    """Records in the finished parts of a dataset that is not complete."""
    for journal in cache.glob("tokenized/*.partial/journal.jsonl"):
        whole = journal.read_bytes().rpartition(b"\n")[0]
        if whole:
            return int(json.loads(whole.splitlines()[-1])["progress"]["tally"]["read"])
    return 0


def main() -> None:
    """Read the command line, tokenize once or twice, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=ASSETS / "tiny-llama")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--kill-at", type=float, help="share of the lines after which the first run is killed")
    given = parser.parse_args()
    dataset = given.dataset.absolute()
    with tempfile.TemporaryDirectory(dir=dataset.parent) as folder:
        arguments = (str(dataset), str(given.tokenizer), folder, given.workers, given.seq_length)
        if given.kill_at is not None:
            with dataset.open("rb") as file:
                kill_at = round(sum(1 for _ in file) * given.kill_at)
            print(f"killed: {Measured(arguments, Path(folder), kill_at)}; {finished_records(Path(folder)):,} finished")
        print(f"{dataset.name}, {dataset.stat().st_size / 2**20:,.0f} MiB: {Measured(arguments, Path(folder), None)}")


if __name__ == "__main__":
    main()
