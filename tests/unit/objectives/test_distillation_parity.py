"""Divergences over the whole vocabulary, and their gradients, are TRL's, which harness/trl_divergences.py recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.loss_heads import head_of
from harness.trl_divergences import BETAS, TEMPERATURES, VOCAB, drawn
from harness.trl_parity import entries_of, sampled

from mobius.config.objective import Divergence, ObjectiveConfig, ObjectiveName
from mobius.models.loss import IGNORE_INDEX, TargetRows
from mobius.objectives.distillation import TEACHER_IDS, TEACHER_LOGPS, Distillation, teacher_numbers
from mobius.objectives.objective import StepScale

RECORDED: Mapping[str, Any] = json.loads(Path(__file__).with_name("trl_divergences.json").read_text(encoding="utf-8"))
NEAR_GRADIENTS = 1e-5
"""Share of the largest entry."""


def test_every_divergence_is_recorded() -> None:
    assert {*BETAS} == {*Divergence}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", Divergence)
def test_loss_and_gradients_are_those_of_trl(kind: Divergence, temperature: float) -> None:
    given = {name: torch.from_numpy(array) for name, array in drawn().items()}
    options = {"divergence": kind, "temperature": temperature, "top_k_logprobs": VOCAB}
    objective = Distillation(ObjectiveConfig(objective=ObjectiveName.DISTILL, teacher_model="t", **options))
    rows = TargetRows(torch.where(given["mask"] > 0, 3, IGNORE_INDEX))
    teacher = head_of(given["teacher"], given["teacher_head"], given["teacher_head"], 5, compiled=False)
    numbers = teacher_numbers(teacher, rows, teacher=objective.teacher, vocab_size=VOCAB)
    ids, logps = numbers.split([VOCAB, VOCAB + 1], -1)
    rows = TargetRows(rows.targets, {TEACHER_IDS: ids.int(), TEACHER_LOGPS: logps})

    of_head = torch.zeros_like(given["student_head"])
    student = head_of(given["student"], given["student_head"], of_head, 5, compiled=False)
    found, of_hidden = objective.loss(student, rows, StepScale(int(given["mask"].sum())))

    recorded = RECORDED[f"{kind} {temperature:g}"]
    assert float(found[0]) == pytest.approx(recorded["loss"], rel=1e-6, abs=1e-6)
    for name, gradient in {"student": of_hidden, "student_head": of_head}.items():
        apart = np.abs(sampled(gradient.numpy()) - entries_of(recorded[name])).max() / recorded[name]["largest"]
        assert apart <= NEAR_GRADIENTS, f"{name}: {apart:.2g} of the largest entry"
