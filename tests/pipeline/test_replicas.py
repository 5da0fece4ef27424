"""Replicas that share a step train what one pipeline trains with the same batch: loss, gradients and steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.grids import named
from harness.rounding import FP16, assert_near_after_adam, assert_near_gradients, reordered
from harness.runs import make_checkpoint, tensors_of
from harness.sessions import VOCAB, evaluator_of, in_sessions, random_samples, weights_of
from torch import Tensor

from mobius.data.batches import TrainingBatches
from mobius.engine.optimizer_stepper import StepCounts
from mobius.engine.stage_memory import StageMemory
from mobius.reporting.events import StepMetrics
from mobius.training.memory_check import run_warmup_step
from mobius.training.session import Session

STEPS, FEW_STEPS = 5, 2
USUAL = """--batch_size 12 --num_chunks 2 --num_stages 4 --seq_length 24 --packing off --num_iterations {}
    --learning_rate 2e-3 --warmup_steps 1 --weight_decay 0.1 --adam_epsilon 1e-5 --save_strategy no --fp32"""
CLIPPED, FREE = "--max_grad_norm 0.5", "--max_grad_norm 0"
LORA = "--use_lora --lora_rank 4 --lora_alpha 8 --learning_rate 1e-2"

TOKENS, NUM_MICROBATCHES = 12 * 24, 6
"""Of a step at most: gradients of all tokens are added in fp32, those of microbatches in the format of the run."""
Tensors = dict[str, Tensor]


@dataclass
class Trained:
    """What a rank has of a run, tensors by name."""

    steps: list[StepMetrics]
    gradients: Tensors
    """Those of the first step but for a factor (its first moments)."""
    before: Tensors
    """Weights."""
    weights: Tensors

    @property
    def numbers(self) -> list[tuple[float, float]]:
        """Loss and norm of each step."""
        return [(step.loss, step.grad_norm) for step in self.steps]


@dataclass
class Case:
    """A run as `num_replicas` pipelines of `num_ranks`."""

    num_replicas: int
    num_ranks: int
    options: str
    family: str = "llama"
    is_tied: bool = False
    more: str = ""
    """Options that only the replicas have."""
    num_steps: int = FEW_STEPS


CASES = {
    "streamed, clipped": Case(2, 1, CLIPPED),
    "streamed, three replicas of two": Case(3, 2, CLIPPED, num_steps=STEPS),
    "streamed, updated stage by stage": Case(2, 2, f"{FREE} --fp32_gradients"),
    "updates wait": Case(2, 1, f"{CLIPPED} --no_overlap_optimizer --no_prefetch"),
    "resident": Case(3, 1, f"{CLIPPED} --no_offload"),
    "some resident, updated stage by stage": Case(2, 2, f"{FREE} --resident_stages 1"),
    "tied, on one rank": Case(3, 1, CLIPPED, is_tied=True),
    "tied, on two ranks": Case(2, 2, f"{FREE} --resident_stages 1", is_tied=True),
    "another family, tied": Case(2, 1, CLIPPED, family="gemma3_text", is_tied=True),
    "packed": Case(2, 1, f"{CLIPPED} --packing on"),
    "rounds": Case(2, 1, f"{CLIPPED} --num_chunks 6 --num_rounds 3", more="--resident_stages 1"),
    "depth-first": Case(2, 2, f"{CLIPPED} --num_chunks 6", more="--compute_order depth_first --num_rounds 3"),
    "head on all ranks": Case(2, 3, f"{CLIPPED} --num_chunks 6 --num_stages 6", more="--spread_head"),
    "adapters": Case(2, 2, f"--max_grad_norm 0.05 {LORA}"),
    "slices": Case(2, 2, f"{CLIPPED} --num_slices 2"),
    "inputs of layers offloaded": Case(2, 1, f"{FREE} --activation_offloading on"),
    "frozen parts": Case(2, 1, f"{CLIPPED} --freeze embedding,layers.0-1"),
}


def train(session: Session, batches: TrainingBatches, num_steps: int) -> Trained:
    plan, asked = session.run_setup.plan, session.run_setup.config.pipeline
    assert (plan.num_slices, bool(plan.offloaded_activation_stages)) == (
        asked.num_slices or 1,
        asked.activation_offloading.value == "on",
    )
    trainer, before = session.trainer(batches), weights_of(session)
    done = [trainer.train_step()]
    trainer.drain()
    gradients: Tensors = {}
    for memory in session.stages.memory.values():
        state = memory.state
        flat = torch.zeros(state.layout.num_trained)
        for own in state.owned:
            flat[own.place] = own.state.exp_avg / _clip_factor(session, done[0].grad_norm)
        gradients |= state.layout.trained_views(flat)
    done += [trainer.train_step() for _ in range(num_steps - 1)]
    trainer.drain()
    return Trained(done, gradients, before, weights_of(session))


def _clip_factor(session: Session, norm: float) -> float:
    most = session.run_setup.config.optim.max_grad_norm
    return min(1.0, most / (norm + 1e-6)) if most else 1.0


def run(case: Case, folder: Path, num_replicas: int) -> list[Trained]:
    options = f"{USUAL.format(case.num_steps)} {case.options} {case.more if num_replicas > 1 else ''}"
    data = random_samples(60, 12 if "--packing on" in options else 24, seed=1)
    work = partial(train, num_steps=case.num_steps)
    return in_sessions(case.num_ranks, folder, options, data, work, num_replicas=num_replicas)


def merged(results: list[Trained], part: str) -> Tensors:
    return {name: value for result in results for name, value in getattr(result, part).items()}


ON_DEMAND = ["updates wait", "some resident, updated stage by stage", "tied, on one rank"]


@pytest.mark.parametrize("name", named({name: name for name in CASES}, on_demand=ON_DEMAND))
def test_replicas_train_what_one_pipeline_trains(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    number = case.num_ranks
    make_checkpoint(tmp_path / "model", is_tied=case.is_tied, family=case.family, vocab_size=VOCAB)
    alone, shared = (run(case, tmp_path / "model", replicas) for replicas in (1, case.num_replicas))
    assert_alike(alone, shared)
    assert CLIPPED not in case.options or shared[0].steps[0].grad_norm > 0.5, "nothing was clipped"
    for replica in range(1, case.num_replicas):
        others = merged(shared[replica * number : (replica + 1) * number], "weights")
        assert all(torch.equal(value, others[key]) for key, value in merged(shared[:number], "weights").items())


def assert_alike(alone: list[Trained], shared: list[Trained]) -> None:
    """All steps are those of one pipeline but for rounding."""
    num_elements = assert_alike_gradients(alone, shared)
    for step, own in zip(alone[0].steps, shared[0].steps, strict=True):
        assert own.loss == pytest.approx(step.loss, rel=reordered(TOKENS))
        assert own.grad_norm == pytest.approx(step.grad_norm, rel=reordered(num_elements))
    assert_alike_weights(alone, shared)


def assert_alike_gradients(alone: list[Trained], shared: list[Trained]) -> int:
    """Returns how many numbers they have."""
    gradients, expected = Tensors(), merged(alone, "gradients")
    for result in shared:  # each replica has its own part, and zeros elsewhere
        for key, value in result.gradients.items():
            gradients[key] = gradients.get(key, torch.zeros_like(value)) + value
    assert_near_gradients(gradients, expected, share=reordered(TOKENS))
    return sum(value.numel() for value in expected.values())


def assert_alike_weights(alone: list[Trained], shared: list[Trained]) -> None:
    rates, before = [step.learning_rate for step in alone[0].steps], merged(alone, "before")
    found, expected = merged(shared[: len(alone)], "weights"), merged(alone, "weights")
    assert_near_after_adam(found, expected, before, rates=rates, share=reordered(TOKENS))


@pytest.mark.parametrize("wrong_step", [1, 2])
def test_gradients_of_a_replica_that_are_a_thousandth_too_large_are_found(tmp_path: Path, wrong_step: int) -> None:
    def train_wrongly(session: Session, batches: TrainingBatches) -> Trained:
        for memory in session.stages.memory.values():
            if session.run_setup.ranks.rank:
                _enlarge(memory, wrong_step)
        return train(session, batches, FEW_STEPS)

    make_checkpoint(tmp_path / "model", vocab_size=VOCAB)
    case, data = CASES["streamed, clipped"], random_samples(60, 24, seed=1)
    options = f"{USUAL.format(FEW_STEPS)} {case.options}"
    alone = run(case, tmp_path / "model", 1)
    shared = in_sessions(1, tmp_path / "model", options, data, train_wrongly, num_replicas=2)
    with pytest.raises(AssertionError, match="of the update differs"):
        assert_alike_weights(alone, shared)
    with pytest.raises(AssertionError) if wrong_step == 1 else nullcontext():
        assert_alike_gradients(alone, shared)


def _enlarge(memory: StageMemory, wrong_step: int) -> None:
    """Let this replica have too large gradients from a step on."""
    seal, steps = memory.finish_gradients, count(1)

    def finish(*arguments: Any, **named: Any) -> Tensor:
        if next(steps) >= wrong_step:
            for gradient in memory.sums.views().values():
                gradient *= 1.001
        return seal(*arguments, **named)

    memory.finish_gradients = finish  # type: ignore[method-assign]


@pytest.mark.parametrize("num_samples", [3, 20])
def test_an_evaluation_between_steps_has_all_updates(tmp_path: Path, num_samples: int) -> None:
    """Also where there are fewer batches than replicas, some of which then load nothing."""
    make_checkpoint(tmp_path / "model", vocab_size=VOCAB)
    options = f"{USUAL.format(FEW_STEPS)} {CLIPPED} --resident_stages 1"

    def train(session: Session, batches: TrainingBatches) -> list[tuple[float, float]]:
        trainer, evaluator = session.trainer(batches), evaluator_of(session, random_samples(num_samples, 24, seed=2))
        return [(trainer.train_step().loss, evaluator.evaluate().loss) for _ in range(FEW_STEPS)]

    data = random_samples(60, 24, seed=1)
    alone, shared = (in_sessions(1, tmp_path / "model", options, data, train, num_replicas=number) for number in (1, 2))
    assert shared[0] == shared[1]
    for numbers, own in zip(alone[0], shared[0], strict=True):
        assert own == pytest.approx(numbers, rel=1e-5)


SMALL = f"--batch_size 8 --seq_length 24 --num_iterations {FEW_STEPS}"
REHEARSED = {  # ranks, replicas, options
    "rounds": (1, 1, f"{SMALL} --num_stages 4 --num_chunks 4 --num_rounds 4 --resident_stages 1"),
    "packed": (1, 1, f"{SMALL} --num_stages 2 --num_chunks 2 --packing on --max_grad_norm 1"),
    "slices": (1, 1, f"{SMALL} --num_stages 4 --num_chunks 2 --num_slices 2 --activation_offloading on"),
    "replicas": (2, 2, f"{USUAL.format(FEW_STEPS)} {FREE} --resident_stages 1"),
}


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_leaves_nothing_in_what_is_trained(tmp_path: Path, name: str) -> None:
    """On GPUs each rank plays a step without its neighbours first; replicas reduce what comes of that."""
    num_ranks, num_replicas, options = REHEARSED[name]
    make_checkpoint(tmp_path / "model", vocab_size=VOCAB)

    def work(session: Session, batches: TrainingBatches, *, rehearses: bool) -> Trained:
        if rehearses:
            run_warmup_step(session.run_setup, session.stages)
        return train(session, batches, FEW_STEPS)

    data = random_samples(60, 24, seed=1)
    plain, rehearsed = (
        in_sessions(
            num_ranks,
            tmp_path / "model",
            options,
            data,
            partial(work, rehearses=rehearses),
            num_replicas=num_replicas,
        )
        for rehearses in (False, True)
    )
    for found, expected in zip(rehearsed, plain, strict=True):
        assert found.numbers == expected.numbers
        assert all(torch.equal(value, expected.weights[name]) for name, value in found.weights.items())


Judged = list[tuple[float, float, float, int]]


def judge(session: Session, batches: TrainingBatches) -> Judged:
    """Loss, perplexity, hits and targets of two datasets before the first step and behind the second."""
    evaluator = evaluator_of(session, *(random_samples(number, 24, seed=number) for number in (7, 17)))
    trainer, found = session.trainer(batches), Judged()
    for num_steps in (0, 2):
        for _ in range(num_steps):
            trainer.train_step()
        trainer.drain()
        scores = evaluator.evaluate()
        found += [(*each.metrics.values(), each.num_targets) for each in (scores, *scores.by_dataset.values())]
    return found


@pytest.mark.parametrize(("num_replicas", "num_ranks"), [(2, 2), (3, 1)])
def test_replicas_judge_as_one_pipeline_does(tmp_path: Path, num_replicas: int, num_ranks: int) -> None:
    make_checkpoint(tmp_path / "model", vocab_size=VOCAB)
    data, options = random_samples(60, 24, seed=1), f"{USUAL.format(2)} {CLIPPED}"
    alone = in_sessions(num_ranks, tmp_path / "model", options, data, judge)[0]
    shared = in_sessions(num_ranks, tmp_path / "model", options, data, judge, num_replicas=num_replicas)
    assert shared == [shared[0]] * (num_replicas * num_ranks)  # one decision: each knows everybody's
    assert len(alone) == 6
    for numbers, own in zip(alone, shared[0], strict=True):
        assert own == pytest.approx(numbers, rel=1e-5)


Scaled = list[tuple[StepMetrics, StepCounts, Tensors]]


def train_with_overflow(session: Session, batches: TrainingBatches) -> Scaled:
    """Three steps: numbers, counts with the loss scale, and weights. In the second, a gradient has an infinite entry.

    It is one on the last of all ranks, whose other replicas have finite ones.
    """
    trainer, ranks, stages = session.trainer(batches), session.run_setup.ranks, session.stages.memory
    found, memory = Scaled(), stages[max(stages)]
    seal = memory.finish_gradients

    def overflow(*arguments: Any, **named: Any) -> Tensor:
        if len(found) == 1 and ranks.rank == ranks.num_ranks - 1:
            list(memory.sums.views().values())[-1].view(-1)[-1] = torch.inf  # the last replica owns it
        return seal(*arguments, **named)

    memory.finish_gradients = overflow  # type: ignore[method-assign]
    for _ in range(3):
        done = trainer.train_step()
        trainer.drain()
        found.append((done, trainer.counts, weights_of(session)))
    return found


@pytest.mark.parametrize(("num_replicas", "num_ranks", "more"), [(2, 2, ""), (3, 1, "--resident_stages 2")])
def test_an_overflow_of_one_replica_skips_the_step_of_all(
    tmp_path: Path, num_replicas: int, num_ranks: int, more: str
) -> None:
    make_checkpoint(tmp_path / "model", vocab_size=VOCAB)
    options = f"{USUAL.format(3).replace('--fp32', '--fp16')} {FREE} --learning_rate 2e-3 {more}"
    data = random_samples(60, 24, seed=1)
    alone, shared = (
        in_sessions(num_ranks, tmp_path / "model", options, data, train_with_overflow, num_replicas=number)
        for number in (1, num_replicas)
    )
    for rank, found in enumerate(shared):
        expected = alone[rank % num_ranks]
        assert [counts for _, counts, _ in found] == [counts for _, counts, _ in expected]
        assert [step.loss for step, _, _ in found] == pytest.approx(
            [step.loss for step, _, _ in expected], rel=2 * FP16
        )
        (_, before, first), (_, skipped, second), (_, after, third) = found
        assert (skipped.num_skipped, after.num_skipped) == (before.num_skipped + 1,) * 2
        assert skipped.loss_scale == before.loss_scale / 2
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert any(not torch.equal(value, third[name]) for name, value in first.items())
        assert all(torch.equal(value, shared[rank % num_ranks][2][2][name]) for name, value in third.items())
        rates = [found[number][0].learning_rate for number in (0, 2)]
        given, share = tensors_of(tmp_path / "model"), reordered(NUM_MICROBATCHES, FP16)
        assert_near_after_adam(third, expected[2][2], given, rates=rates, share=share, unit=FP16)
