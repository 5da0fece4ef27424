"""Memory layout of a rank: the place of each part of a stage's training state, and the buffers that stages share.

    part        streamed stage                         resident stage        adapters of a streamed stage
    weights     host or disks; in a slot meanwhile     GPU                   frozen: as streamed; trained: GPU
    sums        buffers of the rank, or of the stage   as streamed           as streamed
    gradients   host, or a buffer of states            in the sum, or GPU    in the sum, or GPU
    states      host or disks; in a buffer meanwhile   GPU                   GPU

`lay_out_rank` decides the layout, the engine allocates it, and the planner adds up its bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from mobius.limits import (
    MIN_GRADIENT_SUMS,
    NUM_STATE_BUFFERS,
    REDUCE_CHUNK_ELEMENTS,
    gradient_sum_elements,
    largest_shard,
    num_load_buffers,
)

SUM_BYTES = 4
"""Bytes of an element of a gradient sum: the gradients of microbatches are added up in fp32."""
MOMENT_BYTES = (4, 4)
"""Bytes per parameter of AdamW's two fp32 moments."""
CODES_BYTES, SCALE_BYTES = 2, 4
"""Bytes of the 8-bit codes of a weight in a resident stage (by row and by column), and bytes of a scale."""
PART_ALIGNMENT, BUFFER_ALIGNMENT = 64, 4096
"""Alignment in bytes: for the parts of the states in a buffer (cache lines), and for the parts of a buffer (pages)."""


class Part(StrEnum):
    """Parts of a stage's training state."""

    WEIGHTS = "weights"
    CODES = "codes"
    """Eight-bit codes and scales of a resident stage's weights."""
    SUMS = "sums"
    """The fp32 gradient sum that only this stage uses, while the sum is unfinished."""
    GRADIENTS = "gradients"
    STATES = "states"
    """Both moments of the optimizer, and the bits that the weights lack to be fp32 master weights."""


class Place(StrEnum):
    """Places where a part is between its uses."""

    GPU = "gpu"
    HOST = "host"
    DISKS = "disks"
    BUFFER = "buffer"
    """In a buffer of `RankLayout.state_buffers`, from the arrival of the part to the update."""


class Residence(StrEnum):
    """Places where a stage's weights and states are between their uses."""

    STREAMED = "streamed"
    """Weights and states are on the host or on disks; weights are loaded into slots."""
    RESIDENT = "resident"
    """Weights and states are on the GPU."""
    ADAPTERS = "adapters"
    """Trained weights and states are on the GPU; frozen weights are streamed."""


class Region(NamedTuple):
    """Memory of one part of a stage."""

    part: Part
    place: Place
    num_bytes: int


class StageSizes(NamedTuple):
    """Numbers of elements in a stage."""

    weights: int
    """Numbers of the working format that all weights take; an fp32 weight of a 16-bit run takes two."""
    trained: int
    """Number of trained weights; in memory, frozen weights follow them."""
    owned: int
    """Number of trained elements that this replica updates."""
    reduced: int = 0
    """Number of `owned` elements whose optimizer states are in the reduced format."""
    scales: int = 0
    """Number of scales of eight-bit weights; if some weights stay on the GPU, only of the streamed weights."""
    codes: int = 0
    """Number of weights with eight-bit codes."""
    trained_units: int = 0
    """Numbers of the working format that the trained weights take."""
    in_fp32: int = 0
    """Number of `owned` elements with fp32 weights in a 16-bit run; each weight is its own master."""
    decoded: int = 0
    """Number of weights that are codes between their uses."""


class Pool(NamedTuple):
    """Buffers of one size that the stages of a rank use in turn."""

    number: int = 0
    num_bytes: int = 0
    """Bytes of each buffer."""

    @property
    def total(self) -> int:
        return self.number * self.num_bytes


