"""On a GPU: streams and events keep results exact, and streamed stages take the memory of their slots only."""

from __future__ import annotations

import pytest
import torch
from harness.pipelines import FAMILIES, Pipeline, make_batch, make_model, model_of, plain_step
from harness.rank_memory import allocate_memory
from transformers import LlamaConfig, PreTrainedModel

from mobius.engine.host_arena import HostArena
from mobius.engine.step_inputs import StepBatch
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.layout import StageLayout
from mobius.planner.layer_bench import MicrobatchShape, measure_layer_bytes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fp32_pipeline_on_a_gpu_equals_the_plain_model(family: str, num_ranks: int) -> None:
    model = make_model(family).to(CUDA)
    batch = make_batch(3)
    expected_loss, expected = plain_step(model, _on_gpu(batch), 3)
    for num_slots in (None, 1, 2):
        pipeline = Pipeline(model, num_ranks, 3, 3, num_slots, device=CUDA)
        assert torch.allclose(pipeline.run(batch), expected_loss, rtol=1e-6)
        for name, gradient in expected.items():
            difference = (pipeline.gradients[name].to(CUDA) - gradient).abs().max()
            assert difference <= 1e-5 * gradient.abs().max(), (name, num_slots)


def test_bf16_pipeline_stays_near_the_fp32_model() -> None:
    model = make_model("llama").to(CUDA)
    batch = make_batch(3)
    expected_loss, expected = plain_step(model, _on_gpu(batch), 3)
    pipeline = Pipeline(model, 1, 3, 3, 2, device=CUDA, dtype=torch.bfloat16)
    assert torch.allclose(pipeline.run(batch), expected_loss, rtol=2e-3)
    for name, gradient in expected.items():
        error = (pipeline.gradients[name].to(CUDA).float() - gradient).norm() / gradient.norm()
        assert error < 0.1, (name, float(error))


def _heavy_model(num_layers: int) -> PreTrainedModel:
    """Large weights and few tokens: copies take longer than compute, so a missing wait shows."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=num_layers, num_attention_heads=8, vocab_size=96
    )
    return model_of(config).to(CUDA)


def test_streaming_gives_the_bits_of_resident_stages_when_copies_are_slower_than_compute() -> None:
    model = _heavy_model(12)
    batch = make_batch(2)
    resident = Pipeline(model, 1, 6, 2, None, device=CUDA)
    expected_loss = resident.run(batch)
    for num_slots in (1, 2, 3) * 3:
        streamed = Pipeline(model, 1, 6, 2, num_slots, device=CUDA)
        assert torch.equal(streamed.run(batch), expected_loss)
        for name, gradient in resident.gradients.items():
            assert torch.equal(streamed.gradients[name], gradient.cpu()), (name, num_slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rounds_give_the_bits_of_a_step_at_once_when_copies_are_slower_than_compute(dtype: torch.dtype) -> None:
    model = _heavy_model(12)
    batch = make_batch(4)
    nothing = frozenset[int]()
    for num_ranks, stages_per_rank, resident in ((1, 6, nothing), (1, 6, frozenset({0, 3})), (2, 3, nothing)):
        once = Pipeline(model, num_ranks, stages_per_rank, 4, 2, resident=resident, device=CUDA, dtype=dtype)
        expected_loss = once.run(batch)
        for num_slots in (1, 2, 3):
            for num_rounds in (2, 4):
                rounds = Pipeline(
                    model, num_ranks, stages_per_rank, 4, num_slots,
                    resident=resident, device=CUDA, dtype=dtype, num_rounds=num_rounds,
                )  # fmt: skip
                assert torch.equal(rounds.run(batch), expected_loss)
                for name, gradient in once.gradients.items():
                    own = rounds.gradients[name].cpu().to(dtype)
                    assert torch.equal(own, gradient.cpu().to(dtype)), (name, num_ranks, num_slots, num_rounds)


def test_arena_memory_is_page_locked_and_exact() -> None:
    layout = StageLayout.of({"a.weight": (1000, 1000), "a.bias": (1000,)})
    arena = HostArena({0: layout}, dtype=torch.bfloat16, register=True)
    state = arena.states[0]
    assert state.weights.is_pinned()
    assert state.gradients.is_pinned()
    assert [tensor.is_pinned() for tensor in state.tensors] == [True, True, False, False, False]
    assert state.weights.nbytes == 2 * layout.num_units
    arena.close()
    assert not state.weights.is_pinned()


def test_streamed_stages_take_the_memory_of_their_slots() -> None:
    layouts = {stage: StageLayout.of({"weight": (4096, 4096)}) for stage in range(8)}
    before = torch.cuda.memory_allocated(CUDA)
    elements = layouts[0].num_units
    slots, arena = allocate_memory(
        layouts,
        resident=(),
        num_slots=2,
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        deferred_updates=(),
        device=CUDA,
    )
    assert arena is not None
    assert torch.cuda.memory_allocated(CUDA) - before == 2 * elements * 2 + elements * 4
    for stage in range(8):
        slots[stage].weights.load()
        slots[stage].weights.views()
        slots[stage].offload()
    torch.cuda.synchronize(CUDA)
    assert torch.cuda.memory_allocated(CUDA) - before == 2 * elements * 2 + elements * 4
    arena.close()


def test_a_layers_graph_is_measured_as_the_memory_that_its_saved_tensors_take() -> None:
    model = _heavy_model(2)
    parts = ModelParts(model.config, CUDA)
    shape = (4, 256, model.config.hidden_size)
    microbatch = MicrobatchShape(*shape[:2], torch.bfloat16, loss_chunk_tokens=64)
    measured = measure_layer_bytes(parts, microbatch, device=CUDA).saved_activations

    saved: dict[int, int] = {}
    layer, values = parts.layers[0], dict(model.named_parameters())
    weights = {name: values[layer.prefix + name].detach().bfloat16().requires_grad_() for name in layer.shapes}
    own = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept: list[torch.Tensor] = []  # or their addresses would be taken again

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.zeros(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    arguments = LayerArgumentsBuilder(parts, device=CUDA, dtype=torch.bfloat16)(shape[1])[0]
    own.add(hidden.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(weights, hidden, **arguments)
    expected = sum(num_bytes for address, num_bytes in saved.items() if address not in own)
    assert expected <= measured <= 1.2 * expected


def _on_gpu(batch: StepBatch) -> StepBatch:
    return StepBatch(
        batch.input_ids.to(CUDA), batch.labels.to(CUDA), batch.num_targets, batch.num_tokens, batch.num_samples
    )
