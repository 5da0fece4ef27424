"""Optimizer states in fewer bytes, in torch; adamw.c and triton_adamw.py compute the same bits.

    bytes per parameter     fp32 (SplitMaster)   bf16                     compact
    weight, rest of master  bf16, int16          bf16, int16              bf16, int8: a master of 24 bits, stochastic
    first moment            fp32                 bf16, to nearest         sign and e4m3, to nearest
    second moment           fp32                 bf16, stochastic         e5m3 without sign, stochastic
    all but the weight      10                   6                        3 + 2/32

8-bit moments are relative to a power of two per group of 32 elements. An element's code is its fp32 word without the
last 20 bits of the mantissa, minus a word that depends on the group's exponent. A second moment gets code 0 only below
2^-129, because it must not be zero while the element's first moment is not zero. Rounded to nearest, a second moment
would lose a decay of 0.1 %, and a 24-bit master would lose small updates. So both are rounded stochastically: the noise
has as many bits as are dropped, which leaves no bias. The weight is the 24-bit master rounded to nearest, ties away
from zero, so the remainder has 8 bits.

Noise is a hash of seed, step, and the element's offset in its parameter. So the number of stages, ranks, threads and
replicas changes no bit. Each parameter begins a new group and is padded to a multiple of the group.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from mobius.engine.state_codec import CODECS, GROUP, Allocate, Parts, SplitMaster, StateCodec, new_fp32

NoisePlace = tuple[int, int]
"""Key of a parameter's noise, and the parameter's element at which a range begins."""
_WORD, _INFINITY, _QUIET_NAN = 0xFFFFFFFF, 0x7F800000, 0x7FC0
_CODE_SHIFT = 20
_EXP_AVG_RANGE, _EXP_AVG_SQ_RANGE = 15, 31
"""Number of powers of two from the smallest to the largest element of a group, for exponents of 4 and 5 bits."""


def noise_key(seed: int, step: int, name: str) -> int:
    """Return the 32-bit key of the noise for parameter `name` in `step`."""
    return _hash((_hash((zlib.crc32(name.encode()) ^ seed) & _WORD) + step) & _WORD)


def noise_words(key: int, first: int, count: int, device: torch.device, *, each: int = 1) -> Tensor:
    """Return int64 words of 32 random bits for `count` elements from `first` on, of the parameter with `key`.

    `each`: number of consecutive elements that share a word, a power of two.
    """
    words = torch.arange(first, first + count, each, dtype=torch.int64, device=device)
    words = words.bitwise_and_(_WORD).floor_divide_(each).bitwise_xor_(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words.bitwise_xor_(words >> shift).mul_(factor).bitwise_and_(_WORD)
    return words.bitwise_xor_(words >> 16)


def _hash(word: int) -> int:
    """Return the hash lowbias32 of a 32-bit word, by Chris Wellons (public domain)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D & _WORD
    word = (word ^ (word >> 15)) * 0x846CA68B & _WORD
    return word ^ (word >> 16)


class ReducedStates(SplitMaster):
    """Base of formats whose second moment is rounded stochastically."""

    def noise(self, key: int, first: int, count: int, device: torch.device) -> Tensor:
        """Return random words, int64 [count], with as many bits as the format drops; adjacent words may share bits."""
        return noise_words(key, first, count, device)


