"""Several pipelines that share a step: bytes as the engine takes them, and what the planner tells of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.live_bytes import LiveBytes
from harness.plan_requests import estimate_gpu_memory, find_published_shape, plain_profile, refusal_by, request_of
from harness.schedules import spec_of
from transformers import LlamaConfig

from mobius.config.config import AdapterConfig, Dtype, FinetuningType, Recompute, ReduceDtype
from mobius.errors import PlanError
from mobius.models.blocks import ModelParts
from mobius.planner.fit import fit_plan
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import (
    estimate_host_memory,
    estimated_layer,
)
from mobius.planner.plan_file import ModelDigest, SavedPlan, check_saved_plan, read_plan
from mobius.planner.plan_table import describe_replicas
from mobius.planner.profile import CopyRates, Profile, ReplicaRates
from mobius.planner.remedies import find_remedies
from mobius.planner.request import Machine
from mobius.planner.solver import PlanResult, solve
from mobius.planner.stage_costs import StageCost, StepRules
from mobius.planner.step_prediction import simulate_steps
from mobius.schedule.build import build_schedule
from mobius.schedule.memory_layout import MemoryRules
from mobius.training.stages import RankStages, StageOptions
from mobius.units import GIB

CPU = torch.device("cpu")
WIDE = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=256,
    tie_word_embeddings=False,
)
TIED = LlamaConfig(**(WIDE.to_dict() | {"tie_word_embeddings": True}))
LORA = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=8)
FROZEN = AdapterConfig(freeze="embedding,layers.0-1")
FULL = AdapterConfig()
NUMBERS = 512
"""Bytes of norms that stages hold, and of elements by which shares are rounded."""


class Counterparts:
    """Replicas of which only the number is asked."""

    def __init__(self, index: int, num_replicas: int) -> None:
        self.index, self.num_replicas = index, num_replicas


@pytest.mark.parametrize(
    ("model", "adapters", "num_replicas", "num_resident", "options"),
    [
        (WIDE, FULL, 2, 0, {}),
        (WIDE, FULL, 3, 1, {}),
        (WIDE, FULL, 2, 2, {"max_grad_norm": 0.0}),
        (WIDE, FULL, 2, 1, {"fp32_gradients": True}),
        (WIDE, FULL, 2, 0, {"num_rounds": 2}),
        (WIDE, FULL, 3, 2, {"num_rounds": 2}),
        (TIED, FULL, 3, 1, {"max_grad_norm": 0.0}),
        (WIDE, LORA, 2, 1, {}),
        (WIDE, FROZEN, 2, 0, {}),
    ],
)
def test_bytes_of_the_states_are_those_that_memory_takes(
    model: LlamaConfig, adapters: AdapterConfig, num_replicas: int, num_resident: int, options: dict[str, Any]
) -> None:
    parts = ModelParts(model, CPU, adapters=adapters)
    machine = Machine(2, GPU_SPECS["H200"], num_replicas=num_replicas, num_nodes=num_replicas)
    request = request_of(parts.shape(), machine, num_stages=4, batch_size=48, **options)
    plan = replace(request.plan, resident=frozenset(range(2 * num_resident)), slots=(2 - num_resident,) * 2)
    for rank in range(2):
        host, device = [], []
        for index in range(num_replicas):
            with LiveBytes() as live:
                stages = RankStages.allocate(
                    parts,
                    plan,
                    rank,
                    StageOptions(dtype=torch.bfloat16, rules=request.memory_rules, loss_chunk_tokens=64),
                    device=CPU,
                    replicas=Counterparts(index, num_replicas),
                )
            host.append(0 if stages.arena is None else stages.arena.num_bytes)
            device.append(live.now)  # the arena is mapped, and no tensor of torch's
        of_rank = replace(plan, resident=frozenset(range(4)) - frozenset(plan.streamed_stages(rank)))
        need = estimate_gpu_memory(request, plan, rank=rank)
        # The first replicas own the most.
        assert estimate_host_memory(request, of_rank).streamed == pytest.approx(host[0], abs=NUMBERS)
        assert host[0] == max(host)
        planned = need.weights + need.gradients + need.optimizer
        assert planned == pytest.approx(device[0], abs=NUMBERS)


def test_a_streamed_parameter_takes_two_bytes_and_a_share_of_twelve() -> None:
    shape = find_published_shape("7b")
    for number, each in ((1, 14), (2, 8), (3, 6), (4, 5)):
        machine = Machine(4, GPU_SPECS["H200"], num_replicas=number, num_nodes=number)
        request = request_of(shape, machine, batch_size=96)
        assert estimate_host_memory(request, request.plan).streamed == pytest.approx(
            each * shape.num_parameters, rel=1e-6
        )


def test_pipelines_of_a_node_share_what_its_host_may_give() -> None:
    shape = find_published_shape("7b")
    limits = [
        request_of(
            shape, Machine(4, GPU_SPECS["H200"], num_replicas=number, num_nodes=nodes), host_memory_limit=100.0
        ).host_bytes
        for number, nodes in ((1, 1), (2, 2), (4, 2))
    ]
    assert limits == [100 * GIB, 100 * GIB, 50 * GIB]
    two = request_of(shape, Machine(4, GPU_SPECS["H200"], num_replicas=4, num_nodes=2))
    assert describe_replicas(two) == (
        "4 replicas of a pipeline of 4 rank(s), 2 on each of 2 node(s): each computes 16 of 64 rows of a step, and "
        "updates 1/4 of each stage"
    )


def test_a_refusal_names_the_fewest_nodes_that_have_the_memory() -> None:
    shape = find_published_shape("7b")
    machine = Machine(4, GPU_SPECS["H200"], num_replicas=2, num_nodes=2)
    request = request_of(shape, machine, resident_stages="0", num_rounds=1)
    # 3.37e9 x 2 + 12 / R bytes and four processes; the 64 rows are cut into 8 microbatches by 1, 2, 4 or 8 replicas.
    assert [options for options, _ in request.with_more_nodes()] == ["--nnodes 4", "--nnodes 8"]
    two = estimate_host_memory(request, request.plan).total
    four, eight = (estimate_host_memory(each, each.plan).total for _, each in request.with_more_nodes())
    assert two - four == pytest.approx(3 * shape.num_parameters, rel=1e-6)
    assert four - eight == pytest.approx(1.5 * shape.num_parameters, rel=1e-6)
    for available, nodes in ((four, ["--nnodes 4"]), (four - 1, ["--nnodes 8"]), (eight - 1, [])):
        remedies = find_remedies(request, None, available_bytes=available)
        assert [options for options in remedies if options.startswith("--nnodes")] == nodes
    assert not list(request_of(shape).with_more_nodes())


def test_a_gpu_that_is_too_small_for_its_share_of_the_rows_is_told_of_more_nodes() -> None:
    options = {"resident_stages": "0", "recompute": Recompute.FULL, "num_rounds": 1, "tile_tokens": "off"}
    machine = Machine(4, GPU_SPECS["RTX4090"], num_replicas=2, num_nodes=2)
    request = request_of(find_published_shape("7b"), machine, seq_length=8192, **options)
    message = refusal_by(lambda: fit_plan(request, layer=estimated_layer(request)))
    assert re.search(r"^  --nnodes 4 +\d", message, re.MULTILINE)


def test_a_plan_of_replicas_is_for_so_many(tmp_path: Path) -> None:
    shape, path = find_published_shape("7b"), tmp_path / "plan.json"
    digest = ModelDigest.of(shape, Dtype.BF16)
    plan = request_of(shape).plan
    two = SavedPlan(digest, plan, 64, 512, 2)
    path.write_text(two.to_json())
    assert read_plan(path) == two
    check_saved_plan(two, path, model=digest, num_ranks=4, num_replicas=2)
    with pytest.raises(PlanError, match=r"is for 2 replica.s. of the pipeline, 3 are started"):
        check_saved_plan(two, path, model=digest, num_ranks=4, num_replicas=3)
    path.write_text(replace(two, batch_size=24).to_json())
    with pytest.raises(PlanError, match="24: shared by 2 replicas of 8 microbatches each .* a multiple of 16"):
        read_plan(path)


def plain(link: float, *, updates: float = 1e9) -> Profile:
    """A machine of one rank on which nothing but compute, the link and updates takes time, in parameters per second."""
    fast = 1e12
    return plain_profile(
        copies=CopyRates(*(fast,) * 6),
        cpu_adamw=updates,
        cpu_adamw_together=updates,
        cpu_adamw_beside_copies=updates,
        copies_beside_cpu_adamw=fast,
        gpu_adamw=fast,
        gpu_bandwidth=1e15,
        replicas=ReplicaRates(link, link, is_through_host=False),
    )


UNIT = 8
"""Rates are in so many bytes or parameters per second."""
PARAMETERS = 800 * UNIT
"""Of each stage: with two replicas 400 units are the other's, 1600 units of bytes of gradients and 800 of weights."""


