"""Whole steps and evaluations of pipelines of rank-threads, compared with the plain transformers model."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from harness import workers
from harness.local_transport import LocalTransport, run_rank_threads
from harness.rank_memory import rules_of
from harness.schedules import even_cuts, spec_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from mobius.config.config import AdapterConfig, MatmulDtype
from mobius.engine.step_inputs import StepBatch
from mobius.engine.step_sums import StepSums
from mobius.engine.tied_weights import TiedWeights
from mobius.models.blocks import ModelParts
from mobius.models.weights import WeightSource
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.objective import Evaluation, Objective
from mobius.schedule.build import build_schedule
from mobius.schedule.partition import partition_of
from mobius.schedule.plan import Plan, RecomputeLevel
from mobius.schedule.schedule import Schedule
from mobius.schedule.spec import ComputeOrder
from mobius.training.stages import OffloadedActivations, RankStages, StageOptions

CPU = torch.device("cpu")
NUM_LAYERS = 12
SEQ_LENGTH = 12
VOCAB = 96

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 5}
_GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 4}
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": lambda **more: LlamaConfig(**_COMMON | more),
    "llama-tied": lambda **more: LlamaConfig(**_COMMON | {"tie_word_embeddings": True} | more),
    "qwen2": lambda **more: Qwen2Config(**_COMMON | _WINDOWED | more),
    "qwen3": lambda **more: Qwen3Config(**_COMMON | _WINDOWED | {"head_dim": 16} | more),
    "mistral": lambda **more: MistralConfig(**_COMMON | {"sliding_window": 5} | more),
    "gemma3": lambda **more: Gemma3TextConfig(**_COMMON | _GEMMA | {"tie_word_embeddings": True} | more),
    "gemma3-softcap": lambda **more: Gemma3TextConfig(**_COMMON | _GEMMA | {"final_logit_softcapping": 5.0} | more),
}
"""By name: a tiny configuration of it, with whatever else is given."""


_MOST_PARTS = 256
_MAKING = threading.Lock()
_PARTS: dict[tuple[object, ...], ModelParts] = {}
"""By device, configuration and rank: taking a model apart costs more than a step, and ranks are threads that cannot
share it."""


def _parts(
    config: PretrainedConfig,
    device: torch.device,
    rank: int,
    packed_dtype: torch.dtype | None,
    *,
    compiled: bool,
    adapters: AdapterConfig,
    matmul_dtype: MatmulDtype = MatmulDtype.BF16,
) -> ModelParts:
    key = (str(device), config.to_json_string(use_diff=False), rank, packed_dtype, compiled, adapters, matmul_dtype)
    with _MAKING:  # the first packed ones register an operation, which in a run one thread does
        if key not in _PARTS:
            if len(_PARTS) >= _MOST_PARTS:
                _PARTS.clear()
            _PARTS[key] = ModelParts(
                config,
                device,
                packed_dtype=packed_dtype,
                compiled=compiled,
                adapters=adapters,
                matmul_dtype=matmul_dtype,
            )
        return _PARTS[key]


class ModelWeights:
    """The weights of a model that is there."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._values = model.state_dict()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._values[name].detach()


