"""Replicas sum in their own order and in fp32, whatever the format in which gradients travel, and give all parts."""

from __future__ import annotations

import pytest
import torch
from harness.forked import Ranks
from harness.replica_messages import LAYOUT, shares_of, values_of
from harness.runs import environment
from torch import Tensor

NUM_REPLICAS = 3
Found = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of three processes has made over gloo."""
    folder = tmp_path_factory.mktemp("replicas")
    ranks = Ranks(
        "harness.replica_messages",
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
        assert torch.equal(made[f"total in {dtype}"], torch.tensor([0.1, 1.1, 2.1]).sum())


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
