"""Costs of each stage of a plan: a profile's seconds of layers, embedding and loss, added up over the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mobius.planner.gpu_specs import DECODING_BYTES, QUANTIZING_BYTES
from mobius.planner.profile import Profile
from mobius.schedule.action import Action, ActionKind
from mobius.schedule.memory_layout import MemoryRules, RankLayout, StageSizes, lay_out_rank
from mobius.schedule.partition import ModelShape, StageCut
from mobius.schedule.plan import Plan
from mobius.schedule.spec import ScheduleSpec

ACTION_GAP = 40e-6
"""Seconds between two actions, in which a GPU waits for events and other streams (0.02 to 0.08 ms in traces)."""
HEAD_FORWARD = 1 / 4
"""Share of one forward in the head's work of an objective on sequences (`ObjectiveConfig.head_work`)."""


@dataclass(frozen=True)
class StageCost:
    """Costs of a stage: seconds per microbatch, and parameters."""

    forward: float
    """Seconds of the forward; 0 for the model's last stage, whose forward runs in its backward."""
    backward: float
    """Seconds of the backward, with recomputation if the stage recomputes. The last stage's backward includes forward
    and loss, the first stage's backward the embedding's backward."""
    parameters: int
    """Number of trained parameters."""
    is_resident: bool = False
    """Whether the stage's state stays on the GPU, which updates it."""
    forward_launch: float = 0.0
    """Seconds of the host to enqueue the forward of a microbatch."""
    backward_launch: float = 0.0
    num_saving_layers: int = 0
    """Number of layers that save tensors for backward."""
    keys: float = 0.0
    """Seconds per microbatch to recompute keys and values of a slice."""
    forward_attention: float = 0.0
    """Part of `forward` that grows with the keys before a slice; mean over the slices of a sequence."""
    backward_attention: float = 0.0
    saves_attention: bool = False
    loaded: int | None = None
    """Number of parameters that are loaded if the stage is streamed; None if equal to `parameters`."""
    backward_from_saved: tuple[float, float] | None = None
    """Seconds of a backward with offloaded products, and seconds that the host takes to enqueue this backward."""
    trained_in_layers: int = 0
    """Number of trained parameters in layers."""
    keeps_trained_on_gpu: bool = False
    """Whether trained parameters stay on the GPU, which updates them, although frozen parameters are streamed."""
    quantizing: float = 0.0
    """Seconds to quantize the stage's weights: once per load, or once per update if it is resident."""
    has_states_in_memory: bool = False
    """Whether the stage's optimizer state is in host memory, while states of other streamed stages are on disks."""
    evaluation: tuple[float, float] = (0.0, 0.0)
    """Seconds of the model's last stage in a forward pass, with the head, and seconds of the host to enqueue it."""

    @property
    def forward_pass(self) -> float:
        """Seconds per microbatch in a forward pass."""
        return self.evaluation[0] or self.forward

    @property
    def frozen(self) -> int:
        """Number of frozen parameters that are loaded together with trained ones."""
        return 0 if self.loaded is None or self.keeps_trained_on_gpu else self.loaded - self.parameters

    def sizes(self, memory: MemoryRules) -> StageSizes:
        """Return the elements of the stage's parts."""
        loaded = self.parameters if self.loaded is None else self.loaded
        weights = loaded + (self.parameters if self.keeps_trained_on_gpu else 0)
        return memory.sizes_of(weights, self.parameters, self.trained_in_layers)

    @property
    def updates_on_gpu(self) -> bool:
        """Whether the GPU updates the trained parameters, because their state stays there."""
        return self.is_resident or self.keeps_trained_on_gpu

    def launch_seconds(self, action: Action, *, offloads_all: bool) -> float:
        """Seconds that the host takes to enqueue an action; `offloads_all` as in `slice_seconds`."""
        if action.kind is ActionKind.EVALUATE_LAST:
            return self.evaluation[1]
        if not action.kind.is_backward:
            return self.forward_launch
        return self.backward_from_saved[1] if offloads_all and self.backward_from_saved else self.backward_launch

    def slice_seconds(self, action: Action, num_slices: int, *, offloads_all: bool = False) -> float:
        """Seconds of an action on the compute lane; later slices attend to more keys.

        Slice i of n has (2 i + 1) / n times the mean number of keys. `offloads_all`: the microbatch's products were
        offloaded.
        """
        if offloads_all and self.backward_from_saved and action.kind.is_backward:
            return self.backward_from_saved[0]
        if action.kind is ActionKind.RECOMPUTE_KV:
            return self.keys
        if action.kind is ActionKind.EVALUATE_LAST:
            return self.evaluation[0]
        seconds, attention = self.forward, self.forward_attention
        if action.kind.is_backward:
            seconds, attention = self.backward, self.backward_attention
        place = (action.microbatch or 0) % num_slices
        return seconds + attention * ((2 * place + 1) / num_slices - 1)


