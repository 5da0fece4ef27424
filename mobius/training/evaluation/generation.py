"""Generates answers to prompts with the model in a Hugging Face folder, by transformers in one process.

Decoding of batches is greedy or follows the folder's generation_config.json, but never samples. In fp32 an answer does
not depend on the other prompts of its batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from mobius.checkpoint.merged_model import decode_base, merge_into
from mobius.data.images import ImageFile
from mobius.data.token_store import virtual_ids
from mobius.errors import CheckpointError, GpuMemoryError, HostMemoryError, MobiusError
from mobius.hardware.host_memory import available_host_bytes
from mobius.models.families import softcap_attention_implementation
from mobius.models.model_files import describe_error, format_json_value, read_json_object
from mobius.models.peft_folder import AdapterFiles, AdapterFolder
from mobius.models.prompt_folder import PromptFolder
from mobius.models.prompts import with_prompt
from mobius.models.quantized_folder import read_quantization
from mobius.models.reward_head import is_reward_model
from mobius.models.rotary import RotaryLengths
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import CheckpointWeights
from mobius.models.whole_class import class_of
from mobius.training.images import ImageModel, find_image_model
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

TokenIds = npt.NDArray[np.int32]

_WORKSPACE_SHARE: Final = 0.1
"""Memory that generation on a GPU needs in addition to the weights, as a share of the weights' memory."""
_MAX_BEAMS: Final = 64
"""Maximum number of beams; each beam takes the memory of a prompt."""
GREEDY: Final[Mapping[str, Any]] = {
    "do_sample": False,
    # Settings of generation_config.json that have no effect without sampling.
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "typical_p")),
}
"""Settings of transformers' `generate` that choose the most probable token at each position."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated answer."""

    tokens: TokenIds
    """Token ids without the end-of-sequence token."""
    is_finished: bool
    """Whether the model ended the answer; False if the answer reached max_new_tokens or filled the model's context."""


