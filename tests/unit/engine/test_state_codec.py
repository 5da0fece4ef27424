"""A further format of optimizer states is one class: the update, the master and the parts of a shard follow it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mobius.engine import reduced_states
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import Parts, SplitMaster
from mobius.models.layout import StageLayout


class HalfMoments(SplitMaster):
    """Moments in bf16."""

    parts = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_low": torch.int16}  # noqa: RUF012

    def decode_moments(self, parts: Parts) -> tuple[Tensor, Tensor]:
        return parts["exp_avg"].float(), parts["exp_avg_sq"].float()


def test_an_update_reads_and_writes_all_parts_by_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduced_states, "CODECS", {torch.bfloat16: HalfMoments()})
    layout = StageLayout.of({"matrix": (16, 8)})

    def zeros(length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype)

    state = StageState.with_buffers(layout, zeros(128, torch.bfloat16), zeros(128, torch.bfloat16), zeros)
    master = torch.randn(128, generator=torch.Generator().manual_seed(0))
    state.write_master(slice(None), master)
    state.gradients.copy_(master)
    moments = torch.zeros(128), torch.zeros(128)
    settings = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1}

    for step in range(2):
        FlatAdamW(AdamWSettings(**settings, epsilon=1e-8)).update(
            state, step=step + 1, learning_rate=1e-2, gradient_factor=1.0
        )
        steps = [torch.tensor(float(step))]
        gradient = state.gradients.float()
        adamw(
            [master],
            [gradient],
            *([each] for each in moments),
            [],
            steps,
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=1e-2,
            eps=1e-8,
            **settings,
        )
        moments = moments[0].bfloat16().float(), moments[1].bfloat16().float()

    assert [tensor.dtype for tensor in state.tensors[2:]] == list(HalfMoments.parts.values())
    assert torch.equal(state.read_master(), master)
    assert torch.equal(state.exp_avg.float(), moments[0])
    assert torch.equal(state.exp_avg_sq.float(), moments[1])
