"""An objective of another kind needs no change of the product: a class, a format of its rows, and a line in each table.

It learns to rank three answers by scores that the data carry, from sums over sequences that are compared with those of
the weights before step 1, and logs two numbers; evaluations, resumed runs and weighted tokens come with the seam.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.small_run import Run, run, saved_inputs, workplace  # noqa: F401
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from mobius.config.objective import ObjectiveName
from mobius.data.formats import FORMATS_OF, RecordFormat
from mobius.data.messages import Completion, Unit
from mobius.models.loss import EXISTS, TargetRows
from mobius.objectives.objective import REFERENCE
from mobius.objectives.registry import OBJECTIVES
from mobius.objectives.sequences import SequenceObjective, sum_sequences

SCORES = (1.0, 0.5, -2.0)


class Ranking(SequenceObjective):
    """Softplus of a unit's scores times its sequences' differences to the reference."""

    rows_kind = "triples"
    sequence_values = ("score", REFERENCE)
    number_counts: Mapping[str, str] = {"loss": "units", "spread": "units", "logps": "sequences"}

    def counts(self, rows: TargetRows) -> Mapping[str, float]:
        number = float(rows.sequence_values[EXISTS].sum())
        return {"sequences": number, "units": number / 3}

    def sums(self, logps: Tensor, rows: TargetRows) -> Mapping[str, Tensor]:
        totals = sum_sequences(logps, rows)
        weighted = rows.sequence_values["score"] * (totals - rows.sequence_values[REFERENCE])
        exists, places = rows.sequence_values[EXISTS], rows.sequence_values[EXISTS].shape[1] // 3 * 3
        units = weighted[:, :places].unflatten(1, (-1, 3)).sum(-1)
        is_unit = exists[:, :places:3] > 0
        return {
            "loss": torch.where(is_unit, F.softplus(-units), 0.0).sum(),
            "spread": units.detach().abs().sum(),
            "logps": totals.detach().sum(),
        }


def parse(record: Mapping[str, object]) -> Unit:
    return Unit(tuple(Completion(str(record["ask"]), str(record[name])) for name in "abc"), {"score": SCORES})


RECORDS = [
    {"ask": f"Count to {n}.", "a": "1 2 3"[: n % 5 + 1], "b": f"no {n}", "c": "why " * (n % 3 + 1)} for n in range(20)
]


@pytest.fixture
def triples(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.setitem(OBJECTIVES, ObjectiveName.SFT, lambda _: Ranking())  # type: ignore[arg-type]
    monkeypatch.setitem(FORMATS_OF, "triples", (RecordFormat("triple", ("ask", "a", "b", "c"), (), parse),))  # type: ignore[arg-type]
    path = workplace / "triples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def steps(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def mean_log_probability() -> float:
    """Mean over the sequences of the first two records, each alone in the plain model."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    sums = []
    for record in RECORDS:
        for name in "abc":
            prompt = tokenizer(record["ask"], add_special_tokens=False).input_ids
            whole = prompt + tokenizer(record[name], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
            logits = model(input_ids=torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
            own = logits.gather(-1, torch.tensor(whole[1:]).unsqueeze(-1)).squeeze(-1)
            sums.append(own[len(prompt) - 1 :].sum().item())
    return float(np.mean(sums))


def test_another_objective_trains_and_logs_its_numbers(run: Run, triples: Path) -> None:  # noqa: F811
    shared = ["--dataset", str(triples), "--seq_length", "96", "--num_iterations", "4", "--batch_size", "20"]
    shared += ["--num_chunks", "4", "--packing", "off", "--save_strategy", "steps", "--save_steps", "2"]
    run(*shared, "--save_dir", "whole")
    first, *_, last = steps("whole")
    assert first["loss"] == float(torch.tensor(2.0).log())
    assert (first["spread"], first["num_samples"]) == (0.0, 20)
    assert first["logps"] == pytest.approx(mean_log_probability(), rel=1e-5)
    assert last["loss"] < math.log(2)
    assert last["spread"] > 0

    run("--resume_from_checkpoint", "whole/checkpoint-2", *shared, "--save_dir", "whole")
    assert steps("whole")[-1]["loss"] == last["loss"]


def test_it_is_evaluated_with_its_own_reference(run: Run, triples: Path) -> None:  # noqa: F811
    run("--dataset", str(triples), "--seq_length", "96", "--val_size", "4", "--eval_on_start", "--save_dir", "held")
    history = json.loads(Path("held/trainer_state.json").read_text())["log_history"]
    (found,) = [entry for entry in history if "eval_loss" in entry]
    assert found["eval_loss"] == pytest.approx(math.log(2), rel=1e-7)
    assert found["eval_spread"] == 0.0
