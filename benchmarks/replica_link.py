"""Rate at which replicas reduce sums and gather weights, by the code of a run; for replicas.py or torchrun.

torchrun --nproc_per_node 2 benchmarks/replica_link.py OUTPUT.json [--pipeline_ranks N] [--elements NUMBER]
    [--share_gpu] [--socket_rate GB/s]

GB/s that each process sends and receives, all at once, the mean of all: of fp32 sums, of sums that travel in bf16, and
of bf16 weights.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mobius.ranks import Ranks, prepare_environment, set_cuda_max_connections

prepare_environment()  # before torch is imported

import torch  # noqa: E402
from paced_sockets import pace_sockets  # noqa: E402
from shared_gpu import share_first_gpu  # noqa: E402

from mobius.config.config import Device  # noqa: E402
from mobius.distributed.replicas import ReplicaGroup  # noqa: E402
from mobius.distributed.shards import Segment, cut  # noqa: E402
from mobius.distributed.world import World  # noqa: E402
from mobius.hardware import devices  # noqa: E402
from mobius.hardware.devices import MemoryMeter  # noqa: E402

REPEATS = 3
ELEMENTS = 2**28
"""Of a stage's size: 1 GiB of sums."""


def main() -> None:
    """Measure and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--pipeline_ranks", type=int, default=1)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of a stage")
    parser.add_argument("--share_gpu", action="store_true", help="all ranks are on the first GPU")
    parser.add_argument("--socket_rate", type=float, help="GB/s that each TCP connection sends at most")
    arguments = parser.parse_args()
    set_cuda_max_connections()
    ranks = Ranks.from_environment().split_into_pipelines(arguments.pipeline_ranks)
    if arguments.share_gpu:
        share_first_gpu()
    if arguments.socket_rate is not None:
        pace_sockets(arguments.socket_rate)
    device = devices.choose_device(Device.AUTO, ranks, range(ranks.num_local))
    world = World(ranks, device)
    segment = cut(0, arguments.elements, ranks.num_replicas)
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        replicas = ReplicaGroup(ranks, device, reduce_dtype=dtype)
        sums = torch.zeros(arguments.elements, device=device)
        seconds = time_of(lambda: replicas.reduce_scatter(sums, [segment]), world, device)  # noqa: B023
        rates[f"sums in {str(dtype).removeprefix('torch.')}"] = sent(segment, dtype.itemsize) / seconds / 1e9
    weights = torch.zeros(arguments.elements, dtype=torch.bfloat16, device=device)
    seconds = time_of(lambda: replicas.all_gather_for_load(weights, [segment]), world, device)
    rates["weights"] = sent(segment, weights.element_size()) / seconds / 1e9
    if ranks.is_first:
        arguments.output.write_text(json.dumps(rates))
    world.barrier()
    world.close()


def sent(segment: Segment, itemsize: int) -> int:
    """Bytes that each replica sends, and receives."""
    length: int = segment[0].stop - segment[0].start
    return (len(segment) - 1) * length * itemsize


def time_of(work: Callable[[], None], world: World, device: torch.device) -> float:
    """Mean over the processes of the seconds that `work` takes all of them."""
    meter = MemoryMeter(device)
    work()
    meter.synchronize()
    world.barrier()
    start = time.perf_counter()
    for _ in range(REPEATS):
        work()
    meter.synchronize()
    own = torch.tensor([(time.perf_counter() - start) / REPEATS], dtype=torch.float64)
    return float(world.sum_over_ranks(own)) / world.num_ranks


if __name__ == "__main__":
    main()