class StatePool(NamedTuple):
    """Buffers for the parts of stages that are on disks; each buffer has room for the largest stage of the rank.

    states, in aligned parts | gradients, if they have no other memory | weights, if they are on disks
    """

    number: int = 0
    states: int = 0
    gradients: int = 0
    weights: int = 0
    """Bytes of the weights in each buffer. `states`, `gradients` and `weights` are aligned sizes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a buffer."""
        return self.states + self.gradients + self.weights

    @property
    def total(self) -> int:
        return self.number * self.num_bytes


@dataclass(frozen=True, kw_only=True)
class DiskRules:
    """Use of the disks that hold the optimizer states of streamed stages."""

    has_gradients: bool = False
    """Whether gradients are also on the disks while they wait for the norm."""
    has_weights: bool = False
    num_buffers: int = NUM_STATE_BUFFERS
    """Maximum number of stages of a rank whose states are in host memory at once."""
    keeps_steps: bool = False
    """Whether a step's states and weights stay until the next step's states and weights are complete (two slots)."""


@dataclass(frozen=True, kw_only=True)
class MemoryRules:
    """Formats and options of a run that determine its memory layout; they are the same on all ranks."""

    weight: int = 2
    """Bytes of a weight: 2 for bf16 and fp16, 4 for fp32."""
    gradient: int = 2
    """Bytes of a finished gradient: the same as `weight`, or 4."""
    remainder: int = 2
    """Bytes that complete a weight to its fp32 master: 2 for bf16 (the upper half of fp32), 4 for fp16, 0 for fp32."""
    reduced_parts: tuple[float, ...] = ()
    """Bytes per parameter of each part of the layers' states, if the states are in a reduced format."""
    waits_for_norm: bool = False
    """Whether an update waits for all gradients, for example for clipping or with loss scaling."""
    is_tied: bool = False
    """Whether embedding and head are one trained matrix."""
    keeps_trained_on_gpu: bool = False
    """Whether trained weights (adapters) stay on the GPU although the other weights are streamed."""
    overlaps_optimizer: bool = True
    num_replicas: int = 1
    """Pipelines that share gradients and optimizer states."""
    sent: int = SUM_BYTES
    """Bytes of a gradient in a message to another replica: 4, or 2 in bf16."""
    disks: DiskRules | None = None

    def shard_size(self, parameters: int) -> int:
        """Return how many of a stage's parameters this replica updates."""
        return parameters if self.num_replicas == 1 else largest_shard(parameters, self.num_replicas)

    def remote_size(self, parameters: int) -> int:
        """Return how many of a stage's parameters the other replicas update.

        The same number of gradients leaves and arrives, and the same number of weights arrives.
        """
        return parameters - self.shard_size(parameters)

    def reduce_bytes(self, parameters: int) -> int:
        """Return the bytes of a stage's gradients that leave a rank; the same number arrives."""
        return self.sent * self.remote_size(parameters)

    @property
    def received_bytes(self) -> int:
        """GPU bytes for gradients in messages; bf16 gradients need two buffers, because both ends cast them."""
        parts = 0 if self.num_replicas == 1 else 1 if self.sent == SUM_BYTES else 2
        return parts * SUM_BYTES * REDUCE_CHUNK_ELEMENTS

    def sizes_of(
        self,
        weights: int,
        trained: int,
        in_layers: int,
        *,
        scales: int = 0,
        codes: int = 0,
        in_fp32: tuple[int, int] = (0, 0),
        coded: tuple[int, int] = (0, 0),
    ) -> StageSizes:
        """Return the sizes of a stage with `trained` trained weights, of which `in_layers` are in layers.

        `in_fp32`: how many of all and of the trained weights are fp32 in a 16-bit run. `coded`: number of weights that
        are codes, and bytes of the codes.
        """
        every, own = in_fp32 if self.weight < SUM_BYTES else (0, 0)
        reduced = self.shard_size(in_layers - own) if self.reduced_parts else 0
        return StageSizes(
            weights + every - coded[0] + coded[1] // self.weight,
            trained,
            self.shard_size(trained),
            reduced,
            scales,
            codes,
            trained_units=trained + own,
            in_fp32=self.shard_size(own),
            decoded=coded[0],
        )

    @property
    def state_parts(self) -> tuple[float, ...]:
        """Bytes per parameter of each part of the states in the usual format; fp32 weights need no separate master."""
        return (*MOMENT_BYTES, self.remainder) if self.remainder else MOMENT_BYTES

    def state_bytes(self, owned: int, reduced: int, in_fp32: int = 0, *, alignment: int = 1) -> int:
        """Return the state bytes of `owned` elements; align each part.

        `reduced` of the elements are in the reduced format, and the weights of `in_fp32` elements are their masters.
        """
        parts = [(owned - reduced - in_fp32, each) for each in self.state_parts]
        parts += [(reduced, each) for each in self.reduced_parts or self.state_parts]
        parts += [(in_fp32, each) for each in MOMENT_BYTES]
        return sum(aligned(int(elements * each), alignment) for elements, each in parts)

    def tied_stages(self, num_stages: int) -> frozenset[int]:
        """Stages with a copy of the tied matrix. Each of the two needs the gradient of the other for its update."""
        return frozenset((0, num_stages - 1)) if self.is_tied else frozenset()

    def waiting_stages(self, num_stages: int) -> frozenset[int]:
        """Stages whose update waits for gradients of other stages. Other stages are updated after their backward."""
        return frozenset(range(num_stages)) if self.waits_for_norm else self.tied_stages(num_stages)


