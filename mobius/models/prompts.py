"""Trained prompts: vectors that stand before the tokens of each document, in front of a frozen model.

    prompt tuning   the vectors are parameters (arXiv 2104.08691)
    P-tuning        the vectors are the output of an encoder of parameters, as in peft: Linear-ReLU-Linear-ReLU-Linear,
                    or two bidirectional layers of an LSTM and Linear-ReLU-Linear

The data reserve places for a document's virtual tokens, with the ids of `data/token_store.virtual_ids`; the embedding
puts the vectors there. So lengths, positions, packing and slices count virtual tokens like others.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice, pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from mobius.config.config import AdapterConfig, EncoderType, FinetuningType
from mobius.models.block_autograd import Block
from mobius.models.prefixes import PREFIX
from mobius.models.structure import ScalingSteps, apply_scaling

if TYPE_CHECKING:
    from mobius.models.weights import WeightSource

PROMPT_EMBEDDINGS = "prompt_embeddings"
"""Name of the vectors in peft's files."""
_ENCODER = "prompt_encoder"
PROMPT_WEIGHT = f"{_ENCODER}.embedding.weight"
"""Name of the parameter that holds the vectors, or of P-tuning what the encoder makes them of; as in peft's modules."""

_RECURRENT = "lstm_head"
_OF_STATE = f"{_RECURRENT}.weight_hh_l0"


def is_prompt_parameter(name: str) -> bool:
    """Whether a parameter belongs to a prompt, not to the model."""
    return name.startswith(f"{_ENCODER}.") or name.endswith(f".{PREFIX}")


class PromptedEmbedding(nn.Module):
    """A model's embedding, with the vectors of a prompt in the places of virtual tokens."""

    def __init__(self, path: str, embedding: nn.Module, steps: ScalingSteps, config: AdapterConfig) -> None:
        """Create the module on the meta device; `embedding` keeps its name `path`, and is followed by `steps`."""
        super().__init__()
        *above, own = path.split(".")
        parent: nn.Module = self
        for name in above:
            child = nn.Module()
            parent.add_module(name, child)
            parent = child
        parent.add_module(own, embedding)
        self.path, self._steps = path, steps
        width, kind = int(embedding.get_parameter("weight").shape[1]), config.finetuning_type
        hidden_size = (config.encoder_hidden_size or width) if kind is FinetuningType.P_TUNING else None
        is_recurrent = config.encoder_type is EncoderType.LSTM
        encoder = PromptEncoder(config.num_virtual_tokens, width, hidden_size, is_recurrent=is_recurrent)
        self.prompt_encoder = None if kind is FinetuningType.PREFIX else encoder

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, H]."""
        hidden: Tensor = self.get_submodule(self.path)(tokens.clamp(min=0))
        if self.prompt_encoder is not None:
            hidden = with_prompt(hidden, tokens, self.prompt_encoder())
        return apply_scaling(hidden, self._steps)


class PromptEncoder(nn.Module):
    """Vectors of a prompt, encoded if there is a `hidden_size`, with peft's names of parameters; on the meta device."""

    def __init__(self, num_tokens: int, width: int, hidden_size: int | None, *, is_recurrent: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width, device="meta")
        sizes: tuple[int, ...] = (width, hidden_size, hidden_size, width) if hidden_size else ()
        if hidden_size and is_recurrent:
            self.lstm_head = _Lstm(width, hidden_size, num_layers=2, bidirectional=True, device="meta")
            sizes = 2 * hidden_size, 2 * hidden_size, width
        layers = [(nn.Linear(*pair, device="meta"), nn.ReLU()) for pair in pairwise(sizes)]
        self.mlp_head = nn.Sequential(*chain.from_iterable(layers))[:-1]

    def forward(self) -> Tensor:
        """Return the prompt's vectors [tokens, width]."""
        vectors = self.embedding.weight
        if _RECURRENT in self._modules:
            vectors = self.lstm_head(vectors)
        result: Tensor = self.mlp_head(vectors)
        return result


