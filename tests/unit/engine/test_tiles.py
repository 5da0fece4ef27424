"""Tiles of tokens give what a whole layer gives, and what is inside a layer no longer grows with its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness.block_case import BlockCase, assert_near, config_of, layer_cases, parts_of
from harness.live_bytes import LiveBytes
from harness.pipelines import CPU
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from mobius.engine.documents import Rows
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext
from mobius.engine.tiles import TiledLayer
from mobius.models.attention_split import Heads
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.planner.peak_memory import estimate_layer
from mobius.schedule.partition import StageCut

LENGTH = 11
TILES = (3, 4, LENGTH, 16)
"""Some divide the tokens of a microbatch and some do not; some cross rows, and one is longer than a row."""
BATCHES: list[tuple[int, Rows | None]] = [(1, None), (3, None), (1, [[4, 1, 3]]), (3, [[4, 1, 3], [7], [11]])]


@dataclass(frozen=True)
class Results:
    """A layer's output, and in backward the gradient of its input and sums of its parameters' gradients."""

    output: Tensor
    of_input: Tensor
    sums: dict[str, Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [self.output, self.of_input, *self.sums.values()]


def run_layer(parts: ModelParts, case: BlockCase, tile_tokens: int | None) -> Results:
    """The layer of `case` alone in a stage."""
    stage, context = stage_of(parts, case, tile_tokens)
    sums = {name: torch.zeros(value.shape) for name, value in case.weights.items()}
    output, kept = stage.forward(case.weights, case.hidden, context)
    assert torch.equal(stage.run(case.weights, case.hidden, context), output)
    return Results(output, stage.backward(case.weights, sums, kept, case.gradient, context), sums)


def stage_of(
    parts: ModelParts, case: BlockCase, tile_tokens: int | None, *, keep_graphs: bool = False
) -> tuple[StageModule, MicrobatchContext]:
    index = int(case.block.prefix.split(".")[2])
    cut = StageCut(1, index, index + 1, False, False)
    stage = StageModule(parts, cut, loss_chunk_tokens=8, tile_tokens=tile_tokens, keep_graphs=keep_graphs)
    return stage, MicrobatchContext({index: case.arguments})


DENSE_FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "cohere2", "phi3", "olmo2"]
CASES = [
    (family, batch, rows)
    for batch, rows in BATCHES
    for family in (DENSE_FAMILIES if rows is None else [*DENSE_FAMILIES, "gemma2"])
]


@pytest.mark.grid
@pytest.mark.parametrize(("family", "batch", "rows"), CASES)
def test_tiles_give_the_results_of_the_whole_layer(family: str, batch: int, rows: Rows | None) -> None:
    parts = parts_of(family, None if rows is None else torch.float32)
    # Gemma's norms add one to their weights, and gradients of queries nearly cancel out.
    share = 2e-6 if "gemma" in family else 1e-6
    for case, _ in layer_cases(parts, shape=(batch, LENGTH), rows=rows):
        whole = run_layer(parts, case, None)
        for tile_tokens in TILES:
            assert_near(run_layer(parts, case, tile_tokens).all, whole.all, share=share)


@pytest.mark.grid
@pytest.mark.parametrize(("batch", "rows"), BATCHES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere2"])
def test_tiles_in_bf16_are_as_near_to_fp32_as_the_whole_layer(family: str, batch: int, rows: Rows | None) -> None:
    parts = parts_of(family, None if rows is None else torch.bfloat16)
    # Cohere's halves share a norm, whose gradient is rounded once in each of them.
    most = 1.5 if family == "cohere2" else 1.1
    for case, _ in layer_cases(parts, shape=(batch, LENGTH), rows=rows, dtype=torch.bfloat16):
        whole, exact = run_layer(parts, case, None), run_layer(parts, in_fp32(case), None)
        for tile_tokens in TILES:
            tiled = run_layer(parts, case, tile_tokens)
            assert distance(tiled.output, exact.output) <= 1.1 * distance(whole.output, exact.output)
            assert distance(tiled.of_input, exact.of_input) <= most * distance(whole.of_input, exact.of_input)
            # A CPU rounds each tile's product to bf16, whose steps are 2 ** -8, before it is added in fp32.
            assert_near(list(tiled.sums.values()), list(whole.sums.values()), share=2**-7)


def in_fp32(case: BlockCase) -> BlockCase:
    """The same numbers in fp32."""
    tables = tuple(table.float() for table in case.arguments["position_embeddings"])
    return replace(
        case,
        weights={name: weight.float() for name, weight in case.weights.items()},
        hidden=case.hidden.float(),
        gradient=case.gradient.float(),
        arguments={**case.arguments, "position_embeddings": tables},
    )


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other).norm())


@pytest.mark.parametrize("batch", [1, 3])
def test_a_microbatch_of_no_more_tokens_than_a_tile_has_is_not_cut(batch: int) -> None:
    parts = parts_of("llama")
    for case, _ in layer_cases(parts, shape=(batch, LENGTH)):
        whole, tiled = (run_layer(parts, case, tile_tokens).all for tile_tokens in (None, batch * LENGTH))
        assert all(torch.equal(*pair) for pair in zip(whole, tiled, strict=True))


def test_layers_whose_graphs_are_kept_are_not_cut() -> None:
    parts = parts_of("llama")
    ((case, _),) = layer_cases(parts, shape=(1, LENGTH))
    stage, context = stage_of(parts, case, 4, keep_graphs=True)
    sums = case.sums()

    output, kept = stage.forward(case.weights, case.hidden, context)
    of_input = stage.backward(case.weights, sums, kept, case.gradient, context)

    actual = [output, of_input, *sums.values()]
    assert all(torch.equal(*pair) for pair in zip(actual, case.kept(), strict=True))


def test_gradients_add_up_over_the_layers_of_a_stage_and_over_microbatches() -> None:
    parts = parts_of("gemma3")
    context = MicrobatchContext(LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32)(LENGTH))
    generator = torch.Generator().manual_seed(4)
    results = list[Sequence[Tensor]]()
    stages = [
        StageModule(parts, StageCut(1, 3, 7, False, False), loss_chunk_tokens=8, tile_tokens=tile) for tile in (None, 4)
    ]
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in stages[0].shapes.items()}
    microbatches = [torch.randn(2, 2, LENGTH, 32, generator=generator) for _ in range(2)]
    for stage in stages:
        sums = {name: torch.zeros(shape) for name, shape in stage.shapes.items()}
        found = list[Tensor]()
        for inputs, gradient in microbatches:
            output, kept = stage.forward(weights, inputs, context)
            found += [output, stage.backward(weights, sums, kept, gradient, context)]
        results.append([*found, *sums.values()])
    assert_near(results[1], results[0], share=1e-5)


def test_all_tiles_of_all_layers_share_the_graphs_of_a_shape_which_compute_no_product_a_third_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", keep)
    parts = ModelParts(config_of("llama"), CPU, compiled=True)
    (case, _), *_ = layer_cases(parts, shape=(2, LENGTH))
    expected = run_layer(parts_of("llama"), case, None)

    for index in range(3):
        prefix = f"model.layers.{index}."
        weights = {name.replace(case.block.prefix, prefix): weight for name, weight in case.weights.items()}
        own = replace(case, block=replace(case.block, prefix=prefix), weights=weights)
        assert_near(run_layer(parts, own, 6).all, expected.all, share=1e-5)

    # For tiles of six tokens and the last one of four: of the half before attention queries, keys and values, nothing
    # again in backward, three inputs' gradients; behind attention its product, gate, up and the last one, of which
    # backward computes the last not again, and four inputs' gradients.
    assert sorted(map(num_products, graphs)) == sorted(2 * [3, 0, 3, 4, 3, 4])


def num_products(graph: torch.fx.GraphModule) -> int:
    graph.graph.eliminate_dead_code()
    products = torch.ops.aten.mm.default, torch.ops.aten.bmm.default
    return sum(node.target in products for node in graph.graph.nodes)


HIDDEN, INNER = 128, 352


@pytest.mark.parametrize(
    ("family", "is_packed", "dtype"),
    [
        (LlamaConfig, False, torch.float32),
        pytest.param(LlamaConfig, True, torch.bfloat16, marks=pytest.mark.extended),
        pytest.param(Qwen3Config, False, torch.bfloat16, marks=pytest.mark.extended),
    ],
)
def test_what_backward_holds_grows_with_the_length_only_by_what_attention_needs(
    family: type[PretrainedConfig], is_packed: bool, dtype: torch.dtype
) -> None:
    config = family(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=100, max_position_embeddings=8192,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    parts = ModelParts(config, CPU, packed_dtype=dtype if is_packed else None)
    widths: dict[int | None, list[float]] = {}
    for tile_tokens in (None, 256):
        peaks = [peak_bytes(parts, length, tile_tokens, dtype, is_packed=is_packed) for length in (1024, 2048)]
        widths[tile_tokens] = [
            (long - short) / 1024 / HIDDEN / dtype.itemsize for short, long in zip(*peaks, strict=True)
        ]
    # Queries, keys and values have two widths, attention's result one, so have their gradients; then that of the input.
    # Attention keeps a number in fp32 for each token and head.
    forward, backward = widths[256]
    assert forward <= 2 + 1 + 0.1
    assert backward <= 2 * (2 + 1) + 1 + 0.1
    assert widths[None][0] > 10
    assert widths[None][1] > 28


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [{}, {"intermediate_size": 1024}, {"num_key_value_heads": 4}])
@pytest.mark.parametrize(("length", "tile_tokens"), [(2048, 256), (2048, 1024), (300, 256)])
def test_a_layer_in_tiles_takes_what_its_widths_say(
    dtype: torch.dtype, widths: dict[str, int], length: int, tile_tokens: int
) -> None:
    given: dict[str, Any] = {"intermediate_size": INNER, "num_key_value_heads": 2} | widths
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, vocab_size=100, max_position_embeddings=8192,
        **given,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    parts = ModelParts(config, CPU)
    _, counted = peak_bytes(parts, length, tile_tokens, dtype, is_packed=False)
    estimate = estimate_layer(dtype.itemsize, parts.shape(), length, compiled=False, tile_tokens=tile_tokens)
    # A tile takes less than a whole layer of its tokens: its halves exist one after the other.
    assert 0.98 * counted <= estimate.recomputed_peak <= 1.3 * counted


def peak_bytes(
    parts: ModelParts, length: int, tile_tokens: int | None, dtype: torch.dtype, *, is_packed: bool
) -> tuple[int, int]:
    """Most that forward and backward of the layer hold beside its input, and in backward beside the gradient given."""
    rows = [[length // 2, length // 4]] if is_packed else None
    ((case, _),) = layer_cases(parts, shape=(1, length), rows=rows, dtype=dtype)
    stage, context = stage_of(parts, case, tile_tokens)
    sums = {name: torch.zeros(value.shape) for name, value in case.weights.items()}
    with LiveBytes() as forward:
        stage.run(case.weights, case.hidden, context)
    with LiveBytes() as backward:
        stage.backward(case.weights, sums, [case.hidden], case.gradient, context)
    return forward.peak, backward.peak


class Watching:
    """Attention that gives zeros, and looks at what else there is while it is differentiated."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.held = live, 0

    def attend(self, heads: Heads) -> Tensor:
        self._kinds = [each.shape for each in (heads.query, heads.key, heads.value)]
        return torch.zeros_like(heads.query.transpose(1, 2))

    def backward(self, gradient: Tensor) -> Heads:
        self.held = self._live.now
        return Heads(*(torch.zeros(kind) for kind in self._kinds))


def test_no_tile_is_left_while_attention_is_differentiated() -> None:
    parts = parts_of("llama")
    ((case, _),) = layer_cases(parts, shape=(1, LENGTH))
    held = set[int]()
    for tile_tokens in (2, 4, 8):
        layer = TiledLayer(parts.split_at_attention(0), tile_tokens=tile_tokens)
        with LiveBytes() as live:
            attention = Watching(live)
            layer.backward(case.weights, case.sums(), case.hidden, case.gradient, case.arguments, attention)
        held.add(attention.held)
    assert len(held) == 1
