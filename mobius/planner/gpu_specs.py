"""Data sheets of known GPUs, and profiles estimated from them.

Nothing is measured on the GPU itself. Its rates are the vendor's numbers times shares that were measured on one machine
of H200s in November 2026 (docs/decisions/0022-step-time-prediction.md, tests/unit/planner/test_measured_rows.py). Such
a profile is marked as estimated.

    seconds of a product = operations / (data sheet TFLOP/s x GEMM_SHARE x share of forward, backward or loss)

Eight-bit products replace a layer's products in forward, in recomputation and for input gradients. Products for weight
gradients and for attention keep their format.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from mobius.config.config import MatmulDtype, OptimizerStates
from mobius.errors import PlanError
from mobius.planner.profile import CopyRates, LayerSeconds, MessageRates, Profile, Source
from mobius.schedule.partition import ModelShape

GIGA, TERA = 1e9, 1e12

# A compiled layer of Llama-2-7B with 4096 tokens: 1.658 TFLOP forward.
GEMM_SHARE = 0.805  # rate of large products / data sheet: 796 of 989 TFLOP/s
FORWARD_SHARE = 0.84  # rate of a layer's forward / rate of large products: 2.47 ms
BACKWARD_SHARE = 0.755  # rate of a layer's backward without fp32 sums / rate of large products: 8.40 - 2.47 ms
RECOMPUTED_SHARE = 0.76  # time that recomputation adds to backward / time of forward; on an H100, 0.75 to 0.85
LOSS_SHARE = 0.748  # rate of head and loss with their backward / rate of large products: 5.41 ms for 3.22 TFLOP
SUSTAINED_SHARE = 0.955  # rate within a step / rate measured alone
MEMORY_SHARE = 0.8  # reading or writing a long tensor reaches this share of the GPU's memory bandwidth; a guess
WIDTH = 4096  # hidden size of the layer above
NARROW = 0.09
"""Additional seconds per operation, as a share, of a layer with hidden size WIDTH / 2; at WIDTH / 3, twice this share.
In narrow layers, passes through activations take a larger part of the time."""
EAGER_FORWARD, EAGER_BACKWARD = 1.35, 1.16
"""Seconds of an eager layer / seconds of a compiled layer; an eager recomputation runs the whole forward again."""
PACKED_COST = 1.016
"""Seconds of a layer on packed rows (variable-length attention) / seconds on whole rows with as many operations."""
WITHIN = 4096
"""Number of tokens of a sequence up to which FORWARD_SHARE and BACKWARD_SHARE give attention's seconds. For further
tokens, `AttentionRates` give the seconds."""
LAUNCH = LayerSeconds(0.60e-3, 1.30e-3, 1.85e-3)
"""Seconds of Python and launches for a compiled layer: forward, backward, backward with recomputation. On idle hosts of
H100s, forward took 0.44 to 0.85 ms, backward 0.95 to 1.85 ms, and backward with recomputation 1.29 to 2.56 ms
(2026-11-27, equal in bf16 and fp8). Hosts of H200s took half as long."""
ACTION_LAUNCH = 0.70e-3
"""Seconds that the host takes for messages, slots and events of an action. Hosts of H200s took 0.35 ms (0.2 ms in
forward, 0.4 ms in backward). Hosts of H100s were not measured; they are assumed to take longer by the same factor as
for LAUNCH."""
LAUNCH_BESIDE_UPDATES = 2.0
"""Seconds of LAUNCH and ACTION_LAUNCH while other cores update streamed stages / on an idle host: 2 to 3 on four H100s,
1.1 to 1.3 on H200s."""
STEP_OVERHEAD = 0.003
"""Seconds between two steps, in which the host waits for the last backward and reads norms and memory. A guess."""

# Bytes of memory traffic per parameter.
ACCUMULATION_BYTES = 8  # products add to fp32 sums: 4 bytes are read and 4 written
CPU_ADAMW_BYTES: Final = {OptimizerStates.FP32: 26, OptimizerStates.BF16: 18, OptimizerStates.COMPACT: 12}
"""Bytes that the C kernel moves in one pass, with bf16 gradients (docs/decisions/0004-cpu-adamw.md). AdamW on the GPU
moves two bytes more, because its gradients are fp32."""
CPU_ADAMW_PER_CORE = 0.335e9
"""Parameters per second and core while nothing else uses memory: 5.36e9 on 16 cores."""
COPY_PENALTY = 0.70
"""Rate of CPU AdamW during copies in both directions / rate alone: 5.0 / 7.2 Gparam/s for four ranks."""

# Eight-bit products: the same layer and card, torch 2.11 (2026-11-24), fp8 with fast accumulation, weights quantized.
FP8_SHARE = 0.684  # rate of a layer's products / data sheet: 1.225 ms for its 1.658 TFLOP
INT8_SHARE = 0.6  # rate of our kernel's products / data sheet; a guess, not measured on any card
REPLACED_SHARE = 0.89  # rate of bf16 products of the layer's shapes / rate of large products: 2.342 ms
INPUT_BYTES, EAGER_INPUT_BYTES = 3, 31
"""Bytes of memory traffic to quantize one element of a product's input: it is read, and its code is written. Bytes of
eager layers are counted pass by pass. With 3 bytes, the predicted speedup over bf16 is 1.67 in forward (measured: 1.6
to 1.7), 1.31 with backward (measured: 1.29 to 1.36) and 1.41 with recomputation (measured: 1.35 to 1.43)."""
QUANTIZING_BYTES = 10
"""Bytes of memory traffic to quantize a weight: 4 to copy it, 4 to read it by row and by column, 2 to write codes."""
DECODING_BYTES = 4
"""GPU bytes read and written for each weight that is decoded from codes: a code of one byte or less is read, and two
bytes are written. The kernels were not measured; at two thirds of the memory's rate this would be 4 to 4.5."""
EIGHT_BIT_SINCE: Final = {MatmulDtype.FP8: (8, 9), MatmulDtype.INT8: (8, 0)}
"""Lowest compute capability of cards with products in a format."""

