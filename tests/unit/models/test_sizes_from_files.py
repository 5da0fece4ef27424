"""What the planner reads out of a config.json, without torch, is what the model itself has."""

import json
from dataclasses import replace

import pytest
import torch
from harness.pipelines import FAMILIES

from mobius.models.blocks import ModelParts
from mobius.plan.model_files import shape_of_config


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sizes_read_from_the_configuration_are_those_of_the_model(family: str) -> None:
    config = FAMILIES[family]()
    fields = json.loads(config.to_json_string(use_diff=False))
    own = ModelParts(config, torch.device("cpu")).shape()
    assert shape_of_config(fields) == replace(own, intermediate_size=config.intermediate_size)