class RankUse(NamedTuple):
    """Use of a rank's memory by its stages, according to a plan (`ScheduleSpec.rank_use`)."""

    resident: Collection[int]
    num_slots: int
    num_sum_buffers: int = 1
    has_partial_sums: bool = False
    """Whether several stages have unfinished sums at the same time."""
    states_in_memory: Collection[int] = ()
    """Streamed stages whose states are in host memory, while the states of other stages are on disks."""

    def offloads_sums(self, num_streamed: int) -> bool:
        """Whether unfinished sums go to the host, because the rank has fewer buffers than `num_streamed` stages."""
        return self.has_partial_sums and num_streamed > self.num_sum_buffers


class DiskBytes(NamedTuple):
    """Disk bytes of one or several stages."""

    stored: int = 0
    read: int = 0
    """Bytes read in a step."""
    written: int = 0
    """Bytes written in a step."""
    copied: int = 0
    """Bytes among `written` that are first copied to host memory, then written to disks."""


class StageRegions(NamedTuple):
    """Memory of one stage, and facts that determine when this memory is used."""

    stage: int
    residence: Residence
    sizes: StageSizes
    update_waits: bool
    """Whether the stage's update waits for gradients of other stages."""
    keeps_gradients: bool
    """Whether the GPU keeps finished gradients until a later update; False for a stage that the host updates."""
    regions: tuple[Region, ...]

    @property
    def adds_up_in_place(self) -> bool:
        """Whether the stage has a separate fp32 sum on the GPU, and does not use the buffers that stages share."""
        return self.place_of(Part.SUMS) is Place.GPU

    @property
    def offloads_sums(self) -> bool:
        """Whether unfinished sums are on the host between rounds, in the memory of the stage's gradients."""
        return self.place_of(Part.SUMS) is Place.HOST

    @property
    def gradients_wait_on_disks(self) -> bool:
        """Whether gradients are written from their buffer to disks, where they wait for the update."""
        return self.update_waits and self.place_of(Part.GRADIENTS) is Place.BUFFER

    @property
    def is_streamed(self) -> bool:
        """Whether weights are loaded into slots: all weights, or only frozen weights."""
        return self.residence is not Residence.RESIDENT

    @property
    def updates_on_gpu(self) -> bool:
        return self.residence is not Residence.STREAMED

    @property
    def num_loaded(self) -> int:
        """Number of weights that go through a slot; 0 for a resident stage."""
        return self.sizes.weights - _num_on_gpu(self.residence, self.sizes)

    @property
    def is_on_disks(self) -> bool:
        """Whether the stage's states or weights are on disks."""
        return any(each.place is Place.DISKS for each in self.regions)

    def has_on_disks(self, part: Part) -> bool:
        """Whether `part` is on disks between its uses."""
        return self.place_of(part) is Place.DISKS

    def place_of(self, part: Part) -> Place | None:
        """Return the place of a part (with adapters: of the frozen weights); None if the part has no memory."""
        return next((each.place for each in self.regions if each.part is part), None)

    def num_bytes(self, place: Place, *parts: Part) -> int:
        """Return the bytes of `parts`, or of all parts if empty, in one place."""
        return sum(each.num_bytes for each in self.regions if each.place is place and (not parts or each.part in parts))

    def disk_bytes(self, rules: MemoryRules, num_loads: int) -> DiskBytes:
        """Return the disk bytes of the stage in a step that loads it `num_loads` times."""
        disks, whole = rules.disks, rules.weight * self.sizes.weights
        if disks is None:
            return DiskBytes()
        states = self.num_bytes(Place.DISKS, Part.STATES)
        if not states and disks.keeps_steps and self.updates_on_gpu:
            own = whole + self.num_bytes(Place.GPU, Part.STATES)
            return DiskBytes(2 * own, 0, own, own)
        weights = self.num_bytes(Place.DISKS, Part.WEIGHTS)
        updated = weights if self.residence is Residence.STREAMED and self.sizes.trained else 0
        gradients = self.num_bytes(Place.BUFFER, Part.GRADIENTS) if self.gradients_wait_on_disks else 0
        both = states + gradients + updated
        if not disks.keeps_steps:
            return DiskBytes(states + weights + gradients, both + num_loads * weights, both)
        written = both + (whole if self.sizes.trained and not weights else 0)
        return DiskBytes(2 * (states + whole) + gradients, both + num_loads * weights, written)


