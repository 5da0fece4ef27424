"""A clipped run is the same to the bit however its model is cut into stages, and on however many ranks they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from harness.grids import named
from harness.runs import EXPERTS, make_checkpoint
from harness.schedules import partition_of
from harness.sessions import VOCAB, State, differing, in_sessions, random_samples, state_of

from mobius.data.batches import TrainingBatches
from mobius.training.session import Session

USUAL = """--batch_size 8 --num_chunks 4 --seq_length 24 --packing off --num_iterations 2 --learning_rate 1e-2
    --warmup_steps 1 --weight_decay 0.1 --save_strategy no"""


@dataclass(frozen=True)
class Cut:
    """A number of ranks, the layers of each stage, and options that change no bit either."""

    num_ranks: int
    sizes: tuple[int, ...]
    more: str = ""


ONE_STAGE = Cut(1, (8,))
CUTS = (
    Cut(1, (3, 3, 2)),
    Cut(2, (4, 4), "--compute_order depth_first"),
    Cut(2, (2, 2, 2, 2), "--resident_stages 1"),
    Cut(2, (1, 5, 0, 2), "--num_rounds 2"),
    Cut(3, (1, 1, 6)),
    Cut(4, (0, 4, 4, 0), "--no_offload --recompute none"),
    Cut(2, (0, 1, 1, 1, 1, 1, 1, 1, 1, 0)),
)


NUM_VIRTUAL = 4
"""Virtual tokens of a prompt, before each sample."""


@dataclass(frozen=True)
class Kind:
    """A largest norm that several steps exceed, options, and fields of the model's configuration."""

    max_grad_norm: float
    options: str
    fields: dict[str, Any]


ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "decoder_sparse_step": 2}
KINDS = {
    "fp32": Kind(0.5, "--fp32", {}),
    "bf16": Kind(0.5, "--bf16", {}),
    "fp16": Kind(0.5, "--fp16", {}),
    "bf16, tied": Kind(0.5, "--bf16", {"is_tied": True}),
    "bf16, adapters": Kind(0.02, "--bf16 --use_lora --lora_rank 4", {}),
    "bf16, frozen parts": Kind(0.2, "--bf16 --freeze embedding,layers.0-2", {}),
    "bf16 states": Kind(0.5, "--bf16 --optimizer_states bf16", {}),
    "compact states, tied": Kind(0.5, "--bf16 --optimizer_states compact", {"is_tied": True}),
    "compact states, experts": Kind(
        0.5, "--bf16 --optimizer_states compact", {"family": "qwen3_moe", **EXPERTS, **ROUTERS}
    ),
    "fp32, experts": Kind(0.5, "--fp32", {"family": "qwen3_moe", **EXPERTS, **ROUTERS}),
    "bf16, prompt": Kind(0.02, f"--bf16 --finetuning_type p_tuning --num_virtual_tokens {NUM_VIRTUAL}", {}),
    "bf16, prefix": Kind(0.002, f"--bf16 --finetuning_type prefix --num_virtual_tokens {NUM_VIRTUAL}", {}),
}


def train(session: Session, batches: TrainingBatches) -> tuple[list[tuple[float, float]], State]:
    trainer = session.trainer(batches)
    numbers = [(metrics.loss, metrics.grad_norm) for metrics in trainer.train()]
    trainer.drain()
    return numbers, state_of(session)


def run(folder: Path, kind: Kind, cut: Cut) -> tuple[list[tuple[float, float]], State]:
    """Loss and norm of each step, and all that a checkpoint holds."""
    words = f"{USUAL} {kind.options} --max_grad_norm {kind.max_grad_norm} --num_stages {len(cut.sizes)} {cut.more}"
    number = NUM_VIRTUAL if "num_virtual_tokens" in kind.options else 0
    samples = replace(random_samples(60, 24 - number), num_virtual_tokens=number)
    with patch("mobius.schedule.plan.cut_model", lambda *_, **__: partition_of(cut.sizes)):
        results = in_sessions(cut.num_ranks, folder, words, samples, train)
    assert all(numbers == results[0][0] for numbers, _ in results)
    return results[0][0], {name: value for _, state in results for name, value in state.items()}


ON_DEMAND = ["bf16", "fp16", "bf16, frozen parts", "bf16 states", "compact states, experts"]


@pytest.mark.parametrize("name", named({name: name for name in KINDS}, on_demand=ON_DEMAND))
def test_ranks_and_cuts_change_no_bit_of_a_clipped_run(tmp_path: Path, name: str) -> None:
    """All cuts in fp32, every third one of each other kind."""
    kind, place = KINDS[name], [*KINDS].index(name)
    make_checkpoint(tmp_path / "model", num_layers=8, vocab_size=VOCAB, **kind.fields)
    numbers, state = run(tmp_path / "model", kind, ONE_STAGE)
    assert sum(norm > kind.max_grad_norm for _, norm in numbers) > 1, "nothing was clipped"
    for cut in CUTS if place == 0 else CUTS[place % 3 :: 3]:
        found, own = run(tmp_path / "model", kind, cut)
        assert found == numbers, cut
        # A resident stage's state has the frozen parameters of adapters, too.
        assert not differing({name: own[name] for name in state}, state), cut


ON_DISKS = {
    f"{kind}, {norm}": (kind, norm) for kind in ("fp32", "compact states, tied", *ON_DEMAND) for norm in (0.5, 0.0)
}
SOME = frozenset({0, 2, 5, 7, 1, 3})
"""Stages whose states stay in memory: some of one rank's, and all but one of the other's."""


@pytest.mark.parametrize(
    "case", named(ON_DISKS, on_demand=ON_DISKS.keys() - {"fp32, 0.5", "compact states, tied, 0.0"})
)
def test_what_is_on_disks_changes_no_bit(tmp_path: Path, case: tuple[str, float]) -> None:
    """Without clipping gradients arrive in the three buffers that the four stages of a rank share, or wait on disks.

    Weights are on disks with some of the options, with each in the kinds on demand.
    """
    kind, max_grad_norm = case
    own = replace(KINDS[kind], max_grad_norm=max_grad_norm)
    make_checkpoint(tmp_path / "model", num_layers=8, vocab_size=VOCAB, **own.fields)
    expected = run(tmp_path / "model", own, Cut(2, (1,) * 8))
    folders = f"--offload_states_to {tmp_path / 'one'},{tmp_path / 'two'}"
    others = "--gradients_on_disks" if max_grad_norm else "--no_overlap_optimizer --no_prefetch"
    rounds = "--resident_stages 1 --num_rounds 2"
    both = (
        ("", others, rounds, "--compute_order depth_first")
        if kind in ON_DEMAND
        else (others if max_grad_norm else rounds,)
    )
    for more in ("", others, rounds, *(f"--weights_on_disks {each}" for each in both)):
        numbers, state = run(tmp_path / "model", own, Cut(2, (1,) * 8, f"{folders} {more}"))
        assert numbers == expected[0], more
        assert not differing(state, expected[1]), more
    assert not any((tmp_path / "one").iterdir()), "a file is left"
    mixed = Cut(2, (1,) * 8, f"{folders} {others} --durable_steps off")
    with patch("mobius.planner.solver.with_states_in_memory", lambda _, plan: replace(plan, states_in_memory=SOME)):
        numbers, state = run(tmp_path / "model", own, mixed)
    assert numbers == expected[0]
    assert not differing(state, expected[1]), "some in memory"