@dataclass(frozen=True)
class TextGenerator:
    """Model and tokenizer that generate answers."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    prompt: Tensor | None = None
    """Trained vectors [N, H] before each prompt."""
    images: ImageModel | None = None
    """Processor of images; None for a model that is loaded for text."""

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        adapter: AdapterFiles | None = None,
        sees: bool | None = False,
    ) -> TextGenerator:
        """Load the model in a Hugging Face folder on `device`, and add `adapter` to its weights.

        `sees`: prompts may have images; raises CheckpointError for a model that Mobius shows none. None: if it can.

        A model that is too large for the GPU is loaded on the CPU, with a warning. Without `dtype` the model computes
        in the folder's number format on a GPU, and in fp32 on the CPU if memory suffices. A tokenizer of the adapter
        replaces the folder's tokenizer. Raises CheckpointError, HostMemoryError.
        """
        quantization = read_quantization(folder)
        way_out = f". It comes quantized; `mobius export {folder} FOLDER` writes plain weights." if quantization else ""
        try:
            if quantization is not None and isinstance(adapter, AdapterFolder):
                raise CheckpointError(
                    f"{folder}, the base of {adapter.folder}, comes quantized ({quantization.text}). Merge the adapter "
                    f"into its decoded weights: mobius export {adapter.folder} FOLDER --merge"
                )
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if is_reward_model(config) or (adapter is not None and adapter.is_reward_model):
                folder = folder if adapter is None else adapter.folder
                raise CheckpointError(f"{folder} is a reward model: it gives scores, and generates no answers.")
            own = folder
            if adapter is not None and (adapter.folder / "tokenizer_config.json").is_file():
                own = adapter.folder
            tokenizer = load_tokenizer(own, int(config.get_text_config().vocab_size))
            images = None if sees is False else find_image_model(folder, tokenizer)
            if isinstance(images, str) and sees:
                raise CheckpointError(f"{folder} cannot answer questions about images: {images}.")
            device = _fitting_device(folder, device)
            fitting = _fitting_dtype(folder, config, device)
            with _without_bars():
                model = class_of(config, is_whole=isinstance(images, ImageModel)).from_pretrained(
                    folder,
                    dtype=dtype or fitting,
                    attn_implementation=softcap_attention_implementation(config),
                    trust_remote_code=False,
                    use_safetensors=True,
                )
        except MobiusError:
            raise
        except Exception as error:  # transformers raises any error for a wrong value
            raise CheckpointError(
                f"transformers cannot load the model in {folder} to generate answers: {describe_error(error)}{way_out}"
            ) from error
        vectors = None
        if adapter is not None:
            decode_base(model, adapter)
        if isinstance(adapter, AdapterFolder):
            merge_into(model, adapter)
        elif isinstance(adapter, PromptFolder):
            vectors = adapter.put_before(model).to(device)
        image_model = images if isinstance(images, ImageModel) else None
        return cls(model.to(device).eval(), tokenizer, vectors, image_model)

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of text in the model's context; None if the model's config has no limit."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if length is None else int(length) - self._num_virtual

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids of tokens that end an answer: the folder's end tokens, and the tokenizer's, which training uses."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, Sequence) else [configured]
        return frozenset(int(token) for token in (*ids, self.tokenizer.eos_token_id) if token is not None)

    @property
    def _num_virtual(self) -> int:
        return 0 if self.prompt is None else len(self.prompt)

    def can_generate(self, prompt: TokenIds) -> bool:
        """Whether the prompt is not empty and the context has room for an answer after it."""
        return len(prompt) > 0 and (self.context_length is None or len(prompt) < self.context_length)

    def generate(
        self,
        prompts: Sequence[TokenIds],
        *,
        max_new_tokens: int,
        batch_size: int,
        images: Sequence[Sequence[ImageFile]] = (),
        show_progress: bool = False,
    ) -> list[Generation | None]:
        """Return the answers in the order of `prompts`; None for a prompt that cannot be answered.

        `images`: those of each prompt, whose tokens it has; () for prompts without images.

        A batch has `batch_size` prompts of similar length; the longest prompts come first. If GPU memory does not
        suffice, further batches have half as many prompts. Raises GpuMemoryError if a single prompt does not fit.
        """
        answers: list[Generation | None] = [None] * len(prompts)
        order = sorted(
            (index for index, prompt in enumerate(prompts) if self.can_generate(prompt)),
            key=lambda index: -len(prompts[index]),
        )
        done = 0
        with tqdm(desc="answering", total=len(order), unit=" samples", disable=None if show_progress else True) as bar:
            while done < len(order):
                batch = order[done : done + batch_size]
                batch = batch[: self._num_alike([prompts[index] for index in batch], max_new_tokens)]
                try:
                    shown = [images[index] for index in batch] if images else ()
                    answered = [*self._batch([prompts[index] for index in batch], shown, max_new_tokens)]
                except torch.OutOfMemoryError as error:
                    if len(batch) == 1:
                        raise GpuMemoryError(
                            f"GPU memory does not suffice to answer a prompt of {len(prompts[batch[0]])} tokens "
                            f"with up to {max_new_tokens} tokens. Lower --max_new_tokens, generate the answers with "
                            "--no_do_train --do_predict on a larger GPU, or use --device cpu."
                        ) from error
                    batch_size = len(batch) // 2
                else:
                    for index, answer in zip(batch, answered, strict=True):
                        answers[index] = answer
                    done += len(batch)
                    bar.update(len(batch))
                    continue
                # Free memory only after the except block, where the exception still references the failed attempt's
                # tensors.
                torch.cuda.empty_cache()
                logger.warning("out of GPU memory: further batches have %d prompts", batch_size)
        return answers

    def stream(
        self,
        prompt: TokenIds,
        streamer: BaseStreamer,
        *,
        max_new_tokens: int,
        settings: Mapping[str, Any],
        images: Sequence[ImageFile] = (),
    ) -> None:
        """Pass prompt and answer to `streamer`, token by token; `settings` are arguments of transformers' `generate`.

        `can_generate` must be true for the prompt. Raises CheckpointError, GpuMemoryError.
        """
        ids = self._with_places(prompt).unsqueeze(0)
        settings = {"num_beams": 1, **settings, "streamer": streamer}
        try:
            self._generated(ids, torch.ones_like(ids), self._room(prompt, max_new_tokens), images, settings)
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"GPU memory does not suffice to answer a prompt of {len(prompt)} tokens. Shorten it, or use --device "
                "cpu."
            ) from error

    def _num_alike(self, prompts: Sequence[TokenIds], max_new_tokens: int) -> int:
        """Return how many of `prompts` (longest first) need the same rotary factors and so can share a batch.

        transformers uses the factors of the longest text in a batch for all texts of the batch.
        """
        lengths, more = RotaryLengths.of(self.model.config.get_text_config()), self._num_virtual
        if lengths is None:
            return len(prompts)
        for number in range(len(prompts), 1, -1):
            longest = more + len(prompts[0]) + self._room(prompts[number - 1], max_new_tokens)
            if lengths.longest_alike(more + len(prompts[number - 1]), longest) == longest:
                return number
        return 1

    def _batch(
        self, prompts: Sequence[TokenIds], images: Sequence[Sequence[ImageFile]], max_new_tokens: int
    ) -> Iterator[Generation]:
        """Yield answers to `prompts`, generated in one batch that is padded on the left."""
        pad, texts = pad_token_id(self.tokenizer), [*map(self._with_places, prompts)]
        longest = max(map(len, texts))
        ids = torch.full((len(prompts), longest), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, longest - len(text) :], mask[row, longest - len(text) :] = text, 1
        rooms = [self._room(prompt, max_new_tokens) for prompt in prompts]
        output = self._generated(ids, mask, max(rooms), [image for own in images for image in own])
        stops = self.eos_token_ids | {pad}
        for tokens, room in zip(output[:, longest:].tolist(), rooms, strict=True):
            answer = [*takewhile(lambda token: token not in stops, tokens[:room])]
            yield Generation(np.array(answer, dtype=np.int32), is_finished=len(answer) < len(tokens[:room]))

    def _with_places(self, prompt: TokenIds) -> Tensor:
        """Return the ids of a prompt, behind those of virtual tokens."""
        return torch.from_numpy(np.concatenate([virtual_ids(self._num_virtual), prompt]).astype(np.int64))

    def _pixels(self, images: Sequence[ImageFile], ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model for images, whose tokens `ids` [B, L] has. Raises DataError."""
        if not images:
            return {}
        assert self.images is not None, "the model was loaded for text"
        made = self.images.processor([image.open() for image in images], return_tensors="pt")
        kinds = (ids == self.images.rules.token_id).int()
        return {"mm_token_type_ids": kinds, **{name: value.to(ids.device) for name, value in made.items()}}

    def _generated(
        self,
        ids: Tensor,
        mask: Tensor,
        max_new_tokens: int,
        images: Sequence[ImageFile] = (),
        settings: Mapping[str, Any] = GREEDY,
    ) -> Tensor:
        """Return the ids of prompts and answers. Raises CheckpointError if the generation settings are invalid."""
        device, config = self.model.device, self.model.generation_config
        ids = ids.to(device)
        given = {"input_ids": ids}
        if self.prompt is not None:  # transformers then returns the ids of answers alone
            hidden = self.model.get_input_embeddings()(ids.clamp(min=0))
            given = {"inputs_embeds": with_prompt(hidden, ids, self.prompt)}
        given |= self._pixels(images, ids)
        try:
            output = cast(
                Tensor,
                self.model.generate(
                    **given,
                    attention_mask=mask.to(device),
                    max_new_tokens=max_new_tokens,
                    eos_token_id=sorted(self.eos_token_ids),
                    pad_token_id=pad_token_id(self.tokenizer),
                    use_cache=True,
                    num_return_sequences=1,
                    return_dict_in_generate=False,
                    **settings,
                    **({"tokenizer": self.tokenizer} if config.stop_strings else {}),
                ),
            )
            return output if self.prompt is None else torch.cat([ids, output], 1)
        except (torch.OutOfMemoryError, BrokenPipeError):  # BrokenPipeError comes from a streamer
            raise
        except Exception as error:  # transformers raises any error for a wrong setting
            raise CheckpointError(
                f"transformers cannot answer with the settings of generation_config.json: {describe_error(error)}. "
                "Correct that file in the model's folder, or remove it."
            ) from error

    def _room(self, prompt: TokenIds, max_new_tokens: int) -> int:
        """Return the maximum number of tokens for an answer to `prompt`, independent of other prompts in the batch."""
        context = self.context_length
        return max_new_tokens if context is None else min(max_new_tokens, context - len(prompt))


