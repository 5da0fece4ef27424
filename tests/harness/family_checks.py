"""Whether a family's tiny model, cut into stages, computes what transformers alone does; one answer for each family."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import CPU, Pipeline, make_batch, model_of, plain_step
from harness.tiny_families import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mobius.errors import MobiusError, first_line
from mobius.models.blocks import ModelParts
from mobius.models.config_rules import find_invalid_fields
from mobius.models.sliced_attention.slice_support import unsliceable_reason
from mobius.models.weights import CheckpointWeights

NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS = 2, 2, 2, 1
_AFTER_THE_NAME = re.compile(r"the family '[^']+' (.*)")
_STATE = re.compile(r"Mamba|RWKV|Rwkv|LSTM|Recurrent|ShortConv|SSM")
ROUTER_LOSS = 0.5
"""Coefficient of the loss over routers: so large that it is a tenth of the whole loss at least."""
NEAR = 2e-6
"""Share of the norm of all gradients by which they may differ where sums have another order."""


def check_family(family: str) -> dict[str, str]:
    """What is found: `parity`, `packing`, `tiles` and `slices`, "yes" or a reason; or why it is `refused`."""
    try:
        model = model_of(tiny_config(family))
        ModelParts(model.config, CPU)
        declared = {field.name for field in dataclasses.fields(cast(Any, model.config))}
        if wrong := find_invalid_fields(type(model.config)().to_dict(), declared):
            return {"refused": f"has what is not run here in its default configuration ({wrong[0]})"}
    except Exception as error:  # whatever the family's code raises is the reason
        return {"refused": _reason(error)}
    found = {"parity": parity_of(family)}
    if found["parity"] != "bit-equal":
        return {"refused": f"does not give what transformers gives: {found['parity']}"}
    for name, check in _FURTHER.items():
        try:
            found[name] = check(model)
        except Exception as error:
            found[name] = _reason(error)
    return found


def parity_of(family: str, *, num_ranks: int = NUM_RANKS, stages_per_rank: int = STAGES_PER_RANK) -> str:
    """Words on loss and every gradient of the streamed pipeline beside transformers' own, and on weights on the disk.

    The matrix of a tied model is made by two stages, whose sums meet in another order: within 1e-6 of its largest. A
    family that has a loss over its routers is compared with it, too.
    """
    for is_tied, more in ((False, {}), (True, {}), (False, {"output_router_logits": True})):
        config = tiny_config(family, tie_word_embeddings=is_tied, **more)
        if more and not hasattr(config, "router_aux_loss_coef"):
            continue
        model = model_of(config)
        batch = make_batch(MICROBATCHES)
        if more:  # which transformers adds whole with each microbatch
            config.router_aux_loss_coef = model.config.router_aux_loss_coef = ROUTER_LOSS
            cast(Any, model).router_aux_loss_coef = ROUTER_LOSS / MICROBATCHES
        loss, expected = plain_step(model, batch, MICROBATCHES)
        pipeline = Pipeline(model, num_ranks, stages_per_rank, MICROBATCHES, SLOTS)
        if not torch.equal(pipeline.run(batch), loss):
            return "the loss differs"
        if apart := sorted(expected.keys() ^ pipeline.gradients.keys()):
            return f"one of both has no gradient of {apart[0]}"
        shared = {"lm_head.weight", model.get_input_embeddings().weight} if is_tied else set()
        for name, gradient in expected.items():
            bound = 1e-6 if is_tied and model.get_parameter(name) in shared else 0.0
            furthest = float((pipeline.gradients[name] - gradient).abs().max() / gradient.abs().max())
            if not furthest <= bound:
                return f"{name} is {furthest:.0e} of its largest entry off"
        if wrong := _name_not_stored(model):
            return f"{wrong} is stored by another name or in another form"
    return "bit-equal"


def _name_not_stored(model: PreTrainedModel) -> str | None:
    """A parameter that is not read from what transformers writes with the value that it has."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        values = model.state_dict()
        parts = ModelParts(model.config, CPU)
        source = CheckpointWeights(Path(folder), parts.stored_names, parts.parameter_pieces)
        for block in (parts.embedding, *parts.layers, parts.norm, parts.head):
            for name, shape in block.parameter_shapes().items():
                try:
                    is_own = torch.equal(source.read(name, shape), values[name])
                except MobiusError:
                    is_own = False
                if not is_own:
                    return name
    return None


