"""Replicas sum in their own order and in fp32, whatever the format in which gradients travel, and give all parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.forked import Ranks
from harness.live_bytes import LiveBytes
from harness.replica_ranks import LAYOUT, shares_of, values_of
from harness.runs import environment
from torch import Tensor

from mobius.distributed import replicas as messages
from mobius.distributed.replicas import PACK_BYTES, ReplicaGroup
from mobius.distributed.shards import Segment
from mobius.limits import REDUCE_CHUNK_ELEMENTS
from mobius.process.ranks import Ranks as RunRanks

NUM_REPLICAS = 3
Found = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of three processes has made over gloo."""
    folder = tmp_path_factory.mktemp("replicas")
    ranks = Ranks(
        "harness.replica_ranks",
        "use_all",
        [str(folder / "made")],
        num_ranks=NUM_REPLICAS,
        folder=folder,
        environment=environment(folder / "cache"),
    )
    assert ranks.wait(seconds=120) == 0, ranks.output()
    return [torch.load(folder / f"made.{rank}") for rank in range(NUM_REPLICAS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_owner_has_the_sum_in_the_order_of_replicas(found: Found, dtype: torch.dtype) -> None:
    given = [values_of(replica) for replica in range(NUM_REPLICAS)]
    for owner, made in enumerate(found):
        sent = [value if replica == owner else value.to(dtype).float() for replica, value in enumerate(given)]
        expected = (sent[0] + sent[1]) + sent[2]
        assert not torch.equal(expected, sent[0] + (sent[1] + sent[2])), "the order shows"
        for part in shares_of(owner, NUM_REPLICAS).own:
            assert torch.equal(made[f"reduced in {dtype}"][part], expected[part])
        assert made[f"total in {dtype}"].tolist() == [float(torch.tensor([0.1, 1.1, 2.1]).sum()), 21.0]


@pytest.mark.parametrize("name", ["spread", "gathered", "spread on hosts"])
def test_all_have_the_parts_of_each_owner(found: Found, name: str) -> None:
    expected = torch.empty(LAYOUT.num_trained, dtype=torch.bfloat16)
    for owner in range(NUM_REPLICAS):
        for part in shares_of(owner, NUM_REPLICAS).own:
            expected[part] = values_of(owner).bfloat16()[part]
    assert all(torch.equal(made[name], expected) for made in found)


def test_the_first_one_collects_all_parts(found: Found) -> None:
    expected = torch.empty(LAYOUT.num_trained)
    for owner in range(NUM_REPLICAS):
        for part in shares_of(owner, NUM_REPLICAS).own:
            expected[part] = values_of(owner)[part]
    assert torch.equal(found[0]["collected"], expected)
    assert [made["collected"] for made in found[1:]] == [None] * (NUM_REPLICAS - 1)


def segment_of(length: int, number: int) -> Segment:
    return tuple(slice(index * length, (index + 1) * length) for index in range(number))


class Traffic:
    """Addresses of what travels from and to one of several replicas, whose others do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_replicas: int, chunk: int, dtype: torch.dtype) -> None:
        self.addresses: list[int] = []
        fake: Any = SimpleNamespace(isend=None, irecv=None, new_group=lambda peers, **_: peers)
        fake.P2POp = lambda operation, tensor, *_: self.addresses.append(tensor.data_ptr())
        fake.batch_isend_irecv = lambda operations: []
        monkeypatch.setattr(messages, "dist", fake)
        monkeypatch.setattr(messages, "HOST_CHUNK_ELEMENTS", chunk)
        ranks = RunRanks(1, num_replicas, 1, num_replicas=num_replicas)
        self.replicas = ReplicaGroup(ranks, torch.device("cpu"), reduce_dtype=dtype)
        self.addresses.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_travel_begin_where_nccl_takes_them_in_packs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With four replicas a part is a third of what a GPU receives at a time."""
    number, length = 4, 4096
    assert REDUCE_CHUNK_ELEMENTS // (number - 1) % PACK_BYTES, "which is no multiple by itself"
    traffic = Traffic(monkeypatch, num_replicas=number, chunk=2**10 // (number - 1), dtype=dtype)
    sums = torch.zeros(number * length)
    traffic.replicas.reduce_scatter(sums, [segment_of(length, number)])
    traffic.replicas.all_gather_for_load(sums.to(dtype), [segment_of(length, number)])
    assert len(traffic.addresses) > 2 * 2 * (number - 1), "parts go one after the other"
    assert all(address % PACK_BYTES == 0 for address in traffic.addresses)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_reducing_takes_the_memory_of_one_chunk(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: int
) -> None:
    """In bf16 there are what comes, what leaves and the sum: twice what comes in fp32."""
    chunk = 1024
    traffic = Traffic(monkeypatch, num_replicas=2, chunk=chunk, dtype=dtype)
    sums = torch.zeros(8 * chunk)
    with LiveBytes() as live:
        traffic.replicas.reduce_scatter(sums, [segment_of(4 * chunk, 2)])
    assert live.peak == factor * 4 * chunk