def check_generation_config(folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Generate once with a tiny model and the settings of `folder`, so that wrong settings are found before training.

    Raises CheckpointError.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    fields = read_json_object(path)
    for name in ("num_beams", "num_beam_groups"):
        if (value := fields.get(name)) is not None and not (type(value) is int and 1 <= value <= _MAX_BEAMS):
            raise CheckpointError(
                f"{path}: {name!r} is {format_json_value(value)}; it must be a number from 1 to {_MAX_BEAMS}."
            )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **sizes), trust_remote_code=False)
    try:
        model.generation_config = GenerationConfig.from_dict(fields)
        TextGenerator(model.eval(), tokenizer).generate([np.zeros(2, np.int32)], max_new_tokens=2, batch_size=1)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} has values with which transformers cannot generate: {describe_error(error)}. Correct them."
        ) from error


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the bar of transformers that counts loaded tensors."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _weight_bytes(folder: Path) -> int:
    """Return the bytes of the model's weight files, without optimizer states."""
    files = {tensor.path for tensor in CheckpointWeights(folder, {}).stored.values()}
    return sum(path.stat().st_size for path in files)


def _fitting_device(folder: Path, device: torch.device) -> torch.device:
    """Return `device`, or the CPU if the weights do not fit into the GPU's free memory."""
    if device.type != "cuda":
        return device
    needed, free = round((1 + _WORKSPACE_SHARE) * _weight_bytes(folder)), torch.cuda.mem_get_info(device)[0]
    if needed <= free:
        return device
    logger.warning(
        "one process generates the answers, and the model does not fit into one GPU: it needs %s, %s of %s is free. "
        "The process uses the CPU, which is far slower",
        format_bytes(needed),
        format_bytes(free),
        device,
    )
    return torch.device("cpu")


def _fitting_dtype(folder: Path, config: Any, device: torch.device) -> torch.dtype:
    """Return the number format for generation; raises HostMemoryError if the weights do not fit into host memory."""
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    needed, free = _weight_bytes(folder), available_host_bytes()
    if needed > free:
        raise HostMemoryError(
            f"to generate answers, one process loads the model in {folder}. It needs {format_bytes(needed)} of host "
            f"memory, {format_bytes(free)} is free. Use a host with more memory, or omit --do_predict in a run."
        )
    if device.type == "cpu" and needed * 4 // own.itemsize <= free:
        return torch.float32
    return own
