"""A sequence attended in slices beside the same at once, by an explicit softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from harness.live_bytes import LiveBytes
from harness.sliced_sequences import Rows, Sequences, at_once, gpu_attention_on_cpu, in_slices

from mobius.models.slice_attention import attend_slice, attend_slice_backward
from mobius.models.slice_pieces import AttentionKernel, SlicedAttentionSettings

CPU = torch.device("cpu")
SMALL = {"keys_per_call": 20, "tile": 16}
"""Several rectangles and tiles in a sequence of some hundred tokens."""
CUTS = [[97], [50, 47], [32, 32, 33], [1, 60, 20, 16], [16, 31, 2, 47, 1]]
WHOLE, PACKED = [[97]], [[40, 3, 54]]
ROWS = [WHOLE, [[97], [97]], PACKED, [[40, 3, 54], [97]], [[1] * 97, [96, 1]], [[10, 60, 27], [49, 48]]]


def assert_equal(given: Sequences, lengths: list[int], settings: SlicedAttentionSettings, share: float = 1e-6) -> None:
    errors = in_slices(given, lengths, settings).errors(at_once(given))
    assert all(error <= share for error in errors.values()), errors


@pytest.mark.grid(strength=2)
@pytest.mark.parametrize("kernel", [AttentionKernel.CPU, AttentionKernel.TILES])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("lengths", CUTS)
def test_slices_are_what_the_whole_is(
    lengths: list[int], rows: Rows, heads: tuple[int, int], kernel: AttentionKernel
) -> None:
    given = Sequences.draw(rows, heads)
    assert_equal(given, lengths, given.settings(kernel, **SMALL))


@pytest.mark.grid(strength=2)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 96, 97, 200])
@pytest.mark.parametrize("rows", [WHOLE, PACKED, [[10, 60, 27], [49, 48]]])
@pytest.mark.parametrize("lengths", CUTS)
def test_slices_keep_windows_and_caps(
    lengths: list[int], rows: Rows, window: int | None, softcap: float | None
) -> None:
    given = Sequences.draw(rows, window=window, softcap=softcap)
    assert_equal(given, lengths, given.settings(AttentionKernel.TILES, **SMALL))


@pytest.mark.parametrize("kernel", [AttentionKernel.CPU, AttentionKernel.TILES])
def test_two_byte_formats_are_rounded_once(kernel: AttentionKernel) -> None:
    given = Sequences.draw(PACKED, dtype=torch.bfloat16)
    assert_equal(given, CUTS[3], given.settings(kernel, **SMALL), share=8e-3)


@pytest.mark.parametrize("kernel", [AttentionKernel.CPU, AttentionKernel.TILES])
def test_keys_that_no_later_slice_sees_get_no_gradients_from_it(kernel: AttentionKernel) -> None:
    given = Sequences.draw([[40, 57]])
    settings, cache = given.settings(kernel, **SMALL), given.cache()
    cache.put(0, given.key, given.value)
    query, d_output = given.query[:, :, 40:], given.d_output[:, 40:]
    output, lse = attend_slice(query, cache, 40, settings)
    attend_slice_backward(d_output, query, output, lse, cache, 40, settings)
    first, second = cache.take_gradients(0, 40), cache.take_gradients(40, 97)
    assert all(torch.equal(each, torch.zeros_like(each)) for each in first)
    assert all(each.any(-1).all() for each in second)


@pytest.mark.parametrize("kernel", [AttentionKernel.CPU, AttentionKernel.TILES])
@pytest.mark.parametrize("rows", [WHOLE, PACKED])
def test_a_cache_is_as_new_after_its_sequence(rows: Rows, kernel: AttentionKernel) -> None:
    given = Sequences.draw(rows)
    settings, cache = given.settings(kernel, **SMALL), given.cache()
    first = in_slices(given, CUTS[3], settings, cache)
    assert not any(each.any() for each in cache.gradient_sum_views(slice(None), slice(None)))
    second = in_slices(given, CUTS[3], settings, cache)
    assert all(torch.equal(*pair) for pair in zip(vars(first).values(), vars(second).values(), strict=True))


@pytest.mark.parametrize(
    ("rows", "window", "kernels", "first"),
    [
        ([[40, 57]], None, [AttentionKernel.CPU, AttentionKernel.FLASH, AttentionKernel.TILES], 40),
        ([[97]], 10, [AttentionKernel.FLASH, AttentionKernel.TILES], 71),
        ([[75, 22]], 10, [AttentionKernel.FLASH, AttentionKernel.TILES], 75),
        ([[90, 7]], 10, [AttentionKernel.FLASH, AttentionKernel.TILES], 71),
    ],
)
def test_keys_that_a_slice_cannot_see_are_not_even_read(
    rows: Rows, window: int | None, kernels: list[AttentionKernel], first: int
) -> None:
    """A NaN that is read stays one, whatever its weight."""
    given = Sequences.draw(rows, window=window)
    start = max(80, first)
    query, d_output = given.query[:, :, start:], given.d_output[:, start:]
    for kernel in kernels:
        settings, cache = given.settings(kernel, **SMALL), given.cache()
        cache.put(0, given.key, given.value)
        cache.put(0, *(torch.full_like(each[:, :, :first], torch.nan) for each in (given.key, given.value)))
        with gpu_attention_on_cpu():
            output, lse = attend_slice(query, cache, start, settings)
            d_query = attend_slice_backward(d_output, query, output, lse, cache, start, settings)
        gradients = cache.take_gradients(0, 97)
        assert all(each.isfinite().all() for each in (output, lse, d_query, *gradients))


@pytest.mark.parametrize("kernel", [AttentionKernel.CPU, AttentionKernel.TILES])
def test_memory_grows_with_the_slice_and_not_with_queries_times_keys(kernel: AttentionKernel) -> None:
    """Live bytes beside the cache; a row's scores of one head alone would be 4 bytes x T x S."""
    peaks = {(T, S): _peaks(kernel, T, S) for T, S in [(128, 512), (128, 2048), (256, 2048), (512, 2048)]}
    for which in range(2):
        of_keys = [peaks[128, S][which] for S in (512, 2048)]
        assert of_keys[1] == of_keys[0], "of a slice of given length, however many keys there are"
        of_queries = [peaks[T, 2048][which] for T in (128, 256, 512)]
        assert of_queries[2] - of_queries[1] <= 2.1 * (of_queries[1] - of_queries[0])
        assert of_queries[2] < 4 * 512 * 2048 / 2


def _peaks(kernel: AttentionKernel, num_queries: int, num_keys: int) -> tuple[int, int]:
    """Most bytes alive in forward and in backward of the last slice of a sequence."""
    given = Sequences.draw([[num_keys]], heads=(2, 1), size=8)
    settings, cache = given.settings(kernel, keys_per_call=128, tile=64), given.cache()
    cache.put(0, given.key, given.value)
    start = num_keys - num_queries
    query, d_output = given.query[:, :, start:], given.d_output[:, start:]
    with LiveBytes() as forward:
        output, lse = attend_slice(query, cache, start, settings)
    with LiveBytes() as backward:
        attend_slice_backward(d_output, query, output, lse, cache, start, settings)
    return forward.peak, backward.peak
