"""The choice is the fastest of all that fit, by the simulation itself; what does not fit is never chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mobius.errors import GpuMemoryError
from mobius.plan import choice as choosing
from mobius.plan.cards import CARDS, estimate_profile
from mobius.plan.choice import Fitting, Job, choose_stages_and_chunks, predict, recut
from mobius.plan.partition import StageSpan, balanced_partition
from mobius.plan.profile import Profile
from mobius.plan.shape import ModelShape
from mobius.plan.stage_costs import StepRules


@pytest.fixture
def shape(llama_7b: ModelShape) -> ModelShape:
    return replace(llama_7b, layer_parameters=llama_7b.layer_parameters[:8])


def make_job(shape: ModelShape, *, most_parameters: int | None = None, resident: bool = False) -> Job:
    def profile_of(tokens: int) -> Profile:
        return estimate_profile(CARDS["RTX4090"], shape, microbatch_tokens=tokens, seq_length=512, num_ranks=2)

    def fit(spans: tuple[StageSpan, ...], num_chunks: int) -> Fitting:
        largest = max(span.num_parameters(shape) for span in spans)
        if most_parameters is not None and largest > most_parameters:
            raise GpuMemoryError(f"{largest} parameters")
        stages = frozenset(range(len(spans)))
        return Fitting((0, 0), stages, stages) if resident else Fitting((2, 2), frozenset(), frozenset())

    def rules(num_chunks: int) -> StepRules:
        return StepRules(clips=False, message_bytes=16 // num_chunks * 512 * shape.hidden_size * 2)

    return Job(
        shape=shape,
        num_ranks=2,
        batch_size=16,
        seq_length=512,
        rules=rules,
        profile_of=profile_of,
        fit=fit,
    )


def test_nothing_that_was_tried_is_noticeably_faster_than_the_choice(shape: ModelShape) -> None:
    choice = choose_stages_and_chunks(make_job(shape), num_stages=None, num_chunks=None)
    fastest = min(candidate.prediction.step_seconds for candidate in choice.tried)
    assert choice.best.prediction.step_seconds <= fastest * (1 + choosing.NOTICEABLE)
    tried = {(candidate.num_stages, candidate.num_chunks) for candidate in choice.tried}
    assert tried == {(stages, chunks) for stages in (2, 4, 6, 8, 10) for chunks in (1, 2, 4, 8)}


def test_a_given_number_stays(shape: ModelShape) -> None:
    job = make_job(shape)
    assert choose_stages_and_chunks(job, num_stages=4, num_chunks=None).best.num_stages == 4
    assert choose_stages_and_chunks(job, num_stages=None, num_chunks=8).best.num_chunks == 8


def test_what_does_not_fit_is_not_chosen(shape: ModelShape) -> None:
    # A layer and the embedding or the head fit, two layers with it do not.
    limit = shape.layer_parameters[0] + shape.head_parameters
    choice = choose_stages_and_chunks(make_job(shape, most_parameters=limit), num_stages=None, num_chunks=None)
    assert all(max(span.num_parameters(shape) for span in tried.spans) <= limit for tried in choice.tried)


def test_if_nothing_fits_the_reason_is_told(shape: ModelShape) -> None:
    with pytest.raises(GpuMemoryError, match="parameters"):
        choose_stages_and_chunks(make_job(shape, most_parameters=1), num_stages=None, num_chunks=None)


def test_an_uneven_cut_is_taken_where_the_simulation_says_that_it_is_faster(shape: ModelShape) -> None:
    job = make_job(shape, resident=True)
    even = balanced_partition(8, 4)
    choice = recut(job, even, 4)
    before = predict(job, even, 4).prediction.step_seconds
    if choice.best.spans == even:
        assert len(choice.tried) == 1
    else:
        assert choice.best.prediction.step_seconds < before


def test_the_costly_end_of_the_model_gets_fewer_layers(shape: ModelShape) -> None:
    # 128k tokens: the loss costs as much as two layers and a half, so the even cut leaves rank 0 waiting.
    wide = replace(shape, head_parameters=4 * shape.head_parameters, vocab_size=4 * shape.vocab_size)
    job = make_job(wide, resident=True)
    choice = recut(job, balanced_partition(8, 4), 8)
    sizes = [len(span.layers) for span in choice.best.spans]
    assert sizes[-1] < 2
    assert sum(sizes[1::2]) < sum(sizes[0::2])


def test_without_scipy_the_even_cut_is_used_and_a_line_says_so(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    choice = recut(make_job(shape), balanced_partition(8, 4), 4)
    assert choice.best.spans == balanced_partition(8, 4)
    assert any("scipy is not installed" in notice for notice in choice.notices)
