"""What a family is checked for: the bits of the plain model, leaks of packed rows, and text parts of larger models."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import CPU, VOCAB, Pipeline, Step, distance, make_batch, model_of, plain_step
from harness.tiny_families import FIELDS, tiny_config, variants
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mobius.engine.step_inputs import StepBatch
from mobius.errors import MobiusError, first_line
from mobius.models import family_support
from mobius.models.blocks import ModelParts
from mobius.models.config_rules import find_invalid_fields
from mobius.models.family_support import checked_families, unpackable_reason, unsliceable_reason
from mobius.models.model_files import describe_error, read_json_object
from mobius.models.structure import names_in_fp32
from mobius.models.weights import CheckpointWeights, has_untied_head, text_weight_names

NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS = 2, 2, 2, 1
_AFTER_THE_NAME = re.compile(r"the family '[^']+' (.*)")
_STATE = re.compile(r"Mamba|RWKV|Rwkv|LSTM|Recurrent|ShortConv|SSM")
ROUTER_LOSS = 0.5
"""Coefficient of the loss over routers: so large that it is a tenth of the whole loss at least."""
NEAR = 2e-6
"""Share of the norm of all gradients by which they may differ where sums have another order."""


def check_family(family: str) -> dict[str, str]:
    """What is found: `parity`, `packing`, `tiles` and `slices`, "yes" or a reason; or why it is `refused`.

    `fp32`: weights that the family makes in fp32 though none of its lists names them.
    """
    known = cast(dict[str, Any], checked_families().supported)
    before = known.pop(family, None)  # earlier results would decide what is checked now
    try:
        return _check_family(family, known)
    finally:
        known.pop(family, None)
        known |= {} if before is None else {family: before}


def _check_family(family: str, known: dict[str, Any]) -> dict[str, str]:
    try:
        models = [model_of(tiny_config(family, **fields)) for fields in variants(family)]
        for config in [model.config for model in models]:
            ModelParts(config, CPU)
            declared = {field.name for field in dataclasses.fields(cast(Any, config))}
            for fields, which in ((type(config)().to_dict(), "its default"), (config.to_dict(), "a tiny")):
                if wrong := find_invalid_fields(fields, declared):
                    return {"refused": f"has what is not run here in {which} configuration ({wrong[0]})"}
        parity = parity_of(family)
    except Exception as error:  # whatever the family's code raises is the reason
        return {"refused": _reason(error)}
    if parity != "bit-equal":
        return {"refused": f"does not give what transformers gives: {parity}"}
    found = {"parity": parity}
    if names := " ".join(filter(None, map(_made_in_fp32, models))):
        found["fp32"] = names
        known[family] = found  # which the checks below read
    for name, check in _FURTHER.items():
        try:
            found[name] = next((result for result in map(check, models) if result != "yes"), "yes")
        except Exception as error:
            found[name] = _reason(error)
    if (in_bf16 := found.pop("bf16")) != "yes":
        return {"refused": f"does not give what transformers gives in bf16: {in_bf16}"}
    return found


def parity_of(family: str, *, num_ranks: int = NUM_RANKS, stages_per_rank: int = STAGES_PER_RANK) -> str:
    """Words on loss and every gradient of the streamed pipeline against transformers' own, and on stored weights.

    The matrix of a tied model is made by two stages, whose sums meet in another order: within 1e-6 of its largest. A
    family that has a loss over its routers is compared with it, too.
    """
    settings = ((False, {}), (True, {}), (False, {"output_router_logits": True}))
    for fields, (is_tied, more) in itertools.product(variants(family), settings):
        config = tiny_config(family, tie_word_embeddings=is_tied, **fields, **more)
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
            furthest = float((pipeline.gradients[name] - gradient).abs().max())
            if not furthest <= bound * float(gradient.abs().max()):
                return f"{name} is {furthest / float(gradient.abs().max()):.0e} of its largest entry off"
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
    if reason := unpackable_reason(model.config):
        return reason.partition(": ")[2].partition(". ")[0]
    batch = make_packed_batch(ROWS, LENGTH, MICROBATCHES)
    expected = documents_alone(model, ROWS, batch)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS)
    return _near(pipeline.step(batch), expected)


def _tiles(model: PreTrainedModel) -> str:
    batch = make_batch(MICROBATCHES)
    expected = plain_step(model, batch, MICROBATCHES)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS, tile_tokens=5)
    return _near(pipeline.step(batch), expected)


def _slices(model: PreTrainedModel) -> str:
    if reason := unsliceable_reason(model.config):
        return reason.partition(": ")[2].partition(". ")[0]
    batch = make_batch(MICROBATCHES)
    expected = plain_step(model, batch, MICROBATCHES)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, 3 * MICROBATCHES, SLOTS, num_slices=3)
    return _near(pipeline.step(batch), expected)


def _in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """The model as transformers loads it in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded.load_state_dict(model.state_dict())  # youtu sets the embedding of the padding token to 0
    return loaded.eval()


