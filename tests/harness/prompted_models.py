"""Tiny models with prompts of peft, their values by our names, and rows with places for virtual tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from harness.pipelines import FAMILIES, make_model, model_of
from harness.tiny_families import tiny_config
from peft import PeftModel, PeftType, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from mobius.config.config import AdapterConfig, EncoderType, FinetuningType
from mobius.data.token_store import virtual_ids
from mobius.engine.documents import position_ids_and_cu_seqlens
from mobius.engine.step_inputs import StepBatch
from mobius.models.structure import layers_of

NUM_VIRTUAL = 3
PROMPT = AdapterConfig(finetuning_type=FinetuningType.PROMPT, num_virtual_tokens=NUM_VIRTUAL)
P_TUNING = AdapterConfig(
    finetuning_type=FinetuningType.P_TUNING, num_virtual_tokens=NUM_VIRTUAL, encoder_hidden_size=24
)


P_TUNING_BY_LSTM = replace(P_TUNING, encoder_type=EncoderType.LSTM)
PREFIX = AdapterConfig(finetuning_type=FinetuningType.PREFIX, num_virtual_tokens=NUM_VIRTUAL)


def prompt_by_peft(model: PreTrainedModel, config: AdapterConfig) -> PeftModel:
    """`model` with a prompt as `config` says, whose values are random."""
    if config.finetuning_type is FinetuningType.PROMPT:
        settings: Any = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=config.num_virtual_tokens)
    elif config.finetuning_type is FinetuningType.PREFIX:
        settings = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=config.num_virtual_tokens)
    else:
        settings = PromptEncoderConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=config.num_virtual_tokens,
            encoder_hidden_size=config.encoder_hidden_size,
            encoder_reparameterization_type=config.encoder_type.upper(),
        )
    torch.manual_seed(6)
    return get_peft_model(copy.deepcopy(model), settings).eval()


def prompted(family: str, config: AdapterConfig, *, num_layers: int = 4) -> PeftModel:
    """A model of `family` with a prompt; those of the list of families have all their features on."""
    plain = make_model(family, num_layers) if family in FAMILIES else model_of(tiny_config(family))
    return prompt_by_peft(plain, config)


def our_name(name: str) -> str:
    """Name of a parameter of peft's model as it is in ours."""
    return name.removeprefix("base_model.").replace("prompt_encoder.default.", "prompt_encoder.")


def values_of(model: PeftModel) -> dict[str, Tensor]:
    """Values by our names, copies; also of buffers, which are frozen parameters in ours."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    named = [(name, each.detach().clone()) for name, each in every]
    return {ours: value for name, whole in named for ours, value in _ours(model, name, whole)}


def gradients_of(model: PeftModel) -> dict[str, Tensor]:
    """Gradients of what is trained, by our names."""
    named = [(name, each.grad) for name, each in model.named_parameters()]
    found = [(name, gradient) for name, gradient in named if gradient is not None]
    return {ours: value for name, whole in found for ours, value in _ours(model, name, whole)}


def _ours(model: PeftModel, name: str, whole: Tensor) -> list[tuple[str, Tensor]]:
    """Tensor of peft's model under our name; a prefix layer by layer."""
    if "prompt_encoder" not in name or model.peft_config["default"].peft_type != PeftType.PREFIX_TUNING:
        return [(our_name(name), whole)]
    layers = layers_of(model.base_model)
    path = next(path for path, module in model.base_model.named_modules() if module is layers[0]).removesuffix(".0")
    return [(f"{path}.{number}.prefix", part) for number, part in enumerate(whole.chunk(len(layers), 1))]


def step_by_peft(
    model: PeftModel, rows: Sequence[Sequence[tuple[Tensor, Tensor]]], num_targets: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The step by peft and transformers, one document after the other; a document is its tokens and its labels."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        for tokens, labels in row:
            loss = model(input_ids=tokens[None], labels=labels[None], num_items_in_batch=num_targets).loss
            loss.backward()
            total += loss.detach().double()
    return total.float(), gradients_of(model)


def random_documents(
    rows: Sequence[Sequence[int]], vocab: int, *, is_first_predicted: bool
) -> list[list[tuple[Tensor, Tensor]]]:
    """Tokens and labels of documents of these lengths; every second one has targets from its first token on.

    Unless the first token is predicted, which no prefix does.
    """
    generator, found = torch.Generator().manual_seed(2), list[list[tuple[Tensor, Tensor]]]()
    for row in rows:
        found.append([])
        for place, length in enumerate(row):
            tokens = torch.randint(1, vocab, (length,), generator=generator)
            labels = tokens.clone()
            labels[: place % 2 if is_first_predicted else 1] = -100
            found[-1].append((tokens, labels))
    return found


def batch_with_places(
    documents: Sequence[Sequence[tuple[Tensor, Tensor]]], *, seq_length: int, num_microbatches: int, is_packed: bool
) -> StepBatch:
    """Rows of the documents, each behind places for virtual tokens."""
    shape = len(documents), seq_length
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)
    lengths = [[NUM_VIRTUAL + len(own) for own, _ in row] for row in documents]
    for number, row in enumerate(documents):
        start = 0
        for own, targets in row:
            tokens[number, start : start + NUM_VIRTUAL] = torch.from_numpy(virtual_ids(NUM_VIRTUAL))
            start += NUM_VIRTUAL
            tokens[number, start : start + len(own)], labels[number, start : start + len(own)] = own, targets
            start += len(own)
    batch = StepBatch(tokens, labels, int((labels != -100).sum()), sum(map(sum, lengths)), sum(map(len, lengths)))
    if not is_packed:
        assert all(sum(row) == seq_length for row in lengths)
        return batch
    places = position_ids_and_cu_seqlens(
        lengths,
        seq_length=seq_length,
        num_microbatches=num_microbatches,
        max_documents=max(map(len, lengths)) + 1,
    )
    position_ids, cu_seqlens = (torch.from_numpy(each) for each in places)
    return replace(batch, documents=(position_ids, cu_seqlens), document_lengths=lengths)
