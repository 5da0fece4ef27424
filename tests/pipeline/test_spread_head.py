"""Ranks that share the head train what its owner trains alone: norm and head but for rounding, all else to the bit.

Each rank adds up the gradients of its own microbatches, and the sums are added after that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.grids import named
from harness.packed_rows import LENGTH, ROWS, make_packed_batch
from harness.pipelines import Pipeline, Step, distance, make_batch, make_model, model_of, plain_step
from harness.rounding import assert_near_after_adam, reordered
from harness.runs import make_checkpoint, make_dataset, run_main, steps_of
from harness.sessions import VOCAB, evaluator_of, in_sessions, random_samples, weights_of
from harness.tiny_families import tiny_config
from torch import Tensor

from mobius.data.batches import TrainingBatches
from mobius.reporting.events import StepMetrics
from mobius.schedule.plan import RecomputeLevel
from mobius.schedule.spec import ComputeOrder
from mobius.training.memory_check import run_warmup_step
from mobius.training.session import Session

PIPELINES = ((2, 1, 4), (2, 3, 5), (3, 1, 6), (3, 2, 7), (4, 1, 8), (4, 2, 4), (4, 3, 4))
"""Ranks, stages of each, microbatches."""
WAYS: dict[str, dict[str, Any]] = {
    "streamed, sums travel": {},
    "sums stay, activations saved": {"num_sum_buffers": 9, "keeps_graphs": True},
    "products saved": {"num_sum_buffers": 9, "keeps_graphs": True, "recompute_level": RecomputeLevel.ELEMENTWISE},
    "resident": {"num_slots": None},
    "small chunks of logits": {"loss_chunk_tokens": 5},
}
AT_THE_END = ("model.norm.weight", "lm_head.weight")
FORMATS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference of a gradient of norm and head, as a share of the largest entry, stored in the format."""