def _made_in_fp32(model: PreTrainedModel) -> str:
    """Names within a layer of weights that the family makes in fp32 in a bf16 model, though no list names them."""
    parts = ModelParts(model.config, CPU)
    listed = names_in_fp32(parts.model, torch.bfloat16)
    values = _in_bf16(model).state_dict().items()
    found = {name for name, value in values if value.dtype is torch.float32 and name not in listed}
    return " ".join(sorted({name.partition(".layers.")[2].partition(".")[2] or name for name in found}))


def _bf16(model: PreTrainedModel) -> str:
    batch = make_batch(MICROBATCHES)
    expected = float(plain_step(_in_bf16(model), batch, MICROBATCHES)[0])
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS, dtype=torch.bfloat16)
    found = float(pipeline.run(batch))
    return "yes" if abs(found / expected - 1) <= NEAR else f"the loss is {found:.6f}, not {expected:.6f}"


_FURTHER: Mapping[str, Callable[[PreTrainedModel], str]] = {
    "packing": _packing,
    "tiles": _tiles,
    "slices": _slices,
    "bf16": _bf16,
}


def _near(actual: Step, expected: Step) -> str:
    if actual[1].keys() != expected[1].keys() or not torch.allclose(actual[0], expected[0], rtol=2e-6):
        return f"its loss is {float(actual[0]):.6f}, not {float(expected[0]):.6f}"
    share = distance(actual[1], expected[1])
    return "yes" if share <= NEAR else f"its gradients are off by {share:.0e} of their norm"


def why_no_decoder(family: str, supported: Collection[str]) -> str | None:
    """Why a family without a plan is not tried, as far as its configuration and model tell it; None: it is."""
    kind = CONFIG_MAPPING[family]
    if kind.sub_configs.keys() & {"text_config", "vision_config", "text_encoder"}:
        text = getattr(kind.sub_configs.get("text_config"), "model_type", None)
        part = f"; its text part is of the family {text}, which is supported by itself" if text in supported else ""
        return f"is more than a text model{part}"
    if getattr(kind, "is_encoder_decoder", False) is True:
        return "has an encoder"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(kind())
    except Exception:  # a default configuration that makes no model says nothing more
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith(("wpe", "embed_pos"))):
            return f"has learned positions and no pipeline plan ({name})"
        if _STATE.search(type(module).__name__):
            return f"has layers that carry a state from token to token, and no pipeline plan ({type(module).__name__})"
    return None


def _reason(error: Exception) -> str:
    """Words to be read after the family's name, without what only a run can change."""
    text = first_line(error)
    if "scaled_dot_product_attention" in text:
        return "is not run by torch's scaled_dot_product_attention in transformers"
    if found := _AFTER_THE_NAME.search(text):
        return found.group(1).partition(", so ")[0]
    text = text if isinstance(error, MobiusError) else f"{type(error).__name__}: {text}"
    return f"makes no tiny model that can be tried ({text.rpartition('can be built: ')[2][:160]})"


MOST_PARAMETERS = 20_000_000
"""Of a model that counts as tiny; most have a tenth of a million."""
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "out_hidden_size", "d_model", "hidden_dim"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"), 2),
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
    "vocab_size": 96,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
"""Fields of the parts that are for images and sound."""
_OPTIONAL_PARTS = {"gemma4": ["vision_config"]}
"""Parts that a default configuration lacks, and published models have."""
EXACT, NEARLY = "bit-equal", "to 2e-6"
_FOLDER = re.compile(r"/\S*/tmp\w+")
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_AUTO_CLASSES = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")


def families_with_text(supported: Mapping[str, object]) -> dict[str, str]:
    """Families of larger models whose text part, with their default configuration, is of a supported family."""
    found = {}
    for family in CONFIG_MAPPING_NAMES:
        if "text_config" not in (getattr(CONFIG_MAPPING[family], "sub_configs", None) or {}):
            continue
        try:
            part = family_support.extract_text_config({"model_type": family})
        except Exception:  # without a default configuration there is nothing to try
            continue
        if part is not None and part.fields["model_type"] in supported:
            found[family] = part.fields["model_type"]
    return dict(sorted(found.items()))


def check_text_part(family: str) -> dict[str, str]:
    """What is found: `parity` of the text part of the tiny model of `family`, or why it is `refused`."""
    try:
        found = _compare(family)
    except Exception as error:  # whatever the family's code raises is the reason
        found = (
            "makes no tiny model that can be tried "
            f"({_FOLDER.sub('its checkpoint', describe_error(error))[:120].strip()})"
        )
    return {"parity" if found in (EXACT, NEARLY) else "refused": found}