Step = tuple[Tensor, Mapping[str, Tensor]]
"""Loss and gradients of a step."""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums of supervised fine-tuning per microbatch."""

    losses: Tensor
    """fp32 [microbatches]: loss summed over the targets."""
    num_correct: Tensor
    """int64 [microbatches]: number of targets with the top logit."""

    @classmethod
    def of(cls, evaluated: Mapping[int, Tensor]) -> EvaluationSums:
        losses, hits = torch.stack([evaluated[microbatch] for microbatch in sorted(evaluated)]).unbind(1)
        return cls(losses.float(), hits.long())


@dataclass
class Pipeline:
    """The settings of one pipeline run, and what it leaves."""

    model: PreTrainedModel
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    num_slots: int | None
    keeps_graphs: bool = False
    """In all stages that are resident, and in those of each rank that stay in a slot from forward to backward."""
    recompute_level: RecomputeLevel = RecomputeLevel.NONE
    resident: frozenset[int] = frozenset()
    """Stages that stay on the device though others are streamed."""
    loss_chunk_tokens: int = 4096
    sizes: tuple[int, ...] | None = None
    """Layers of each stage; None cuts evenly."""
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    tile_tokens: int | None = None
    num_rounds: int = 1
    order: ComputeOrder = ComputeOrder.BREADTH_FIRST
    spreads_head: bool = False
    """Whether the ranks share norm and head."""
    num_sum_buffers: int = 0
    """Of each rank; 0: as few as possible."""
    offloaded_activation_stages: frozenset[int] = frozenset()
    """Stages whose layers' inputs are offloaded."""
    num_offloaded_microbatches: int = 0
    """Microbatches of a round whose products these stages offload too."""
    product_bytes: int = 2**20
    """Room on the host for the products of one layer and microbatch."""
    num_slices: int = 1
    """Slices of each sequence; `num_microbatches` counts all."""
    saves_attention: bool = False
    """Whether layers of slices save attention's result."""
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    matmul_dtype: MatmulDtype = MatmulDtype.BF16
    source: WeightSource | None = None
    """Source of the parameters; None: the model."""
    objective: Objective = SUPERVISED
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers of the objective in the latest step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    _stages: list[RankStages] = field(default_factory=list)

    def step(self, batch: StepBatch) -> Step:
        """Loss and gradients of one step."""
        return self.run(batch), self.gradients

    def run(self, batch: StepBatch) -> Tensor:
        """Run one step in rank-threads; `gradients` are then as on the host, tied ones summed. Returns the loss."""
        with contextlib.nullcontext() if self.device.type == "cuda" else _on_one_core():
            results = run_rank_threads(self.num_ranks, lambda transport: self._run_rank(transport, batch))
        for gradients, _ in results:
            self.gradients.update(gradients)
        while self._stages:
            self._stages.pop().close()
        numbers = torch.stack([sums.numbers for _, sums in results]).sum(0).cpu()
        self.numbers = self.objective.numbers(numbers[1:].tolist())
        return numbers[0]

    def evaluate(self, batch: StepBatch) -> EvaluationSums:
        """Evaluate in rank-threads; gradients that anybody made would be an error."""
        return EvaluationSums.of(self.evaluated(batch))

    def evaluated(self, batch: StepBatch, evaluate: Evaluation | None = None) -> dict[int, Tensor]:
        """Results of `evaluate` (default: the objective's) by microbatch."""
        with _on_one_core():
            sums = run_rank_threads(self.num_ranks, lambda transport: self._evaluate_rank(transport, batch, evaluate))
        last = sums.pop((self.num_ranks * self.stages_per_rank - 1) % self.num_ranks)
        assert not any(sums)
        return last

    def _evaluate_rank(
        self, transport: LocalTransport, batch: StepBatch, evaluate: Evaluation | None
    ) -> dict[int, Tensor]:
        _, stages = self._stages_of(transport, batch)
        before = [stage.state.gradients.clone() for stage in stages.memory.values()]
        executor = stages.executor(self._schedule(ComputeOrder.EVALUATION), transport)
        sums = executor.evaluate(batch, evaluate)
        assert len(executor._saved_activations) == 0
        for stage, gradients in zip(stages.memory.values(), before, strict=True):
            assert torch.equal(stage.state.gradients, gradients)
        stages.close()
        return sums

    def _run_rank(self, transport: LocalTransport, batch: StepBatch) -> tuple[dict[str, Tensor], StepSums]:
        parts, stages = self._stages_of(transport, batch)
        self._stages.append(stages)
        sums = stages.executor(self._schedule(self.order), transport).run(batch)
        if parts.trained_tied_names:
            embedding, head = parts.trained_tied_names
            last = self.num_ranks * self.stages_per_rank - 1
            pair = TiedWeights(embedding, head, 0, last, self.num_ranks, self.dtype)
            pair.sum_gradients(stages.memory, transport, self.device)
        named: dict[str, Tensor] = {}
        for own in stages.memory.values():
            own.states.wait_for_gradients()
            views = own.state.layout.trained_views(own.state.gradients)
            named.update({name: view.clone() for name, view in views.items()})
        return named, sums

    def _stages_of(self, transport: LocalTransport, batch: StepBatch) -> tuple[ModelParts, RankStages]:
        packed_dtype = None if batch.documents is None and self.num_slices == 1 else self.dtype
        groups = self.num_microbatches // self.num_slices
        rows, length = batch.input_ids.chunk(groups)[0].shape
        parts = _parts(
            self.model.config,
            self.device,
            transport.rank,
            packed_dtype,
            compiled=self.compiled,
            adapters=self.adapters,
            matmul_dtype=self.matmul_dtype,
        )
        plan = self._plan(len(parts.layers))
        stages = RankStages.allocate(
            parts,
            plan,
            transport.rank,
            StageOptions(
                dtype=self.dtype,
                rules=rules_of(
                    self.dtype,
                    deferred=range(plan.num_stages),
                    keeps_trained_on_gpu=parts.adapters.has_frozen_base,
                ),
                loss_chunk_tokens=self.loss_chunk_tokens,
                offloaded=OffloadedActivations(
                    (rows, length // self.num_slices, self.model.config.hidden_size), self.product_bytes
                ),
                tile_tokens=self.tile_tokens,
                objective=self.objective,
            ),
            device=self.device,
        )
        stages.load_weights(self.source or ModelWeights(self.model))
        return parts, stages

    def _schedule(self, order: ComputeOrder) -> Schedule:
        return build_schedule(
            spec_of(
                self.num_ranks,
                self.stages_per_rank,
                self.num_microbatches,
                self.num_slots,
                self.resident,
                num_rounds=self.num_rounds,
                order=order,
                spreads_head=self.spreads_head,
                sum_buffers=(self.num_sum_buffers,) * self.num_ranks,
                num_slices=self.num_slices,
                offloaded_activation_stages=self.offloaded_activation_stages,
                num_offloaded_microbatches=self.num_offloaded_microbatches,
            )
        )

    def _plan(self, num_layers: int) -> Plan:
        num_stages = self.num_ranks * self.stages_per_rank
        plan = Plan(
            self.num_ranks,
            num_stages,
            self.num_microbatches,
            (self.num_slots or 0,) * self.num_ranks,
            frozenset(range(num_stages)) if self.num_slots is None else self.resident,
            cuts=partition_of(self.sizes) if self.sizes else even_cuts(num_layers, num_stages),
            num_rounds=self.num_rounds,
            order=self.order,
            spreads_head=self.spreads_head,
            sum_buffers=(self.num_sum_buffers,) * self.num_ranks,
            num_slices=self.num_slices,
            offloaded_activation_stages=self.offloaded_activation_stages,
            num_offloaded_microbatches=self.num_offloaded_microbatches,
            saved_attention_stages=frozenset(range(num_stages) if self.saves_attention else ()),
        )
        staying = {s for rank in range(self.num_ranks) for s in plan.streamed_stages(rank)[-(self.num_slots or 1) :]}
        if not self.keeps_graphs:
            return plan
        saved = plan.resident | staying
        products = saved if self.recompute_level is RecomputeLevel.ELEMENTWISE else frozenset[int]()
        return replace(plan, saved_activation_stages=saved, saved_product_stages=products)


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread and those that it starts there: they hand Python's lock over faster than between two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[workers.number % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def resident_stages(num_ranks: int, stages_per_rank: int, places: Collection[int]) -> frozenset[int]:
    """Stages at these places among those of each rank."""
    return frozenset(
        rank + place * num_ranks for rank in range(num_ranks) for place in places if place < stages_per_rank
    )


def assert_same_bits(found: Step, expected: Step, where: object = "", *, reordered: Collection[str] = ()) -> None:
    """Loss and every gradient have the same bits, but for those `reordered`: within 1e-6 of the largest entry."""
    assert torch.equal(found[0], expected[0]), where
    assert found[1].keys() == expected[1].keys(), where
    for name, gradient in expected[1].items():
        if name in reordered:
            assert (found[1][name] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), (where, name)
        else:
            assert torch.equal(found[1][name], gradient), (where, name)


def norm_of(gradients: Iterable[Tensor]) -> float:
    """L2 norm of all gradients together."""
    return float(torch.stack([gradient.double().norm() for gradient in gradients]).norm())


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of all differences together, as a share of that of all gradients."""
    assert found.keys() == expected.keys()
    return norm_of(found[name].double() - each for name, each in expected.items()) / norm_of(expected.values())


def assert_near(found: Step, expected: Step, *, loss: float, gradients: float) -> None:
    """Loss within this share of the expected one, all gradients together within this share of their norm."""
    torch.testing.assert_close(found[0], expected[0], rtol=loss, atol=0.0)
    assert (share := distance(found[1], expected[1])) <= gradients, share


def tied_names(model: PreTrainedModel) -> set[str]:
    """Both names of a matrix that embedding and head share."""
    return {"model.embed_tokens.weight", "lm_head.weight"} if model.config.tie_word_embeddings else set()


def make_model(family: str, num_layers: int = NUM_LAYERS) -> PreTrainedModel:
    """A tiny model of `family` with random weights, norms and biases included."""
    return model_of(FAMILIES[family](num_hidden_layers=num_layers))


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    """A model of `config` with random weights; norms, biases and stored constants included."""
    torch.manual_seed(0)
    config.use_cache = False
    config._attn_implementation = getattr(config, "_attn_implementation", None) or "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        stored = model.state_dict()
        constants = (each for name, each in model.named_buffers() if name in stored and each.is_floating_point())
        for values in (*model.parameters(), *constants):
            values.add_(torch.randn_like(values) * 0.1)
    return model.eval()


def make_batch(num_sequences: int, seq_length: int = SEQ_LENGTH) -> StepBatch:
    """Random tokens; sequences differ in how many targets they have, so a mean over microbatches would be wrong."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (num_sequences, seq_length), generator=generator)
    labels = tokens.clone()
    for row in range(num_sequences):
        labels[row, : 1 + row % 7] = -100
    return StepBatch(tokens, labels, int((labels[:, 1:] != -100).sum()), tokens.numel(), len(tokens))


def plain_step(model: PreTrainedModel, batch: StepBatch, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step by transformers alone.

    Its own loss, one backward per microbatch, gradients accumulated by autograd.
    """
    model.zero_grad()
    total = torch.zeros(())
    microbatches = zip(batch.input_ids.chunk(num_microbatches), batch.labels.chunk(num_microbatches), strict=True)
    for tokens, labels in microbatches:
        loss = model(input_ids=tokens, labels=labels, num_items_in_batch=batch.num_targets).loss
        loss.backward()
        total += loss.detach().cpu()
    named = model.named_parameters(remove_duplicate=False)
    return total, {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@pytest.fixture(autouse=True)
def scalar_code() -> Iterator[None]:
    """Graphs are compiled without vector instructions, which takes half of the seconds; the claims are of graphs.

    All folders' graphs then share the headers that are compiled first, too.
    """
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield
