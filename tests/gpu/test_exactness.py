"""On GPUs with deterministic kernels: overlaps, and saved, recomputed or offloaded activations change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.pipelines import Pipeline, Step, assert_same_bits, distance, make_batch, make_model
from harness.replica_ranks import exact_results
from transformers import LlamaConfig

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.engine import saved_activations
from mobius.engine.stage import StageModule
from mobius.models.block_autograd import backward, recomputed_backward, run_with_graph
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.planner.layer_bench import make_weights_and_sums
from mobius.schedule.partition import StageCut
from mobius.schedule.spec import ComputeOrder

pytestmark = pytest.mark.gpu

OPTIONS = """--device cuda --bf16 --num_stages 8 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 10
    --learning_rate 1e-3"""
STREAMED = [
    f"--resident_stages 0 --{overlap} --{prefetch}"
    for overlap in ("no_overlap_optimizer", "overlap_optimizer")
    for prefetch in ("no_prefetch", "use_prefetch")
]
RESIDENT = [f"--no_offload --recompute {recompute}" for recompute in ("full", "elementwise", "none")]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("clip", ["0.5", "0"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ten_steps_end_in_the_same_bits_with_every_overlap_on_and_off(
    tmp_path: Path, num_ranks: int, clip: str, compiled: str
) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    # Compiled, a forward with gradients is another graph than one without, and may round otherwise.
    recompute = "full" if compiled == "on" else "auto"
    options = f"{OPTIONS} --max_grad_norm {clip} --compile {compiled} --recompute {recompute}"
    results = exact_results(num_ranks, tmp_path, options, [*STREAMED, *(RESIDENT if compiled == "off" else [])])
    assert all(results[variant] == results[STREAMED[0]] for variant in STREAMED), results
    if compiled == "off":
        assert all(results[variant] == results[RESIDENT[0]] for variant in RESIDENT), results


@pytest.mark.parametrize("seq_length", [512, 1000])
def test_gradients_of_a_wide_compiled_layer_are_those_of_an_eager_one(seq_length: int) -> None:
    """With the attention that runs take, which deterministic algorithms exclude."""
    torch.use_deterministic_algorithms(False)
    device = torch.device("cuda", 0)
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    found = []
    for compiled, keeps in ((False, True), (True, True), (True, False)):
        parts = ModelParts(config, device, compiled=compiled)
        torch.manual_seed(0)
        cut = StageCut(1, 0, 1, is_first=False, is_last=False)
        weights, sums = make_weights_and_sums(StageModule(parts, cut, loss_chunk_tokens=1), torch.bfloat16, device)
        for name in (name for name in weights if "norm" in name):
            weights[name].fill_(1)
        hidden, gradient = torch.randn(2, 4, seq_length, 4096, device=device, dtype=torch.bfloat16)
        arguments = LayerArgumentsBuilder(parts, device=device, dtype=torch.bfloat16)(seq_length)[0]
        layer = parts.layers[0]
        for given in (hidden, gradient):  # graphs are made as in a run: by the planner, with one tensor as both
            own = {name: torch.zeros_like(each) for name, each in sums.items()}
            if keeps:
                graph = run_with_graph(layer, weights, hidden, arguments)
                (back,) = backward(layer, graph, own, given)
            else:
                (back,) = recomputed_backward(layer, weights, (hidden,), arguments, own, given)
        found.append(own | {"inputs": back})
    for other in found[1:]:
        assert distance(other, found[0]) < 0.02


def test_an_adapter_of_unaligned_rank_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, the product that is saved would have rows of 8 values where backward expects 4."""
    monkeypatch.setattr(torch._inductor.config, "force_shape_pad", True)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    device, found = torch.device("cuda", 0), []
    for compiled in (False, True):
        adapters = AdapterConfig(FinetuningType.LORA, lora_rank=4)
        parts = ModelParts(config, device, compiled=compiled, adapters=adapters)
        torch.manual_seed(0)
        cut = StageCut(1, 0, 1, is_first=False, is_last=False)
        weights, sums = make_weights_and_sums(StageModule(parts, cut, loss_chunk_tokens=1), torch.bfloat16, device)
        hidden, gradient = torch.randn(2, 4, 128, 256, device=device, dtype=torch.bfloat16)
        arguments = LayerArgumentsBuilder(parts, device=device, dtype=torch.bfloat16)(128)[0]
        layer = parts.layers[0]
        (back,) = backward(layer, run_with_graph(layer, weights, hidden, arguments), sums, gradient)
        found.append(sums | {"inputs": back})
    assert distance(found[1], found[0]) < 0.02


LAYERS = STAGES = 4
MICROBATCHES = 4


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("num_rounds", [1, 2])
@pytest.mark.parametrize("order", [ComputeOrder.BREADTH_FIRST, ComputeOrder.DEPTH_FIRST])
def test_compiled_layers_continue_from_offloaded_products(
    family: str, num_rounds: int, order: ComputeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are copied to the host and back while loads and gradients are; a place taken too early shows."""
    device = torch.device("cuda", 0)
    model, batch = make_model(family, LAYERS).to(device), make_batch(MICROBATCHES)
    offloaded, select = [], saved_activations._select_for_offload

    def counted(saved: object, room: int) -> object:
        layers, tensors = select(saved, room)  # type: ignore[arg-type]
        offloaded.append(sum(layer.saved is not None for layer in layers))
        return layers, tensors

    monkeypatch.setattr(saved_activations, "_select_for_offload", counted)
    expected: Step | None = None
    for number in (0, 1, MICROBATCHES // num_rounds):
        offloaded.clear()
        pipeline = Pipeline(
            model,
            1,
            STAGES,
            MICROBATCHES,
            STAGES if order is ComputeOrder.DEPTH_FIRST else 2,
            order=order,
            num_rounds=num_rounds,
            offloaded_activation_stages=frozenset(range(STAGES - 1)),
            num_offloaded_microbatches=number,
            compiled=True,
            dtype=torch.bfloat16,
            device=device,
        )
        loss, gradients = pipeline.step(batch)
        found = loss, {name: each.cpu() for name, each in gradients.items()}
        assert sum(offloaded) == number * num_rounds * (STAGES - 1)
        expected = expected or found
        assert_same_bits(found, expected, number)
