"""Counts the bytes of tensors that are alive, op by op, and plays one rank's step under it without neighbours.

What an operation takes inside and gives back before it returns is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness.rank_memory import rules_of
from harness.schedules import spec_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from mobius.distributed.transport import MessageFormat, SingleRankTransport, WarmupTransport
from mobius.engine.step_inputs import StepBatch
from mobius.limits import max_sends_in_flight
from mobius.models.block_autograd import backward, run_with_graph
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.planner.peak_memory import LayerBytes
from mobius.schedule.build import build_schedule
from mobius.schedule.plan import Plan, RecomputeLevel
from mobius.training.stages import RankStages, StageOptions

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made under it: now, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {each.untyped_storage()._cdata for each in _tensors((*args, *(kwargs or {}).values()))}
        result = func(*args, **(kwargs or {}))
        for each in _tensors((result,)):
            self._count(each, known)
        return result

    def _count(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in known:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """All of an operation's; torch's own function for all trees takes longer than most operations."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def held_at_peak(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines `bytes x number, where they were allocated` of what is alive when most is, the largest first.

    `events` are a device's part of a snapshot of torch's allocator, from a moment at which what is freed later, but not
    allocated in them, does not count.
    """
    alive, held, now, most = dict[int, tuple[int, str]](), list[tuple[int, str]](), 0, 0
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], _place(event["frames"])
            now += event["size"]
            if now > most:
                most, held = now, [*alive.values()]
        elif event["action"] == "free_requested":
            now -= alive.pop(event["addr"], (0, ""))[0]
    counts = Counter(held).most_common()
    return [f"{size:,} x {n}, {place}" for (size, place), n in sorted(counts, key=lambda item: -item[0][0] * item[1])]


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The nearest frames that are code of this project, or else of torch."""
    own = [each for each in frames if "/mobius/" in each["filename"]] or frames
    return " < ".join(f"{Path(each['filename']).name}:{each['line']}" for each in own[:3])


def count_layer(
    config: PretrainedConfig,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    level: RecomputeLevel = RecomputeLevel.NONE,
) -> LayerBytes:
    """What the first layer takes for a microbatch of `shape` [B, L], eager."""
    parts = ModelParts(config, CPU)
    layer = parts.layers[0]
    weights = {name: torch.randn(size, dtype=dtype) * 0.02 for name, size in layer.parameter_shapes().items()}
    sums = {name: torch.zeros(size) for name, size in layer.parameter_shapes().items()}
    hidden = torch.randn(*shape, config.hidden_size, dtype=dtype)
    gradient = torch.randn_like(hidden)
    arguments = LayerArgumentsBuilder(parts, device=CPU, dtype=dtype)(shape[1])[0]
    with LiveBytes() as live:
        graph = run_with_graph(layer, weights, hidden, arguments, level)
        held = live.now
        backward(layer, graph, sums, gradient)
    return LayerBytes(held, live.peak)


def count_step(
    config: PretrainedConfig,
    plan: Plan,
    rank: int,
    *,
    batch_size: int,
    seq_length: int,
    dtype: torch.dtype,
    loss_chunk_tokens: int,
    graph_stages: Collection[int] = (),
    device: torch.device = CPU,
    held: list[str] | None = None,
) -> int:
    """Most that comes and goes within a step of `rank`: all but weights, gradients' sums and the optimizer.

    On a GPU layers and loss are compiled, and torch's own meter reads the second step; `held` is told what there is at
    its peak.
    """
    parts = ModelParts(config, device, compiled=device.type == "cuda")
    stages = RankStages.allocate(
        parts,
        replace(plan, saved_activation_stages=frozenset(graph_stages)),
        rank,
        StageOptions(dtype=dtype, rules=rules_of(dtype, deferred=plan.resident), loss_chunk_tokens=loss_chunk_tokens),
        device=device,
    )
    schedule = build_schedule(
        spec_of(
            plan.num_ranks,
            plan.stages_per_rank,
            plan.num_microbatches,
            plan.slots,
            plan.resident,
            num_slices=plan.num_slices,
        )
    )
    stages.layer_inputs(seq_length)  # rotary embeddings and masks are made once
    tokens = torch.randint(0, config.vocab_size, (batch_size, seq_length))
    transport = SingleRankTransport() if plan.num_ranks == 1 else WarmupTransport(
        rank=rank,
        device=device,
        message_format=MessageFormat((batch_size // plan.num_microbatches, seq_length, config.hidden_size), dtype),
        max_pending_sends=max_sends_in_flight(plan.num_microbatches),
    )  # fmt: skip
    executor = stages.executor(schedule, transport)
    batch = StepBatch(tokens, tokens, tokens.numel(), tokens.numel(), len(tokens))
    if device.type == "cuda" or plan.num_slices > 1:
        executor.run(batch)  # compiles, and takes what stays, such as caches of keys and values
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=10**6, clear_history=True)
        executor.run(batch)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.synchronize(device)
        if held is not None:
            held[:] = held_at_peak(torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0])
        torch.cuda.memory._record_memory_history(enabled=None)
        stages.close()
        return peak
    with LiveBytes() as live:
        executor.run(batch)
    return live.peak
