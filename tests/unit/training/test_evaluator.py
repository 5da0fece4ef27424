"""An evaluation scores every sample once, as the plain model does, and leaves no trace in what is trained."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.live_bytes import LiveBytes, count_step
from harness.pipelines import CPU
from harness.rank_memory import rules_of
from harness.runs import make_checkpoint
from harness.samples import dataset_of, row_of
from harness.schedules import even_cuts, spec_of
from harness.sessions import VOCAB, evaluator_of, in_sessions, random_samples
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mobius.data.batches import TrainingBatches
from mobius.data.token_store import TokenizedDataset
from mobius.distributed.transport import MessageFormat, SingleRankTransport, WarmupTransport
from mobius.engine.adamw import FlatAdamW
from mobius.engine.stage_memory import StageMemory
from mobius.engine.step_inputs import StepBatch
from mobius.errors import DataError
from mobius.limits import max_sends_in_flight
from mobius.models.blocks import ModelParts
from mobius.objectives.cross_entropy import SUPERVISED
from mobius.objectives.objective import StepScale
from mobius.schedule.build import build_schedule
from mobius.schedule.partition import partition_of
from mobius.schedule.plan import Plan
from mobius.schedule.spec import ComputeOrder
from mobius.training.evaluation.evaluator import (
    MAX_BATCHES_PER_PASS,
    EvaluationResult,
    Evaluator,
    batches_per_pass,
)
from mobius.training.session import Session
from mobius.training.stages import RankStages, StageOptions

SHAPE = "--batch_size 4 --num_chunks 2 --seq_length 16 --fp32 --num_iterations 3 --learning_rate 0.01"
SHAPE += " --warmup_steps 0 --lr_scheduler_type constant"
KINDS = {
    "streamed, clipped": "--num_stages 4 --resident_stages 0",
    "streamed, updated under the step": "--num_stages 4 --resident_stages 0 --max_grad_norm 0",
    "one slot": "--num_stages 4 --resident_stages 0 --no_prefetch --max_grad_norm 0",
    "resident": "--num_stages 2 --no_offload --max_grad_norm 0",
    "mixed": "--num_stages 4 --resident_stages 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, is_tied=True, vocab_size=VOCAB)
    return path


def digest_of(memory: dict[int, StageMemory]) -> str:
    digest = hashlib.sha256()
    for _, own in sorted(memory.items()):
        for tensor in (own.state.weights, own.state.read_master(), own.state.exp_avg, own.state.exp_avg_sq):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "num_ranks", "packing"),  # each kind with both numbers and both words
    [
        (kind, num_ranks, ("off", "on")[(place + num_ranks) % 2])
        for place, kind in enumerate(KINDS)
        for num_ranks in (1, 2)
    ],
)
def test_an_evaluation_between_steps_changes_no_bit_of_training(
    folder: Path, kind: str, num_ranks: int, packing: str
) -> None:
    data, held = random_samples(40, 16), random_samples(9, 16, seed=3)

    def train(session: Session, batches: TrainingBatches, *, judged: bool) -> tuple[list[float], list[float], str]:
        trainer = session.trainer(batches, has_kernel=False)
        evaluator, losses, judgements = evaluator_of(session, held), list[float](), list[float]()
        if judged:
            judgements.append(evaluator.evaluate().loss)
        for step in trainer.train():
            losses += [step.loss, step.grad_norm]
            if judged:
                judgements.append(evaluator.evaluate().loss)
        return losses, judgements, digest_of(dict(session.stages.memory))

    options = f"{SHAPE} {KINDS[kind]} --packing {packing}"
    plain = in_sessions(num_ranks, folder, options, data, lambda *given: train(*given, judged=False))
    judged = in_sessions(num_ranks, folder, options, data, lambda *given: train(*given, judged=True))

    for (losses, none, digest), (others, judgements, other) in zip(plain, judged, strict=True):
        assert not none
        assert losses == others
        assert digest == other
        assert len(set(judgements)) == 4, "each sees the weights behind its step"


def test_an_evaluation_waits_for_the_updates_of_the_step_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are waited for beforehand makes no difference, however long they take."""
    update = FlatAdamW.update

    def slow(self: FlatAdamW, *given: Any, **named: Any) -> None:
        time.sleep(0.05)
        update(self, *given, **named)

    monkeypatch.setattr(FlatAdamW, "update", slow)
    data, held = random_samples(40, 16), random_samples(9, 16, seed=1)

    def train(session: Session, batches: TrainingBatches, *, drains: bool) -> list[float]:
        trainer, evaluator = session.trainer(batches, has_kernel=False), evaluator_of(session, held)
        losses = []
        for _ in trainer.train():
            if drains:
                for memory in session.stages.memory.values():
                    memory.weights.wait_until_updated()
            losses.append(evaluator.evaluate().loss)
        return losses

    options = f"{SHAPE} {KINDS['streamed, updated under the step']} --packing off"
    at_once = in_sessions(2, folder, options, data, lambda *given: train(*given, drains=False))
    drained = in_sessions(2, folder, options, data, lambda *given: train(*given, drains=True))
    assert at_once == drained


