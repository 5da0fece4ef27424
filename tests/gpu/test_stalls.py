"""Within a step nothing waits for the device, takes device memory from the driver or page-locks memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from harness.sessions import make_single_trainer

from mobius.engine.executor import Executor
from mobius.engine.optimizer_stepper import OptimizerStepper
from mobius.engine.step_sums import StepSums
from mobius.training.session import Session
from mobius.training.trainer import Trainer

pytestmark = pytest.mark.gpu

OPTIONS = """--device cuda --bf16 --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16 --num_iterations 6
    --learning_rate 1e-3"""


@pytest.fixture
def strict_steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """From the fourth step on, a synchronizing call is an error within a step, and what it took is noted.

    Rehearsals, which have executors of their own, do not count.
    """
    run, taken, num_runs = Executor.run, list[dict[str, int]](), WeakKeyDictionary[Executor, int]()

    def counts() -> dict[str, int]:
        device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
        return {"device": device["num_device_alloc"], "host": host["num_host_alloc"]}

    def strict(self: Executor, *args: Any, **kwargs: Any) -> StepSums:
        num_runs[self] = num_runs.get(self, 0) + 1
        is_strict, before = num_runs[self] > 3, counts()
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        try:
            return run(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            if is_strict:
                taken.append({kind: after - before[kind] for kind, after in counts().items()})

    monkeypatch.setattr(Executor, "run", strict)
    return taken


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[[str], Trainer]]:
    """Page-locked memory is given back at the end, or the next test could not lock it."""
    sessions: list[Session] = []

    def make(options: str) -> Trainer:
        trainer, session = make_single_trainer(tmp_path, f"{OPTIONS} {options}")
        sessions.append(session)
        return trainer

    yield make
    torch.cuda.synchronize()
    for session in sessions:
        session.close()


@pytest.mark.parametrize(
    "options",
    [
        "--resident_stages 0 --use_prefetch --compile off",
        "--resident_stages 0 --use_prefetch --compile on",
        "--resident_stages 0 --no_prefetch --max_grad_norm 0 --compile off",
        "--resident_stages 0 --fp32_gradients --compile off",
        "--resident_stages 2 --compile off",
        "--resident_stages 2 --max_grad_norm 0 --compile on",
        "--resident_stages 3 --max_grad_norm 0 --fp32_gradients --compile off",
        "--no_offload --recompute none --compile off",
        "--no_offload --recompute none --max_grad_norm 0 --compile on",
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
    trainer = make_trainer("--resident_stages 0 --compile off")
    monkeypatch.setattr(OptimizerStepper, "on_gradients_ready", lambda *_: torch.zeros(1, device="cuda").item())
    with pytest.raises(RuntimeError, match="synchronizing"):
        list(trainer.train())