def _packing(model: PreTrainedModel) -> str:
    if reason := unsliceable_reason(model.config):
        return reason.partition(": ")[2].partition(". ")[0]
    batch = make_packed_batch(ROWS, LENGTH, MICROBATCHES)
    expected = documents_alone(model, ROWS, batch)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS)
    return _near((pipeline.run(batch), pipeline.gradients), expected)


def _tiles(model: PreTrainedModel) -> str:
    batch = make_batch(MICROBATCHES)
    expected = plain_step(model, batch, MICROBATCHES)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS, tile_tokens=5)
    return _near((pipeline.run(batch), pipeline.gradients), expected)


def _slices(model: PreTrainedModel) -> str:
    if reason := unsliceable_reason(model.config):
        return reason.partition(": ")[2].partition(". ")[0]
    batch = make_batch(MICROBATCHES)
    expected = plain_step(model, batch, MICROBATCHES)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, 3 * MICROBATCHES, SLOTS, num_slices=3)
    return _near((pipeline.run(batch), pipeline.gradients), expected)


_FURTHER: Mapping[str, Callable[[PreTrainedModel], str]] = {"packing": _packing, "tiles": _tiles, "slices": _slices}


def _near(actual: tuple[Tensor, Mapping[str, Tensor]], expected: tuple[Tensor, Mapping[str, Tensor]]) -> str:
    if actual[1].keys() != expected[1].keys() or not torch.allclose(actual[0], expected[0], rtol=2e-6):
        return f"its loss is {float(actual[0]):.6f}, not {float(expected[0]):.6f}"
    off = torch.stack([(actual[1][name] - value).double().norm() for name, value in expected[1].items()]).norm()
    share = float(off / torch.stack([value.double().norm() for value in expected[1].values()]).norm())
    return "yes" if share <= NEAR else f"its gradients are off by {share:.0e} of their norm"


def why_no_plan(family: str, supported: Collection[str]) -> str:
    """What keeps a family without a plan from being cut into stages, as far as its model tells it."""
    kind = CONFIG_MAPPING[family]
    if kind.sub_configs.keys() & {"text_config", "vision_config", "text_encoder"}:
        text = getattr(kind.sub_configs.get("text_config"), "model_type", None)
        part = f"; its text part is of the family {text}, which is supported by itself" if text in supported else ""
        return f"is more than a text model{part}"
    if getattr(kind, "is_encoder_decoder", False) is True:
        return "has an encoder"
    plain = "has no pipeline plan of embedding, layers and norm (base_model_pp_plan)"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(kind())
    except Exception:  # a default configuration that makes no model says nothing more
        return plain
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith(("wpe", "embed_pos"))):
            return f"has learned positions and no pipeline plan ({name})"
        if _STATE.search(type(module).__name__):
            return f"has layers that carry a state from token to token, and no pipeline plan ({type(module).__name__})"
    return plain


def _reason(error: Exception) -> str:
    """Words to be read after the family's name, without what only a run can change."""
    text = first_line(error)
    if "scaled_dot_product_attention" in text:
        return "is not run by torch's scaled_dot_product_attention in transformers"
    if found := _AFTER_THE_NAME.search(text):
        return found.group(1).partition(", so ")[0]
    text = text if isinstance(error, MobiusError) else f"{type(error).__name__}: {text}"
    return f"makes no tiny model that can be tried ({text.rpartition('can be built: ')[2][:160]})"
