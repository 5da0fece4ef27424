"""Seconds and rates of a machine for one model and microbatch shape, measured or estimated, and their JSON format."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar, cast

from mobius.config.options import COUNT, POSITIVE, Bounds
from mobius.files.regular_files import typed_object
from mobius.schedule.partition import ModelShape

FORMAT = 9
"""Incremented when a field changes its meaning, so that older files are not used."""
ROW_NORM_PASSES = 2
"""Number of times that DoRA's row norms read the frozen weights in a forward: for their norms, and for W A^T."""
ADAPTER_FORWARD, ADAPTER_BACKWARD = 2.5, 3.5
"""Number of times that adapters read or write the inputs and outputs of their linear layers. Forward reads inputs,
writes a result, reads the result and the layer's outputs, and writes their sum. Backward reads the outputs' gradients
twice and inputs once, writes a gradient of inputs, reads it and the layer's gradient, and writes their sum. Inputs and
outputs of a layer are about equally wide, so the numbers are (1 + 4) / 2 and (5 + 2) / 2."""
MOST_KINDS = 4
"""Maximum number of kinds of layers whose seconds are shown."""

T = TypeVar("T")
Seconds = Annotated[float, Bounds(minimum=0, ceiling=math.inf)]
Rate = Annotated[float, Bounds(above=0, ceiling=math.inf)]
"""Bytes or parameters per second."""


class ProfileError(ValueError):
    """Error for a text that is no profile; the caller measures again."""


class Source(StrEnum):
    """Origin of a profile's numbers."""

    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one kind of layer for one microbatch; backward adds parameter gradients to fp32 sums."""

    forward: Seconds
    backward: Seconds
    """Backward from saved activations."""
    recomputed_backward: Seconds
    """Backward from the layer's input: the layer's forward runs again."""

    def __add__(self, other: LayerSeconds) -> LayerSeconds:
        return LayerSeconds(*map(operator.add, astuple(self), astuple(other)))

    def describe(self) -> str:
        """Times in milliseconds, as text."""
        forward = f"{1e3 * self.forward:.2f} ms forward"
        if self.backward == self.recomputed_backward == 0:
            return f"{forward}, no backward"
        return f"{forward}, {1e3 * self.backward:.2f} backward, {1e3 * self.recomputed_backward:.2f} with recompute"

    def times(self, factor: float) -> LayerSeconds:
        """Return all seconds multiplied by `factor`."""
        return LayerSeconds(*(factor * seconds for seconds in astuple(self)))


@dataclass(frozen=True)
class CopyRates:
    """Bytes per second of one GPU's copies between page-locked host memory and the GPU."""

    host_to_device: Rate
    """Host to device, while only this GPU copies."""
    device_to_host: Rate
    """Device to host, while only this GPU copies."""
    host_to_device_all_gpus: Rate
    """Host to device, while all GPUs copy at once."""
    device_to_host_all_gpus: Rate
    host_to_device_duplex: Rate
    """Host to device, while all GPUs copy in both directions at once."""
    device_to_host_duplex: Rate


@dataclass(frozen=True)
class MessageRates:
    """Rates of messages (activations) between the GPUs of neighbouring ranks."""

    bandwidth: Rate
    """Bytes per second from one rank to the next."""
    latency: Seconds
    """Seconds of a message in addition to its bytes."""
    is_through_host: bool
    """Whether messages use PCIe links and host memory, as for cards that cannot write to each other's memory."""


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second of all disks together that hold a pipeline's optimizer states; sustained unless `is_burst`."""

    read: Rate
    write: Rate
    is_burst: bool = False
    """Whether the written bytes may have fit into the drives' caches; drives are slower once their caches are full."""
    at_once: Rate | None = None
    """Bytes read plus bytes written per second, while the disks do both; None if unknown."""

    @property
    def total(self) -> float:
        """Maximum bytes per second of reads and writes together."""
        return self.read + self.write if self.at_once is None else self.at_once

    def times(self, factor: float) -> DiskRates:
        """Return all rates multiplied by `factor`."""
        at_once = None if self.at_once is None else factor * self.at_once
        return DiskRates(factor * self.read, factor * self.write, self.is_burst, at_once)