class Bf16States(ReducedStates):
    """bf16 moments next to an fp32 master; the master needs no noise."""

    name: ClassVar = "bf16"
    parts: ClassVar = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_low": torch.int16}

    def decode_moments(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return both moments in new fp32 memory."""
        return parts["exp_avg"].float(), parts["exp_avg_sq"].float()

    def encode_moments(self, moments: tuple[Tensor, Tensor], parts: Parts, noise: Tensor | None = None) -> None:
        """Round both moments, the second one stochastically if there is `noise`."""
        parts["exp_avg"].copy_(moments[0])
        if noise is None:
            parts["exp_avg_sq"].copy_(moments[1])
            return
        words = moments[1].view(torch.int32).long()
        words += torch.where(words < _INFINITY, noise >> 16, 0)
        parts["exp_avg_sq"].view(torch.int16).copy_(words >> 16)


class CompactStates(ReducedStates):
    """8-bit moments with an exponent per group, and a master of 24 bits."""

    name: ClassVar = "compact"
    parts: ClassVar = {
        "exp_avg.codes": torch.uint8,
        "exp_avg.exponents": torch.uint8,
        "exp_avg_sq.codes": torch.uint8,
        "exp_avg_sq.exponents": torch.uint8,
        "master_low8": torch.int8,
    }
    per_group: ClassVar = frozenset({"exp_avg.exponents", "exp_avg_sq.exponents"})

    def noise(self, key: int, first: int, count: int, device: torch.device) -> Tensor:
        """Return 20 bits per element: four elements share a word, rotated so that no two share their upper eight."""
        words = noise_words(key, first, count, device, each=4)
        rotated = [words >> shift | words << 32 - shift & _WORD for shift in (0, 8, 16, 24)]
        return torch.stack(rotated, dim=1).view(-1) >> 32 - _CODE_SHIFT

    def decode_moments(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return both moments in new fp32 memory."""
        codes = parts["exp_avg.codes"].int()
        words = _decode(codes & 0x7F, parts["exp_avg.exponents"], _EXP_AVG_RANGE)
        mean = words.bitwise_or_((codes & 0x80) << 24).view(torch.float32)
        square = _decode(parts["exp_avg_sq.codes"].int(), parts["exp_avg_sq.exponents"], _EXP_AVG_SQ_RANGE)
        return mean, square.view(torch.float32)

    def encode_moments(self, moments: tuple[Tensor, Tensor], parts: Parts, noise: Tensor | None = None) -> None:
        """Round both moments to codes, the second one stochastically if there is `noise`; store groups' exponents."""
        half, words = 1 << (_CODE_SHIFT - 1), moments[0].view(torch.int32)
        codes = _encode(words & 0x7FFFFFFF, half, parts["exp_avg.exponents"], _EXP_AVG_RANGE).clamp_(0, 127)
        parts["exp_avg.codes"].copy_(codes.bitwise_or_(words >> 24 & 0x80))
        words = moments[1].view(torch.int32).bitwise_and(0x7FFFFFFF).clamp_max_(_INFINITY)
        words += half if noise is None else noise.int()
        codes = _encode(words, 0, parts["exp_avg_sq.exponents"], _EXP_AVG_SQ_RANGE).clamp_(1, 255)
        parts["exp_avg_sq.codes"].copy_(codes.mul_(words >> _CODE_SHIFT != 0))

    def decode_master(self, weights: Tensor, parts: Parts, allocate: Allocate = new_fp32) -> Tensor:
        """Return the master, joined from weights and remainder."""
        out = allocate(weights)
        words = out.view(torch.int32)
        words.copy_(weights.view(torch.int16))
        words.bitwise_left_shift_(8).add_(parts["master_low8"]).bitwise_left_shift_(8)
        return out

    def encode_master(self, master: Tensor, weights: Tensor, parts: Parts, noise: Tensor | None = None) -> None:
        """Round `master` to 24 bits, stochastically if there is `noise`, and round the result to `weights`."""
        remainder, size = parts["master_low8"], self.chunk_elements(weights.device)
        if master.dtype == weights.dtype:
            weights.copy_(master)
            remainder.zero_()
            return
        chunks = [each.split(size) for each in (master, weights, remainder)]
        added = [None] * len(chunks[0]) if noise is None else noise.split(size)
        for chunk, rounded, rest, own in zip(*chunks, added, strict=True):
            words = chunk.to(weights.device, torch.float32).view(torch.int32)
            by = 0x80 if own is None else own.bitwise_and(0xFF).int()
            master24 = (words + by) >> 8  # an infinity stays one, because its last bits are zeros
            weight = (master24 + 0x80) >> 8
            is_nan = (words & 0x7FFFFFFF) > _INFINITY
            rest.copy_((master24 - (weight << 8)).masked_fill_(is_nan, 0))
            rounded.view(torch.int16).copy_(weight.masked_fill_(is_nan, _QUIET_NAN))


def _decode(codes: Tensor, exponents: Tensor, largest: int) -> Tensor:
    """Return the fp32 words (int32) of codes without sign."""
    words = (codes << _CODE_SHIFT).view(-1, GROUP) + _lowest_words(exponents, largest)
    return words.view(-1).mul_(codes != 0)


def _encode(words: Tensor, added: int, exponents: Tensor, largest: int) -> Tensor:
    """Store each group's exponent; return the codes (int32, not clamped) of fp32 words without sign."""
    groups = words.view(-1, GROUP)
    exponents.copy_(((groups.amax(1) >> 23) + 1).clamp_(largest + 1, 254))
    return ((groups - _lowest_words(exponents, largest)).view(-1) + added) >> _CODE_SHIFT


def _lowest_words(exponents: Tensor, largest: int) -> Tensor:
    """Return for each group the word that code 0 would represent, int32 [groups, 1]."""
    return ((exponents.int() - largest) << 23).unsqueeze(1)


REDUCED: Final[Mapping[str, StateCodec]] = {codec.name: codec for codec in (Bf16States(), CompactStates())}
"""Value of `--optimizer_states` -> codec for states next to bf16 weights."""


def codec_for(dtype: torch.dtype, reduced_format: str = "") -> StateCodec:
    """Return the codec for weights in `dtype`, or the codec that `reduced_format` names if that is not empty."""
    return REDUCED[reduced_format] if reduced_format else CODECS[dtype]
