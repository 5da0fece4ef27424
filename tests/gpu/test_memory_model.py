"""The memory model against torch's own meter, with compiled layers that were measured as a run measures them."""

from dataclasses import replace

import pytest
import torch
from harness.live_bytes import count_step
from harness.plan_requests import request_of
from transformers import LlamaConfig

from mobius.models.blocks import ModelParts
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.layer_bench import MicrobatchShape, measure_layer_bytes
from mobius.planner.memory_estimates import STEP_BYTES_PER_TOKEN, microbatch_bytes
from mobius.planner.peak_memory import estimate_layer, find_peak
from mobius.planner.request import Machine
from mobius.schedule.plan import make_plan

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BATCH, SEQ_LENGTH, CHUNKS = 8, 512, 4


@pytest.fixture(autouse=True)
def _kernels_of_a_run(_deterministic_kernels: None) -> None:
    """Not deterministic, which no option asks for.

    Else FlashAttention's backward takes an fp32 sum of the queries' gradients for each split of the keys. There are
    multiprocessors / (rows x heads) of them: nine on an H200 for one row of 16 heads.
    """
    torch.use_deterministic_algorithms(False)


def config() -> LlamaConfig:
    """Wide enough that activations are megabytes."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def test_a_compiled_layer_is_measured_near_its_estimate() -> None:
    parts = ModelParts(config(), CUDA, compiled=True)
    shape = MicrobatchShape(BATCH, SEQ_LENGTH, torch.bfloat16, loss_chunk_tokens=2048)
    measured = measure_layer_bytes(parts, shape, device=CUDA, with_products=True)
    estimate = estimate_layer(2, parts.shape(), BATCH * SEQ_LENGTH, compiled=True)
    assert measured.saved_products == pytest.approx(estimate.saved_products, rel=0.1)
    assert measured.saved_activations == pytest.approx(estimate.saved_activations, rel=0.1)
    assert measured.peak == pytest.approx(estimate.peak, rel=0.1)


@pytest.mark.parametrize("tile_tokens", [4096, 8192])
def test_a_compiled_layer_in_tiles_takes_no_more_than_its_estimate(tile_tokens: int) -> None:
    parts, tokens = ModelParts(config(), CUDA, compiled=True), 32_768
    shape = MicrobatchShape(1, tokens, torch.bfloat16, loss_chunk_tokens=2048, tile_tokens=tile_tokens)
    measured = measure_layer_bytes(parts, shape, device=CUDA)
    estimate = estimate_layer(2, parts.shape(), tokens, compiled=True, tile_tokens=tile_tokens)
    assert 0.7 * estimate.recomputed_peak < measured.recomputed_peak <= 1.05 * estimate.recomputed_peak
    assert measured.recomputed_peak < 0.6 * measured.peak


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_a_compiled_slice_takes_no_more_than_its_estimate(tokens: int) -> None:
    parts, length = ModelParts(config(), CUDA, compiled=True), 131_072
    shape = MicrobatchShape(1, tokens, torch.bfloat16, loss_chunk_tokens=2048, tile_tokens=8192, full_seq_length=length)
    measured = measure_layer_bytes(parts, shape, device=CUDA)
    estimate = estimate_layer(2, parts.shape(), tokens, compiled=True, tile_tokens=8192, sliced_length=length)
    assert 0.7 * estimate.recomputed_peak < measured.recomputed_peak <= 1.05 * estimate.recomputed_peak


@pytest.mark.parametrize(("num_ranks", "num_graphs"), [(2, 0), (2, 1), (4, 2)])
def test_a_compiled_step_holds_at_most_what_is_predicted_and_not_much_less(num_ranks: int, num_graphs: int) -> None:
    parts = ModelParts(config(), CUDA, compiled=True)
    shape, batch = parts.shape(), BATCH * CHUNKS
    microbatch = MicrobatchShape(BATCH, SEQ_LENGTH, torch.bfloat16, loss_chunk_tokens=2048)
    measured = measure_layer_bytes(parts, microbatch, device=CUDA)
    plan = make_plan(shape, num_ranks=num_ranks, num_stages=8, num_microbatches=CHUNKS, num_slots=2)
    machine = Machine(num_ranks, GPU_SPECS["H200"])
    request = request_of(
        shape, machine, batch_size=batch, seq_length=SEQ_LENGTH, num_stages=8, num_chunks=CHUNKS, loss_chunk_tokens=2048
    )
    size = microbatch_bytes(request, measured)
    for rank in (0, num_ranks - 1):
        own = plan.local_stages(rank)
        graphs = own[len(own) - num_graphs :]
        keeping = replace(plan, saved_activation_stages=frozenset(graphs))
        held: list[str] = []
        counted = count_step(
            config(),
            plan,
            rank,
            batch_size=batch,
            seq_length=SEQ_LENGTH,
            dtype=torch.bfloat16,
            loss_chunk_tokens=2048,
            graph_stages=graphs,
            device=CUDA,
            held=held,
        )
        predicted = find_peak(keeping, rank, size).total + STEP_BYTES_PER_TOKEN * request.step_tokens
        report = "\n".join([f"rank {rank}: {predicted / counted:.3f}; at the peak, of {counted:,} bytes:", *held[:30]])
        assert 0.97 * counted <= predicted <= 1.10 * counted, report
