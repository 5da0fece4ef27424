"""On one GPU: where a stage lives changes no bit of training in bf16, else the rounding, and takes the bytes planned.

The update of a resident stage is Triton's kernel in bf16 and torch's else, that of a streamed one the C kernel's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.pipelines import Pipeline, make_batch, make_model
from harness.rank_memory import allocate_memory
from harness.sessions import make_single_trainer
from torch import Tensor

from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.adamw_cpu import load_adamw_cpu
from mobius.engine.adamw_gpu import GPUAdamW
from mobius.engine.host_arena import HostArena
from mobius.engine.stage_state import StageState
from mobius.models.layout import StageLayout
from mobius.training.session import Session

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
COUNT = 3_000_001
LEARNING_RATE = 1e-3
OPTIONS = f"""--device cuda --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 16
    --learning_rate {LEARNING_RATE} --lr_scheduler_type constant --warmup_steps 0 --recompute full"""
Train = Callable[..., tuple[list[float], dict[str, Tensor]]]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Page-locked memory is given back at the end, or the next test could not lock it."""
    sessions: list[Session] = []

    def run(options: str, *, num_steps: int, is_tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
        given = f"{OPTIONS} --num_iterations {num_steps} {options}"
        trainer, session = make_single_trainer(tmp_path, given, is_tied=is_tied)
        sessions.append(session)
        losses = [metrics.loss for metrics in trainer.train()]
        torch.cuda.synchronize()
        masters: dict[str, Tensor] = {}
        for stage in (memory.state for memory in session.stages.memory.values()):
            masters.update(stage.layout.views(stage.read_master().cpu()))
        return losses, masters

    yield run
    torch.cuda.synchronize()
    for session in sessions:
        session.close()


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("options", ["--bf16 --max_grad_norm 0", "--bf16 --max_grad_norm 0.5", "--fp32"])
def test_the_first_step_is_that_of_streamed_stages(train: Train, options: str, compiled: str) -> None:
    """Gradients are the same to the bit, so masters differ by the rounding of one update, and in bf16 not at all."""
    shared = f"{options} --compile {compiled}"
    before, start = train(f"{shared} --resident_stages 0 --learning_rate 1e-30", num_steps=1)
    losses, expected = train(f"{shared} --resident_stages 0", num_steps=1)
    assert before == losses
    depth_first = "--compute_order depth_first --resident_stages"
    for residency in (
        *("--resident_stages 1", "--resident_stages 3", "--resident_stages all", "--no_offload"),
        *(f"{depth_first} 0", f"{depth_first} 0 --num_rounds 2", f"{depth_first} 1 --num_rounds 2"),
    ):
        other_losses, masters = train(f"{shared} {residency}", num_steps=1)
        assert other_losses == losses
        for name, value in expected.items():
            moved = (value - start[name]).abs()
            bound = 2 * 2.0**-23 * torch.maximum(value.abs(), start[name].abs()) + 2.0**-18 * moved
            if "--bf16" in options:
                assert torch.equal(masters[name], value), (name, residency)
            assert ((masters[name] - value).abs() <= bound).all(), (name, residency)
        assert any(not torch.equal(masters[name], start[name]) for name in masters)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("options", ["--bf16 --max_grad_norm 0", "--bf16 --max_grad_norm 0.5", "--fp16"])
def test_ten_steps_in_rounds_are_those_at_once(train: Train, options: str, is_tied: bool) -> None:
    """Sums are offloaded and loaded during updates of the step before and loads of the next one."""
    for residency in ("--resident_stages 0", "--resident_stages 1 --no_prefetch", "--no_offload"):
        shared = f"{options} --compile off --num_chunks 4 {residency}"
        losses, expected = train(f"{shared} --num_rounds 1", num_steps=10, is_tied=is_tied)
        for num_rounds in (2, 4):
            other_losses, masters = train(f"{shared} --num_rounds {num_rounds}", num_steps=10, is_tied=is_tied)
            assert other_losses == losses
            assert all(torch.equal(masters[name], value) for name, value in expected.items()), residency


@pytest.mark.parametrize("options", ["--bf16 --max_grad_norm 0", "--bf16 --max_grad_norm 0.5", "--fp16"])
def test_ten_steps_with_offloaded_activations_are_those_without(train: Train, options: str) -> None:
    """Inputs are offloaded during loads, gradients and sums; with long copies a place taken too early shows."""
    for residency in ("--resident_stages 0", "--resident_stages 1 --no_prefetch", "--no_offload"):
        for num_rounds in (1, 2):
            shared = f"{options} --compile off --num_chunks 4 --num_rounds {num_rounds} --recompute full {residency}"
            losses, expected = train(f"{shared} --activation_offloading off", num_steps=10)
            other_losses, masters = train(f"{shared} --activation_offloading on", num_steps=10)
            assert other_losses == losses
            assert all(torch.equal(masters[name], value) for name, value in expected.items()), residency


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("options", ["--bf16 --max_grad_norm 0", "--bf16 --max_grad_norm 0.5", "--fp16", "--fp32"])
def test_ten_steps_stay_near_those_of_streamed_stages(train: Train, options: str, is_tied: bool) -> None:
    """In bf16 they are those; else an ulp of a master changes a weight, and with it what follows, by little."""
    shared = f"{options} --compile off"
    _, start = train(f"{shared} --resident_stages 0 --learning_rate 1e-30", num_steps=1, is_tied=is_tied)
    losses, expected = train(f"{shared} --resident_stages 0", num_steps=10, is_tied=is_tied)
    for residency in ("--resident_stages 1", "--resident_stages 3 --no_prefetch", "--no_offload"):
        other_losses, masters = train(f"{shared} {residency}", num_steps=10, is_tied=is_tied)
        if "--bf16" in options:
            assert other_losses == losses
            assert all(torch.equal(masters[name], value) for name, value in expected.items()), residency
            continue
        assert other_losses == pytest.approx(losses, rel=2e-3)
        apart = sum(float((masters[name] - value).double().square().sum()) for name, value in expected.items())
        moved = sum(float((value - start[name]).double().square().sum()) for name, value in expected.items())
        assert apart <= (0.02**2) * moved, residency


def test_mixed_gradients_are_those_of_streamed_stages_to_the_bit() -> None:
    model = make_model("llama").to(CUDA)
    batch = make_batch(3)
    for dtype in (torch.float32, torch.bfloat16):
        streamed = Pipeline(model, 1, 4, 3, 2, device=CUDA, dtype=dtype)
        loss = streamed.run(batch)
        for resident in ({0}, {0, 1, 2}, {3}, {1}):
            mixed = Pipeline(model, 1, 4, 3, 2, device=CUDA, dtype=dtype, resident=frozenset(resident))
            assert torch.equal(mixed.run(batch), loss)
            for name, gradient in streamed.gradients.items():
                assert torch.equal(mixed.gradients[name].cpu(), gradient.cpu()), (name, resident)


def _pair(gradient_dtype: torch.dtype, step: int) -> tuple[StageState, StageState]:
    """The same random state on the host and on the GPU, as it is before `step`."""
    layouts = {0: StageLayout.of({"matrix": (COUNT, 1), "norm": (1000,)})}
    host = HostArena(layouts, dtype=torch.bfloat16, register=False, gradient_dtype=gradient_dtype).states[0]
    gradients = torch.zeros(layouts[0].num_trained, dtype=gradient_dtype, device=CUDA)
    gpu = StageState.on_device(layouts[0], CUDA, torch.bfloat16, gradients)
    generator = torch.Generator().manual_seed(step)
    count = layouts[0].num_units
    host.write_master(slice(None), torch.randn(count, generator=generator))
    scale = 10.0 ** torch.randint(-6, 2, (count,), generator=generator)
    host.gradients.copy_(torch.randn(count, generator=generator) * scale)
    if step > 1:
        host.exp_avg.copy_(torch.randn(count, generator=generator) * scale)
        host.exp_avg_sq.copy_((host.exp_avg.abs() + torch.rand(count, generator=generator) * scale) ** 2)
    for mine, theirs in zip(gpu.tensors, host.tensors, strict=True):
        mine.copy_(theirs)
    return host, gpu


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_an_update_on_the_gpu_is_the_c_kernels(
    tmp_path: Path, step: int, gradient_dtype: torch.dtype, is_fused: bool
) -> None:
    host, gpu = _pair(gradient_dtype, step)
    before = host.read_master()
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    fused = GPUAdamW() if is_fused else None
    adamw = FlatAdamW(settings, load_adamw_cpu(tmp_path, num_threads=4), fused)
    gradient = host.gradients.float() * 0.25
    for state in (host, gpu):
        adamw.update(state, step=step, learning_rate=LEARNING_RATE, gradient_factor=0.25)
    if fused is not None:
        assert fused.supports(gpu), "compiling has failed"
        for mine, theirs in zip(gpu.tensors, host.tensors, strict=True):
            assert torch.equal(mine.cpu(), theirs), "Triton's kernel gives the C kernel's bits"
        return

    # torch's own, which takes powers for the bias correction in fp32
    largest = torch.maximum(host.exp_avg.abs(), gradient.abs())
    assert ((gpu.exp_avg.cpu() - host.exp_avg).abs() <= 2.0**-22 * largest).all()
    square = torch.maximum(largest.square(), host.exp_avg_sq)
    assert ((gpu.exp_avg_sq.cpu() - host.exp_avg_sq).abs() <= 2.0**-22 * square).all()
    master, expected = gpu.read_master().cpu(), host.read_master()
    moved = (expected - before).abs() + LEARNING_RATE * 0.1 * before.abs()
    bound = 2 * 2.0**-23 * torch.maximum(expected.abs(), before.abs()) + 2.0**-14 * moved
    assert ((master - expected).abs() <= bound).all()
    assert torch.equal(gpu.weights.cpu(), master.bfloat16()), "the working copy is the rounded master"


@pytest.mark.parametrize("is_fused", [True, False])
def test_what_is_not_finite_changes_nothing_on_the_gpu(is_fused: bool) -> None:
    _, gpu = _pair(torch.bfloat16, 2)
    before = [tensor.clone() for tensor in gpu.tensors]
    settings = AdamWSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    adamw = FlatAdamW(settings, None, GPUAdamW() if is_fused else None)
    found = torch.ones((), device=CUDA)
    adamw.update(gpu, step=2, learning_rate=LEARNING_RATE, gradient_factor=1.0, found_inf=found)
    # Without the fused kernel master, weight and remainder are joined and split again, which changes no bit.
    assert all(torch.equal(tensor, old) for tensor, old in zip(gpu.tensors, before, strict=True))


def test_the_fused_update_takes_no_memory() -> None:
    _, gpu = _pair(torch.bfloat16, 2)
    adamw = FlatAdamW(AdamWSettings(0.9, 0.999, 1e-8, 0.0), None, GPUAdamW())
    adamw.warm_up([gpu])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    adamw.update(gpu, step=1, learning_rate=LEARNING_RATE, gradient_factor=1.0)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(CUDA) - before <= 64 * 512  # scalars


@pytest.mark.parametrize(("deferred_updates", "num_bytes"), [((0, 1), 14), ((), 12)])
def test_resident_stages_take_the_bytes_planned(deferred_updates: tuple[int, ...], num_bytes: int) -> None:
    layouts = {stage: StageLayout.of({"matrix": (4096, 4096)}) for stage in range(2)}
    gc.collect()  # what earlier tests left must not be freed meanwhile
    before = torch.cuda.memory_allocated(CUDA)
    stages, _ = allocate_memory(
        layouts,
        resident=layouts,
        num_slots=0,
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        deferred_updates=deferred_updates,
        device=CUDA,
    )
    num_bytes_of_sum = 4 * 4096 * 4096
    assert torch.cuda.memory_allocated(CUDA) - before == 2 * 4096 * 4096 * num_bytes + num_bytes_of_sum
    assert len(stages) == 2
