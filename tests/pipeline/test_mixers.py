"""Layers that carry a state from token to token: documents of packed rows begin anew, slices go on."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import Pipeline, assert_near, make_batch, model_of, plain_step
from harness.rounding import assert_both_round
from harness.sliced_rows import SETTINGS, Setting, assert_slices_are_as_near_as_the_plain_model, sliced
from harness.tiny_families import FIELDS, tiny_config
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.family_support import unpackable_reason, unsliceable_reason
from mobius.models.layer_config import MIXERS
from mobius.models.mixers import OPERATIONS, SliceStates

FAMILIES = ("qwen3_5_text", "olmo_hybrid", "lfm2")
HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
"""Heads of the delta rule, which are as large as in real models otherwise."""
CHUNK = 64
"""Tokens that the families' delta rule takes at once."""
CASES = {  # ranks, stages per rank, microbatches, slots, whether everything is saved
    "resident": (1, 1, 2, None, False),
    "everything saved": (1, 2, 1, None, True),
    "streamed": (2, 2, 4, 1, False),
}


def small_model(family: str, **fields: Any) -> PreTrainedModel:
    return model_of(tiny_config(family, **({} if family == "lfm2" else HEADS), **fields))


@pytest.mark.parametrize("keeps_graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_document_sees_another_one(family: str, keeps_graphs: bool) -> None:
    assert_no_leaks(small_model(family), keeps_graphs=keeps_graphs)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_what_each_document_gives_alone(family: str) -> None:
    model = small_model(family)
    batch = make_packed_batch(ROWS, LENGTH, 4)
    expected = documents_alone(model, ROWS, batch)
    exact = documents_alone(copy.deepcopy(model).double(), ROWS, batch)
    for num_ranks, per_rank, microbatches, slots, keeps_graphs in CASES.values():
        batch = make_packed_batch(ROWS, LENGTH, microbatches)
        found = Pipeline(model, num_ranks, per_rank, microbatches, slots, keeps_graphs).step(batch)
        assert_both_round(found, expected, exact)


@pytest.mark.parametrize("family", MIXERS)
def test_what_is_refused_on_gpus(family: str) -> None:
    config = tiny_config(family)
    assert unpackable_reason(config) is None
    assert "separate samples on CPUs only" in str(unpackable_reason(config, on_gpu=True))
    assert unsliceable_reason(config) is None
    assert "run on slices on CPUs only" in str(unsliceable_reason(config, on_gpu=True))
    assert "only of rows that are not packed" in str(unsliceable_reason(config, packed=True))


@pytest.mark.grid
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_give_the_gradients_of_whole_sequences(family: str, setting: Setting) -> None:
    """Slices are chunks of the delta rule: sums of shorter ones have another order. lfm2's last layer has a mixer."""
    layers = max(4, setting[0] * setting[1])
    kinds = [next(iter(MIXERS[family])), "full_attention"] * layers
    model = small_model(family, num_hidden_layers=layers, layer_types=kinds[family == "lfm2" :][:layers])
    batch = make_batch(setting[2], CHUNK * setting[3])
    found = sliced(model, setting, saves_attention=setting[1] == 2).step(batch)
    exact = plain_step(copy.deepcopy(model).double(), batch, setting[2])
    assert_both_round(found, plain_step(model, batch, setting[2]), exact)


def running_mean(inputs: Tensor, decay: Tensor, **_: Any) -> Tensor:
    """A toy recurrence: inputs [B, L, C] -> means that forget."""
    return continued_mean(inputs, decay, inputs.new_zeros(len(inputs), 1, inputs.shape[-1]))[0]


def continued_mean(inputs: Tensor, decay: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the mean of earlier inputs on [B, 1, C]; also returns the last mean."""
    means = list[Tensor]()
    for token in inputs.split(1, 1):
        mean = decay * mean + (1 - decay) * token
        means.append(mean)
    return torch.cat(means, 1), mean


def mean_of_documents(
    own: Any,
    inputs: Tensor,
    decay: Tensor,
    *,
    documents: Tensor | None = None,
    states: SliceStates | None = None,
    **_: Any,
) -> Tensor:
    """What a new kind of mixer adds: its function by documents and with states."""
    if states is not None:
        before = states.take()
        start = inputs.new_zeros(len(inputs), 1, inputs.shape[-1]) if before is None else before
        means, after = continued_mean(inputs, decay, start)
        states.put(after)
        return means
    if documents is None:
        return torch.as_tensor(own(inputs, decay))
    bounds = [(start, end) for start, end in pairwise(documents.tolist()) if start < end]
    rows = inputs.flatten(0, 1)[None]
    return torch.cat([own(rows[:, start:end], decay) for start, end in bounds], 1).view_as(inputs)


class ToyConfig(LlamaConfig):
    model_type = "toy_recurrence"


class ToyMixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.zeros(width))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.out(running_mean(self.into(hidden_states), self.decay.sigmoid(), **kwargs)))


class ToyLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.layer_types[layer_idx] == "running_mean":
            self.mixer, self.self_attn = ToyMixer(config.hidden_size), None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.self_attn is not None:
            return cast(Tensor, super().forward(hidden_states, **kwargs))
        hidden_states = hidden_states + self.mixer(self.input_layernorm(hidden_states), **kwargs)
        return cast(Tensor, hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)))


class ToyModel(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList([ToyLayer(config, index) for index in range(config.num_hidden_layers)])


def test_a_new_mixer_packs_and_slices_without_a_change_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    AutoConfig.register("toy_recurrence", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyModel, exist_ok=True)
    monkeypatch.setitem(MIXERS, "toy_recurrence", {"running_mean": "mixer"})
    monkeypatch.setitem(OPERATIONS, "running_mean", mean_of_documents)
    fields = {name: value for name, value in FIELDS.items() if hasattr(LlamaConfig(), name)}
    config = ToyConfig(**fields | {"num_hidden_layers": 4})
    config.layer_types = ["running_mean", "full_attention"] * 2
    model = model_of(config)

    batch = make_packed_batch(ROWS, LENGTH, 2)
    expected = documents_alone(model, ROWS, batch)
    assert_near(Pipeline(model, 2, 1, 2, 1).step(batch), expected, loss=1e-6, gradients=2e-6)
    assert_no_leaks(model, keeps_graphs=False)
    for setting in SETTINGS[:3]:
        assert_slices_are_as_near_as_the_plain_model(model, setting)


def test_layers_that_pass_nothing_on_to_their_mixers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.17, where documents of packed rows would run into each other."""
    plain = Lfm2DecoderLayer.forward
    monkeypatch.setattr(
        Lfm2DecoderLayer, "forward", lambda layer, hidden, states=None, **more: plain(layer, hidden, **more)
    )
    with pytest.raises(CheckpointError, match="does not tell its mixer where documents and slices begin"):
        ModelParts(tiny_config("lfm2"), torch.device("cpu"), packed_dtype=torch.float32)
