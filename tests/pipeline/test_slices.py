"""Slices of sequences as microbatches: loss and gradients are those of whole sequences, to rounding."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import (
    FAMILIES,
    Pipeline,
    Step,
    assert_near,
    assert_same_bits,
    make_batch,
    make_model,
    plain_step,
)
from harness.runs import assert_equal_tensors, steps_of
from harness.sliced_rows import SETTINGS, Setting, assert_slices_are_as_near_as_the_plain_model, sliced
from harness.small_run import Run
from torch import Tensor
from transformers import PreTrainedModel

from mobius.engine import sliced_layers
from mobius.engine.step_inputs import StepBatch
from mobius.models.slice_attention import attend_slice


@pytest.mark.grid
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_slices_are_as_near_to_the_exact_gradients_as_the_plain_model_is(family: str, setting: Setting) -> None:
    assert_slices_are_as_near_as_the_plain_model(make_model(family, max(6, setting[0] * setting[1])), setting)


@lru_cache(maxsize=3)
def alone(family: str, num_groups: int) -> tuple[PreTrainedModel, StepBatch, Step]:
    """Model and batch, and the step of its documents alone, which several pipelines are compared with."""
    model, batch = make_model(family, 6), make_packed_batch(ROWS, LENGTH, num_groups)
    return model, batch, documents_alone(model, ROWS, batch)


@pytest.mark.grid
@pytest.mark.parametrize("num_slices", [2, 4, 5])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_documents_across_slices_give_what_each_gives_alone(family: str, num_slices: int) -> None:
    """Documents of a row that end within slices, begin in them, and span several."""
    pipelines = {2: (1, 1, None), 4: (2, 2, 2), 5: (3, 4, 1)}
    for num_ranks, groups, num_slots in (each for number, each in pipelines.items() if number != num_slices):
        model, batch, expected = alone(family, groups)
        found = sliced(model, (num_ranks, 2, groups, num_slices, num_slots, 1, False)).step(batch)
        assert_near(found, expected, loss=1e-6, gradients=2e-6)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_stages_without_layers_pass_slices_on(is_offloaded: bool) -> None:
    """Embedding and head are stages of their own where there are more stages than layers."""
    model, batch = make_model("llama", 4), make_batch(2)
    expected = plain_step(model, batch, 2)
    for num_ranks, stages_per_rank, num_slots in ((2, 3, 2), (3, 2, None), (1, 5, 1)):
        found = sliced(model, (num_ranks, stages_per_rank, 2, 3, num_slots, 1, is_offloaded)).step(batch)
        assert_near(found, expected, loss=1e-6, gradients=2e-6)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.extended), "gemma3"])
def test_saved_attention_changes_no_bit_and_is_not_recomputed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_layers = 6  # one in each stage of the longest pipeline, and both kinds
    model, calls = make_model(family, num_layers), list[int]()

    def counting(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return attend_slice(*given)

    monkeypatch.setattr(sliced_layers, "attend_slice", counting)
    for turn, setting in enumerate(SETTINGS[2:4]):
        sequences, num_slices = setting[2:4]
        batch, runs = make_batch(sequences), list[tuple[Step, int]]()
        for saves_attention, is_offloaded in ((False, False), (True, True), (True, False))[: 2 + turn]:
            calls.clear()
            pipeline = sliced(
                model,
                (*setting[:-1], is_offloaded),
                dtype=(torch.float32, torch.bfloat16)[turn % 2],
                tile_tokens=2 if turn % 2 else None,
                saves_attention=saves_attention,
            )
            runs.append((pipeline.step(batch), len(calls)))
        (step, num_calls), *others = runs
        for own, num_own in others:
            assert_same_bits(own, step, setting)
            assert num_own == num_layers * sequences * num_slices < num_calls


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_evaluation_in_slices_gives_the_losses_of_whole_rows(is_packed: bool) -> None:
    model = make_model("qwen3", 6)
    batch = make_packed_batch(ROWS, LENGTH, 2) if is_packed else make_batch(4)
    for num_ranks, stages_per_rank in ((1, 1), (2, 2), (4, 2)):
        whole = Pipeline(model, num_ranks, stages_per_rank, 2, 2).evaluate(batch)
        parts = Pipeline(model, num_ranks, stages_per_rank, 2 * 4, 2, num_slices=4).evaluate(batch)

        assert torch.allclose(parts.losses.view(2, 4).sum(1), whole.losses, rtol=1e-5)
        assert torch.equal(parts.num_correct.view(2, 4).sum(1), whole.num_correct)


USUAL = "--num_chunks 2 --num_stages 4 --learning_rate 1e-3 --save_params none --max_grad_norm 0.5 --num_iterations"


def losses(folder: str) -> list[float]:
    return [step["loss"] for step in steps_of(Path(folder))]


@pytest.mark.extended  # half a minute each
@pytest.mark.parametrize("options", ["--packing on", "--packing off --num_rounds 2 --resident_stages 1"])
def test_twenty_steps_in_slices_stay_within_rounding_of_whole_sequences(run: Run, options: str) -> None:
    words = f"{USUAL} 20 {options}".split()
    run(*words, "--save_dir", "whole", "--save_results", "whole.txt")
    in_slices = ["--num_slices", "4", "--activation_offloading", "on", "--tile_tokens", "3"]
    run(*words, *in_slices, "--save_dir", "sliced", "--save_results", "sliced.txt")

    assert len(losses("whole")) == 20
    assert losses("sliced") == pytest.approx(losses("whole"), rel=1e-5)
    assert losses("whole")[-1] < losses("whole")[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--activation_offloading off", "--activation_offloading on"),
        (
            "--num_slices 4 --packing on --recompute full --activation_offloading off",
            "--num_slices 4 --packing on --recompute linear --activation_offloading on",
        ),
    ],
    ids=["whole sequences", "slices"],
)
def test_offloading_and_saved_attention_change_no_bit_of_a_run(run: Run, one: str, other: str) -> None:
    for name, options in (("one", one), ("other", other)):
        run(*f"{USUAL} 2 {options} --save_dir {name} --save_results {name}.txt".split())

    assert losses("one") == losses("other")
    assert_equal_tensors(Path("one"), Path("other"))
