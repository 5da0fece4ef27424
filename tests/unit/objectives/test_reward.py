"""Reward model: the loss of TRL's formula, and the place where a score is read."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from mobius.config.objective import ObjectiveConfig, ObjectiveName
from mobius.models.loss import EXISTS, IGNORE_INDEX, TargetRows
from mobius.objectives.registry import make_objective
from mobius.objectives.sequences import SequenceObjective


def reward(center: float = 0.0) -> SequenceObjective:
    made = make_objective(ObjectiveConfig(objective=ObjectiveName.REWARD, center_rewards=center))
    assert isinstance(made, SequenceObjective)
    return made


@pytest.mark.parametrize(
    ("margin", "center", "expected"),
    [(0.5, 0.0, 0.5543552445), (0.5, 0.01, 0.5543552445 + 0.0256), (None, 0.0, 0.3711006659)],
)
def test_a_pair_has_the_loss_of_the_formula(margin: float | None, center: float, expected: float) -> None:
    """-logsigmoid(1.2 - 0.4 - margin) + center * (1.2 + 0.4)^2."""
    values = {EXISTS: torch.tensor([[1.0, 1.0, 0.0]])}
    if margin is not None:
        values["margin"] = torch.tensor([[margin, margin, 0.0]])
    rows = TargetRows(torch.full((1, 4), IGNORE_INDEX), {}, values)
    sums = {name: float(each) for name, each in reward(center).sums(torch.tensor([[1.2, 0.4, 9.0]]), rows).items()}
    assert sums["loss"] == pytest.approx(expected, rel=1e-6)
    assert sums == pytest.approx({**sums, "accuracy": 1.0, "margin": 0.8, "mean_reward": 0.8})


def test_a_score_is_read_where_transformers_reads_it() -> None:
    """At the last token that is not the padding token, which may also be the end token of the sequences."""
    tokens = torch.tensor([[5, 6, 7, 2, 8, 2, 9, 9, 4, 2, 2, 0]])
    sequences = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 5]])
    rows = TargetRows(tokens, {}, {EXISTS: torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]])}, sequences, tokens)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=10, num_labels=1
    )
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for padding in (2, 0, None):
        ends = rows.ends(padding)[0, :3].tolist()
        model.config.pad_token_id = padding
        for place, end in enumerate(ends):
            own = tokens[:, sequences[0] == place]
            begin = int((sequences[0] == place).nonzero()[0])
            with torch.no_grad():
                scores = model.score(model.model(own).last_hidden_state)[0, :, 0]
                assert float(model(own).logits) == float(scores[end - begin])
    assert rows.ends(2).tolist() == [[2, 4, 8, 0, 0]]
