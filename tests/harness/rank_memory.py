"""Memory of a rank's stages, of which a test says itself whose updates wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mobius.distributed.replicas import ReplicaGroup
from mobius.engine import rank_memory
from mobius.engine.host_arena import HostArena
from mobius.engine.rank_memory import stage_sizes
from mobius.engine.stage_memory import StageMemory
from mobius.engine.update_queue import UpdateQueue
from mobius.models.layout import StageLayout
from mobius.planner.request import REDUCED_PARTS
from mobius.schedule.memory_layout import MemoryRules, RankUse, lay_out_rank

REMAINDERS = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}


@dataclass(frozen=True, kw_only=True)
class GivenRules(MemoryRules):
    """Rules that say which stages wait."""

    waiting: frozenset[int] = frozenset()

    def waiting_stages(self, num_stages: int) -> frozenset[int]:
        return self.waiting


def rules_of(
    dtype: torch.dtype, gradient_dtype: torch.dtype | None = None, *, deferred: Collection[int] = (), **more: Any
) -> GivenRules:
    """Rules of these formats; the updates of `deferred` stages wait."""
    gradient = (gradient_dtype or dtype).itemsize
    formats = {"weight": dtype.itemsize, "gradient": gradient, "remainder": REMAINDERS[dtype]}
    return GivenRules(**formats, waiting=frozenset(deferred), **more)


def allocate_memory(
    layouts: Mapping[int, StageLayout],
    *,
    resident: Collection[int],
    num_slots: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    deferred_updates: Collection[int],
    device: torch.device,
    num_sum_buffers: int = 1,
    has_partial_sums: bool = False,
    updates: UpdateQueue | None = None,
    replicas: ReplicaGroup | None = None,
    tied: Collection[str] = (),
    rules: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[dict[int, StageMemory], HostArena | None]:
    """Memory of stages; `rules` and `more` go to `MemoryRules` and `rank_memory.allocate_memory`."""
    reduced = next((layout.reduced_format for layout in layouts.values() if layout.reduced_format), "")
    own = rules_of(
        dtype,
        gradient_dtype,
        deferred=deferred_updates,
        reduced_parts=REDUCED_PARTS.get(reduced, ()),  # type: ignore[call-overload]
        overlaps_optimizer=updates is not None and updates.has_thread,
        num_replicas=1 if replicas is None else replicas.num_replicas,
        **(rules or {}),
    )
    adapters = set(layouts) - set(resident) if own.keeps_trained_on_gpu else ()
    sizes = stage_sizes(layouts, replicas=replicas, tied=tied, adapters=adapters)
    use = RankUse(resident, num_slots, num_sum_buffers, has_partial_sums)
    layout = lay_out_rank(sizes, use, own, num_stages=1 + max(layouts))
    given: dict[str, Any] = {"dtype": dtype, "device": device, "updates": updates, "replicas": replicas, "tied": tied}
    return rank_memory.allocate_memory(layouts, layout, **given, **more)