@dataclass(frozen=True)
class RankLayout:
    """Memory of one rank's stages."""

    rules: MemoryRules
    stages: Mapping[int, StageRegions]
    slots: tuple[int, ...]
    """Number of weights that each slot holds."""
    slot_scales: int
    """Number of scales that each slot holds."""
    sum_buffers: tuple[int, ...]
    """Number of elements of each fp32 sum buffer that stages share."""
    state_buffers: StatePool
    """Buffers in host memory for parts that are on disks."""
    load_buffers: Pool
    """Buffers in host memory through which weights go from disks to a slot."""
    decoded: int = 0
    """Number of values in the GPU memory for decoded weights, which all stages share."""

    def num_bytes(self, place: Place, *parts: Part) -> int:
        """Return the bytes of `parts`, or of all parts if empty, of all stages in one place."""
        return sum(self._bytes_in[place][part] for part in parts or Part)

    @cached_property
    def _bytes_in(self) -> dict[Place, dict[Part, int]]:
        found = {place: dict.fromkeys(Part, 0) for place in Place}
        for stage in self.stages.values():
            for part, place, num_bytes in stage.regions:
                found[place][part] += num_bytes
        return found

    @cached_property
    def num_loaded(self) -> int:
        """Number of weights of all stages that go through slots."""
        return sum(stage.num_loaded for stage in self.stages.values())

    @cached_property
    def gpu_pools(self) -> dict[str, int]:
        """Bytes of each pool on the GPU, by the pool's name."""
        return {
            "slots": self.rules.weight * sum(self.slots),
            "scales of slots": SCALE_BYTES * self.slot_scales * len(self.slots),
            "sum buffers": SUM_BYTES * sum(self.sum_buffers),
            "decoded weights": self.rules.weight * self.decoded,
        }

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory."""
        return self.num_bytes(Place.GPU) + sum(self.gpu_pools.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self.num_bytes(Place.HOST) + self.state_buffers.total + self.load_buffers.total


def lay_out_rank(
    sizes: Mapping[int, StageSizes],
    use: RankUse,
    rules: MemoryRules,
    *,
    num_stages: int,
) -> RankLayout:
    """Return the layout of a rank; `sizes` has its stages, `num_stages` is the number of stages of the model."""
    resident, in_memory = frozenset(use.resident), frozenset(use.states_in_memory)
    use = use._replace(resident=resident.intersection(sizes), states_in_memory=in_memory.intersection(sizes))
    return _lay_out_rank(tuple(sorted(sizes.items())), use, rules, num_stages)


@lru_cache(maxsize=4096)  # a search asks for the same ranks in many plans
def _lay_out_rank(
    sizes_of_stages: tuple[tuple[int, StageSizes], ...], use: RankUse, rules: MemoryRules, num_stages: int
) -> RankLayout:
    waiting, tied = rules.waiting_stages(num_stages), rules.tied_stages(num_stages)
    num_on_host = 0 if rules.keeps_trained_on_gpu else len(sizes_of_stages) - len(use.resident)
    offloads_sums = use.offloads_sums(num_on_host)
    stages = dict[int, StageRegions]()
    for stage, sizes in sizes_of_stages:
        disks, update_waits = None if stage in use.states_in_memory else rules.disks, stage in waiting
        if stage in use.resident or rules.keeps_trained_on_gpu:
            residence = Residence.RESIDENT if stage in use.resident else Residence.ADAPTERS
            keeps_gradients = update_waits or rules.keeps_trained_on_gpu
            own = _regions_on_gpu(sizes, residence, rules, disks, use.has_partial_sums, keeps_gradients)
        else:
            residence, keeps_gradients = Residence.STREAMED, False
            sums = Place.HOST if offloads_sums else Place.GPU if use.has_partial_sums else None
            # A tied matrix's gradient stays in memory, because the stage with the other copy reads it there.
            leave = not update_waits or (disks is not None and disks.has_gradients and stage not in tied)
            own = _regions_on_host(sizes, rules, disks, sums, gradients_leave=leave)
        stages[stage] = StageRegions(stage, residence, sizes, update_waits, keeps_gradients, own)
    loaded = [stage for stage in stages.values() if stage.is_streamed]
    weights = [stage.num_loaded for stage in loaded]
    summed = [stage.sizes.trained for stage in reversed(stages.values()) if not stage.adds_up_in_place]
    # The next stage needs a second buffer while the first sum is copied in fp32 or reduced across the replicas.
    needs_two = rules.num_replicas > 1 or (num_on_host > 0 and rules.gradient > rules.weight)
    number = max(use.num_sum_buffers if offloads_sums else 1, MIN_GRADIENT_SUMS if needs_two else 1)
    return RankLayout(
        rules,
        stages,
        slots=tuple(weights if use.num_slots >= len(weights) else [max(weights, default=0)] * use.num_slots),
        slot_scales=max((stage.sizes.scales for stage in loaded), default=0),
        sum_buffers=gradient_sum_elements(summed, number) if summed else (),
        state_buffers=_state_buffers(loaded, rules),
        load_buffers=_load_buffers(loaded, rules),
        decoded=max((stage.sizes.decoded for stage in stages.values()), default=0),
    )


def _regions_on_host(
    sizes: StageSizes, rules: MemoryRules, disks: DiskRules | None, sums: Place | None, *, gradients_leave: bool
) -> tuple[Region, ...]:
    """Regions of a stage that is updated on the host.

    `sums` is the place of the stage's separate unfinished sum, None without such a sum. `gradients_leave` is set if the
    update with the gradients, or their write to disks, begins right after they arrive.
    """
    states = rules.state_bytes(sizes.owned, sizes.reduced, sizes.in_fp32)
    regions = [
        _loaded(sizes.weights, rules, disks),
        Region(Part.STATES, Place.DISKS if disks is not None else Place.HOST, states),
    ]
    if sums is not None:
        regions.append(Region(Part.SUMS, sums, SUM_BYTES * sizes.trained))
    if sums is not Place.HOST:
        in_buffer = disks is not None and gradients_leave and rules.overlaps_optimizer and sizes.trained > 0
        place = Place.BUFFER if in_buffer else Place.HOST
        regions.append(Region(Part.GRADIENTS, place, rules.gradient * sizes.owned))
    return tuple(regions)


def _regions_on_gpu(
    sizes: StageSizes,
    residence: Residence,
    rules: MemoryRules,
    disks: DiskRules | None,
    has_partial_sums: bool,
    keeps_gradients: bool,
) -> tuple[Region, ...]:
    """Regions of a stage that the GPU updates; with `Residence.ADAPTERS`, only trained weights are on the GPU."""
    on_gpu, states = _num_on_gpu(residence, sizes), rules.state_bytes(sizes.owned, sizes.reduced, sizes.in_fp32)
    regions = [_loaded(sizes.weights - on_gpu, rules, disks)] if residence is Residence.ADAPTERS else []
    regions += [Region(Part.WEIGHTS, Place.GPU, rules.weight * on_gpu), Region(Part.STATES, Place.GPU, states)]
    # Without other replicas, gradients that are kept in fp32 stay in the buffer of their sum.
    in_place = has_partial_sums or (keeps_gradients and rules.gradient == SUM_BYTES)
    if in_place:
        regions.append(Region(Part.SUMS, Place.GPU, SUM_BYTES * sizes.trained))
    if rules.num_replicas > 1 or (keeps_gradients and not in_place):
        regions.append(Region(Part.GRADIENTS, Place.GPU, rules.gradient * sizes.owned))
    if residence is Residence.RESIDENT and sizes.codes:
        regions.append(Region(Part.CODES, Place.GPU, CODES_BYTES * sizes.codes + SCALE_BYTES * sizes.scales))
    return tuple(regions)


def _loaded(num_weights: int, rules: MemoryRules, disks: DiskRules | None) -> Region:
    """Region of the weights that go through a slot."""
    on_disks = disks is not None and disks.has_weights
    return Region(Part.WEIGHTS, Place.DISKS if on_disks else Place.HOST, rules.weight * num_weights)


def _num_on_gpu(residence: Residence, sizes: StageSizes) -> int:
    """Numbers of the working format that stay on the GPU."""
    on_gpu = {Residence.STREAMED: 0, Residence.ADAPTERS: sizes.trained_units, Residence.RESIDENT: sizes.weights}
    return on_gpu[residence]


def _state_buffers(loaded: Sequence[StageRegions], rules: MemoryRules) -> StatePool:
    own = [stage for stage in loaded if stage.is_on_disks]
    if not own or rules.disks is None:
        return StatePool()
    owned = [stage.sizes for stage in own if stage.residence is Residence.STREAMED]
    states = max(
        (rules.state_bytes(each.owned, each.reduced, each.in_fp32, alignment=PART_ALIGNMENT) for each in owned),
        default=0,
    )
    gradients = max(stage.num_bytes(Place.BUFFER, Part.GRADIENTS) for stage in own)
    weights = max(stage.num_bytes(Place.DISKS, Part.WEIGHTS) for stage in own)
    parts = (aligned(each, BUFFER_ALIGNMENT) for each in (states, gradients, weights))
    return StatePool(min(rules.disks.num_buffers, len(own)), *parts)


def _load_buffers(loaded: Sequence[StageRegions], rules: MemoryRules) -> Pool:
    weights = [stage.num_bytes(Place.DISKS, Part.WEIGHTS) for stage in loaded]
    own = [each for each in weights if each > 0]
    if not own or rules.disks is None:
        return Pool()
    return Pool(num_load_buffers(rules.disks.num_buffers, len(own)), aligned(max(own), BUFFER_ALIGNMENT))


def aligned(num_bytes: int, alignment: int) -> int:
    """Return `num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment
