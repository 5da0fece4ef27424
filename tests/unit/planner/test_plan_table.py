"""The table of a plan says of every stage what it holds and where it is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from harness.plan_requests import find_published_shape, request_of

from mobius.planner.gpu_specs import GEMM_SHARE, GPU_SPECS, PublicRates
from mobius.planner.plan_table import (
    describe_gpus,
    describe_long_step,
    describe_public_rates,
    describe_stages,
    describe_step,
)
from mobius.planner.profile import Source
from mobius.planner.request import Machine
from mobius.planner.solver import solve
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse, make_plan


def test_stages_that_are_alike_share_a_line_and_those_without_parameters_say_so(llama_7b: ModelShape) -> None:
    plan = make_plan(llama_7b, num_ranks=4, num_stages=36, num_microbatches=8, num_slots=2)
    plan = replace(plan.with_memory_uses([MemoryUse(1, 0, 2)] * 4), saved_activation_stages=frozenset({34}))

    head, _, *lines = describe_stages(plan, llama_7b).splitlines()

    assert head == "36 stages on 4 rank(s), 8 microbatches, 2 slot(s) per rank"
    assert [line.split() for line in lines] == [
        ["0", "0", "embedding", "131.1M", "resident", "-"],
        ["1-2", "1-2", "none:", "pass", "messages", "on", "0.0M", "-", "-"],
        ["3", "3", "0", "202.4M", "resident", "recomputed"],
        ["4-33", "0-3", "1-30", "202.4M", "streamed", "recomputed"],
        ["34", "2", "31", "202.4M", "streamed", "kept"],
        ["35", "3", "head", "131.1M", "streamed", "-"],
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mailboxes_are_told_besides_what_torch_allocates(llama_7b: ModelShape, num_ranks: int) -> None:
    found = solve(request_of(llama_7b, Machine(num_ranks, GPU_SPECS["H200"])))
    # Two edges with two messages each of 4096 tokens, 4096 wide, in bf16.
    mailboxes = "128.0 MiB" if num_ranks > 1 else "0.0 GiB"
    assert f"  besides: {mailboxes} for mailboxes, " in describe_gpus(found)


def test_a_step_is_also_predicted_with_rates_that_others_published(llama_7b: ModelShape) -> None:
    card = GPU_SPECS["RTX4090"]
    found = solve(request_of(llama_7b, Machine(2, card)))

    def seconds(*shares: float) -> list[float]:
        published = PublicRates(*(share * card.tera_flops * GEMM_SHARE for share in shares), "a table")
        machine = Machine(2, replace(card, published=published))
        changed = replace(found, request=replace(found.request, machine=machine))
        line = describe_public_rates(changed)
        assert line is not None
        assert line in describe_step(changed)
        assert line.endswith("(a table)")
        return [float(number) for number in re.findall(r"\d+\.\d{3}", line)]

    assert seconds(1.0, 1.0) == [round(found.step_seconds, 3)]
    fast, slow = seconds(0.8, 1.25)
    assert fast < found.step_seconds < slow
    assert fast > found.step_seconds / 1.25, "copies and messages stay as they are"


def test_no_published_rates_are_told_of_a_measured_machine_and_where_there_are_none(llama_7b: ModelShape) -> None:
    found = solve(request_of(llama_7b, Machine(2, GPU_SPECS["RTX4090"])))
    assert found.profile is not None
    measured = replace(found, profile=replace(found.profile, source=Source.MEASURED))
    assert describe_public_rates(measured) is None
    assert describe_public_rates(solve(request_of(llama_7b))) is None, "the shares are of this card"
    assert describe_public_rates(solve(request_of(llama_7b, Machine(2, GPU_SPECS["A10"])))) is None


@pytest.mark.parametrize(
    ("size", "rows", "length", "options"),
    [
        ("1b", 128, 512, "--batch_size 4 --seq_length 128"),
        ("1b", 128, 64, "--batch_size 4"),
        ("tiny", 128, 512, "--batch_size 4"),
        ("tiny", 16, 512, None),
        ("1b", 4, 128, None),
    ],
)
def test_a_step_of_minutes_on_cpus_is_told_with_options_for_a_shorter_one(
    size: str, rows: int, length: int, options: str | None
) -> None:
    shape = find_published_shape("1b")
    if size == "tiny":  # 8e6 parameters in products
        shape = replace(shape, layer_parameters=(2 * 10**6,) * 4, head_parameters=0)
    sizes = {"batch_size": rows, "seq_length": length, "num_stages": 4, "num_chunks": 4}
    text = describe_long_step(request_of(shape, Machine(2), **sizes))
    assert describe_long_step(request_of(shape, Machine(2, GPU_SPECS["H200"]), **sizes)) is None
    if options is None:
        assert text is None
        return
    assert text is not None
    assert f"{rows * length:,} tokens" in text
    assert f"; with {options} a step has 1/" in text
