"""Products kept without what is cheap: the bits of everything kept, fewer bytes, and no product a second time.

Both are wanted of layers in graphs of their own and of eager ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.block_case import FAMILIES_OF_LAYERS, BlockCase, assert_equal, layer_case, parts_of
from harness.live_bytes import LiveBytes
from harness.pipelines import FAMILIES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from mobius.models.block_autograd import Block, backward, run_with_graph
from mobius.models.blocks import ModelParts
from mobius.models.compiled import CompiledGraph, CompiledModule, is_cheap_to_recompute
from mobius.schedule.plan import RecomputeLevel

CPU = torch.device("cpu")
BATCH, LENGTH = 2, 8
DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, INNER, HEADS = 256, 688, 4
WIDE = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}


def costly(targets: Sequence[object]) -> Counter[str]:
    """How often each operation runs that is a product or attention."""
    names = [str(target).removeprefix("aten.").removesuffix(".default") for target in targets]
    return Counter(name for name in names if name in ("mm", "addmm", "bmm") or "attention" in name)


# Of seven linears the inputs' gradients; those of weights are made outside of the graph, from their factors.
ONLY_BACKWARD = {"mm": 7, "_scaled_dot_product_flash_attention_for_cpu_backward": 1}


_GRAPHS = [(family, dtype) for family in FAMILIES for dtype in DTYPES]
_USUAL_GRAPHS = [("llama", torch.float32), ("gemma3", torch.bfloat16)]
"""Tracing takes seconds; gemma3 has the norms and the windows of others."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [pytest.param(*each, marks=[] if each in _USUAL_GRAPHS else pytest.mark.extended) for each in _GRAPHS],
)
def test_the_graphs_of_each_family_give_the_bits_of_everything_kept_and_run_no_product_again(
    uncompiled: list[torch.fx.GraphModule], family: str, dtype: torch.dtype
) -> None:
    case = layer_case(parts_of(family), dtype=dtype, in_graphs=True)

    assert_equal(case.kept(RecomputeLevel.ELEMENTWISE), case.kept())

    assert len(uncompiled) == 4, "each level has its own forward and backward"
    for graph in (uncompiled[1], uncompiled[3]):
        assert costly([node.target for node in graph.graph.nodes]) == ONLY_BACKWARD


class Operations(TorchDispatchMode):
    """Every operation that is dispatched under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES_OF_LAYERS)
def test_the_backward_of_an_eager_layer_runs_no_product_again(family: str) -> None:
    case = layer_case(parts_of(family))
    graph = run_with_graph(case.block, case.weights, case.hidden, case.arguments, RecomputeLevel.ELEMENTWISE)
    with Operations() as operations:
        backward(case.block, graph, case.sums(), case.gradient)
    # Beside those of the inputs' gradients seven of the weights'.
    assert costly(operations.seen) == {**ONLY_BACKWARD, "mm": 14}


@pytest.mark.extended  # compiling them takes a minute; above graphs run as they were traced
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_layers_give_the_bits_of_everything_kept_and_of_recomputed_ones(dtype: torch.dtype) -> None:
    case = layer_case(parts_of("llama"), dtype=dtype, in_graphs=True)
    actual = case.kept(RecomputeLevel.ELEMENTWISE)
    assert_equal(actual, case.kept())
    assert_equal(actual[1:], case.recomputed())


@pytest.mark.grid
@pytest.mark.parametrize(
    ("level", "widths"),
    [
        # Output, both norms' results, the states between, queries, keys, values, attention's result; gate, up, product.
        (RecomputeLevel.NONE, 8 * HIDDEN + 3 * INNER),
        (RecomputeLevel.ELEMENTWISE, 6 * HIDDEN + 2 * INNER),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_hold_what_the_widths_say(
    uncompiled: list[torch.fx.GraphModule], dtype: torch.dtype, level: RecomputeLevel, widths: int
) -> None:
    parts = ModelParts(LlamaConfig(**WIDE, num_hidden_layers=1, vocab_size=96), CPU)
    case = layer_case(parts, dtype=dtype, in_graphs=True)
    graph = run_with_graph(case.block, case.weights, case.hidden, case.arguments, level)
    assert isinstance(graph, CompiledGraph)
    given = [*case.weights.values(), case.hidden, *tree_leaves(dict(case.arguments))]
    storages = {each.untyped_storage()._cdata for each in given if isinstance(each, Tensor)}
    held = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in (*graph.outputs, *graph.saved)}
    total = sum(size for key, size in held.items() if key not in storages)
    # Per token and in fp32: a factor of both norms, and the logarithm of a sum of each head.
    assert total == BATCH * LENGTH * (widths * dtype.itemsize + 4 * (2 + HEADS))


@pytest.mark.parametrize(("dtype", "everything"), [(torch.float32, 10), (torch.bfloat16, 13)])
def test_eager_layers_hold_what_the_widths_say(dtype: torch.dtype, everything: int) -> None:
    parts = ModelParts(LlamaConfig(**WIDE, num_hidden_layers=1, vocab_size=96), CPU)
    case = layer_case(parts, dtype=dtype)
    held = {}
    for level in RecomputeLevel:
        with LiveBytes() as live:
            graph = run_with_graph(case.block, case.weights, case.hidden, case.arguments, level)
            held[level] = live.now / (BATCH * LENGTH * dtype.itemsize)
            del graph
    assert held[RecomputeLevel.NONE] == pytest.approx(everything * HIDDEN + 4 * INNER, rel=0.01)
    # All products, that of the output too.
    assert held[RecomputeLevel.ELEMENTWISE] == pytest.approx(7 * HIDDEN + 2 * INNER, rel=0.01)


class Counting(nn.Module):
    """Calls an operation that torch knows nothing of."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._operation = operation

    def forward(self, inputs: Tensor) -> Tensor:
        return (self._operation(inputs * self.weight) * self.weight).square()


@pytest.mark.parametrize("in_graphs", [True, False])
def test_an_operation_that_is_not_known_runs_once(uncompiled: list[torch.fx.GraphModule], in_graphs: bool) -> None:
    calls = list[str]()
    library = torch.library.Library("mobius_test", "FRAGMENT")
    name = f"doubled_{int(in_graphs)}"

    def double(inputs: Tensor) -> Tensor:
        calls.append("real")
        return inputs * 2

    operation = torch.library.custom_op(f"mobius_test::{name}", double, mutates_args=())
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _, gradient: gradient * 2)
    block = Block("layer.", Counting(operation), {"weight": (4,)})
    case = BlockCase(block, {"layer.weight": torch.rand(4)}, torch.rand(2, 4), {}, torch.rand(2, 4))
    expected = case.kept()
    if in_graphs:
        case = replace(case, block=replace(block, graphs=CompiledModule(block.module, name="layers")))
    calls.clear()

    assert_equal(case.kept(RecomputeLevel.ELEMENTWISE), expected)

    assert calls == ["real"]
    assert len(uncompiled) == (2 if in_graphs else 0)
    del library


def test_products_reductions_and_what_torch_does_not_know_are_not_cheap() -> None:
    aten = torch.ops.aten
    for operation in (aten.mm.default, aten.bmm.default, aten.mean.dim, aten._softmax.default, aten.cumsum.default):
        assert not is_cheap_to_recompute(operation)
    for operation in (
        aten.silu.default,
        aten.mul.Tensor,
        aten.cat.default,
        aten.permute.default,
        aten._to_copy.default,
    ):
        assert is_cheap_to_recompute(operation)
    assert not is_cheap_to_recompute(len)
