"""CPU shares: disjoint, near the GPU, whole cores, and refused where they would cost more than they bring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mobius.hardware.numa import GpuLocation, gpu_addresses, parse_cpu_list, slice_cpus, split_cpus_by_rank

# Two sockets of four cores with two threads each, numbered as Linux does: first threads first.
NODES = (frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15}))
EVERY_CPU = NODES[0] | NODES[1]
SIBLINGS = {cpu: frozenset({cpu % 8, cpu % 8 + 8}) for cpu in range(16)}


def places(*nodes: int) -> list[GpuLocation]:
    """One GPU per rank, on these nodes."""
    return [GpuLocation(f"0000:{17 + rank}:00.0", node, NODES[node]) for rank, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3\n", {0, 1, 2, 3}),
        ("0-1,64-65", {0, 1, 64, 65}),
        ("7", {7}),
        ("0,2,4-5\n", {0, 2, 4, 5}),
        ("\n", set()),  # a node that has memory only
    ],
)
def test_a_cpu_list_of_the_kernel_is_read(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["x", "-3", "0,,1", "0-3,", "0 1"])
def test_anything_else_is_no_cpu_list(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)


def test_an_address_is_written_as_the_kernel_names_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [(0, 0x17, 0), (0x10000, 0xE1, 0x1F)]
    properties = [SimpleNamespace(pci_domain_id=a, pci_bus_id=b, pci_device_id=c) for a, b, c in numbers]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)

    assert gpu_addresses([0, 1]) == ["0000:17:00.0", "10000:e1:1f.0"]


def test_the_threads_of_a_core_stay_together() -> None:
    shares = [slice_cpus(NODES[0], SIBLINGS, num_shares=2, index=index) for index in range(2)]

    assert shares == [{0, 1, 8, 9}, {2, 3, 10, 11}]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4, 5, 8])
def test_shares_are_disjoint_complete_and_differ_by_one_core_at_most(num_shares: int) -> None:
    shares = [slice_cpus(EVERY_CPU, SIBLINGS, num_shares=num_shares, index=index) for index in range(num_shares)]

    assert sorted(cpu for share in shares for cpu in share) == list(range(16))
    assert max(map(len, shares)) - min(map(len, shares)) <= 2  # CPUs, two of which are a core


def test_each_rank_gets_a_part_of_the_node_of_its_own_gpu() -> None:
    # Ranks take the GPUs in an order in which nodes alternate.
    shares = split_cpus_by_rank(places(1, 0, 1, 0), SIBLINGS, allowed=EVERY_CPU)

    assert shares == [{4, 5, 12, 13}, {0, 1, 8, 9}, {6, 7, 14, 15}, {2, 3, 10, 11}]


def test_only_allowed_cpus_are_shared_out() -> None:
    allowed = frozenset({2, 3, 8, 9, 10, 11, 4, 12})  # a container that has single threads of some cores

    shares = split_cpus_by_rank(places(0, 0, 1), SIBLINGS, allowed=allowed)

    assert shares == [{8, 9}, {2, 3, 10, 11}, {4, 12}]


@pytest.mark.parametrize(
    ("nodes", "allowed", "reason"),
    [
        ((0, 1), NODES[0], r"GPU 0000:18:00.0 is on NUMA node 1, which has 0 of the 8 CPUs for 1 of the 2 ranks"),
        ((0, 0, 0), frozenset({0, 8, 1, 9}), "node 0, which has 4 of the 4 CPUs for 3 of the 3 ranks"),  # two cores
        ((0, 1), frozenset({0, *NODES[1]}), "node 0, which has 1 of the 9 CPUs for 1 of the 2 ranks"),
    ],
)
def test_no_rank_is_bound_if_one_would_be_left_with_too_little(
    nodes: tuple[int, ...], allowed: frozenset[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        split_cpus_by_rank(places(*nodes), SIBLINGS, allowed=allowed)


def test_nodes_that_claim_the_same_cpus_are_not_believed() -> None:
    overlapping = [GpuLocation("0000:17:00.0", 0, EVERY_CPU), GpuLocation("0000:18:00.0", 1, EVERY_CPU)]

    with pytest.raises(ValueError, match="share CPUs"):
        split_cpus_by_rank(overlapping, SIBLINGS, allowed=EVERY_CPU)
