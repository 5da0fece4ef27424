"""Tiny models with images, pictures for them, and what transformers makes of the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.pipelines import model_of
from harness.runs import TOKENIZER
from torch import Tensor
from transformers import AutoModelForMultimodalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mobius.engine.documents import Rows, position_ids_and_cu_seqlens
from mobius.engine.step_inputs import StepBatch, StepImages
from mobius.models.family_support import text_config_of
from mobius.models.vision import VisionModel
from mobius.models.weights import text_weight_names

IMAGE, START, END = 90, 88, 89
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Fields of a preprocessor_config.json: an image of 8 x 16 pixels has 2 tokens."""


EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def vision_fields(family: str = "qwen3_5", **text: Any) -> dict[str, Any]:
    """Fields of a config.json of a tiny model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    return {
        "model_type": family,
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": f"{family}_text",
            **(EXPERTS if "moe" in family else {}),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "vocab_size": 96,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": rope,
            **text,
        },
        "vision_config": {
            "model_type": family,
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": text.get("hidden_size", 32),
        },
    }


def vision_model(family: str = "qwen3_5") -> PreTrainedModel:
    """A tiny whole model with random weights, in fp32."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family].from_dict(vision_fields(family))
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def text_of(whole: PreTrainedModel) -> PreTrainedModel:
    """The text of a whole model as a text model, with the same weights."""
    text = model_of(text_config_of(whole.config))
    state = whole.state_dict()
    renamed = text_weight_names(state)
    text.load_state_dict({renamed.get(name, name): value for name, value in state.items() if ".visual." not in name})
    return text


def pictures(*sizes: tuple[int, int]) -> list[np.ndarray]:
    """Pictures of random pixels, uint8 [height, width, 3]."""
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def processed(images: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Pixels and grids of images, as the family's processor makes them."""
    fields = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    found = Qwen2VLImageProcessorPil(**fields)([*images], return_tensors="pt")
    return found["pixel_values"], found["image_grid_thw"]


class VisionRows:
    """Rows of documents with images: the step's batch, and the same step by transformers alone."""

    def __init__(self, whole: PreTrainedModel, documents: Sequence[Sequence[Sequence[Any]]], length: int) -> None:
        """`documents` of each row: numbers of text tokens, and pictures between them."""
        self.whole, self.vision = whole, VisionModel(whole.config)
        self.vision.base = whole.base_model
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.zeros(len(documents), length, dtype=torch.int64)
        self.labels = torch.full_like(self.tokens, -100)
        self.lengths: list[list[int]] = []
        self.images: list[list[list[np.ndarray]]] = []
        for number, row in enumerate(documents):
            start, lengths, of_row = 0, list[int](), list[list[np.ndarray]]()
            for document in row:
                ids, is_image, own = list[int](), list[bool](), list[np.ndarray]()
                for part in document:
                    if isinstance(part, int):
                        new = torch.randint(3, 80, (part,), generator=generator).tolist()
                    else:
                        own.append(part)
                        count = int(processed([part])[1].prod()) // 4
                        new = [START, *[IMAGE] * count, END]
                    ids += new
                    is_image += [each >= START for each in new]
                end = start + len(ids)
                self.tokens[number, start:end] = torch.tensor(ids)
                targets = torch.tensor([-100 if image else each for each, image in zip(ids, is_image, strict=True)])
                targets[: 1 + number % 3] = -100
                self.labels[number, start:end] = targets
                lengths.append(len(ids))
                of_row.append(own)
                start = end
            self.lengths.append(lengths)
            self.images.append(of_row)

    def batch(self, num_microbatches: int, *, is_packed: bool) -> StepBatch:
        of_rows = [[image for own in row for image in own] for row in self.images]
        every = [image for row in of_rows for image in row]
        features = torch.empty(0, self.whole.config.text_config.hidden_size)
        grids = iter(list[tuple[int, ...]]())
        if every:
            pixels, found = processed(every)
            features, grids = torch.cat(self.vision.features(pixels, found)), iter(map(tuple, found.tolist()))
        own_grids: list[list[Any]] = [[next(grids) for _ in row] for row in of_rows]
        is_image = self.tokens == IMAGE
        places = torch.where(is_image, is_image.flatten().cumsum(0).view_as(is_image) - 1, -1)
        positions = self.vision.positions(self.tokens, self.lengths if is_packed else (), own_grids)
        packing: dict[str, Any] = {}
        if is_packed:
            most = max(map(len, self.lengths)) + 1
            rows: Rows = self.lengths
            made = position_ids_and_cu_seqlens(
                rows, seq_length=self.tokens.shape[1], num_microbatches=num_microbatches, max_documents=most
            )
            packing = {"documents": tuple(map(torch.from_numpy, made)), "document_lengths": rows}
        return StepBatch(
            self.tokens,
            self.labels,
            int((self.labels[:, 1:] != -100).sum()),
            self.tokens.numel(),
            len(self.tokens),
            images=StepImages(positions, places, features),
            **packing,
        )

    def alone(self, model: PreTrainedModel, num_targets: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of the text by transformers: one document after the other, with a frozen tower."""
        model.requires_grad_(True).zero_grad()
        model.base_model.get_submodule(self.vision.name).requires_grad_(False)
        total = torch.zeros(())
        for row, lengths in enumerate(self.lengths):
            for number, length in enumerate(lengths):
                first = sum(lengths[:number])
                tokens, labels = (each[row : row + 1, first : first + length] for each in (self.tokens, self.labels))
                given: dict[str, Any] = {}
                if images := self.images[row][number]:
                    pixels, grids = processed(images)
                    kinds = (tokens == IMAGE).int()
                    given = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
                loss = model(input_ids=tokens, labels=labels, num_items_in_batch=num_targets, **given).loss
                loss.backward()
                total += loss.detach()
        grads = {name: each.grad for name, each in model.named_parameters(remove_duplicate=False)}
        renamed = text_weight_names(grads.keys())
        return total, {renamed.get(name, name): grad for name, grad in grads.items() if grad is not None}


TOKENS = {START: "<|vision_start|>", END: "<|vision_end|>", IMAGE: "<|image_pad|>", 91: "<|video_pad|>"}
TEMPLATE = (
    "{%- for turn in messages -%}{{- '[' + turn['role'] + ']\\n' + turn['content'] -}}"
    "{%- if turn['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)


def make_vision_folder(folder: Path) -> PreTrainedModel:
    """Save a tiny whole model with the quickstart tokenizer, the tokens of images and a processor."""
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS.values()]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {old: tokenizer.convert_tokens_to_ids(token) for old, token in TOKENS.items()}
    fields = vision_fields(vocab_size=4096 + 64, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id)
    names = {"vision_start_token_id": START, "vision_end_token_id": END, "image_token_id": IMAGE, "video_token_id": 91}
    config = CONFIG_MAPPING["qwen3_5"].from_dict(fields | {name: ids[old] for name, old in names.items()})
    torch.manual_seed(3)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)  # of the class that transformers has for the family
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model.eval()
