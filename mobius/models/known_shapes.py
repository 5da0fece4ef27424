"""Configurations of models that a plan needs no files for: published shapes by a short name, and two of the hub's.

A plan asks for sizes only, and those of Llama are known; training needs the files themselves (families.py).
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

from transformers import PretrainedConfig

from mobius.config.config import ModelConfig
from mobius.errors import CheckpointError
from mobius.models.families import load_model_config, locate_model
from mobius.plan.model_files import LLAMA_SHAPES, llama_fields

logger = logging.getLogger(__name__)

SHAPES_ON_HUB = {"meta-llama/Llama-2-7b-hf": "7b", "meta-llama/Llama-2-13b-hf": "13b"}
"""Models of the hub that are given only to who asks for access, and the shapes they have."""

_NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file: the length of its header, and a header that names nothing."""


def load_planned_config(options: ModelConfig) -> tuple[PretrainedConfig, Path | None]:
    """The configuration of the model that a plan is for, shape options applied as in a run, and its folder, if any.

    A folder goes before a short name (`7b`); the shape of a model of the hub is taken where it is known and the model
    cannot be had, and a line says so. Raises CheckpointError like `locate_model` and `load_model_config`.
    """
    name = options.model_path
    if name in LLAMA_SHAPES and not Path(name).is_dir():
        return _config_of_shape(name, options, has_weights=False), None
    try:
        folder = locate_model(name)
    except CheckpointError:
        if name not in SHAPES_ON_HUB:
            raise
        logger.info("%s cannot be had here: the plan is for its shape, which is known (training needs the model)", name)
        return _config_of_shape(SHAPES_ON_HUB[name], options, has_weights=True), None
    return load_model_config(folder, options), folder


def _config_of_shape(name: str, options: ModelConfig, *, has_weights: bool) -> PretrainedConfig:
    """As read from a folder: whether that has weights decides what the shape options may change."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **llama_fields(name)}), encoding="utf-8")
        if has_weights:
            (folder / "model.safetensors").write_bytes(_NO_TENSORS)
        return load_model_config(folder, options)
