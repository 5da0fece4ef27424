"""A conversation with a model: its turns, rendered by the chat template, and streamed answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers.generation.streamers import TextStreamer

from mobius.data.images import MARK, ImageFile, with_images
from mobius.errors import CheckpointError, ConfigError, DataError
from mobius.models.model_files import describe_error
from mobius.training.evaluation.generation import TextGenerator, TokenIds

logger = logging.getLogger(__name__)


class Conversation:
    """Turns of a user and a model. Without a chat template the model continues the text of all turns."""

    def __init__(self, generator: TextGenerator, settings: Mapping[str, Any], *, max_new_tokens: int) -> None:
        """`settings` are arguments of transformers' `generate`; `max_new_tokens` limits the tokens of an answer."""
        self._generator, self._settings, self._max_new_tokens = generator, settings, max_new_tokens
        self._has_template = bool(generator.tokenizer.chat_template)
        self._turns: list[tuple[str, str]] = []
        self._images: list[tuple[ImageFile, ...]] = []
        """Images of each turn."""
        self._shown: list[ImageFile] = []
        """Images of the next prompt."""
        self._system: str | None = None

    def describe(self) -> str:
        """Line that describes the model, its chat template, and how its answers are drawn."""
        model, saved = self._generator.model, self._generator.model.generation_config
        settings = {name: getattr(saved, name) for name in ("do_sample", "temperature", "top_p")}
        settings = {name: value for name, value in {**settings, **self._settings}.items() if value is not None}
        how = "the likeliest tokens"
        if settings.pop("do_sample", False):
            how = ", ".join(["drawn", *(f"{name} {value:g}" for name, value in settings.items())])
        template = "chat template" if self._has_template else "no chat template: the model continues your text"
        return (
            f"{model.config.model_type}, {model.num_parameters():.3g} parameters, {model.dtype} on {model.device}; "
            f"{template}; answers of up to {self._max_new_tokens} tokens, {how}"
        )

    def set_system(self, text: str | None) -> None:
        """Start again with a system message. Raises ConfigError for a model without a chat template."""
        if text is not None and not self._has_template:
            raise ConfigError("a system message has no place: the model has no chat template. Leave it out.")
        self._system = text
        self.reset()

    def reset(self) -> None:
        """Forget all turns and images."""
        self._turns.clear()
        self._images.clear()
        self._shown.clear()

    def show(self, path: str) -> None:
        """Let the next prompt be about the image at `path`. Raises ConfigError, DataError."""
        if self._generator.images is None:
            raise ConfigError("the model is loaded for text: it has no tower whose images Mobius reads.")
        self._shown.append(self._generator.images.rules.read(path, Path.cwd()))

    def ask(self, prompt: str, write: Callable[[str], object]) -> str:
        """Return the answer, and pass its parts to `write` as they come. Prompt and answer become turns.

        The oldest turns are forgotten if the context has no room. After KeyboardInterrupt the written part becomes the
        turn. Raises CheckpointError for a template that fails, DataError for a prompt without room, and
        GpuMemoryError.
        """
        prompt, shown = self._with_images(prompt), tuple(self._shown)
        tokens, streamer = self._fitting_tokens(prompt), _Streamer(self._generator.tokenizer, write)
        options: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "settings": self._settings}
        try:
            images = [image for own in (*self._images, shown) for image in own]
            self._generator.stream(tokens, streamer, images=images, **options)
        finally:
            if streamer.text:
                self._turns.append((prompt, streamer.text))
                self._images.append(shown)
                self._shown.clear()
        return streamer.text

    def _with_images(self, prompt: str) -> str:
        """Return the prompt with the tokens of its images, in front of it if it does not say where."""
        if not self._shown:
            return prompt
        assert self._generator.images is not None, "`show` has refused images"
        places = MARK * len(self._shown) if MARK not in prompt else ""
        return with_images([places + prompt], self._shown, self._generator.images.rules)[0]

    def _fitting_tokens(self, prompt: str) -> TokenIds:
        """Tokens of the turns and `prompt`, without the oldest turns if there would be no room for the answer."""
        context, tokens = self._generator.context_length, self._tokens(prompt)
        while self._turns and context and len(tokens) + min(self._max_new_tokens, context // 4) > context:
            del self._turns[0], self._images[0]
            logger.warning("the context of %d tokens is full: the oldest prompt and answer are forgotten", context)
            tokens = self._tokens(prompt)
        if not len(tokens) and self._has_template:
            raise CheckpointError(
                "the model's chat template writes nothing for the prompt: it may not know the role `user`. Correct "
                "chat_template.jinja in the model's folder, or train with --chat_template."
            )
        if not self._generator.can_generate(tokens):
            raise DataError(
                f"a prompt of {len(tokens)} tokens has no room in the model's context of {context}. Shorten it."
            )
        return tokens

    def _tokens(self, prompt: str) -> TokenIds:
        tokenizer, text = self._generator.tokenizer, "\n".join([*map("".join, self._turns), prompt])
        if self._has_template:
            messages = [] if self._system is None else [{"role": "system", "content": self._system}]
            for turn in (*self._turns, (prompt,)):
                messages += [{"role": role, "content": said} for role, said in zip(("user", "assistant"), turn)]  # noqa: B905
            try:
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # a template may raise any exception
                raise CheckpointError(
                    f"the chat template cannot write these turns: {describe_error(error)}."
                ) from error
        return np.array(tokenizer(text, add_special_tokens=not self._has_template)["input_ids"], dtype=np.int32)


class _Streamer(TextStreamer):
    """Passes the text of an answer to `write`, and keeps the text."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._write, self.text = write, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write `text`, which is final."""
        self.text += text
        self._write(text)
