"""Bytes and seconds of runs that train adapters, or a part of the parameters, are those of what is trained."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from harness.plan_requests import estimate_gpu_memory, find_published_shape, num_stages_with, request_of
from harness.schedules import spec_of
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from mobius.config.config import AdapterConfig, FinetuningType, ModelConfig
from mobius.models.blocks import ModelParts
from mobius.models.families import load_planned_config
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimate_host_memory
from mobius.planner.peak_memory import estimate_layer
from mobius.planner.plan_table import describe_stages
from mobius.planner.profile import ADAPTER_BACKWARD, ADAPTER_FORWARD
from mobius.planner.request import Machine
from mobius.planner.solver import PlanResult, resolve_auto, solve
from mobius.planner.stage_costs import stage_costs
from mobius.planner.step_tasks import StepTasks
from mobius.schedule.build import build_schedule
from mobius.schedule.checkpoint_estimates import estimate_checkpoint
from mobius.schedule.lanes import Lane
from mobius.schedule.partition import ModelShape
from mobius.schedule.plan import MemoryUse
from mobius.training.stages import RankStages, StageOptions

CPU = torch.device("cpu")
LORA = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=8)
FROZEN = AdapterConfig(freeze="embedding,layers.0-1")
P_TUNING = AdapterConfig(finetuning_type=FinetuningType.P_TUNING, num_virtual_tokens=16)
PREFIX = AdapterConfig(finetuning_type=FinetuningType.PREFIX, num_virtual_tokens=16)
QWEN_14B = Qwen2Config(
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
    tie_word_embeddings=False,
)
IN_AND_OUT_OF_7B = 4 * (4096 + 4096) + 3 * (4096 + 11008)
"""Widths of a layer's linear inputs and outputs."""
WIDE = LlamaConfig(  # so that no parameter is padded
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
)


def shape_of_7b(adapters: AdapterConfig) -> ModelShape:
    config = load_planned_config(ModelConfig(model_path="7b"))[0]
    return ModelParts(config, CPU, adapters=adapters).shape()


@pytest.mark.parametrize("num_resident", [0, 1])
@pytest.mark.parametrize(
    "adapters", [LORA, FROZEN, P_TUNING, PREFIX], ids=["adapters", "frozen parts", "prompt", "prefix"]
)
def test_bytes_of_the_states_are_those_that_a_run_takes(adapters: AdapterConfig, num_resident: int) -> None:
    parts = ModelParts(WIDE, CPU, adapters=adapters)
    request = request_of(parts.shape(), num_stages=4)
    plan = request.plan.with_memory_uses([MemoryUse(int(rank < num_resident), 0, 1) for rank in range(4)])
    host = gpu = 0
    for rank in range(4):
        stages = RankStages.allocate(
            parts,
            plan,
            rank,
            StageOptions(dtype=torch.bfloat16, rules=request.memory_rules, loss_chunk_tokens=64),
            device=CPU,
        )
        host += 0 if stages.arena is None else stages.arena.num_bytes
        on_gpu = [own.states for own in stages.memory.values()]
        gpu += sum(
            tensor.nbytes
            for stage, own in zip(stages.memory, on_gpu, strict=True)
            if stage in plan.resident or adapters.has_frozen_base
            for tensor in own.state.tensors
        )
    slots = [
        plan.slots[rank]
        * max((plan.cuts[s].num_streamed_parameters(request.shape) for s in plan.streamed_stages(rank)), default=0)
        for rank in range(4)
    ]
    needs = [estimate_gpu_memory(request, plan, rank=rank) for rank in range(4)]
    sums = 0 if adapters.has_frozen_base else sum(4 * plan.cuts[rank].num_trained(request.shape) for rank in range(4))

    assert estimate_host_memory(request, plan).streamed == host
    assert sum(need.weights + need.gradients + need.optimizer for need in needs) == gpu + 2 * sum(slots) + sums


def test_a_frozen_base_takes_two_bytes_of_the_host_and_adapters_none() -> None:
    base, shape = find_published_shape("7b"), shape_of_7b(LORA)
    assert shape.num_trained == sum(shape.trained.layers) == shape.num_parameters - base.num_parameters  # type: ignore[union-attr]
    assert shape.num_trained == 32 * 8 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    request = request_of(shape)
    need = estimate_host_memory(request, request.plan)
    assert need.streamed == 2 * base.num_parameters
    assert need.streamed_parameters == base.num_parameters


def test_a_checkpoint_of_adapters_has_what_is_trained() -> None:
    request = request_of(shape_of_7b(LORA))
    need = estimate_checkpoint(request.plan, request.shape, request.memory_rules, has_optimizer=True)
    assert need.disk_bytes == 12 * request.shape.num_trained == sum(need.rank_bytes)
    whole = request_of(shape_of_7b(FROZEN))
    need = estimate_checkpoint(whole.plan, whole.shape, whole.memory_rules, has_optimizer=True)
    assert need.disk_bytes == 2 * whole.shape.num_parameters + 10 * whole.shape.num_trained


def answered(shape: ModelShape, **options: object) -> PlanResult:
    return solve(resolve_auto(request_of(shape, **options)))


def lanes_of(found: PlanResult) -> set[Lane]:
    """The lanes that have anything to do in the predicted step."""
    assert found.profile is not None
    costs = stage_costs(found.plan, found.request.shape, found.profile)
    plan = found.plan
    schedule = build_schedule(
        spec_of(plan.num_ranks, plan.stages_per_rank, plan.num_microbatches, plan.slots, plan.resident)
    )
    tasks = StepTasks(schedule, costs, found.profile, found.request.rules)
    tasks.add_step()
    return {lane for _, lane, *_ in tasks.names.values()}


def test_a_prompt_has_its_parameters_and_its_updates_in_the_first_stage() -> None:
    base, shape = find_published_shape("7b"), shape_of_7b(P_TUNING)
    assert shape.num_trained == 16 * 4096 + 3 * 4096 * (4096 + 1)
    assert shape.num_parameters == base.num_parameters + shape.num_trained
    found, full = answered(shape), answered(base)
    assert [cut.num_trained(shape) for cut in found.plan.cuts] == [shape.num_trained, *[0] * (len(found.plan.cuts) - 1)]
    assert found.profile is not None
    assert full.profile is not None
    assert 0 < found.profile.embedding_backward < full.profile.embedding_backward
    assert found.step_seconds < full.step_seconds


def test_frozen_parameters_spare_their_gradients_products_copies_and_updates() -> None:
    options = {"resident_stages": "0"}
    full, lora = (answered(shape, **options) for shape in (find_published_shape("7b"), shape_of_7b(LORA)))
    assert full.profile is not None
    assert lora.profile is not None
    ours, theirs = lora.profile.of_layer(5), full.profile.of_layer(5)
    one_pass = 2 * lora.profile.microbatch_tokens * IN_AND_OUT_OF_7B / GPU_SPECS["H200"].memory_rate
    assert ours.forward == pytest.approx(theirs.forward + ADAPTER_FORWARD * one_pass, rel=0.02)
    assert 0.5 < (ours.backward - ADAPTER_BACKWARD * one_pass) / theirs.backward < 0.6
    again = theirs.recomputed_backward - theirs.backward + ADAPTER_FORWARD * one_pass
    assert ours.recomputed_backward - ours.backward == pytest.approx(again, rel=0.02)
    assert lora.profile.embedding_backward == 0
    assert lora.profile.loss == pytest.approx(full.profile.loss * 2 / 3)
    assert lora.step_seconds < 0.8 * full.step_seconds
    lanes = [lanes_of(found) for found in (full, lora)]
    assert lanes[0] - lanes[1] == {Lane.OFFLOAD, Lane.OPTIMIZER}
    assert Lane.LOAD in lanes[1]


def test_dora_reads_the_weights_twice_more_and_saves_the_outputs() -> None:
    dora, in_full = replace(LORA, use_dora=True), replace(LORA, additional_target="down_proj")
    shapes = [shape_of_7b(each) for each in (LORA, dora, in_full)]
    lora, ours, mixed = (answered(shape, resident_stages="0").profile for shape in shapes)
    assert lora is not None
    assert ours is not None
    assert mixed is not None
    passes = 2 * 2 * 4 * (4096 * 4096 + 3 * 4096 * 11008 / 4) / GPU_SPECS["H200"].memory_rate
    assert ours.of_layer(5).forward - lora.of_layer(5).forward == pytest.approx(passes, rel=0.01)
    assert mixed.of_layer(5).forward < lora.of_layer(5).forward, "a matrix trained in full has no adapter"
    lengths = 4 * 4096 + 2 * 11008 + 4096
    assert shapes[1].num_trained == shapes[0].num_trained + 32 * lengths
    bytes_of = [estimate_layer(2, shape, 1024, compiled=True).peak for shape in shapes]
    assert bytes_of[1] - bytes_of[0] == pytest.approx(2 * 1024 * lengths, rel=1e-3)


