"""Fields that differ between layers."""

from __future__ import annotations

import pytest
import torch
from harness.tiny_families import tiny_config

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.errors import CheckpointError
from mobius.models.blocks import ModelParts
from mobius.models.layer_config import head_size, layer_configs, num_key_heads

CPU = torch.device("cpu")


def test_the_widest_layer_decides() -> None:
    """Gemma 4: attention must have kernels for the widest heads; keys of other layers have more, narrower heads."""
    config = tiny_config("gemma4_text", head_dim=256, global_head_dim=512, num_key_value_heads=4)
    assert [layer.head_dim for layer in layer_configs(config)] == [256, 512, 256, 512]
    assert (head_size(config), num_key_heads(config)) == (512, 2)
    shape = ModelParts(config, CPU).shape()
    assert (shape.attention_width, shape.key_width) == (4 * 512, 4 * 256)


def test_layers_that_are_alike_share_one_configuration() -> None:
    config = tiny_config("qwen3")
    assert layer_configs(config) == [config]
    assert (head_size(config), num_key_heads(config)) == (16, 2)


def test_layers_of_one_kind_share_their_module() -> None:
    """Layers that hand keys on to others would have one of their own."""
    layers = ModelParts(tiny_config("gemma4_text"), CPU).layers
    assert len({id(layer.module) for layer in layers}) == 2


def test_a_prefix_for_layers_with_different_keys_is_refused() -> None:
    adapters = AdapterConfig(finetuning_type=FinetuningType.PREFIX)
    with pytest.raises(CheckpointError, match="--finetuning_type prefix: the keys of the layers of 'gemma4_text'"):
        ModelParts(tiny_config("gemma4_text"), CPU, adapters=adapters)
