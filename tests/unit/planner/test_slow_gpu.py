"""A GPU whose power or processors are limited, or that others use, is planned for by its measured rate of products."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from harness.plan_requests import find_published_shape, request_of

from mobius.config.config import ActivationOffloading, Order
from mobius.distributed.rank_context import RankContext
from mobius.planner import this_machine
from mobius.planner.gpu_specs import GPU_SPECS, SUSTAINED_SHARE
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine
from mobius.planner.solver import resolve_auto
from mobius.planner.this_machine import MILLION, SLOW_SHARE, with_product_share
from mobius.process.ranks import Ranks
from mobius.schedule.spec import ComputeOrder

H100, CUDA = Machine(2, GPU_SPECS["H100"]), torch.device("cuda", 0)
USUAL = GPU_SPECS["H100"].product_rate / SUSTAINED_SHARE
"""Operations per second of large products alone."""


class Met:
    """A rendezvous with one other process, whose GPU has a rate of the same card."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def gather(self, own: int) -> list[int]:
        return [own, round(MILLION * self._rate / USUAL)]


def share_of(machine: Machine, met: Met | None = None, *, device: torch.device = CUDA) -> Machine:
    others = {"device_order": (0, 1), "pipeline_rendezvous": met}
    context = RankContext(ranks=Ranks(0, 2, 0), device=device, **others)  # type: ignore[arg-type]
    return with_product_share(machine, context, torch.bfloat16)


def with_rates(monkeypatch: pytest.MonkeyPatch, own: float, other: float | None = None) -> Machine:
    monkeypatch.setattr(this_machine, "measure_product_rate", lambda *_: own)
    return share_of(H100, None if other is None else Met(other))


def test_the_slowest_gpu_is_planned_for_if_it_is_much_slower_than_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for own, other in ((USUAL, None), (1.2 * USUAL, USUAL), ((SLOW_SHARE + 0.01) * USUAL, None)):
        assert with_rates(monkeypatch, own, other) is H100
    assert not caplog.text
    assert with_rates(monkeypatch, USUAL / 4).product_share == pytest.approx(0.25)
    assert "4.0 times as long as is usual" in caplog.text
    assert with_rates(monkeypatch, USUAL, USUAL / 2).product_share == pytest.approx(0.5)


def test_a_gpu_without_room_for_a_product_counts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(this_machine, "measure_product_rate", full)
    assert share_of(H100) is H100


def test_nothing_is_measured_without_a_gpu_or_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "measure_product_rate", lambda *_: pytest.fail("it was measured"))
    unknown = replace(H100, gpu_spec=None)
    assert share_of(H100, device=torch.device("cpu")) is H100
    assert share_of(unknown) is unknown
    slow = share_of(unknown, Met(USUAL / 2))
    assert slow.product_share == 0.5, "the other rank's"


def test_numbers_are_chosen_for_the_speed_that_is_left() -> None:
    """A quarter of an H100 as two ranks: copies take a small part of compute, which recomputes nothing then."""
    shape = find_published_shape("7b")
    shape = replace(shape, layer_parameters=shape.layer_parameters[:16])
    options = {"num_stages": 8, "num_chunks": None, "num_rounds": None, "batch_size": 128, "seq_length": 1024}
    options |= {"compute_order": Order.AUTO, "activation_offloading": ActivationOffloading.AUTO}
    found = {}
    for share in (1.0, 0.25):
        machine = replace(H100, product_share=share)
        request = request_of(shape, machine, gpu_memory_limit=24.0, max_grad_norm=1.0, **options)
        found[share] = resolve_auto(request)
        profile = estimated_profile(request.trying(num_stages=16, num_chunks=32))
        assert profile is not None
        found[share, "layer"] = profile.layer_kinds[0].forward
    assert found[0.25, "layer"] > 2.5 * found[1.0, "layer"]
    assert found[1.0].candidate.order is ComputeOrder.BREADTH_FIRST
    assert found[0.25].candidate.order is ComputeOrder.DEPTH_FIRST