def step(
    link: float, *, clips: bool = True, resident: bool = False, num_replicas: int = 2, updates: float = 1e9
) -> float:
    """Seconds of a step of four stages on one rank, each a second forward and two back, the last three back."""
    inner = StageCost(1, 2, PARAMETERS, is_resident=resident)
    costs = [inner] * 3 + [StageCost(0, 3, PARAMETERS, is_resident=resident)]
    rules = StepRules(MemoryRules(waits_for_norm=clips, num_replicas=num_replicas), message_bytes=0)
    slots = 0 if resident else 4
    schedule = build_schedule(spec_of(1, 4, 1, slots, frozenset(range(4)) if resident else frozenset()))
    return simulate_steps(schedule, costs, plain(UNIT * link, updates=UNIT * updates), rules, num_steps=4).step_seconds


@pytest.mark.parametrize("resident", [False, True])
def test_only_the_last_reduction_and_the_first_weights_show(resident: bool) -> None:
    """Gradients of a stage take 1.6 s where the next backward takes 2, weights 0.8 where the next forward takes 1."""
    alone = 3 + 3 * 2 + 3
    assert step(1000, num_replicas=1, resident=resident) == pytest.approx(alone, rel=1e-6)
    assert step(1e12, resident=resident) == pytest.approx(alone, rel=1e-6)
    assert step(1000, resident=resident) == pytest.approx(alone + 1.6 + 0.8, rel=1e-6)


