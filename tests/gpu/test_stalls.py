"""Within a step nothing waits for the device, takes device memory from the driver or page-locks memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.runs import make_checkpoint

from mobius.cli import parse_args
from mobius.data.batches import Batches
from mobius.data.store import TokenizedDataset
from mobius.models.families import load_model_config
from mobius.optim.stepper import Stepper
from mobius.ranks import Ranks
from mobius.runtime.executor import Executor, StepSums
from mobius.runtime.transport import SingleRankTransport
from mobius.training.build import RankState, assemble, draw_blueprint, load_state
from mobius.training.trainer import Trainer

pytestmark = pytest.mark.gpu

OPTIONS = """--device cuda --bf16 --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 6
    --learning_rate 1e-3"""


@pytest.fixture
def strict_steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """From the fourth step on, a synchronizing call is an error within a step, and what it took is noted."""
    run, taken, num_run = Executor.run, list[dict[str, int]](), 0

    def counts() -> dict[str, int]:
        device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
        return {"device": device["num_device_alloc"], "host": host["num_host_alloc"]}

    def strict(self: Executor, *args: Any, **kwargs: Any) -> StepSums:
        nonlocal num_run
        num_run += 1
        before = counts()
        torch.cuda.set_sync_debug_mode("error" if num_run > 3 else "default")
        try:
            return run(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            if num_run > 3:
                taken.append({kind: after - before[kind] for kind, after in counts().items()})

    monkeypatch.setattr(Executor, "run", strict)
    return taken


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[[str], Trainer]]:
    """Page-locked memory is given back at the end, or the next test could not lock it."""
    states: list[RankState] = []

    def make(options: str) -> Trainer:
        trainer, state = _trainer(tmp_path, options)
        states.append(state)
        return trainer

    yield make
    torch.cuda.synchronize()
    for state in states:
        state.close()


def _trainer(folder: Path, options: str) -> tuple[Trainer, RankState]:
    make_checkpoint(folder)
    config = parse_args(f"--model_path {folder} {OPTIONS} {options}".split())
    blueprint = draw_blueprint(config, Ranks(0, 1, 0), load_model_config(folder, config.model))
    tokens = np.random.default_rng(0).integers(0, blueprint.shape.vocab_size, 64, dtype=np.int32)
    dataset = TokenizedDataset(tokens, np.ones(64, dtype=bool), np.arange(5, dtype=np.int64) * 16)
    batches = Batches(dataset, batch_size=4, seq_length=16, pad_token_id=0, seed=1)
    state = load_state(blueprint, folder)
    return assemble(blueprint, state, SingleRankTransport(), batches), state


@pytest.mark.parametrize(
    "options",
    [
        "--use_offload --use_prefetch --compile off",
        "--use_offload --use_prefetch --compile on",
        "--use_offload --no_prefetch --max_grad_norm 0 --compile off",
        "--use_offload --fp32_gradients --compile off",
        "--no_offload --recompute none --compile off",
    ],
)
def test_a_step_neither_waits_nor_takes_memory(
    make_trainer: Callable[[str], Trainer], strict_steps: list[dict[str, int]], options: str
) -> None:
    assert len(list(make_trainer(options).train())) == 6

    assert strict_steps == [{"device": 0, "host": 0}] * 3


@pytest.mark.usefixtures("strict_steps")
def test_a_wait_within_a_step_would_be_seen(
    make_trainer: Callable[[str], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("--use_offload --compile off")
    monkeypatch.setattr(Stepper, "gradients_leave", lambda *_: torch.zeros(1, device="cuda").item())
    with pytest.raises(RuntimeError, match="synchronizing"):
        list(trainer.train())