@dataclass(frozen=True)
class ReplicaRates:
    """Rates between equal ranks of different replicas, in bytes per second of each direction."""

    together: Rate
    """Rate of all ranks of a pipeline together, while all exchange at once."""
    alone: Rate
    """Rate of one rank while the other ranks are idle."""
    is_through_host: bool
    """Whether the exchange also uses the GPUs' PCIe links and host memory, as it does over a network."""


@dataclass(frozen=True)
class Profile:
    """Seconds per microbatch and layer, and rates of copies, messages and updates."""

    source: Source
    basis: str
    """Device and origin of the numbers, as text."""
    num_ranks: Annotated[int, COUNT]
    """Number of GPUs that were busy while rates named `together` were measured."""
    microbatch_tokens: Annotated[int, COUNT]
    layer_kinds: tuple[LayerSeconds, ...]
    kind_of_layer: tuple[int, ...]
    """Index into `layer_kinds` of every layer of the model."""
    embedding_forward: Seconds
    embedding_backward: Seconds
    loss: Seconds
    """Seconds of final norm, head and loss, with their backward."""
    copies: CopyRates
    messages: MessageRates
    cpu_adamw: Rate
    """Parameters per second of one rank's CPU optimizer while other ranks are idle."""
    cpu_adamw_together: Rate
    """Parameters per second of each rank's CPU optimizer while all ranks update."""
    cpu_adamw_beside_copies: Rate
    """Parameters per second of each rank's CPU optimizer while all ranks update and all GPUs copy both ways."""
    copies_beside_cpu_adamw: Rate
    """Bytes per second of one GPU's copies in each direction, while all ranks update and all GPUs copy."""
    cpu_adamw_bytes: Annotated[int, COUNT]
    """Host memory traffic of one update, in bytes per parameter."""
    gpu_adamw: Rate
    """Parameters per second of a GPU's optimizer."""
    host_bandwidth: Rate
    """Bytes per second of host memory that all ranks share."""
    gpu_bandwidth: Rate
    """Bytes per second of one GPU's memory."""
    step_overhead: Seconds
    """Seconds between a step's last backward and the next step's first action, in which norms and losses are summed."""
    launch_overhead: LayerSeconds = LayerSeconds(0.0, 0.0, 0.0)
    """Seconds that the host takes to enqueue a layer; small microbatches are computed faster than this."""
    action_launch: Seconds = 0.0
    """Seconds that the host takes for everything else that an action needs: events, messages, slots."""
    launch_beside_updates: Annotated[float, Bounds(minimum=1, ceiling=math.inf)] = 1.0
    """Factor by which the host takes longer for layers and actions while its other cores update streamed stages."""
    optimizer_threads: Annotated[int, Bounds(minimum=0, ceiling=math.inf)] = 0
    """Measured number of threads of each rank's CPU optimizer; 0 if it was not measured."""
    attention_length: Annotated[float, POSITIVE] | None = None
    """Tokens of a sequence in the layers' attention; for packed rows the mean over tokens. None: the length of rows."""
    attention: LayerSeconds = LayerSeconds(0.0, 0.0, 0.0)
    """Part of each layer's seconds that attention takes; known for runs with slices, and for estimates."""
    replicas: ReplicaRates | None = None
    """None if there is one pipeline."""
    disks: DiskRates | None = None
    """None if optimizer states are in memory, or if the disks' rates are not known."""

    def of_layer(self, layer: int) -> LayerSeconds:
        """Return the seconds of the model's layer number `layer`."""
        return self.layer_kinds[self.kind_of_layer[layer]]

    def elementwise_seconds(self, layer: int, shape: ModelShape) -> float:
        """Return the seconds per microbatch to recompute a layer's elementwise work, at the GPU's memory bandwidth.

        Widths of two-byte elements, where H is the hidden width, I the feed-forward width, A / 2 of queries and keys:

            norm of the input             H read, H written
            rotary embeddings             A / 2 read, A / 2 written
            attention's sum and norm      2 H read, H written
            activation times up           2 I read, I written

            copies for experts and their results' sum    K H read, K H written, each

        This is an estimate: backward reads some of these tensors anyway, and reads the recomputed tensors, too.
        """
        widths = shape.layer_widths(layer)
        elements = 5 * shape.hidden_size + widths.products + 3 * widths.feed_forward + 4 * widths.copies
        return 2 * elements * self.microbatch_tokens / self.gpu_bandwidth

    def describe(self) -> str:
        """Line with the source of the numbers, and the seconds of each kind of layers."""
        numbers = [self.kind_of_layer.count(kind) for kind in range(len(self.layer_kinds))]
        layers = [
            f"{number} layers take {kind.describe()}" if len(numbers) > 1 else f"a layer takes {kind.describe()}"
            for kind, number in zip(self.layer_kinds[:MOST_KINDS], numbers, strict=False)
        ]
        more = ["other layers are not shown"] if len(numbers) > MOST_KINDS else []
        loss = f"the loss {1e3 * self.loss:.2f} ({self.microbatch_tokens} tokens)"
        return f"{self.source}: {self.basis}; {', '.join([*layers, *more, loss])}"

    def to_json(self) -> str:
        """Return the profile as a JSON object of its fields; the text ends in a line break."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read the text of `to_json`; raises ProfileError for any other text and for impossible numbers."""
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
                raise ValueError("has another format")
            profile = typed_object(cls, fields)
            if not profile.kind_of_layer or not {*profile.kind_of_layer} <= {*range(len(profile.layer_kinds))}:
                raise ValueError("names kinds of layers that do not exist")
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"not a profile: it {error}") from error
        return profile