def test_a_slow_link_bounds_the_step() -> None:
    # 6.4 s of gradients and 3.2 of weights at 1000 bytes per second; ten times that at 100.
    assert step(100) > 10 * (6.4 + 3.2) * 0.95
    assert step(100) > step(200) > step(400) > step(1000)


def test_each_host_updates_its_share() -> None:
    # 400 of 800 parameters of each stage at 100 per second, one after the other; compute waits for the first.
    alone, shared = (step(1e12, num_replicas=number, updates=100) for number in (1, 2))
    assert alone == pytest.approx(4 * 8 + 3 + 2 * 3, rel=0.2)
    assert shared == pytest.approx(alone - 4 * 4, rel=1e-6)


def test_gradients_in_two_bytes_take_half_of_the_link() -> None:
    assert MemoryRules(num_replicas=2).reduce_bytes(6400) == 12800
    assert MemoryRules(num_replicas=4, sent=2).reduce_bytes(6400) == 2 * 4800
    shape, machine = find_published_shape("7b"), Machine(4, GPU_SPECS["H200"], num_replicas=2, num_nodes=2)
    assert request_of(shape, machine).memory_rules.sent == 4
    assert request_of(shape, machine, reduce_dtype=ReduceDtype.BF16).memory_rules.sent == 2


def test_what_pipelines_of_a_node_send_each_other_does_not_leave_it() -> None:
    one, two = (Machine(4, num_replicas=number, num_nodes=2).replica_bytes_per_link for number in (2, 4))
    # Of a stage of a byte per replica, one leaves a node with a pipeline; of four, two of each pipeline leave it.
    assert one == 1
    assert two == pytest.approx((3 / 4) / (2 * 2 / 4))


def test_another_node_pays_with_a_fast_link_and_does_not_with_a_slow_one() -> None:
    shape, options = (
        find_published_shape("7b"),
        {"recompute": Recompute.FULL, "resident_stages": "0", "gpu_memory_limit": 23.0, "num_stages": 16},
    )

    def asked(nodes: int, link: float) -> PlanResult:
        machine = Machine(4, GPU_SPECS["RTX4090"], num_replicas=nodes, num_nodes=nodes, node_link=link)
        request = request_of(shape, machine, batch_size=64 * nodes, **options)
        return solve(request, layer=estimated_layer(request))

    alone, fast, slow = asked(1, 12.5), asked(2, 12.5), asked(2, 0.5)
    assert 1.8 < fast.tokens_per_second / alone.tokens_per_second <= 2.05
    assert slow.tokens_per_second < alone.tokens_per_second
    assert slow.step_time_prediction is not None
    assert str(slow.step_time_prediction.bottleneck) == "the link between replicas"
    assert slow.profile is not None
    assert Profile.from_json(slow.profile.to_json()) == slow.profile