def assert_alike(found: Step, expected: Step, most: float, *, is_tied: bool = False, where: object = "") -> None:
    """Loss and gradients are the same, those of norm and head but for rounding."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0.0)
    assert found[1].keys() == expected[1].keys(), where
    near = {*AT_THE_END, *(("model.embed_tokens.weight",) if is_tied else ())}
    for name, gradient in expected[1].items():
        if name in near:
            assert (found[1][name] - gradient).abs().max() <= most * gradient.abs().max(), (where, name)
        else:
            assert torch.equal(found[1][name], gradient), (where, name)


@pytest.mark.grid
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_shared_head_changes_nothing_but_how_its_own_gradients_are_added(family: str, way: str) -> None:
    """Each case has every third pipeline; together they have each with each format."""
    first = [*WAYS].index(way) + (family == "llama-tied")
    for turn in range(first % 3, len(PIPELINES), 3):
        num_ranks, per_rank, number = PIPELINES[turn]
        model = make_model(family, max(4, num_ranks * per_rank))
        batch, dtype = make_batch(number), [*FORMATS][(first // 3 + turn) % len(FORMATS)]
        usual = {"num_slots": per_rank} | WAYS[way]
        rounds = 2 if number % (2 * num_ranks) == 0 else 1
        alone = Pipeline(
            model,
            num_ranks,
            per_rank,
            number,
            dtype=dtype,
            num_rounds=rounds,
            order=ComputeOrder.DEPTH_FIRST,
            **usual,
        )
        shared = replace(alone, spreads_head=True, gradients={}, _stages=[])
        where = num_ranks, per_rank, number, dtype
        assert_alike(shared.step(batch), alone.step(batch), FORMATS[dtype], is_tied="tied" in family, where=where)


@pytest.mark.parametrize("number", [4, 7])
def test_loss_and_gradients_are_those_of_transformers(number: int) -> None:
    model, batch = make_model("llama", 4), make_batch(number)
    loss, gradients = plain_step(model, batch, number)
    found = Pipeline(model, 4, 1, number, 1, order=ComputeOrder.DEPTH_FIRST, spreads_head=True).step(batch)
    torch.testing.assert_close(found[0], loss, rtol=1e-6, atol=0.0)
    assert distance(found[1], gradients) < 1e-7


def test_packed_rows_and_a_router_loss_go_to_the_head_of_any_rank() -> None:
    for model, batch in (
        (make_model("llama", 4), make_packed_batch(ROWS, LENGTH, 4)),
        (model_of(tiny_config("qwen3_moe")), make_batch(4)),
    ):
        alone = Pipeline(model, 3, 1, 4, 1, order=ComputeOrder.DEPTH_FIRST)
        expected = alone.step(batch)
        found = replace(alone, spreads_head=True, gradients={}, _stages=[]).step(batch)
        assert_alike(found, expected, 1e-6)


USUAL = """--batch_size 10 --num_chunks 5 --seq_length 24 --packing off --num_iterations 2 --learning_rate 2e-3
    --warmup_steps 1 --weight_decay 0.1 --adam_epsilon 1e-5 --save_strategy no --fp32 --num_stages 6
    --compute_order depth_first --val_size 4 --eval_strategy steps --eval_steps 2"""
RUNS = {
    "clipped": "--max_grad_norm 0.5",
    "not clipped, some resident": "--max_grad_norm 0 --resident_stages 1",
    "all resident, fp32 gradients": "--max_grad_norm 0 --no_offload --fp32_gradients",
    "adapters": "--max_grad_norm 0.05 --use_lora --lora_rank 4 --learning_rate 1e-2",
    "frozen head": "--max_grad_norm 0.5 --freeze head,embedding",
}


Trained = tuple[list[StepMetrics], list[float], dict[str, Tensor], dict[str, Tensor]]


def train(session: Session, batches: TrainingBatches) -> Trained:
    """Steps after a rehearsal, the loss of an evaluation, and the weights before and after."""
    run_warmup_step(session.run_setup, session.stages)
    evaluator, evaluated = evaluator_of(session, random_samples(9, 24, seed=5)), list[float]()
    trainer, before = session.trainer(batches), weights_of(session)
    steps = []
    for number in range(2):
        steps.append(trainer.train_step())
        if number % 2:
            trainer.drain()
            evaluated.append(evaluator.evaluate().loss)
    return steps, evaluated, before, weights_of(session)


@pytest.mark.parametrize("options", named(RUNS, on_demand=["clipped", "all resident, fp32 gradients"]))
def test_steps_and_evaluations_of_three_ranks_are_those_without(tmp_path: Path, options: str) -> None:
    is_tied = options in (RUNS["not clipped, some resident"], RUNS["all resident, fp32 gradients"])
    make_checkpoint(tmp_path / "model", num_layers=6, vocab_size=VOCAB, is_tied=is_tied)
    words, data = (f"{USUAL} {options} {more}" for more in ("", "--spread_head")), random_samples(90, 24, seed=1)
    alone, shared = (in_sessions(3, tmp_path / "model", each, data, train) for each in words)
    share = reordered(10 * 24)  # tokens of a step
    before, weights = ({name: value for each in alone for name, value in each[part].items()} for part in (2, 3))
    for (steps, losses, *_), (found, found_losses, *_) in zip(alone, shared, strict=True):
        assert [step.loss for step in found] == pytest.approx([step.loss for step in steps], rel=share)
        norms = pytest.approx(
            [step.grad_norm for step in steps], rel=reordered(sum(map(Tensor.numel, weights.values())))
        )
        assert [step.grad_norm for step in found] == norms
        assert found_losses == pytest.approx(losses, rel=share)
    own = {name: value for each in shared for name, value in each[3].items()}
    rates = [step.learning_rate for step in alone[0][0]]
    assert_near_after_adam(own, weights, before, rates=rates, share=share)


OF_RANKS = """--model_path model --dataset data.jsonl --num_chunks 4 --batch_size 8 --seq_length 24 --num_iterations 4
    --fp32 --num_stages 3 --save_steps 2 --save_total_limit 0 --learning_rate 1e-3 --warmup_steps 1
    --save_params none --compute_order depth_first"""


def test_processes_share_a_head_and_checkpoints_do_not_tell_it(tmp_path: Path) -> None:
    """Three ranks over gloo go on as they began, to the bit, and without sharing it but for rounding."""
    num_elements = make_checkpoint(tmp_path / "model", num_layers=3).num_parameters()
    make_dataset(tmp_path / "data.jsonl", 60)

    def train(name: str, options: str) -> list[tuple[float, float]]:
        finished = run_main(3, tmp_path, *f"{options} --save_dir {name} --save_results {name}.txt".split())
        assert finished.returncode == 0, finished.stdout
        return [(row["loss"], row["grad_norm"]) for row in steps_of(tmp_path / name)]

    def resumed(name: str, more: str = "") -> list[tuple[float, float]]:
        return train(name, f"--resume_from_checkpoint shared/checkpoint-2 --save_params none {more}")[-2:]

    shared = train("shared", f"{OF_RANKS} --spread_head")
    assert resumed("as-before") == shared[2:]
    alone = resumed("alone", "--no_spread_head")
    for part, count in ((0, 8 * 24), (1, num_elements)):
        assert [step[part] for step in alone] == pytest.approx(
            [step[part] for step in shared[2:]], rel=reordered(count)
        )
