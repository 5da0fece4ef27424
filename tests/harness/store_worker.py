"""Meets at the launcher's store, then makes process groups by way of the same store, then meets again.

torchrun --nproc_per_node N tests/harness/store_worker.py        every rank prints one JSON line: what it heard
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from mobius.distributed.rendezvous import join_run
from mobius.ranks import Ranks


def main() -> None:
    ranks = Ranks.from_environment()
    rendezvous = join_run(ranks)
    first = rendezvous.gather(["first", ranks.rank])
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    second = join_run(ranks).gather(["second", ranks.rank])
    third = rendezvous.gather(total.item())
    sys.stdout.write(json.dumps([first, second, third]) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
