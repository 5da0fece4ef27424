"""Codes, scales and decoded values of the formats of frozen weights."""

from __future__ import annotations

import math

import pytest
import torch
from harness.quantized_references import CODES, DTYPES, digest, read_records
from torch import Tensor

from mobius.errors import CheckpointError
from mobius.models import weight_codecs
from mobius.models.quantization import FP8
from mobius.models.weight_codecs import CODECS, PART_ALIGNMENT, DoubleNf4Codec, Nf4Codec, WeightCodec

RECORDED, DIGESTS = read_records(CODES)
MXFP4 = CODECS["mxfp4"]
ALL = (*(codec for codec in CODECS.values() if codec is not MXFP4), DoubleNf4Codec())
over_codecs = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)


def encoded(codec: WeightCodec, values: Tensor) -> Tensor:
    raw = torch.empty(codec.num_bytes(tuple(values.shape)), dtype=torch.uint8)
    codec.encode(values, raw)
    return raw


def decoded(codec: WeightCodec, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return codec.decode(encoded(codec, values), tuple(values.shape), torch.empty(values.shape, dtype=dtype))


def normal(*shape: int) -> Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", RECORDED)
def test_nf4_has_codes_scales_and_values_of_bitsandbytes_to_the_bit(case: str) -> None:
    kind, word, _ = case.split()
    codec = DoubleNf4Codec() if kind == "double" else Nf4Codec()
    values = RECORDED[case.replace("double", "plain")]["values"]
    recorded = {name: each for name, each in RECORDED[case].items() if each is not values}
    raw = encoded(codec, values)

    found = codec.parts(raw, tuple(values.shape))
    assert found.keys() == recorded.keys()
    for name in found:
        if kind == "double" and name == "absmax":  # a table finds the codes in bitsandbytes on a CPU
            steps = (found[name].int() - recorded[name].int()).abs()
            assert steps.max() <= 1
            assert (steps > 0).sum() <= 0.005 * steps.numel()
            found[name].copy_(recorded[name])
        else:
            assert torch.equal(found[name], recorded[name]), name
    out = torch.empty(values.shape, dtype=DTYPES[word])
    assert codec.decode(raw, tuple(values.shape), out) is out
    assert digest(out) == DIGESTS[case]


def test_nf4_codes_are_the_nearest_next_to_every_bound() -> None:
    table = weight_codecs.nf4_table(torch.device("cpu"))
    bounds = (table[:-1] + table[1:]) / 2
    edges = torch.cat([bounds, table, torch.arange(-64, 65) / 64])
    near = [torch.nextafter(edges, torch.full_like(edges, side)) for side in (-2.0, 2.0)]
    values = torch.cat([edges, *near, torch.linspace(-1, 1, 100_001)]).clamp(-1, 1)

    assert torch.equal(weight_codecs._nearest_codes(values), torch.bucketize(values, bounds, out_int32=True))


@over_codecs
def test_parts_are_aligned_views_that_fill_the_bytes(codec: WeightCodec) -> None:
    shape = (3, 10, 50)
    raw = encoded(codec, normal(*shape))
    parts = codec.parts(raw, shape)

    starts = [part.data_ptr() - raw.data_ptr() for part in parts.values()]
    ends = [start + part.nbytes for start, part in zip(starts, parts.values(), strict=True)]
    assert starts == [0, *(-(-end // PART_ALIGNMENT) * PART_ALIGNMENT for end in ends[:-1])]
    assert raw.numel() == -(-ends[-1] // PART_ALIGNMENT) * PART_ALIGNMENT


BITS = {"bf16": 16, "fp32": 32, "fp8": 8, "int8": 8, "nf4": 4.5, DoubleNf4Codec.name: 4.127}
DISTANCES = {"bf16": 0.0017, "fp32": 0, "fp8": 0.0266, "int8": 0.0088, "nf4": 0.0924, DoubleNf4Codec.name: 0.0926}
"""Largest distances of decoded values, in root mean squares of the values, as the docstrings tell."""


@over_codecs
def test_bytes_and_distance_of_decoded_values(codec: WeightCodec) -> None:
    values = normal(512, 4096)

    distance = (decoded(codec, values) - values).norm() / values.norm()

    assert codec.num_bytes((512, 4096)) * 8 / values.numel() == pytest.approx(BITS[codec.name], rel=2e-3)
    assert 0.95 * DISTANCES[codec.name] <= distance <= DISTANCES[codec.name]


@over_codecs
def test_chunks_do_not_change_a_bit(codec: WeightCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(7, 30, 50)
    whole = encoded(codec, values), decoded(codec, values)

    monkeypatch.setattr(weight_codecs, "_chunk_elements", lambda _: 4096)

    parts = zip(*(codec.parts(raw, (7, 30, 50)).values() for raw in (whole[0], encoded(codec, values))), strict=True)
    assert all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in parts)
    assert torch.equal(whole[1], decoded(codec, values))


def test_fp8_codes_are_those_of_products() -> None:
    values = normal(48, 80).bfloat16()

    parts = CODECS["fp8"].parts(encoded(CODECS["fp8"], values), (48, 80))

    codes, scales = FP8.quantize(values)
    assert torch.equal(parts["codes"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(parts["scales"], scales[:, 0])


def test_int8_codes_put_the_largest_magnitude_of_a_row_at_127() -> None:
    values = normal(48, 80)

    parts = CODECS["int8"].parts(encoded(CODECS["int8"], values), (48, 80))

    assert torch.equal(parts["codes"].abs().amax(1), torch.full((48,), 127, dtype=torch.int8))
    assert torch.equal(parts["scales"], values.abs().amax(1) / 127)
    assert ((parts["codes"] * parts["scales"][:, None] - values).abs() <= 0.5001 * parts["scales"][:, None]).all()


@over_codecs
def test_a_row_of_zeros_and_its_neighbours_decode(codec: WeightCodec) -> None:
    values = normal(4, 64)
    values[1] = 0

    found = decoded(codec, values)

    assert found[1].abs().max() <= (3e-4 if isinstance(codec, DoubleNf4Codec) else 0)
    assert (found - values).abs().max() < 0.01


@over_codecs
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_is_not_finite_is_an_error(codec: WeightCodec, value: float) -> None:
    values = normal(40, 64)
    values[39, 63] = value

    with pytest.raises(CheckpointError, match=r"of a tensor of shape \(40, 64\) in .* must be finite"):
        encoded(codec, values)


@over_codecs
def test_bytes_that_do_not_fit_the_shape_are_an_error(codec: WeightCodec) -> None:
    raw = encoded(codec, normal(40, 64))

    with pytest.raises(CheckpointError, match=rf"\(40, 1640\) takes \d+ bytes in .* but there are {raw.nbytes}"):
        codec.decode(raw, (40, 1640), torch.empty(40, 1640))


def mxfp4_values(*shape: int) -> Tensor:
    """Values of random codes, in blocks of 32 rows whose largest code may be any."""
    generator = torch.Generator().manual_seed(4)
    stack, rows, columns = shape
    codes = torch.randint(0, 16, (stack, rows // 32, 32, columns), generator=generator)
    codes[:, :, :, ::3] &= 11  # magnitudes of 0 to 1.5
    exponents = torch.randint(-126, 124, (stack, rows // 32, 1, columns), generator=generator)
    return torch.ldexp(torch.tensor(weight_codecs.MX_VALUES)[codes], exponents).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_keeps_values_that_came_in_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_codecs, "_chunk_elements", lambda _: 2**17)
    values = mxfp4_values(3, 96, 1500).to(dtype)
    raw = encoded(MXFP4, values)

    found = MXFP4.decode(raw, (3, 96, 1500), torch.empty_like(values))
    assert torch.equal(found, values)
    assert torch.equal(found.signbit(), values.signbit())
    parts = MXFP4.parts(raw, (3, 96, 1500))
    assert sum(part.nbytes for part in parts.values()) * 8 == 4.5 * values.numel()
    part = torch.zeros_like(raw)
    for expert in (2, 0, 1):
        MXFP4.encode_part(values[expert], part, (3, 96, 1500), expert * 96 * 1500)
    own = MXFP4.parts(part, (3, 96, 1500))
    assert all(torch.equal(each, own[name]) for name, each in parts.items())


@pytest.mark.parametrize("value", [0.7, math.inf, math.nan, 2.0**-60])
def test_a_value_without_an_exact_code_of_mxfp4_is_an_error(value: float) -> None:
    values = torch.ones(2, 32, 8)
    values[1, 31, 7] = value
    with pytest.raises(CheckpointError, match="values without exact codes of mxfp4: they did not come in it"):
        encoded(MXFP4, values)


def test_mxfp4_takes_stacked_matrices_of_whole_blocks() -> None:
    shapes = [(4, 32, 6), (2880, 2880), (4, 33, 6), (4, 32, 5), (32,)]
    assert [MXFP4.takes(shape) for shape in shapes] == [True, False, False, False, False]
    assert all(codec.takes(shape) for codec in ALL for shape in shapes)
