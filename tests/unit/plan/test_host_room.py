"""Where the host's memory is short, plans leave more on the GPUs, and a refusal names the option that is to blame."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from harness.plan_requests import request_of

from mobius.config.config import ActivationOffloading
from mobius.errors import GpuMemoryError, HostMemoryError
from mobius.plan.budget import check_host_memory, estimated_layer, gpu_needs
from mobius.plan.cards import CARDS
from mobius.plan.choice import Answer, answer, choose, settle
from mobius.plan.memory_use import fits_host
from mobius.plan.partition import ModelShape
from mobius.plan.plan_table import describe_short_host
from mobius.plan.request import Machine, PlanRequest
from mobius.planning.host_remedies import host_remedies
from mobius.units import GIB

MACHINE = Machine(2, CARDS["RTX4090"])


@pytest.fixture
def shape(llama_7b: ModelShape) -> ModelShape:
    return replace(llama_7b, layer_parameters=llama_7b.layer_parameters[:16])


def request_for(shape: ModelShape, limit: float | None, **options: object) -> PlanRequest:
    usual: dict[str, object] = {"num_stages": 16, "num_chunks": 16, "host_memory_limit": limit}
    return request_of(shape, MACHINE, **(usual | options))


@cache
def planned(request: PlanRequest) -> Answer:
    settled = settle(request)
    return answer(settled, layer=estimated_layer(settled))


def test_less_host_memory_leaves_more_stages_on_the_gpus(shape: ModelShape) -> None:
    unlimited, *limited = [planned(request_for(shape, limit)) for limit in (None, 46, 35, 24)]
    assert limited[0].plan == unlimited.plan
    for found in limited:
        assert fits_host(found.request, found.plan)
        assert max(need.total for need in gpu_needs(found.request, found.plan, found.layer)) <= 24 * GIB
    assert [len(found.plan.resident) for found in limited] == sorted({len(found.plan.resident) for found in limited})
    assert unlimited.step_seconds < limited[1].step_seconds < limited[2].step_seconds < 1.1 * unlimited.step_seconds


def test_a_plan_that_the_host_makes_longer_says_so(shape: ModelShape) -> None:
    assert describe_short_host(planned(request_for(shape, None))) is None
    assert describe_short_host(planned(request_for(shape, 60))) is None
    told = describe_short_host(planned(request_for(shape, 35)))
    assert told is not None
    assert re.fullmatch(
        r"all stages would take \d\d\.\d GiB of host memory, and 35\.0 GiB may be used: \d+ stay on the GPUs.*", told
    )


def test_where_nothing_fits_the_least_is_told(shape: ModelShape) -> None:
    found = planned(request_for(shape, 16))
    alike = []
    for number in (0, 4, 5, 6):
        with suppress(GpuMemoryError):
            alike.append(planned(request_for(shape, 16, resident_stages=str(number))).host.total)
    assert 16 * GIB < found.host.total <= min(alike)


def test_rounds_make_room_for_stages_that_the_host_cannot_hold(shape: ModelShape) -> None:
    options: dict[str, object] = {"seq_length": 2048, "activation_offloading": ActivationOffloading.AUTO}
    ample, short = planned(request_for(shape, 60, **options)), planned(request_for(shape, 28, **options))
    assert ample.plan.num_rounds == 1
    assert short.plan.num_rounds > 1
    assert short.host.total <= 28 * GIB
    fewer = planned(request_for(shape, 28, num_rounds=short.plan.num_rounds // 2, **options))
    assert fewer.host.total > 28 * GIB


def test_numbers_of_stages_and_chunks_are_chosen_among_what_fits_the_host(shape: ModelShape) -> None:
    few = replace(shape, layer_parameters=shape.layer_parameters[:6])
    open_numbers: dict[str, object] = {"num_stages": None, "num_chunks": None, "batch_size": 16}
    best = choose(request_for(few, 8, **open_numbers))
    assert fits_host(best.request, best.plan)
    assert best.seconds > choose(request_for(few, None, **open_numbers)).seconds


@pytest.mark.parametrize(
    ("options", "advice"),
    [({"resident_stages": "0"}, "--resident_stages auto"), ({"num_rounds": 1}, "--num_rounds auto")],
)
def test_a_refusal_names_the_option_without_which_it_fits(
    shape: ModelShape, options: dict[str, object], advice: str
) -> None:
    usual = {"seq_length": 2048, "activation_offloading": ActivationOffloading.AUTO}
    found = planned(request_for(shape, 28, **usual, **options))
    with pytest.raises(HostMemoryError, match=rf"Use {advice} \(needs .* GiB\)"):
        check_host_memory(found.host, available_bytes=28 * GIB, remedies=host_remedies(found))
    assert planned(request_for(shape, 28, **usual)).host.total <= 28 * GIB