@dataclass(frozen=True)
class StepRules:
    """Rules of the runtime that decide a step's work."""

    memory: MemoryRules
    message_bytes: int
    """Bytes of an activation [B, L, H]."""
    attention_bytes: int = 0
    """Bytes of attention's result for a layer and microbatch, if it is saved."""
    product_bytes: int = 0
    """Bytes that a layer offloads for a microbatch whose products are offloaded."""
    head_weight_bytes: int = 0
    """Bytes of norm and head, which their owner sends in each step to the ranks that share them."""
    head_sum_bytes: int = 0
    """Bytes of the gradients of norm and head, which each rank that shares the head sends back."""
    begins_with_pass: bool = False
    """Whether each step begins with a forward pass over as many rows."""

    def offloaded_bytes(self, cost: StageCost, *, offloads_all: bool) -> int:
        """Bytes that a stage's layers offload per microbatch: inputs to recompute from, or products."""
        if offloads_all:
            return cost.num_saving_layers * self.product_bytes
        return cost.num_saving_layers * (self.message_bytes + (self.attention_bytes if cost.saves_attention else 0))

    def layouts(self, spec: ScheduleSpec, costs: Sequence[StageCost]) -> list[RankLayout]:
        """Return the memory layout of every rank."""
        layouts, stages = list[RankLayout](), range(spec.num_stages)
        resident, in_memory = (
            {stage for stage in stages if getattr(costs[stage], name)}
            for name in ("is_resident", "has_states_in_memory")
        )
        for rank in range(spec.num_ranks):
            sizes = {stage: costs[stage].sizes(self.memory) for stage in spec.local_stages(rank)}
            use = spec.rank_use(rank)._replace(resident=resident, states_in_memory=in_memory)
            layouts.append(lay_out_rank(sizes, use, self.memory, num_stages=spec.num_stages))
        return layouts


def stage_costs(plan: Plan, shape: ModelShape, profile: Profile) -> tuple[StageCost, ...]:
    """Cost of every stage, summed over the stage's layers; the cost of a head that ranks share comes last."""
    known = _known_costs(shape, profile, plan.num_slices > 1, plan.spreads_head, plan.num_offloaded_microbatches > 0)
    saved, resident = (plan.saved_activation_stages, plan.saved_product_stages), plan.resident
    sets = *saved, resident, plan.saved_attention_stages, plan.offloaded_activation_stages, plan.states_in_memory
    costs = list[StageCost]()
    for cut in plan.cuts:
        key = cut.first_layer, cut.end_layer, cut.is_first, cut.is_last, *[cut.stage in each for each in sets]
        if key not in known:
            known[key] = _stage_cost(cut, plan, shape, profile)
        costs.append(known[key])
    if plan.spreads_head:
        costs.append(StageCost(profile.loss + ACTION_GAP, 0.0, 0, True, forward_launch=profile.action_launch))
    return tuple(costs)


@lru_cache(maxsize=64)
def _known_costs(*_: object) -> dict[object, StageCost]:
    """Cache of stages' costs for these arguments; the caller fills it, keyed by all other dependencies."""
    return {}