def times(value: T, factor: float, *names: str) -> T:
    """Return a copy of a dataclass with the named numbers multiplied by `factor`."""
    changed: T = dataclasses.replace(cast(Any, value), **{name: factor * getattr(value, name) for name in names})
    return changed


def with_frozen(profile: Profile, shape: ModelShape, byte_rate: float) -> Profile:
    """Return a `profile` of full training without the work that the frozen parameters of `shape` save.

    Frozen parameters save the products for their gradients, a third of all products of layers and head. They also save
    the backward of all layers before the first trained layer. Adapters add passes through memory, in a two-byte format
    at `byte_rate` bytes per second.
    """
    trained = shape.trained
    if trained is None:
        return profile
    kinds: list[LayerSeconds] = []
    for layer, (parameters, own) in enumerate(zip(shape.active_parameters, shape.active_trained, strict=True)):
        seconds, attention = profile.of_layer(layer), (profile.attention_length or 0) * shape.hidden_size
        spared = (1 - own / parameters) / 2 * parameters / (parameters + attention)
        backward = seconds.backward * (1 - spared) if layer >= shape.first_backward else 0.0
        again = (seconds.recomputed_backward - seconds.backward + backward) if backward else 0.0
        kind = LayerSeconds(seconds.forward, backward, again)
        if trained.adapted_widths:
            one_pass = 2 * profile.microbatch_tokens * trained.adapted_widths[layer] / byte_rate
            norms = 2 * ROW_NORM_PASSES * (parameters - own) / byte_rate if trained.has_row_norms else 0.0
            forward, backward = ADAPTER_FORWARD * one_pass + norms, ADAPTER_BACKWARD * one_pass if backward else 0.0
            kind += LayerSeconds(forward, backward, forward + backward if backward else 0.0)
        kinds.append(kind)
    unique = list(dict.fromkeys(kinds))
    return dataclasses.replace(
        profile,
        layer_kinds=tuple(unique),
        kind_of_layer=tuple(map(unique.index, kinds)),
        embedding_backward=profile.embedding_backward * trained.embedding / shape.embedding_parameters,
        loss=profile.loss * (2 + trained.head / shape.head_parameters) / 3,
    )