def test_adapters_of_experts_count_all_experts_in_memory_and_a_tokens_experts_in_time() -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 32, "num_experts_per_tok": 4}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=99)
    adapted = replace(LORA, lora_target="none", lora_target_parameters="all")
    plain, shape = (ModelParts(config, CPU, adapters=each).shape() for each in (LORA, adapted))
    assert shape.trained is not None
    of_expert = 8 * (256 + 2 * 96) + 8 * (96 + 256)
    assert shape.trained.layers == (32 * of_expert,) * 2
    assert shape.active_trained == (4 * of_expert,) * 2
    assert shape.trained.adapted_widths == (4 * (256 + 2 * 96 + 96 + 256),) * 2
    for number in range(2):
        own, other = shape.layer_widths(number), plain.layer_widths(number)
        assert other.feed_forward + 4 * 8 // 2 <= own.feed_forward <= other.feed_forward + 2 * 4 * 8


@pytest.mark.parametrize(
    ("num_ranks", "stages", "chunks", "rounds", "measured"),
    [(1, 10, 8, 2, 4.885), (2, 10, 8, 1, 2.559), (2, 26, 4, 1, 2.609)],
)
def test_steps_with_adapters_are_predicted_as_they_were_measured(
    num_ranks: int, stages: int, chunks: int, rounds: int, measured: float
) -> None:
    """Qwen2.5-14B's shape on H200s under 24 GiB, docs/performance.md, 2026-11-23; without passes they are 9 % short."""
    machine, shape = Machine(num_ranks, GPU_SPECS["H200"]), ModelParts(QWEN_14B, CPU, adapters=LORA).shape()
    options = {"num_stages": stages, "num_chunks": chunks, "num_rounds": rounds, "gpu_memory_limit": 24.0}
    request = request_of(shape, machine, batch_size=16, seq_length=2048, max_grad_norm=1.0, **options)
    assert solve(resolve_auto(request)).step_seconds == pytest.approx(measured, rel=0.05)


def test_layers_before_the_first_trained_one_have_no_backward() -> None:
    found = answered(shape_of_7b(FROZEN))
    assert found.profile is not None
    assert [found.profile.of_layer(layer).backward > 0 for layer in range(4)] == [False, False, True, True]
    assert found.profile.of_layer(31) == answered(find_published_shape("7b")).profile.of_layer(31)  # type: ignore[union-attr]


def test_mfu_counts_what_is_computed() -> None:
    shape = find_published_shape("7b")
    assert shape.product_operations == 6 * (sum(shape.layer_parameters) + shape.head_parameters)
    lora = shape_of_7b(LORA)
    assert lora.product_operations == 4 * (sum(lora.layer_parameters) + lora.head_parameters) + 2 * lora.num_trained


def test_layers_before_the_first_trained_one_keep_nothing_for_backward() -> None:
    both = []
    for adapters in (AdapterConfig(), AdapterConfig(freeze="embedding,layers.0-15")):
        request = request_of(shape_of_7b(adapters), num_stages=8)
        need = estimate_gpu_memory(request, request.plan, rank=0)
        offloaded = replace(request.plan, offloaded_activation_stages=frozenset(range(7)))
        both.append((need.inputs, estimate_host_memory(request, offloaded).offloaded_activations))
        table = describe_stages(offloaded, request.shape)
        told = num_stages_with(table, "no backward"), num_stages_with(table, "from the host")
        assert told == ((0, 7), (4, 3))[len(both) - 1]
    # Rank 0 of 4 has layers 0 to 3 and 16 to 19; stages 4 to 6 of 0 to 6 are behind the first trained layer.
    assert both[1][0] * 2 == both[0][0] > 0
    assert both[1][1] * 7 == both[0][1] * 3 > 0


def test_the_seconds_of_frozen_layers_and_of_trained_ones_are_told_apart() -> None:
    profile = answered(shape_of_7b(AdapterConfig(freeze="embedding,layers.0-23"))).profile
    assert profile is not None
    frozen, trained = re.findall(
        r"(\d+) layers take (.*? forward), (no backward|\d.*? with recompute)", profile.describe()
    )
    assert (frozen[0], frozen[2], trained[0]) == ("24", "no backward", "8")
    assert frozen[1] == trained[1]
    assert "layers take" not in answered(shape_of_7b(AdapterConfig())).profile.describe()  # type: ignore[union-attr]