def _stage_cost(cut: StageCut, plan: Plan, shape: ModelShape, profile: Profile) -> StageCost:
    launch_overhead, slices = profile.launch_overhead, plan.num_slices > 1
    layers = [profile.of_layer(layer) for layer in cut.layers]
    back = cut.backward_layers(shape.first_backward)
    forward = sum(layer.forward for layer in layers)
    keeps = cut.stage in plan.saved_activation_stages
    backward = sum(layer.backward if keeps else layer.recomputed_backward for layer in layers)
    elementwise = sum(profile.elementwise_seconds(layer, shape) for layer in back)
    if keeps and cut.stage in plan.saved_product_stages:
        backward += elementwise
    spared = sum(layer.recomputed_backward - layer.backward for layer in layers) - elementwise
    if cut.is_first:
        forward += profile.embedding_forward
        backward += profile.embedding_backward
    keys, attention = _slice_parts(cut, shape, profile) if slices else (0.0, (0.0, 0.0))
    if cut.stage in plan.saved_attention_stages:  # backward does not repeat attention's forward
        backward, attention = backward - attention[0], (attention[0], attention[1] - attention[0])
    evaluated = forward + HEAD_FORWARD * profile.loss + ACTION_GAP
    runs_at_once = cut.is_last and not plan.spreads_head
    if runs_at_once:
        # In forward, slices run through all layers; of the last layer, only keys and values. Backward does the rest.
        last, early = forward, 0.0
        if slices and layers:
            last, early, moved = layers[-1].forward, keys / len(layers), profile.attention.forward
            attention = attention[0] - moved, attention[1] + moved
        forward, backward = forward - last + early, last + profile.loss + backward
    launch_back = launch_overhead.backward if keeps else launch_overhead.recomputed_backward
    forward_launch = launch_overhead.forward * len(cut.layers) + profile.action_launch
    backward_launch = launch_back * len(back) + profile.action_launch
    with_products = None
    if plan.num_offloaded_microbatches and cut.stage in plan.offloaded_activation_stages:
        spared_launch = (launch_overhead.recomputed_backward - launch_overhead.backward) * len(back)
        with_products = backward - spared + ACTION_GAP, backward_launch - spared_launch
    return StageCost(
        forward + (0.0 if runs_at_once else ACTION_GAP),
        backward + ACTION_GAP,
        cut.num_trained(shape),
        cut.stage in plan.resident,
        0.0 if runs_at_once else forward_launch,
        backward_launch + (forward_launch if runs_at_once else 0.0),
        len(back),
        keys + ACTION_GAP,
        *attention,
        cut.stage in plan.saved_attention_stages,
        loaded=cut.num_streamed_parameters(shape),
        backward_from_saved=with_products,
        trained_in_layers=cut.num_trained_in_layers(shape),
        keeps_trained_on_gpu=shape.keeps_trained_on_gpu,
        quantizing=_conversion_bytes(cut, shape) / profile.gpu_bandwidth,
        has_states_in_memory=cut.stage in plan.states_in_memory,
        evaluation=(evaluated, forward_launch) if cut.is_last else (0.0, 0.0),
    )


def _conversion_bytes(cut: StageCut, shape: ModelShape) -> int:
    """GPU bytes read and written to make codes of a stage's weights, or values of its codes."""
    return QUANTIZING_BYTES * cut.num_quantized(shape) + DECODING_BYTES * cut.num_coded(shape)[0]


def _slice_parts(cut: StageCut, shape: ModelShape, profile: Profile) -> tuple[float, tuple[float, float]]:
    """Seconds per microbatch to recompute queries, keys and values, and of attention's (forward, backward)."""
    attention, keys = profile.attention, 0.0
    back = cut.backward_layers(shape.first_backward)
    for layer in back:
        projected = shape.hidden_size * (shape.attention_width + 2 * shape.key_width)
        products = profile.of_layer(layer).forward - attention.forward
        keys += products * min(1.0, projected / shape.active_parameters[layer])
    return keys, (len(cut.layers) * attention.forward, len(back) * attention.recomputed_backward)
