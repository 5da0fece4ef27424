"""Eight-bit products on a GPU: all graphs of a layer quantize the same values, and so do all ways to run a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.replica_ranks import exact_results
from transformers import LlamaConfig, Qwen2Config

from mobius.config.config import MatmulDtype
from mobius.engine.stage import StageModule
from mobius.models.block_autograd import backward, recomputed_backward, run_with_graph, run_without_graph
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.planner.layer_bench import make_weights_and_sums
from mobius.schedule.partition import StageCut
from mobius.schedule.plan import RecomputeLevel

pytestmark = pytest.mark.gpu

FORMATS = ["fp8", "int8"]
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 1}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES, num_key_value_heads=4)}
TOKENS = 512
OPTIONS = """--device cuda --bf16 --num_stages 8 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 10
    --learning_rate 1e-3 --max_grad_norm 0.5 --compile off"""
WAYS = [
    "--resident_stages 0",
    "--resident_stages 0 --no_prefetch",
    "--resident_stages 3",
    "--no_offload --recompute full",
    "--no_offload --recompute none",
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", CONFIGS)
def test_compiled_graphs_of_a_layer_agree_to_the_bit(family: str, kind: str) -> None:
    device = torch.device("cuda", 0)
    config = CONFIGS[family]
    config._attn_implementation = "sdpa"
    parts = ModelParts(config, device, compiled=True, matmul_dtype=MatmulDtype(kind))
    torch.manual_seed(0)
    stage = StageModule(parts, StageCut(1, 0, 1, is_first=False, is_last=False), loss_chunk_tokens=TOKENS)
    weights, sums = make_weights_and_sums(stage, torch.bfloat16, device)
    layer = parts.layers[0]
    arguments = LayerArgumentsBuilder(parts, device=device, dtype=torch.bfloat16)(TOKENS)[0]
    hidden, gradient = torch.randn(2, 2, TOKENS, config.hidden_size, device=device, dtype=torch.bfloat16)
    output = run_without_graph(layer, weights, hidden, arguments)
    found = []
    for level in (None, RecomputeLevel.NONE, RecomputeLevel.ELEMENTWISE):
        own = {name: torch.zeros_like(each) for name, each in sums.items()}
        if level is None:
            (back,) = recomputed_backward(layer, weights, (hidden,), arguments, own, gradient)
        else:
            graph = run_with_graph(layer, weights, hidden, arguments, level)
            assert torch.equal(graph.output, output), level
            (back,) = backward(layer, graph, own, gradient)
        found.append(own | {"inputs": back})
    assert layer.graphs is not None
    assert not layer.graphs._is_broken
    for other in found[1:]:
        assert {name for name, each in found[0].items() if not torch.equal(each, other[name])} == set()


@pytest.mark.parametrize("kind", FORMATS)
def test_ten_steps_end_in_the_same_bits_wherever_weights_are(tmp_path: Path, kind: str) -> None:
    results = exact_results(1, tmp_path, f"{OPTIONS} --matmul_dtype {kind}", WAYS)
    assert len({str(result) for result in results.values()}) == 1, results