class _Lstm(nn.LSTM):
    """An LSTM that runs on given parameters; torch's keeps references to its first ones."""

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        """[tokens, width] -> [tokens, 2 * hidden size]."""
        state = inputs.new_zeros(2 * self.num_layers, 1, self.hidden_size)
        weights = [getattr(self, name) for name in self._flat_weights_names]
        with torch.backends.cudnn.flags(enabled=False):  # its sums may differ from run to run
            made = torch.lstm(
                inputs.unsqueeze(1), (state, state), weights, True, self.num_layers, 0.0, False, True, False
            )
        return made[0].squeeze(1)


def with_prompt(hidden: Tensor, tokens: Tensor, prompt: Tensor) -> Tensor:
    """Return `hidden` [B, T, H] with the vectors of `prompt` [N, H] in the places of virtual tokens."""
    is_virtual = tokens < 0
    vectors = F.embedding(torch.where(is_virtual, ~tokens, 0), prompt)
    return torch.where(is_virtual.unsqueeze(-1), vectors.to(hidden.dtype), hidden)


def exported_prompt(values: Mapping[str, Tensor]) -> Tensor:
    """Return the vectors of a prompt, of P-tuning as its encoder makes them.

    `values` are the prompt's parameters by name, on any device. The encoder runs in fp32 on the CPU; the vectors have
    the dtype of the values.
    """
    own = {name.removeprefix(f"{_ENCODER}."): value.detach().to("cpu", torch.float32) for name, value in values.items()}
    bias, (num_tokens, width) = own.get("mlp_head.0.bias"), values[PROMPT_WEIGHT].shape
    is_recurrent = _OF_STATE in own
    hidden_size = None if bias is None else len(bias) // (2 if is_recurrent else 1)
    with torch.no_grad():
        encoder = PromptEncoder(num_tokens, width, hidden_size, is_recurrent=is_recurrent)
        vectors: Tensor = functional_call(encoder, own, ())
    return vectors.to(values[PROMPT_WEIGHT].dtype)


class InitialPrompt:
    """Source of a prompt's first values, as in peft; `base` has all other values.

    Vectors are the embeddings of words, or else standard normal; weights and biases are uniform in +-1 / sqrt(inputs),
    of an LSTM +-1 / sqrt(hidden size).
    The seed of a draw depends on the parameter's name, so values do not depend on the partition.
    """

    def __init__(self, base: WeightSource, embedding: Block, *, seed: int, words: Sequence[int] = ()) -> None:
        """`embedding`: block of a PromptedEmbedding. `words`: token ids, repeated or cut to the number of vectors."""
        self._base, self._embedding, self._seed, self._words = base, embedding, seed, words

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the value of parameter `name`; a prompt's value is in fp32."""
        if not is_prompt_parameter(name):
            return self._base.read(name, shape)
        if name == PROMPT_WEIGHT and self._words:
            return self._embedded([*islice(cycle(self._words), shape[0])])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if name == PROMPT_WEIGHT or name.endswith(f".{PREFIX}"):
            return torch.randn(shape, generator=generator)
        module = name.rpartition(".")[0]
        weight = f"{_ENCODER}.{_OF_STATE}" if module.endswith(_RECURRENT) else f"{module}.weight"
        bound = 1 / math.sqrt(self._embedding.shapes[weight][1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def _embedded(self, words: Sequence[int]) -> Tensor:
        """Return the model's embeddings of `words`, as its module makes them: some families scale them there."""
        module = cast(PromptedEmbedding, self._embedding.module)
        name = f"{module.path}.weight"
        weight = self._base.read(name, self._embedding.shapes[name])
        with torch.no_grad():
            vectors: Tensor = functional_call(
                module.get_submodule(module.path), {"weight": weight}, torch.tensor(words)
            )
        return vectors.float()
