"""The memory model against real steps: every tensor of a rank's step is counted, op by op, on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.live_bytes import count_layer, count_step
from harness.pipelines import CPU
from harness.plan_requests import request_of
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from mobius.config.config import Dtype
from mobius.models.blocks import ModelParts
from mobius.planner.memory_estimates import STEP_BYTES_PER_TOKEN, microbatch_bytes
from mobius.planner.peak_memory import estimate_layer, find_peak
from mobius.planner.request import Machine
from mobius.schedule.plan import make_plan

DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}
_SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
BATCH, SEQ_LENGTH = 2, 64
"""Of a microbatch."""


def with_attention(config: PretrainedConfig) -> PretrainedConfig:
    config._attn_implementation = "sdpa"
    return config


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "widths"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"intermediate_size": 1024}),
        (LlamaConfig, {"num_key_value_heads": 4, "hidden_size": 384}),
        (Qwen2Config, {}),
    ],
)
def test_an_eager_layer_takes_what_its_widths_say(family: Any, widths: dict[str, int], dtype: Dtype) -> None:
    config = with_attention(family(**(_SIZES | widths)))
    counted = count_layer(config, shape=(BATCH, SEQ_LENGTH), dtype=DTYPES[dtype])
    estimate = estimate_layer(
        DTYPES[dtype].itemsize, ModelParts(config, CPU).shape(), BATCH * SEQ_LENGTH, compiled=False
    )
    assert estimate.saved_activations == pytest.approx(counted.saved_activations, rel=0.03)
    assert 0.97 * counted.peak <= estimate.peak <= 1.1 * counted.peak


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "num_experts_per_token"), [(192, 1), (192, 4), (384, 2)])
def test_an_eager_layer_with_experts_takes_what_its_widths_say(
    width: int, num_experts_per_token: int, dtype: Dtype
) -> None:
    sizes = _SIZES | {"intermediate_size": width, "num_local_experts": 4, "num_experts_per_tok": num_experts_per_token}
    config = with_attention(MixtralConfig(**sizes))
    tokens = 512  # many for each expert, as on GPUs: what their weights' gradients take comes on top
    counted = count_layer(config, shape=(BATCH, tokens), dtype=DTYPES[dtype])
    estimate = estimate_layer(DTYPES[dtype].itemsize, ModelParts(config, CPU).shape(), BATCH * tokens, compiled=False)
    assert estimate.saved_activations == pytest.approx(counted.saved_activations, rel=0.03)
    assert 0.97 * counted.peak <= estimate.peak <= 1.15 * counted.peak


def test_norms_on_queries_and_keys_make_a_graph_larger_than_the_widths_say() -> None:
    # Told in planner/peak_memory.py; on a GPU it is measured.
    config = with_attention(Qwen3Config(**_SIZES, head_dim=48))
    counted = count_layer(config, shape=(BATCH, SEQ_LENGTH), dtype=torch.bfloat16)
    estimate = estimate_layer(2, ModelParts(config, CPU).shape(), BATCH * SEQ_LENGTH, compiled=False)
    assert 1.1 < counted.saved_activations / estimate.saved_activations < 1.4


@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "chunks", "slots", "num_graphs", "loss_chunk"),
    [
        pytest.param(1, 1, 2, None, 0, 64, marks=pytest.mark.extended),
        pytest.param(1, 3, 2, 2, 1, 64, marks=pytest.mark.extended),
        pytest.param(2, 1, 2, 1, 0, 32, marks=pytest.mark.extended),
        (2, 2, 3, 2, 1, 32),
        (2, 2, 1, 2, 0, 512),
        (4, 2, 4, None, 2, 32),
    ],
)
def test_a_step_holds_at_most_what_is_predicted_and_not_much_less(
    num_ranks: int, per_rank: int, chunks: int, slots: int | None, num_graphs: int, loss_chunk: int
) -> None:
    config = with_attention(LlamaConfig(**_SIZES))
    shape, batch = ModelParts(config, CPU).shape(), BATCH * chunks
    num_stages = num_ranks * per_rank
    plan = make_plan(shape, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=chunks, num_slots=slots)
    request = request_of(
        shape, Machine(num_ranks), batch_size=batch, seq_length=SEQ_LENGTH, num_stages=num_stages, num_chunks=chunks,
        loss_chunk_tokens=loss_chunk,
    )  # fmt: skip
    size = microbatch_bytes(request)
    for rank in {0, num_ranks - 1}:
        own = plan.local_stages(rank)
        graphs = own[per_rank - num_graphs :]
        keeping = replace(plan, saved_activation_stages=frozenset(graphs))
        counted = count_step(
            config,
            plan,
            rank,
            batch_size=batch,
            seq_length=SEQ_LENGTH,
            dtype=torch.bfloat16,
            loss_chunk_tokens=loss_chunk,
            graph_stages=graphs,
        )
        predicted = find_peak(keeping, rank, size).total + STEP_BYTES_PER_TOKEN * request.step_tokens
        assert 0.97 * counted <= predicted <= 1.10 * counted, f"rank {rank}: {predicted / counted:.3f}"


@pytest.mark.parametrize(
    ("batch", "num_stages", "num_slices"),
    [(1, 2, 8), *(pytest.param(*size, marks=pytest.mark.extended) for size in ((1, 8, 16), (2, 4, 8)))],
)
def test_a_step_in_slices_holds_at_most_what_is_predicted_and_not_much_less(
    batch: int, num_stages: int, num_slices: int
) -> None:
    length = 512
    small = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "vocab_size": 128}
    config = LlamaConfig(**_SIZES | small | {"max_position_embeddings": length})
    shape, number = ModelParts(config, CPU).shape(), batch * num_slices
    whole = make_plan(shape, num_ranks=1, num_stages=num_stages, num_microbatches=number, num_slots=2)
    plan = replace(whole, num_slices=num_slices)
    request = request_of(
        shape, Machine(1), batch_size=batch, seq_length=length, num_stages=num_stages, num_chunks=batch,
        num_slices=num_slices, loss_chunk_tokens=64, tile_tokens="off",
    )  # fmt: skip
    counted = count_step(
        config, plan, 0, batch_size=batch, seq_length=length, dtype=torch.bfloat16, loss_chunk_tokens=64
    )
    predicted = find_peak(plan, 0, microbatch_bytes(request)).total + STEP_BYTES_PER_TOKEN * request.step_tokens
    assert 0.97 * counted <= predicted <= 1.10 * counted, f"{predicted / counted:.3f}"
