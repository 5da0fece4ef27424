"""One layer of a family on random numbers, whole and in halves, and its plain gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness.grids import named
from harness.pipelines import CPU, FAMILIES
from torch import Tensor
from transformers import (
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PretrainedConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from mobius.engine.documents import Rows, position_ids_and_cu_seqlens
from mobius.models.attention import DocumentLayout
from mobius.models.attention_split import SplitBlocks
from mobius.models.block_autograd import Block, backward, recomputed_backward, run_with_graph, run_without_graph
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.compiled import CompiledModule
from mobius.schedule.plan import RecomputeLevel


@dataclass
class BlockCase:
    """A block with something to run it on."""

    block: Block
    weights: dict[str, Tensor]
    hidden: Tensor
    arguments: dict[str, Any]
    gradient: Tensor

    def kept(self, level: RecomputeLevel = RecomputeLevel.NONE) -> list[Tensor]:
        """Output, gradients of the inputs and of every parameter as a run makes them that kept the activations."""
        sums = self.sums()
        graph = run_with_graph(self.block, self.weights, self.hidden, self.arguments, level)
        return [graph.output.detach(), *backward(self.block, graph, sums, self.gradient), *sums.values()]

    def by_autograd(self) -> list[Tensor]:
        """The same without graphs of our own."""
        return replace(self, block=replace(self.block, compiled=None, graphs=None)).kept()

    def forward(self) -> Tensor:
        """The output as a run makes it that keeps nothing."""
        return run_without_graph(self.block, self.weights, self.hidden, self.arguments)

    def recomputed(self) -> list[Tensor]:
        """The gradients as a run makes them that kept nothing."""
        sums = self.sums()
        given = self.block, self.weights, (self.hidden,), self.arguments, sums, self.gradient
        return [*recomputed_backward(*given), *sums.values()]

    def sums(self) -> dict[str, Tensor]:
        """Zeros, to which gradients are added in fp32."""
        return {name: torch.zeros(weight.shape) for name, weight in self.weights.items()}


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], *, share: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, other, rtol=share, atol=share * float(other.abs().max()))


_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OTHERS: dict[str, Callable[[], PretrainedConfig]] = {
    "cohere2": lambda: Cohere2Config(**_TINY, sliding_window=4),  # attention parallel to the feed-forward part
    "exaone4": lambda: Exaone4Config(**_TINY, sliding_window=4),
    "glm4": lambda: Glm4Config(**_TINY, head_dim=8),  # rotary embeddings on a part of each head
    "granite": lambda: GraniteConfig(**_TINY, residual_multiplier=0.5, attention_multiplier=0.3),
    "olmo": lambda: OlmoConfig(**_TINY, clip_qkv=0.5),  # changes queries, keys and values in place
    "olmo2": lambda: Olmo2Config(**_TINY),  # norms behind attention and feed-forward part
    "olmo3": lambda: Olmo3Config(**_TINY, sliding_window=4),
    "phi3": lambda: Phi3Config(**_TINY),  # one linear for queries, keys and values
    "smollm3": lambda: SmolLM3Config(**_TINY),
    "starcoder2": lambda: Starcoder2Config(**_TINY),
}
_PACKED_ONLY: dict[str, Callable[[], PretrainedConfig]] = {
    # Capped scores, which dense attention of transformers refuses in the fast way.
    "gemma2": lambda: Gemma2Config(**_TINY, head_dim=16, sliding_window=4, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(**_TINY, head_dim=16, sliding_window=4, num_local_experts=6),  # sinks
}
FAMILIES_OF_LAYERS = named(
    {family: family for family in FAMILIES}, on_demand=["llama-tied", "gemma3-softcap", "qwen3", "mistral"]
)
"""On demand are those whose layers have nothing that others lack: llama-tied and gemma3-softcap differ outside of them,
gemma3 has the norms of qwen3 and the windows of mistral."""
GRAPHS_OF_FAMILIES = named({family: family for family in FAMILIES}, on_demand=FAMILIES.keys() - {"llama", "gemma3"})
"""qwen2's layers, which have biases, are traced on demand: it takes a second each."""
CUT_FAMILIES = {**FAMILIES, **_OTHERS}
CUT_FAMILIES_PACKED = {**CUT_FAMILIES, **_PACKED_ONLY}


def config_of(family: str) -> PretrainedConfig:
    """A tiny configuration of `family`, with the attention that a run takes."""
    config = CUT_FAMILIES_PACKED[family]()
    config._attn_implementation = "sdpa" if family in CUT_FAMILIES else "eager"
    return config


@functools.cache
def parts_of(family: str, packed_dtype: torch.dtype | None = None) -> ModelParts:
    """Parts of `config_of`, eager: built once, because no test changes them."""
    return ModelParts(config_of(family), CPU, packed_dtype=packed_dtype)


def layer_case(
    parts: ModelParts,
    index: int = 0,
    *,
    shape: tuple[int, int] = (2, 8),
    documents: DocumentLayout | None = None,
    dtype: torch.dtype = torch.float32,
    in_graphs: bool = False,
) -> BlockCase:
    """A layer on numbers of `shape` [B, L], in graphs of its own or run eagerly."""
    layer = parts.layers[index]
    if in_graphs:
        layer = replace(layer, graphs=CompiledModule(layer.module, name="layers"))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: (torch.randn(size, generator=generator) * 0.1).to(dtype)
        for name, size in layer.parameter_shapes().items()
    }
    hidden, gradient = (torch.randn(*shape, parts.config.hidden_size, generator=generator).to(dtype) for _ in range(2))
    arguments = LayerArgumentsBuilder(parts, device=CPU, dtype=dtype)(shape[1], documents)[index]
    return BlockCase(layer, weights, hidden, arguments, gradient)


def layer_cases(
    parts: ModelParts, *, shape: tuple[int, int], rows: Rows | None = None, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[BlockCase, SplitBlocks]]:
    """One layer of each kind, whole and in halves; `rows` are lengths of documents."""
    documents = None
    if rows is not None:
        most = 1 + max(len(row) for row in rows)
        places = position_ids_and_cu_seqlens(rows, seq_length=shape[1], num_microbatches=1, max_documents=most)
        position_ids, (cu_seqlens,) = (torch.from_numpy(each) for each in places)
        documents = DocumentLayout(position_ids, cu_seqlens)
    kinds = {id(layer.module): index for index, layer in reversed(list(enumerate(parts.layers)))}
    for index in kinds.values():
        case = layer_case(parts, index, shape=shape, documents=documents, dtype=dtype)
        yield replace(case, arguments=dict(case.arguments)), parts.split_at_attention(index)
