"""What a rank may do with its GPU memory, and an estimate of how long a step then takes, to prefer one by.

It does not know what fits (fit.py). The estimate is a few lines of arithmetic, at the rates of a profile or, where
there is none, at those of one kind of machine; with a profile, memory_use.py asks the simulation for what matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mobius.plan.profile import Profile
from mobius.plan.shape import ModelShape


@dataclass(frozen=True)
class Candidate:
    """One way to use the GPU memory of one rank."""

    num_resident: int
    """Of the rank's stages the first ones, which the next step needs first."""
    num_graphs: int
    """Of the rank's stages the last ones, whose activations are kept from forward to backward."""
    num_slots: int
    """For the streamed stages; 0 where nothing is streamed."""


Score = Callable[[int, Candidate], float]
"""From a rank and what it may do to what that costs, less being better; seconds per step, for instance."""


@dataclass(frozen=True)
class Rates:
    """How fast one rank computes and updates.

    The defaults are those at which `estimated_seconds` gives what Llama-2-7B's shape took on four H200 and 64 cores
    (docs/benchmarks.md): 0.762 s per step of 32768 tokens with nothing streamed or recomputed, and with everything
    streamed 1.22 s without and 1.62 s with clipping. On other machines they are wrong; only their relation matters to
    the choice.
    """

    flops: float = 4.35e14
    """Per second and GPU, bubbles of the pipeline included."""
    updates_in_step: float = 1.4e9
    """Parameters per second and rank, updated on the CPU while the GPU computes and gradients travel."""
    updates_behind_step: float = 2.2e9
    """The same with clipping, when gradients have arrived."""

    @classmethod
    def of(
        cls, profile: Profile, shape: ModelShape, *, num_ranks: int, stages_per_rank: int, num_microbatches: int
    ) -> Rates:
        """Those of a profile; the bubble is that of equal stages, which fill and drain the ranks once per step."""
        turns = stages_per_rank * num_microbatches
        kinds = [profile.of_layer(layer) for layer in range(shape.num_layers)]
        layers = sum(kind.forward + kind.backward for kind in kinds) * (turns + num_ranks - 1) / turns
        return cls(
            flops=6 * sum(shape.layer_parameters) * profile.microbatch_tokens / layers,
            updates_in_step=profile.cpu_adamw_beside_copies,
            updates_behind_step=profile.cpu_adamw_together,
        )


def estimated_seconds(
    candidate: Candidate, parameters: Sequence[int], *, tokens: int, clips: bool, rates: Rates
) -> float:
    """Estimate one rank's step; `parameters` are those of its stages, `tokens` those of a step.

    Compute is 6 FLOP per parameter and token, 2 more where a forward is run again. The CPU updates streamed stages one
    after the other. Without clipping it does so while the GPU computes, and the first streamed stage, the last whose
    gradients arrive, has the time that the resident ones before it take in backward and forward. With clipping it
    begins when the step ends, and a streamed stage has the time of the forwards before it. Copies and neighbours are
    left out.
    """
    num_stages, resident = len(parameters), candidate.num_resident
    forward = 2 * sum(parameters) / num_stages * tokens / rates.flops
    num_recomputed = num_stages - candidate.num_graphs
    compute = forward * (3 * num_stages + num_recomputed)
    streamed = parameters[resident:]
    if not streamed:
        return compute
    updates = rates.updates_behind_step if clips else rates.updates_in_step
    all_updates, first_update = (count / updates for count in (sum(streamed), streamed[0]))
    if clips:
        before_first, before_last = forward * resident, forward * (num_stages - 1)
        return compute + max(0.0, first_update - before_first, all_updates - before_last)
    return max(compute, all_updates, compute + first_update - 3 * forward * resident)
