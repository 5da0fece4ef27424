"""Eight-bit products in a pipeline: the bits of one that quantizes as the documents say, over all cuts and places."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.adapted_models import GivenValues, adapted, parameters_of
from harness.packed_rows import make_packed_batch
from harness.pipelines import (
    FAMILIES,
    VOCAB,
    Pipeline,
    Step,
    assert_same_bits,
    distance,
    make_batch,
    make_model,
    model_of,
    resident_stages,
)
from harness.runs import make_checkpoint
from harness.sessions import VOCAB as SAMPLE_VOCAB
from harness.sessions import in_sessions, random_samples
from harness.tiny_families import tiny_config
from torch import Tensor

from mobius.config.config import AdapterConfig, FinetuningType, MatmulDtype
from mobius.data.batches import TrainingBatches
from mobius.models.linear import ProductFormat
from mobius.schedule.plan import RecomputeLevel
from mobius.training.session import Session

FORMATS = [MatmulDtype.FP8, MatmulDtype.INT8]
LARGEST = {MatmulDtype.FP8: 448.0, MatmulDtype.INT8: 127.0}
BF16 = torch.bfloat16
LORA = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=16)
"""Its factors have sizes that could have codes."""
Sizes = tuple[int, int, int, int | None]
"""Ranks, stages per rank, microbatches, slots."""


def quantized(rows: Tensor, kind: MatmulDtype) -> Tensor:
    """The values that the codes of `rows` stand for, in fp64; rows along the last dimension."""
    values = rows.double()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / LARGEST[kind])))  # the smallest that overflows no code
    scale = torch.where(largest > 0, scale, 1.0)
    codes = values / scale
    return (codes.round() if kind is MatmulDtype.INT8 else codes.float().to(torch.float8_e4m3fn).double()) * scale


class Product(torch.autograd.Function):
    """A linear's output, with the gradient of its inputs alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, kind: MatmulDtype) -> Tensor:
        ctx.weight, ctx.kind = weight, kind
        return (quantized(inputs, kind) @ quantized(weight, kind).t()).float().to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return input_gradient(gradient, ctx.weight, ctx.kind), None, None


def input_gradient(gradient: Tensor, weight: Tensor, kind: MatmulDtype) -> Tensor:
    return (quantized(gradient, kind) @ quantized(weight.t(), kind).t()).float().to(gradient.dtype)


def quantizing_products(kind: MatmulDtype, monkeypatch: pytest.MonkeyPatch, kept: Collection[int]) -> None:
    """Let linears quantize both factors of a product where it is made, and multiply in fp64.

    Not those with a size in `kept`.
    """
    plain = ProductFormat.output, ProductFormat.input_gradient

    def output(inputs: Tensor, weight: Tensor, bias: Tensor | None, scales: None = None) -> Tensor:
        if {*weight.shape} & {*kept}:
            return plain[0](inputs, weight, bias)
        made: Tensor = Product.apply(inputs, weight, kind)  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias

    def backward(gradient: Tensor, weight: Tensor, scales: None = None) -> Tensor:
        return plain[1](gradient, weight) if {*weight.shape} & {*kept} else input_gradient(gradient, weight, kind)

    monkeypatch.setattr(ProductFormat, "output", staticmethod(output))
    monkeypatch.setattr(ProductFormat, "input_gradient", staticmethod(backward))


def step(family: str, kind: MatmulDtype, sizes: Sizes, **options: Any) -> Step:
    """A step in bf16 of 4 layers; `sizes` as the first of `Pipeline`."""
    batch = options.pop("batch", None) or make_batch(4)
    if family in FAMILIES:
        model = adapted(family, LORA) if "adapters" in options else make_model(family, 4)
    else:
        model = model_of(tiny_config(family))
    if "adapters" in options:
        options["source"] = GivenValues(parameters_of(model))
        model = model.base_model.model
    return Pipeline(model.to(BF16), *sizes, dtype=BF16, matmul_dtype=kind, **options).step(batch)