def tiny_whole(family: str, *, is_tied: bool, vocab_size: int = VOCAB) -> PreTrainedModel:
    """A tiny model of `family` with random weights, its text part with all features on."""
    kind = cast(Any, CONFIG_MAPPING[family])
    default = kind(**{name: {} for name in _OPTIONAL_PARTS.get(family, ())})
    own = default.text_config
    text = {**_tiny_text(own, is_tied=is_tied), "vocab_size": vocab_size}
    others = {}
    for name in kind.sub_configs:
        if name != "text_config" and (other := getattr(default, name, None)) is not None:
            declared = {field.name for field in dataclasses.fields(other)}
            small = {field: value for field, value in _SMALL.items() if field in declared}
            others[name] = {"model_type": other.model_type, **small}
    config = kind(text_config=text, tie_word_embeddings=is_tied, **others)
    model_class = getattr(transformers, _class_name(family))
    with torch.device("meta"):
        if (size := model_class(config).num_parameters()) > MOST_PARAMETERS:
            raise ValueError(f"it has {size:,} parameters")
    torch.manual_seed(0)
    config.text_config.use_cache = False
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _tiny_text(default: PretrainedConfig, *, is_tied: bool) -> dict[str, Any]:
    """Fields of `text_config`; Gemma 3's logits have a cap in its text model alone, and in no published one."""
    if default.model_type not in family_support.EQUIVALENT_FAMILIES:
        uncapped = {"final_logit_softcapping": None} if default.model_type == "gemma3_text" else {}
        return tiny_config(default.model_type, tie_word_embeddings=is_tied, **uncapped).to_dict()
    declared = {field.name for field in dataclasses.fields(cast(Any, default))}
    fields = {name: value for name, value in FIELDS.items() if name in declared}
    half = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"]) // 2
    axes = {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return {**fields, "model_type": default.model_type, "rope_parameters": {**_ROTARY, **axes}}


def _class_name(family: str) -> str:
    tables = (getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in _AUTO_CLASSES)
    if (name := next((table[family] for table in tables if family in table), None)) is None:
        raise ValueError("no class of it makes logits")
    return name


def whole_step(model: PreTrainedModel, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of text alone by the whole model; names are those of the text part by itself."""
    total = torch.zeros(())
    for tokens, labels in zip(batch.input_ids.chunk(MICROBATCHES), batch.labels.chunk(MICROBATCHES), strict=True):
        logits = model(input_ids=tokens).logits
        loss = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=batch.num_targets)
        loss.backward()
        total += loss.detach()
    names = text_weight_names([name for name, _ in model.named_parameters(remove_duplicate=False)])
    named = model.named_parameters(remove_duplicate=False)
    found = {names.get(name, name): each.grad for name, each in named if name in names or name.startswith("lm_head.")}
    return total, {name: gradient for name, gradient in found.items() if gradient is not None}


def _compare(family: str) -> str:
    worst = 0.0
    for is_tied in (False, True):
        model = tiny_whole(family, is_tied=is_tied)
        batch = make_batch(MICROBATCHES)
        loss, expected = whole_step(model, batch)
        for saves in (_save_as_on_the_hub, _save_as_named):
            with tempfile.TemporaryDirectory() as folder:
                saves(model, Path(folder))
                found = _run_text_part(Path(folder), batch)
            if not torch.allclose(found[0], loss, rtol=1e-6):
                return "does not give what transformers gives for text alone: the loss differs"
            if apart := sorted(expected.keys() ^ found[1].keys()):
                return f"does not give what transformers gives for text alone: one has no gradient of {apart[0]}"
            shared = {"lm_head.weight", "model.embed_tokens.weight"} if is_tied else set()
            for name, gradient in expected.items():
                off = float((found[1][name] - gradient).abs().max() / gradient.abs().max())
                worst = max(worst, 0.0 if name in shared and off <= 1e-6 else off)
    if worst > 2e-6:
        return f"does not give what transformers gives for text alone: a gradient is {worst:.0e} of its largest off"
    return EXACT if worst == 0 else NEARLY


def _save_as_on_the_hub(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


def _save_as_named(model: PreTrainedModel, folder: Path) -> None:
    """By the names that the model itself has, as transformers 5 may write them."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    once = {id(value): (name, value) for name, value in reversed(model.state_dict(keep_vars=True).items())}
    save_file({name: value.detach().clone() for name, value in once.values()}, folder / "model.safetensors")


def _run_text_part(folder: Path, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The pipeline on what the program reads from `folder`."""
    part = family_support.extract_text_config(read_json_object(folder / "config.json"))
    assert part is not None
    config = CONFIG_MAPPING[part.fields["model_type"]].from_dict(part.fields)
    if config.tie_word_embeddings and has_untied_head(folder):  # as in a run
        config.tie_word_embeddings = False
    model = model_of(config)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    source = CheckpointWeights(folder, tied)
    pipeline = Pipeline(model, NUM_RANKS, STAGES_PER_RANK, MICROBATCHES, SLOTS, source=source)
    return pipeline.run(batch), pipeline.gradients