PCIE_BYTES = {3: 12.5e9, 4: 25.5e9, 5: 55e9}
"""Bytes per second of copies in one direction over 16 lanes, by generation: 5 is measured, 3 and 4 are published."""
DUPLEX_SHARE = 0.90  # rate of each direction while both run / its rate alone, on one GPU; a guess
HOST_BANDWIDTH = 190e9
"""Approximate bytes per second of host memory with 64 cores and 4 x H200, for all users together."""
DOWN_LIMIT, UP_LIMIT, BOTH_LIMIT = 164 / 190, 136 / 190, 188 / 190
"""Shares of HOST_BANDWIDTH that copies of all GPUs reach, measured in GB/s: 4 x 41 to the GPUs, 4 x 34 back, and 4 x
(22 + 25) in both directions at once."""
# Shares of a link's rate that messages reach: PCIe through host memory, NVLink (394 of 450 GB/s), PCIe slot to slot.
# The shares of PCIe are guesses.
HOST_MESSAGE_SHARE, NVLINK_SHARE, PEER_SHARE = 0.2, 0.87, 0.75
LATENCY = 20e-6  # seconds of a message; a guess


@dataclass(frozen=True)
class AttentionRates:
    """TFLOP/s of attention alone, counting two matrix products forward and five backward."""

    forward: float
    backward: float


CUDNN_ATTENTION, FLASH_ATTENTION = AttentionRates(573, 527), AttentionRates(339, 313)
"""Rates measured on one H200, torch 2.11: slices of 16,384 tokens from sequences of 131,072 tokens."""


@dataclass(frozen=True)
class PublicRates:
    """TFLOP/s of large products that users of a GPU published: the lowest, the highest, and the source."""

    lowest: float
    highest: float
    source: str = "github.com/zzc0721/torch-performance-test-data"


