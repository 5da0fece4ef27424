"""Optimizer states in fewer bytes: C kernel and torch have the bits of a reference in numpy, whatever cuts a stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from harness.reduced import FORMATS, SEED, arguments, fill, run, same, state_of
from torch import Tensor

from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu
from mobius.engine.host_arena import HostArena
from mobius.engine.reduced_states import REDUCED, noise_key, noise_words
from mobius.engine.stage_state import StageState
from mobius.engine.state_codec import GROUP
from mobius.models.layout import StageLayout

Floats, Words = npt.NDArray[np.float32], npt.NDArray[np.uint32]


def bits(values: Floats) -> Words:
    return values.view(np.uint32)


def floats(words: npt.NDArray[Any]) -> Floats:
    return words.astype(np.uint32).view(np.float32)


def hashed(index: Words, key: int) -> Words:
    x = index ^ np.uint32(key)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def noise_of(reduced: str, count: int, key: int) -> Words:
    """Noise of the first elements; of compact states, four share a word, each has another byte of it as the highest."""
    if reduced == "bf16":
        return hashed(np.arange(count, dtype=np.uint32), key)
    bytes_of = hashed(np.arange(count // 4, dtype=np.uint32), key).astype("<u4").view(np.uint8).reshape(-1, 4)
    rotated = [np.roll(bytes_of, -k, axis=1).copy().view("<u4") for k in range(4)]
    return np.concatenate(rotated, axis=1).reshape(-1).astype(np.uint32) >> 12


def updated(gradient: Floats, master: Floats, mean: Floats, square: Floats, c: dict[str, float]) -> list[Floats]:
    """AdamW in the order of adamw.c, each operation rounded once."""
    f = {name: np.float32(value) for name, value in c.items()}
    scaled = gradient * f["gradient_factor"]
    mean = mean + (scaled - mean) * f["one_minus_beta1"]
    square = square * f["beta2"] + f["one_minus_beta2"] * scaled * scaled
    divisor = np.sqrt(square) + f["epsilon"]
    return [master * f["decay"] - f["step_size"] * mean / divisor, mean, square]


def reference_bf16(parts: dict[str, Any], weights: Any, gradient: Floats, c: dict[str, float], noise: Words) -> None:
    """Update uint16 weights and moments and an int16 remainder in place."""
    word = (weights.astype(np.uint32) << 16) + parts["master_low"].astype(np.int32).astype(np.uint32)
    moments = (floats(parts[name].astype(np.uint32) << 16) for name in ("exp_avg", "exp_avg_sq"))
    master, mean, square = updated(gradient, floats(word), *moments, c)

    def nearest(values: Floats) -> Words:
        word = bits(values)
        return (word + 0x7FFF + ((word >> 16) & 1)) >> 16

    weights[:] = nearest(master)
    rest = bits(master).astype(np.int64) - (weights.astype(np.int64) << 16)
    parts["master_low"][:] = np.minimum(rest, 32767)
    parts["exp_avg"][:] = nearest(mean)
    parts["exp_avg_sq"][:] = (bits(square) + (noise >> 16)) >> 16


def reference_compact(parts: dict[str, Any], weights: Any, gradient: Floats, c: dict[str, float], noise: Words) -> None:
    """Update uint16 weights, uint8 codes and exponents and an int8 remainder in place."""

    def spread(name: str, largest: int) -> npt.NDArray[np.int64]:
        return np.repeat((parts[name].astype(np.int64) - largest) << 23, GROUP)

    word = ((weights.astype(np.int64) << 8) + parts["master_low8"]) << 8
    codes, magnitude = parts["exp_avg.codes"].astype(np.int64), parts["exp_avg.codes"].astype(np.int64) & 0x7F
    mean_word = np.where(magnitude > 0, (magnitude << 20) + spread("exp_avg.exponents", 15), 0) | (codes & 0x80) << 24
    squares = parts["exp_avg_sq.codes"].astype(np.int64)
    square_word = np.where(squares > 0, (squares << 20) + spread("exp_avg_sq.exponents", 31), 0)
    master, mean, square = updated(
        gradient, floats(word & 0xFFFFFFFF), floats(mean_word & 0xFFFFFFFF), floats(square_word & 0xFFFFFFFF), c
    )
    master24 = (bits(master).astype(np.int64) + (noise & 0xFF)) >> 8
    weights[:] = (master24 + 0x80) >> 8
    parts["master_low8"][:] = master24 - (((master24 + 0x80) >> 8) << 8)
    for name, values, largest, drawn, added, bounds in (
        ("exp_avg", mean, 15, 0, 1 << 19, (0, 127)),
        ("exp_avg_sq", square, 31, noise.astype(np.int64), 0, (1, 255)),
    ):
        words = (bits(values).astype(np.int64) & 0x7FFFFFFF) + drawn
        parts[f"{name}.exponents"][:] = np.clip((words.reshape(-1, GROUP).max(1) >> 23) + 1, largest + 1, 254)
        codes = np.clip((words - spread(f"{name}.exponents", largest) + added) >> 20, *bounds)
        signs = bits(values) >> 24 & 0x80
        parts[f"{name}.codes"][:] = codes | signs if name == "exp_avg" else np.where(words < 2**20, 0, codes)


REFERENCES: dict[str, Callable[..., None]] = {"bf16": reference_bf16, "compact": reference_compact}


def as_numpy(tensor: Tensor) -> Any:
    """A copy, the bits of bf16 as uint16."""
    values = tensor.clone()
    return values.view(torch.int16).numpy().view(np.uint16) if values.dtype == torch.bfloat16 else values.numpy()


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("step", [1, 2, 1000, 100_000])
@pytest.mark.parametrize("reduced", FORMATS)
def test_kernel_and_torch_have_the_bits_of_the_reference(
    kernel: CPUAdamW, reduced: str, step: int, gradient_dtype: torch.dtype
) -> None:
    count = 2**12 * GROUP
    mine, other = (state_of(reduced, count, gradient_dtype) for _ in range(2))
    for state in (mine, other):
        fill(state, step)
    parts = {name: as_numpy(part) for name, part in mine.parts.items()}
    weights, gradient = as_numpy(mine.weights), mine.gradients.float().numpy().copy()
    noise = noise_of(reduced, count, noise_key(SEED, step, "matrix"))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        REFERENCES[reduced](parts, weights, gradient, arguments(step).constants(is_reduced=True), noise)

    assert kernel.supports(mine)
    run(mine, step, kernel)
    run(other, step, None)

    assert same(mine, other)
    assert np.array_equal(as_numpy(mine.weights), weights)
    for name, part in mine.parts.items():
        assert np.array_equal(as_numpy(part), parts[name]), name


@pytest.mark.extended
@pytest.mark.parametrize("reduced", FORMATS)
def test_a_million_groups_have_the_bits_of_the_reference(kernel: CPUAdamW, reduced: str) -> None:
    for seed in range(245):  # of 4096 groups
        test_kernel_and_torch_have_the_bits_of_the_reference(kernel, reduced, 1 + 409 * seed, torch.bfloat16)


def test_every_code_of_every_exponent_is_read_and_written_by_all_as_by_the_reference(kernel: CPUAdamW) -> None:
    """Eight groups have all codes; gradients of zero keep a group's largest element where it is, or next to it."""
    count = 256 * 256
    states = [state_of("compact", count) for _ in range(2)]
    for state in states:
        for name in ("exp_avg", "exp_avg_sq"):
            state.parts[f"{name}.codes"].copy_(torch.arange(256).repeat(256))
            state.parts[f"{name}.exponents"].copy_(torch.arange(256).repeat_interleave(8))
    parts = {name: as_numpy(part) for name, part in states[0].parts.items()}
    noise = noise_of("compact", count, noise_key(SEED, 3, "matrix"))
    weights = as_numpy(states[0].weights)
    with np.errstate(all="ignore"):
        reference_compact(parts, weights, np.zeros(count, np.float32), arguments(3).constants(is_reduced=True), noise)
    for state, own in zip(states, (kernel, None), strict=True):
        run(state, 3, own)
        for name, part in state.parts.items():
            # Exponents that no update writes stand for no number here; all others do.
            is_possible = slice(32 * GROUP * 8 // (GROUP if name.endswith("exponents") else 1), None)
            assert np.array_equal(as_numpy(part)[is_possible], parts[name][is_possible]), name


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("reduced", FORMATS)
def test_the_cut_into_stages_shards_pieces_and_threads_changes_no_bit(
    kernels: Path, reduced: str, has_kernel: bool
) -> None:
    shapes = {"a": (50, 33), "b": (7,), "c": (1000, 40), "d": (3, 3)}
    together = StageLayout.of(shapes, reduced={"a", "c"}, reduced_format=reduced)
    alone = {name: StageLayout.of({name: shapes[name]}, reduced={"a", "c"}, reduced_format=reduced) for name in shapes}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    gradients = {name: torch.randn(shape) * 1e-3 for name, shape in shapes.items()}

    def made(layout: StageLayout) -> StageState:
        state = HostArena({0: layout}, dtype=torch.bfloat16, register=False).states[0]
        for name in layout.offsets:
            state.set_parameter(name, values[name])
            layout.views(state.gradients)[name].copy_(gradients[name])
        return state

    def finished(state: StageState, pieces: int | None, threads: int) -> dict[str, Tensor]:
        own = load_adamw_cpu(kernels, num_threads=threads) if has_kernel else None
        adamw = FlatAdamW(AdamWSettings(0.9, 0.999, 1e-8, 0.1, SEED), own)
        for step in range(1, 4):
            for part in [None] if pieces is None else state.layout.pieces(pieces):
                adamw.update(state, step=step, learning_rate=1e-2, gradient_factor=1.0, pieces=part)
        master = torch.cat([each.state.read_master() for each in state.owned])
        return {name: master[state.layout.slice_of(name)] for name in state.layout.offsets}

    expected = finished(made(together), None, 1)
    for pieces in (4096, (3 if has_kernel else 33) * GROUP):
        assert all(torch.equal(finished(made(together), pieces, 2)[name], expected[name]) for name in shapes), pieces
    for name, layout in alone.items():
        assert torch.equal(finished(made(layout), None, 2)[name], expected[name]), name


def test_noise_is_that_of_the_reference_and_differs_by_seed_step_and_name() -> None:
    keys = {noise_key(*place) for place in ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"))}
    assert len(keys) == 4
    key = max(keys)
    words = noise_words(key, 2**32 - 5, 10, torch.device("cpu"))
    index = (np.arange(10, dtype=np.uint64) + (2**32 - 5)).astype(np.uint32)
    assert words.tolist() == hashed(index, key).tolist()
    many = noise_words(key, 0, 2**20, torch.device("cpu"))
    for shift in range(0, 32, 4):
        counts = torch.bincount(many >> shift & 15, minlength=16).double()
        assert float(((counts - 2**16) ** 2 / 2**16).sum()) < 60  # chi-square with 15 degrees of freedom: 1e-6 above 56


def test_neighbours_that_share_a_word_of_noise_are_rounded_independently() -> None:
    """Bits that decide a rounding are uniform, and differ between the four that share them."""
    fours = REDUCED["compact"].noise(3, 64, 2**20, torch.device("cpu")).view(-1, 4)
    assert torch.equal(fours[16:].reshape(-1), REDUCED["compact"].noise(3, 128, 2**20 - 64, torch.device("cpu")))
    assert int(fours.max()) < 2**20
    for each in (fours >> 12, fours & 0xFF):  # of second moments, of the master
        for k in range(4):
            counts = torch.bincount(each[:, k], minlength=256).double()
            assert float(((counts - 1024) ** 2 / 1024).sum()) < 390  # chi-square with 255 degrees: 1e-7 above 390
    for limit in (0.008, 0.5):  # the share that is rounded down if a thousandth of a code is left of it, and half
        is_down = (fours < limit * 2**20).double()
        correlation = torch.corrcoef(is_down.T) - torch.eye(4)
        assert float(correlation.abs().max()) < 0.015  # five standard deviations are 0.01


@pytest.mark.parametrize(("reduced", "moment_bytes"), [("bf16", 10.0), ("compact", 7.0625)])
def test_bytes_per_parameter(reduced: str, moment_bytes: float) -> None:
    state = state_of(reduced, 4096)
    assert sum(tensor.nbytes for tensor in state.tensors) / 4096 == moment_bytes


@pytest.mark.parametrize("reduced", FORMATS)
def test_a_second_moment_decays_as_it_should_without_gradients(kernel: CPUAdamW, reduced: str) -> None:
    """The mean of what is left of each; a single 8-bit one goes in steps of an eighth, at random times."""
    state, steps = state_of(reduced, 2**15), 5000
    moments = torch.zeros(2**15), torch.exp(torch.randn(2**15)) * 1e-8
    state.codec.encode_moments(moments, state.parts)
    before = state.codec.decode_moments(state.parts)[1].double()
    for step in range(1, steps + 1):
        run(state, step, kernel)
    after = state.codec.decode_moments(state.parts)[1].double()
    assert float((after / before).mean()) / 0.999**steps == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("reduced", FORMATS)
def test_a_gradient_that_is_not_finite_is_seen_in_the_weight_alone(kernel: CPUAdamW, reduced: str) -> None:
    for own in (kernel, None):
        state = state_of(reduced, 4 * GROUP)
        state.gradients.normal_()
        state.gradients[5], state.gradients[GROUP + 5] = float("nan"), float("inf")
        run(state, 1, own)
        finite = state.weights.isfinite()
        assert (~finite).nonzero().flatten().tolist() == [5, GROUP + 5]


def test_numbers_that_are_too_large_or_not_finite_have_the_same_bits_in_kernel_and_torch(kernel: CPUAdamW) -> None:
    states = [state_of("compact", 128 * GROUP, torch.float32) for _ in range(2)]
    for state in states:
        fill(state, 5)
        odd = [1e17, -1e19, 1e30, 3e38, -3e38, float("inf"), -float("inf"), 1e-22, 1e-30, 0.0]
        state.gradients.view(128, GROUP)[: len(odd), 3].copy_(torch.tensor(odd))
        state.gradients.view(torch.int32)[64 * GROUP] = 0x7FFFFFFF  # a NaN of GPUs
    for state, own in zip(states, (kernel, None), strict=True):
        for step in (1, 2):
            run(state, step, own)
    assert states[0].weights.isnan().nonzero().flatten().tolist() == [5 * GROUP + 3, 6 * GROUP + 3, 64 * GROUP]
    assert same(*states)


def test_a_master_of_24_bits_is_kept_exactly_and_its_weight_is_the_nearest() -> None:
    codec, count = REDUCED["compact"], 2**16
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    master = (words & ~0xFF).int().view(torch.float32)
    master = torch.where(master.isfinite() & (master.abs() < 3e38), master, 1.0)
    weights, parts = torch.zeros(count, dtype=torch.bfloat16), {"master_low8": torch.zeros(count, dtype=torch.int8)}
    codec.encode_master(master, weights, parts)
    assert torch.equal(codec.decode_master(weights, parts), master)
    off = (weights.float() - master).abs()
    assert bool((off <= (master.bfloat16().float() - master).abs()).all()), "another bf16 number is nearer"