CASES: dict[str, tuple[str, Sizes, dict[str, Any]]] = {
    "llama": ("llama", (2, 2, 4, 1), {}),
    "biases": ("qwen2", (2, 2, 4, 1), {}),
    "norms of results": ("gemma3", (2, 2, 4, 1), {}),
    "tied": ("llama-tied", (2, 2, 4, None), {}),
    "tiles": ("llama", (2, 2, 4, 1), {"tile_tokens": 5}),
    "slices": ("llama", (2, 2, 8, 1), {"num_slices": 2}),
    "packed": ("llama", (2, 2, 2, 1), {"batch": make_packed_batch([[5, 7], [12]], 12, 2)}),
    "adapters": ("qwen3", (2, 2, 4, 1), {"adapters": LORA}),
    "resident adapters": ("qwen3", (2, 2, 4, None), {"adapters": LORA}),
    "experts": ("mixtral", (2, 1, 4, 1), {}),
}
"""Family, `Sizes`, and other options of `Pipeline`."""
ON_DEMAND = ("biases", "resident adapters")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, marks=[] if kind == kept and case not in ON_DEMAND else pytest.mark.extended)
        for case, kept in zip(CASES, cycle(FORMATS))
        for kind in FORMATS
    ],
)
def test_a_step_has_the_bits_of_linears_that_quantize(
    case: str, kind: MatmulDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, sizes, options = CASES[case]
    found, bf16 = (step(family, each, sizes, **options) for each in (kind, MatmulDtype.BF16))
    kept = {VOCAB, LORA.lora_rank} if "adapters" in options else {VOCAB}
    quantizing_products(kind, monkeypatch, kept)

    assert_same_bits(found, step(family, MatmulDtype.BF16, sizes, **options))
    assert 0.005 < distance(found[1], bf16[1]) < 0.5


PLACES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "resident": ((1, 4, 4, None), {}),
    "four ranks, streamed": ((4, 1, 4, 1), {}),
    "some resident": ((2, 2, 4, 1), {"resident": resident_stages(2, 2, [0])}),
    "rounds": ((2, 2, 4, 1), {"num_rounds": 2}),
    "saved": ((2, 2, 4, 2), {"keeps_graphs": True}),
    "saved products": ((2, 2, 4, None), {"keeps_graphs": True, "recompute_level": RecomputeLevel.ELEMENTWISE}),
    "offloaded activations": ((2, 2, 4, 1), {"offloaded_activation_stages": frozenset({0, 1, 2})}),
}


@pytest.mark.parametrize("kind", [MatmulDtype.INT8, pytest.param(MatmulDtype.FP8, marks=pytest.mark.extended)])
@pytest.mark.parametrize("place", PLACES)
def test_where_and_how_a_stage_computes_changes_no_bit(place: str, kind: MatmulDtype) -> None:
    sizes, options = PLACES[place]
    assert_same_bits(step("llama", kind, sizes, **options), step("llama", kind, (1, 1, 4, 1)), place)


REPLICATED = """--batch_size 12 --num_chunks 2 --num_stages 4 --seq_length 24 --packing off --num_iterations 4 --bf16
    --learning_rate 2e-3 --warmup_steps 1 --save_strategy no --matmul_dtype int8"""


def train(session: Session, batches: TrainingBatches) -> tuple[list[float], dict[str, Tensor]]:
    trainer = session.trainer(batches)
    losses = [trainer.train_step().loss for _ in range(4)]
    trainer.drain()
    states = [memory.state for memory in session.stages.memory.values()]
    return losses, {name: view.clone() for state in states for name, view in state.layout.views(state.weights).items()}


def test_replicas_gather_weights_before_they_quantize_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=SAMPLE_VOCAB)
    samples = random_samples(60, 24, seed=1)
    (alone,), (one, other) = (
        in_sessions(1, tmp_path, REPLICATED, samples, train, num_replicas=number) for number in (1, 2)
    )
    assert one[0] == pytest.approx(alone[0], rel=3e-3)
    assert one[1].keys() == alone[1].keys()
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name
        assert (weight - alone[1][name]).norm() < 0.05 * alone[1][name].norm(), name