@dataclass(frozen=True)
class GpuSpec:
    """Data sheet of a GPU."""

    name: str
    tera_flops: float
    """Dense TFLOP/s in bf16 with fp32 accumulation; in fp16 if the GPU has no bf16."""
    memory_gb: float
    """GiB of memory."""
    memory_bandwidth: float
    """GB/s of GPU memory."""
    pcie: int
    """Generation of its 16 PCIe lanes."""
    fp8: float = 0.0
    """Dense TFLOP/s with fp32 accumulation; 0 if the GPU has no such products."""
    int8: float = 0.0
    nvlink: float = 0.0
    """GB/s in one direction to a neighbour; 0 without NVLink, or if NVLink connects only pairs."""
    has_peer_copies: bool = True
    """Whether the driver lets GPUs write into each other's memory."""
    device_names: tuple[str, ...] = ()
    """The driver's names of the GPU, in small letters and digits; empty if they equal `name`."""
    attention: tuple[AttentionRates, AttentionRates] | None = None
    """Rates beyond WITHIN tokens, on whole and on packed rows. None (not measured): a layer's shares always apply."""
    published: PublicRates | None = None

    @property
    def matmul_dtypes(self) -> tuple[MatmulDtype, ...]:
        """Formats of products that the GPU has."""
        return MatmulDtype.BF16, *(each for each in EIGHT_BIT_SINCE if getattr(self, each))

    def at(self, share: float) -> GpuSpec:
        """Return the GPU with its rates of products multiplied by `share`."""
        rates = {name: share * getattr(self, name) for name in ("tera_flops", "fp8", "int8")}
        return replace(self, **rates)

    def eight_bit_rate(self, matmul_dtype: str) -> float:
        """Operations per second of eight-bit products within a step."""
        rates = {MatmulDtype.FP8: self.fp8 * FP8_SHARE, MatmulDtype.INT8: self.int8 * INT8_SHARE}
        return rates[MatmulDtype(matmul_dtype)] * TERA * SUSTAINED_SHARE

    @property
    def product_rate(self) -> float:
        """Operations per second of large products within a step."""
        return self.tera_flops * TERA * GEMM_SHARE * SUSTAINED_SHARE

    @property
    def memory_rate(self) -> float:
        """Bytes per second of passes through long tensors."""
        return self.memory_bandwidth * GIGA * MEMORY_SHARE


_MLXCEL, _TABLES = "github.com/lablup/mlxcel/issues/1654", f"{PublicRates.source}, github.com/stas00/ml-engineering"
_40GB, _80GB = ("a100sxm440gb", "a100pcie40gb"), ("a100sxm480gb", "a100pcie80gb", "a10080gb")
_HOPPER = (CUDNN_ATTENTION, FLASH_ATTENTION)
_A100, _H100 = PublicRates(264.5, 271.2, _TABLES), PublicRates(783.7, 794.5, _TABLES)
_CARDS = (
    GpuSpec("V100", 125, 32, 900, 3, nvlink=50, published=PublicRates(95, 100, _MLXCEL)),
    GpuSpec("T4", 65, 16, 320, 3, published=PublicRates(41.9, 42.7)),
    GpuSpec("A10", 125, 24, 600, 4, 0, 250),
    GpuSpec("L4", 121, 24, 300, 4, 242, 242, published=PublicRates(56.9, 59.4)),  # issue 120
    GpuSpec("L20", 119.5, 48, 864, 4, 239, 239, published=PublicRates(108.0, 114.1)),  # issue 107
    GpuSpec("L40S", 362, 48, 864, 4, 733, 733, published=PublicRates(269.2, 269.2)),  # issue 43
    GpuSpec("A6000", 154.8, 48, 768, 4, 0, 309.7, published=PublicRates(123.3, 123.3)),  # issue 46
    GpuSpec("6000-Ada", 364, 48, 960, 4, 728.5, 728.5, device_names=("rtx6000ada",)),
    # Sources: issues 20 and 42 (RTX3090); 20, 41, 50 and 78 (RTX4090); 96, 124 and 200 (RTX5090).
    GpuSpec("RTX3090", 71, 24, 936, 4, 0, 284, has_peer_copies=False, published=PublicRates(76.3, 76.7)),
    GpuSpec("RTX4090", 165.2, 24, 1008, 4, 330.3, 660.6, has_peer_copies=False, published=PublicRates(158.5, 173.3)),
    GpuSpec("RTX5090", 209.5, 32, 1792, 5, 419, 838, has_peer_copies=False, published=PublicRates(174.7, 242.2)),
    GpuSpec("A100-40", 312, 40, 1555, 4, 0, 624, nvlink=300, device_names=_40GB, published=PublicRates(246.3, 246.3)),
    GpuSpec("A100-80", 312, 80, 2039, 4, 0, 624, nvlink=300, device_names=_80GB, published=_A100),
    GpuSpec("A800", 312, 80, 2039, 4, 0, 624, nvlink=200, published=PublicRates(266.5, 266.5)),
    GpuSpec("H20", 148, 96, 4000, 5, 296, 296, nvlink=450, published=PublicRates(138.6, 142.3)),  # issue 77
    GpuSpec("H100", 989, 80, 3350, 5, 1979, 1979, nvlink=450, attention=_HOPPER, published=_H100),
    GpuSpec("H200", 989, 141, 4800, 5, 1979, 1979, nvlink=450, attention=_HOPPER),
)
GPU_SPECS = {gpu_spec.name: gpu_spec for gpu_spec in _CARDS}
"""Data sheets of the vendors. For RTX cards, rates of bf16 and fp8 are for fp32 accumulation, which halves them.

Published rates are from reports found until November 2026 in issues of the source and in its table. The rates are for
bf16 with fp32 accumulation (V100 and T4: fp16) and for dense square matrices of size 8192 and 10,240. If a report has
only the best of several sizes, this size is used (V100: 2048). Most reports time 30 products in a row; in long runs a
card at its power limit is slower.
"""


