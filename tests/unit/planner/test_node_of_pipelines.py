"""All pipelines of a node meet, so that what one of them finds out about copies between its GPUs holds for all."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from mobius.distributed import rank_context, rendezvous
from mobius.process.ranks import Ranks


@pytest.mark.parametrize(
    ("pipeline_ranks", "num_nodes", "heard"),
    [
        (2, 2, [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4),
        (1, 1, [[*range(8)]] * 8),
        (4, 2, [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4),  # the node is the pipeline
        (1, 8, [None] * 8),  # each has one GPU alone
    ],
)
def test_the_ranks_of_a_node_meet_whatever_their_pipeline(
    pipeline_ranks: int, num_nodes: int, heard: list[list[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = HashStore(), dict[int, tuple[list[int] | None, list[int] | None]]()
    store.set_timeout(timedelta(seconds=30))
    monkeypatch.setattr(rendezvous, "open_store", lambda ranks: store)

    def run(rank: int) -> None:
        num_local = 8 // num_nodes
        ranks = Ranks(rank, 8, rank % num_local, num_replicas=num_nodes, num_nodes=num_nodes).split_into_pipelines(
            pipeline_ranks
        )
        own, beside = (None if seat is None else seat.gather(rank) for seat in rank_context._join_others(ranks))
        found[rank] = own, beside

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[rank][1] for rank in range(8)] == heard
    first = [rank - rank % pipeline_ranks for rank in range(8)]
    assert [found[rank][0] for rank in range(8)] == [
        [*range(each, each + pipeline_ranks)] if pipeline_ranks > 1 else None for each in first
    ]
