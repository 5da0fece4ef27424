"""A wheel's library has the kernels for each instruction set; all have the bits of the CPU's own build."""

import ctypes
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch
from harness.reduced import FORMATS, arguments, fill, state_of

from mobius.engine import adamw_cpu
from mobius.engine.adamw_build import INSTRUCTION_SETS, PACKAGED, SOURCE, best_instruction_set, build_for_all
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu
from mobius.engine.host_arena import HostArena
from mobius.engine.stage_state import StageState
from mobius.hardware.cpu_dtype import cpu_flags
from mobius.models.layout import StageLayout

COUNT = 32 * 3004
PART = slice(32, 32 * 3002)  # ends with half a run of the kernels
SETS = INSTRUCTION_SETS.get(platform.machine(), ())
OWN = [each.name for each in SETS if each.cpu_flags <= cpu_flags()]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    assert compiler is not None
    path = tmp_path_factory.mktemp("wheel") / "libadamw.so"
    build_for_all(compiler, path, machine=platform.machine())
    return path


def random_state(states: str, gradient_dtype: torch.dtype) -> StageState:
    if states in FORMATS:
        state = state_of(states, COUNT, gradient_dtype)
        fill(state, 3)
        return state
    layouts = {0: StageLayout.of({"matrix": (COUNT, 1)})}
    dtype = torch.float32 if states == "whole" else torch.bfloat16
    state = HostArena(layouts, dtype=dtype, register=False, gradient_dtype=gradient_dtype).states[0]
    generator = torch.Generator().manual_seed(3)
    state.write_master(slice(None), torch.randn(COUNT, generator=generator))
    state.gradients.normal_(generator=generator)
    state.exp_avg.normal_(generator=generator)
    state.exp_avg_sq.copy_(torch.rand(COUNT, generator=generator))
    return state


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("states", ["whole", "split", *FORMATS])
def test_every_instruction_set_of_this_cpu_has_the_bits_of_its_own_build(
    library: Path, kernel: CPUAdamW, states: str, gradient_dtype: torch.dtype
) -> None:
    def updated(own: CPUAdamW) -> StageState:
        state = random_state(states, torch.float32 if states == "whole" else gradient_dtype)
        constants = arguments(3).constants(is_reduced=states in FORMATS)
        own.update(state, PART, constants, noise=(5, 64) if states in FORMATS else None)
        return state

    expected, before = updated(kernel), random_state(states, gradient_dtype)
    assert not torch.equal(expected.read_master(), before.read_master())
    for instruction_set in OWN:
        state = updated(CPUAdamW(library, num_threads=2, instruction_set=instruction_set))
        for a, b in zip(state.tensors, expected.tensors, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), instruction_set


def test_the_library_has_every_function_for_every_instruction_set(library: Path) -> None:
    names = re.findall(r"^KERNEL\((\w+)\)", SOURCE.read_text(), re.MULTILINE)
    assert len(names) == 7
    loaded = ctypes.CDLL(str(library))
    for name in names:
        for each in SETS:
            assert loaded[f"mobius_adamw_{name}_{each.name}"]


def test_a_cpu_gets_the_widest_instructions_that_it_has() -> None:
    avx2 = {"sse4_1", "avx2", "bmi2"}
    avx512 = {*avx2, "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert best_instruction_set("x86_64", avx512) == "avx512"
    assert best_instruction_set("x86_64", avx512 - {"avx512bw"}) == "avx2", "as on Xeon Phi"
    assert best_instruction_set("x86_64", {"sse4_1", "bmi2"}) == "sse4"
    assert best_instruction_set("x86_64", {"sse2"}) is None
    assert best_instruction_set("aarch64", {"asimd", "sve"}) == "neon"
    assert best_instruction_set("riscv64", avx512) is None


def test_the_installed_library_is_used_and_nothing_is_compiled(
    library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert load_adamw_cpu(tmp_path / "cache", num_threads=1, packaged=library) is not None
    assert f"the installed kernel for {OWN[0]}" in caplog.text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_library_that_does_not_load_or_is_not_for_this_cpu_is_left_for_what_is_compiled_here(
    library: Path,
    kernel: CPUAdamW,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_broken: bool,
) -> None:
    monkeypatch.setattr(adamw_cpu, "_load_built", lambda cache, num_threads: kernel)
    if is_broken:
        library = tmp_path / "libadamw.so"
        library.write_bytes(b"\x7fELF")
    else:
        monkeypatch.setattr(adamw_cpu, "cpu_flags", frozenset)
    with caplog.at_level("INFO"):
        assert load_adamw_cpu(tmp_path, num_threads=1, packaged=library) is kernel
    assert ("the installed kernel cannot be loaded" in caplog.text) == is_broken


def test_a_source_checkout_has_no_library() -> None:
    assert not PACKAGED.exists(), "tests would run it and not adamw.c as it is"