def find_gpu_spec(name: str) -> GpuSpec:
    """Return the GPU called `name` in any spelling; raises PlanError with the known names."""
    plain = {_plain(known): gpu_spec for known, gpu_spec in GPU_SPECS.items()}
    wanted = _plain(name)
    if wanted in plain:
        return plain[wanted]
    ending = [gpu_spec for known, gpu_spec in plain.items() if wanted and known.endswith(wanted)]
    if len(ending) == 1:
        return ending[0]
    near = difflib.get_close_matches(wanted, plain, n=1)
    hint = f"; did you mean {plain[near[0]].name}?" if near else "."
    raise PlanError(f"the card {name!r} is not known{hint} Known are {', '.join(GPU_SPECS)}.")


def gpu_spec_of_device(device_name: str) -> GpuSpec | None:
    """Return the GPU that a driver calls `device_name`, such as `NVIDIA GeForce RTX 4090`; None if it is not known."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    # Compare whole words, one or more in a row, so that A10 does not match A100, and L4 does not match L40S.
    runs = {"".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)}
    found = (gpu_spec for gpu_spec in _CARDS if runs & {*(gpu_spec.device_names or (_plain(gpu_spec.name),))})
    return next(found, None)


def check_matmul_dtype(wanted: MatmulDtype, card: str, usable: Collection[MatmulDtype]) -> None:
    """Raise PlanError if the `wanted` format of products is not among the `usable` formats of the GPU called `card`."""
    if wanted not in usable:
        major, minor = EIGHT_BIT_SINCE[wanted]
        refusal = PlanError(
            f"--matmul_dtype {wanted}: the card {card} has no {wanted} products (compute capability {major}.{minor} or "
            f"newer has them). Use {' or '.join(usable)}."
        )
        refusal.advice = tuple(f"--matmul_dtype {each}" for each in usable)
        raise refusal


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")


@dataclass(frozen=True)
class Host:
    """Host of the GPUs."""

    cores_per_rank: int = 16
    bandwidth: float = HOST_BANDWIDTH
    """Bytes per second of host memory, for all users together."""
    pcie: int | None = None
    """PCIe generation of the slots. If it is None or newer than the card's generation, the card's is used."""


def estimate_profile(
    gpu_spec: GpuSpec,
    shape: ModelShape,
    *,
    microbatch_tokens: int,
    seq_length: int,
    num_ranks: int,
    host: Host | None = None,
    compiled: bool = True,
    attention_length: float | None = None,
    states: OptimizerStates = OptimizerStates.FP32,
) -> Profile:
    """Estimate a profile for `num_ranks` GPUs of `gpu_spec` in `host`.

    Layers with equal parameter counts are one kind. `attention_length` is `PackedRows.attention_length`; None if each
    row is one document. Raises PlanError for an unknown PCIe generation.
    """
    host = host or Host()
    generation = min(gpu_spec.pcie, host.pcie or gpu_spec.pcie)
    if generation not in PCIE_BYTES:
        known = ", ".join(map(str, PCIE_BYTES))
        raise PlanError(f"PCIe generation {generation} is not known; known are {known}.")
    layers = LayerEstimate(gpu_spec, shape, is_packed=attention_length is not None, compiled=compiled)
    length = seq_length if attention_length is None else attention_length
    copies = estimate_copies(PCIE_BYTES[generation], host.bandwidth, num_ranks)
    memory = gpu_spec.memory_rate
    embedding_bytes = 2.0 * 2 * shape.hidden_size * microbatch_tokens
    moved = CPU_ADAMW_BYTES[states]
    alone = min(host.cores_per_rank * CPU_ADAMW_PER_CORE, host.bandwidth / moved)
    together = min(alone, host.bandwidth / moved / num_ranks)
    return Profile(
        source=Source.ESTIMATED,
        basis=f"{num_ranks} x {gpu_spec.name}, PCIe {generation}, by data sheets and shares measured on H200s",
        num_ranks=num_ranks,
        microbatch_tokens=microbatch_tokens,
        layer_kinds=tuple(layers.layer(layer, microbatch_tokens, length) for layer in shape.layer_kinds),
        kind_of_layer=shape.kind_of_layer,
        embedding_forward=embedding_bytes / memory,
        # The whole matrix's gradient is written (2 bytes) and read (2), and its fp32 sum is read (4) and written (4).
        embedding_backward=12 * shape.embedding_parameters / memory,
        loss=6 * shape.head_parameters * microbatch_tokens / (gpu_spec.product_rate * LOSS_SHARE),
        copies=copies,
        messages=_messages(gpu_spec, PCIE_BYTES[generation]),
        cpu_adamw=alone,
        cpu_adamw_together=together,
        cpu_adamw_beside_copies=together * COPY_PENALTY,
        copies_beside_cpu_adamw=(copies.host_to_device_duplex + copies.device_to_host_duplex) / 2,
        cpu_adamw_bytes=moved,
        gpu_adamw=memory / (moved + 2),
        host_bandwidth=host.bandwidth,
        gpu_bandwidth=memory,
        step_overhead=STEP_OVERHEAD,
        launch_overhead=LAUNCH,
        action_launch=ACTION_LAUNCH,
        launch_beside_updates=LAUNCH_BESIDE_UPDATES,
        attention_length=length,
        attention=layers.attention(microbatch_tokens, length),
    )


@dataclass(frozen=True)
class LayerEstimate:
    """Estimated seconds of a model's layers on a GPU within a step."""

    gpu_spec: GpuSpec
    shape: ModelShape
    is_packed: bool = False
    """Whether rows are packed; attention then uses another kernel."""
    compiled: bool = True

    def layer(self, layer: int, tokens: int, length: float) -> LayerSeconds:
        """Return the seconds of layer number `layer` for `tokens` tokens in sequences of `length`."""
        sums = ACCUMULATION_BYTES * self.shape.layer_parameters[layer] / self.gpu_spec.memory_rate
        within, beyond = self._attention(tokens, length)
        products = self._products(2 * (self.shape.active_parameters[layer] + within) * tokens, sums)
        return products + self._experts(layer, tokens) + beyond

    def attention(self, tokens: int, length: float) -> LayerSeconds:
        """Return the seconds of causal attention, which `layer` includes."""
        within, beyond = self._attention(tokens, length)
        return self._products(2 * within * tokens) + beyond

    def with_eight_bit(self, profile: Profile) -> Profile:
        """Return the profile with eight-bit products of quantized weights, if the model has any."""
        quantized, kinds = self.shape.quantized, list[LayerSeconds]()
        if quantized is None:
            return profile
        rate, tokens = self.gpu_spec.eight_bit_rate(quantized.matmul_dtype), profile.microbatch_tokens
        spared = 1 / (self.gpu_spec.product_rate * REPLACED_SHARE) - 1 / rate
        # Inputs are quantized in forward, gradients of outputs in backward; each is about half of the widths.
        passed = (INPUT_BYTES if self.compiled else EAGER_INPUT_BYTES) / 2 / self.gpu_spec.memory_rate
        for kind, seconds in enumerate(profile.layer_kinds):
            layer = profile.kind_of_layer.index(kind)
            change = tokens * (passed * quantized.scales[layer] - 2 * spared * quantized.layers[layer])
            backward = change if seconds.backward else 0.0
            kinds.append(seconds + LayerSeconds(change, backward, 2 * backward))
        return replace(profile, layer_kinds=tuple(kinds))

    def _attention(self, tokens: int, length: float) -> tuple[float, LayerSeconds]:
        """Return attention up to WITHIN tokens as a number of parameters, and the seconds of attention beyond them.

        FORWARD_SHARE and BACKWARD_SHARE give the seconds of the first part. `AttentionRates` give the seconds of the
        second part: two products in forward, five in backward, and forward again if recomputed.
        """
        rates = None if self.gpu_spec.attention is None else self.gpu_spec.attention[self.is_packed]
        if rates is None:
            return length * self.shape.hidden_size, LayerSeconds(0.0, 0.0, 0.0)
        within = min(length, WITHIN)
        product = (length - within) * self.shape.attention_width * tokens / (TERA * SUSTAINED_SHARE)
        forward, backward = 2 * product / rates.forward, 5 * product / rates.backward
        return within * self.shape.hidden_size, LayerSeconds(forward, backward, forward + backward)

    def _products(self, operations: float, sums: float = 0.0) -> LayerSeconds:
        """Return the seconds of a layer with `operations` in forward; `sums` are the seconds of gradient sums."""
        narrow = 1 + NARROW * max(0.0, WIDTH / self.shape.hidden_size - 1)
        rate = self.gpu_spec.product_rate / narrow / (PACKED_COST if self.is_packed else 1.0)
        forward = operations / (rate * FORWARD_SHARE)
        backward = 2 * operations / (rate * BACKWARD_SHARE) + sums
        if not self.compiled:
            forward, backward = EAGER_FORWARD * forward, EAGER_BACKWARD * backward
            return LayerSeconds(forward, backward, forward + backward)
        return LayerSeconds(forward, backward, RECOMPUTED_SHARE * forward + backward)

    def _experts(self, layer: int, tokens: int) -> LayerSeconds:
        """Return the seconds of memory passes for a layer's experts, computed from bytes, not measured.

        Each token is copied for its experts, and their results are summed: 4 widths in forward, and as many in
        backward. All experts' weights are read once in forward and once in backward, even if an expert has few tokens.
        """
        if self.shape.experts is None:
            return LayerSeconds(0.0, 0.0, 0.0)
        copies = 4 * self.shape.layer_widths(layer).copies * tokens
        seconds = 2 * (copies + self.shape.experts.layers[layer]) / self.gpu_spec.memory_rate
        return LayerSeconds(seconds, seconds, 2 * seconds)