def plain_scores(model: PreTrainedModel, *datasets: TokenizedDataset) -> tuple[float, int, int]:
    """Summed loss, hits and targets of transformers alone, sample by sample."""
    total, hits, targets = 0.0, 0, 0
    for dataset in datasets:
        for index in range(len(dataset)):
            ids, is_target = row_of(dataset.sample(index))
            tokens = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
            labels = torch.where(torch.from_numpy(is_target.copy()), tokens, -100)
            with torch.no_grad():
                made = model(input_ids=tokens, labels=labels, num_items_in_batch=1)
            total += float(made.loss)
            hits += int((made.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
            targets += int((labels[:, 1:] != -100).sum())
    return total, hits, targets


def easy(model: PreTrainedModel, dataset: TokenizedDataset) -> TokenizedDataset:
    """The samples with every other target replaced by what the model says there."""
    rows = []
    for index in range(len(dataset)):
        ids, is_target = (each.copy() for each in row_of(dataset.sample(index)))
        for place in range(1, len(ids), 2):
            with torch.no_grad():
                ids[place] = int(
                    model(input_ids=torch.from_numpy(ids[None, :place].astype(np.int64))).logits[0, -1].argmax()
                )
        rows.append((ids, is_target))
    return dataset_of(rows)


@pytest.mark.parametrize("packing", ["off", "on"])
def test_scores_are_those_of_the_plain_model_and_the_same_however_the_model_is_cut(folder: Path, packing: str) -> None:
    """To the bit over ranks, stages and residency; one sample after the other gives them within rounding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    sets = easy(model, random_samples(9, 16, seed=1)), easy(model, random_samples(30, 9, seed=2))
    total, hits, targets = plain_scores(model, *sets)
    assert 0 < hits < targets
    results = list[EvaluationResult]()
    residencies = ("--resident_stages 0", "--no_offload")
    cuts = ((1, 4), (2, 4), (4, 4)) if packing == "on" else ((1, 1), (2, 2), (4, 4))
    for number, (num_ranks, num_stages) in enumerate(cuts, start=packing == "on"):
        found = in_sessions(
            num_ranks,
            folder,
            f"{SHAPE} --num_stages {num_stages} {residencies[number % 2]} --packing {packing}",
            random_samples(40, 16),
            lambda session, _: evaluator_of(session, *sets).evaluate(show_progress=True),
        )
        results += found
    for result in results:
        first = results[0]
        assert result.metrics == first.metrics
        assert result.by_dataset == first.by_dataset
    assert first.loss == pytest.approx(total / targets, rel=1e-6)
    assert first.metrics["perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-5)
    assert first.metrics["token_accuracy"] == hits / targets
    assert (first.num_targets, first.num_samples) == (targets, 39)
    assert first.num_tokens == sum(len(each.input_ids) for each in sets)
    assert first.tokens_per_second == pytest.approx(first.num_tokens / first.seconds)
    assert list(first.by_dataset) == ["a", "b"]
    for scores, each in zip(first.by_dataset.values(), sets, strict=True):
        own, own_hits, own_targets = plain_scores(model, each)
        assert scores.loss == pytest.approx(own / own_targets, rel=1e-6)
        assert (scores.metrics["token_accuracy"], scores.num_samples) == (own_hits / own_targets, len(each))


def test_datasets_of_one_name_are_told_apart_and_a_single_one_is_the_total(folder: Path) -> None:
    held = random_samples(5, 16, seed=1)

    def judge(session: Session, _: TrainingBatches) -> tuple[EvaluationResult, EvaluationResult]:
        several = evaluator_of(session, held, held, held, names=["x", "x", "x (2)"])
        return several.evaluate(), evaluator_of(session, held).evaluate()

    ((several, single),) = in_sessions(1, folder, f"{SHAPE} --num_stages 2", random_samples(8, 16), judge)
    assert list(several.by_dataset) == ["x", "x (2)", "x (2) (2)"]
    assert all(each == next(iter(several.by_dataset.values())) for each in several.by_dataset.values())
    assert single.by_dataset == {}
    assert (single.loss, 3 * single.num_targets) == (several.loss, several.num_targets)


def test_without_samples_the_options_that_give_some_are_named(folder: Path) -> None:
    nothing = ("x", random_samples(4, 8), np.empty(0, dtype=np.int64))

    def judge(session: Session, _: TrainingBatches) -> None:
        Evaluator(session, [nothing], pad_token_id=0)

    with pytest.raises(DataError, match="--eval_dataset, or --val_size"):
        in_sessions(1, folder, f"{SHAPE} --num_stages 2", random_samples(8, 16), judge)


def test_a_loss_beyond_what_a_float_can_raise_has_an_infinite_perplexity() -> None:
    def perplexity(loss: float) -> float:
        return SUPERVISED.scores({"loss": loss, "hits": 0.0}, StepScale(1))["perplexity"]

    assert perplexity(0.0) == 1.0
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_a_pass_takes_as_many_batches_as_a_step_keeps_activations_for() -> None:
    def number(num_ranks: int, *sizes: int) -> int:
        return batches_per_pass(Plan(num_ranks, len(sizes), 2, (2,) * num_ranks, cuts=partition_of(sizes)))

    assert number(1, 4) == MAX_BATCHES_PER_PASS, "no message waits anywhere"
    assert number(2, 2, 2) == 3, "the first rank keeps the inputs of two layers"
    assert number(2, 2, 2, 2, 2) == 3, "the second rank, whose last stage keeps nothing"
    assert number(2, 0, 1, 2, 1) == 2
    assert number(2, 0, 0, 2, 2) == 1
    assert number(1, 20, 20) == MAX_BATCHES_PER_PASS


@pytest.mark.grid
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_a_pass_takes_no_more_memory_than_a_step(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Every tensor is counted on each rank, with as many messages kept as ever wait."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        vocab_size=500,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    cuts = even_cuts(8, num_ranks * stages_per_rank)
    plan = Plan(num_ranks, len(cuts), num_microbatches, (2,) * num_ranks, cuts=cuts)
    for rank in range(num_ranks):
        training = count_step(
            config,
            plan,
            rank,
            batch_size=2 * num_microbatches,
            seq_length=32,
            dtype=torch.float32,
            loss_chunk_tokens=64,
        )
        evaluating = count_pass(config, plan, rank, rows=2, seq_length=32)
        assert evaluating <= training, f"rank {rank}: {evaluating / training:.2f}"


def count_pass(config: LlamaConfig, plan: Plan, rank: int, *, rows: int, seq_length: int) -> int:
    stages = RankStages.allocate(
        ModelParts(config, CPU),
        plan,
        rank,
        StageOptions(dtype=torch.float32, rules=rules_of(torch.float32), loss_chunk_tokens=64),
        device=CPU,
    )
    stages.layer_inputs(seq_length)  # rotary embeddings and masks are made once
    plan = replace(plan, num_microbatches=plan.num_microbatches * batches_per_pass(plan))
    schedule = build_schedule(
        spec_of(
            plan.num_ranks,
            plan.stages_per_rank,
            plan.num_microbatches,
            plan.slots,
            plan.resident,
            order=ComputeOrder.EVALUATION,
        )
    )
    tokens = torch.randint(0, config.vocab_size, (rows * plan.num_microbatches, seq_length))
    transport = SingleRankTransport() if plan.num_ranks == 1 else WarmupTransport(
        rank=rank,
        device=CPU,
        message_format=MessageFormat((rows, seq_length, config.hidden_size), torch.float32),
        max_pending_sends=max_sends_in_flight(plan.num_microbatches),
    )  # fmt: skip
    executor = stages.executor(schedule, transport)
    batch = StepBatch(tokens, tokens, tokens.numel(), tokens.numel(), len(tokens))
    with LiveBytes() as live:
        executor.evaluate(batch)
    return live.peak