def with_attention_length(
    profile: Profile, shape: ModelShape, *, measured_length: float, length: float, estimate: LayerEstimate | None = None
) -> Profile:
    """Return the profile with layers whose attention spans `length` tokens instead of `measured_length`.

    Attention's seconds come from `estimate`; without an estimate, from attention's share of operations.
    """
    if estimate is not None:
        before, after = (estimate.attention(profile.microbatch_tokens, each) for each in (measured_length, length))
    else:
        all_before = shape.active_parameters[0] + shape.hidden_size * measured_length
        shares = (shape.hidden_size * each / all_before for each in (measured_length, length))
        before, after = map(profile.of_layer(0).times, shares)
    kinds = tuple(kind + after + before.times(-1) for kind in profile.layer_kinds)
    return replace(profile, layer_kinds=kinds, attention_length=length, attention=after)


def action_launch(launch: LayerSeconds) -> float:
    """Scale ACTION_LAUNCH to a host that takes `launch` for a layer; unchanged if `launch` is 0, as on a CPU."""
    measured, usual = (each.forward + each.recomputed_backward for each in (launch, LAUNCH))
    return ACTION_LAUNCH * measured / usual if measured > 0 else ACTION_LAUNCH


def estimate_copies(link: float, host_bandwidth: float, num_ranks: int) -> CopyRates:
    """Estimate copies over `num_ranks` links that share host memory; `link`: bytes per second in each direction."""
    down = min(link, host_bandwidth * DOWN_LIMIT / num_ranks)
    up = min(link, host_bandwidth * UP_LIMIT / num_ranks)
    each = host_bandwidth * BOTH_LIMIT / num_ranks / (down + up)
    both = min(DUPLEX_SHARE, each)
    return CopyRates(link, link, down, up, down * both, up * both)


def _messages(gpu_spec: GpuSpec, link: float) -> MessageRates:
    if gpu_spec.nvlink:
        return MessageRates(gpu_spec.nvlink * GIGA * NVLINK_SHARE, LATENCY, is_through_host=False)
    if gpu_spec.has_peer_copies:
        return MessageRates(link * PEER_SHARE, LATENCY, is_through_host=False)
    return MessageRates(link * HOST_MESSAGE_SHARE, LATENCY, is_through_host=True)
