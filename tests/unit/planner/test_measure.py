"""A profile of the real thing on a CPU: plausible, the same on all ranks, kept, and made anew where it is broken."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.pipelines import FAMILIES
from harness.tiny_families import tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mobius.distributed.transport import SingleRankTransport
from mobius.engine import sliced_layers, stage
from mobius.engine.documents import typical_arguments
from mobius.engine.stage_layers import SequenceSlice
from mobius.models import router_loss
from mobius.models.attention import DocumentAttention
from mobius.models.blocks import LayerArguments, ModelParts
from mobius.planner import host_rates, measure, timer
from mobius.planner.gpu_specs import ACTION_LAUNCH, SUSTAINED_SHARE
from mobius.planner.layer_bench import LayerBench, MicrobatchShape, layer_seconds, measure_layer_bytes, slice_seconds
from mobius.planner.measure import Launches, measure_launches, measure_profile
from mobius.planner.measured_plan import cached_profile, profile_path
from mobius.planner.profile import LayerSeconds, Profile, Source
from mobius.planner.timer import CollectiveTimer
from mobius.schedule.action import Direction
from mobius.schedule.packed_rows import PackedRows

CPU = torch.device("cpu")
SHAPE = MicrobatchShape(batch=2, seq_length=8, dtype=torch.float32, loss_chunk_tokens=64)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "PART_SECONDS", 0.01)
    monkeypatch.setattr(host_rates, "COPY_BYTES", 2**16)
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**12)
    monkeypatch.setattr(measure, "GPU_PARAMETERS", 2**12)


def parts_of(family: str) -> ModelParts:
    return ModelParts(FAMILIES[family](), CPU)


class CountOperations(TorchDispatchMode):
    """Counts what torch is asked for while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations(_: CollectiveTimer, work: Callable[[], object], **__: object) -> float:
    """In the place of `CollectiveTimer.seconds`: the same on a busy machine."""
    with CountOperations() as counter:
        work()
    return float(counter.number)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_rank_measures_every_kind_of_layer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveTimer, "seconds", operations)
    parts = parts_of(family)
    profile = measure_profile(CollectiveTimer(CPU, SingleRankTransport()), parts, SHAPE, None)
    assert profile.source is Source.MEASURED
    assert len(profile.kind_of_layer) == len(parts.layers)
    assert len(profile.layer_kinds) == len({id(layer.module) for layer in parts.layers})
    for layer in profile.layer_kinds:
        assert 0 < layer.forward < layer.backward < layer.recomputed_backward
    assert Profile.from_json(profile.to_json()) == profile


def arguments_of(parts: ModelParts, shape: MicrobatchShape) -> LayerArguments:
    return typical_arguments(
        parts, shape.packed, batch=shape.batch, seq_length=shape.seq_length, dtype=shape.dtype, device=CPU
    )


def test_layers_over_packed_rows_are_measured_with_their_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ModelParts(FAMILIES["gemma3"](), CPU, packed_dtype=torch.float32)
    shape = replace(SHAPE, packed=PackedRows(attention_length=2.9, max_documents=4))
    for arguments in arguments_of(parts, shape):
        # Eight tokens in documents of 3, 3 and 2, twice; there may be eight documents.
        assert arguments["documents"].tolist() == [0, 3, 6, 8, 11, 14, 16, 16, 16]
        assert arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]] * 2
    assert all("documents" not in arguments for arguments in arguments_of(parts, SHAPE))
    monkeypatch.setattr(CollectiveTimer, "seconds", operations)
    profile = measure_profile(CollectiveTimer(CPU, SingleRankTransport()), parts, shape, None)
    assert all(layer.forward > 0 for layer in profile.layer_kinds)


def test_whole_rows_have_bounds_where_flexattention_takes_the_place_of_masks() -> None:
    """As for slices in fp32 on a GPU: without them FlashAttention would be asked, which takes no fp32."""
    parts = ModelParts(FAMILIES["llama"](), CPU, packed_dtype=torch.float32)
    parts.attention = DocumentAttention.FLEX
    for arguments in arguments_of(parts, SHAPE):
        assert arguments["documents"].documents.cu_seqlens.tolist() == [0, 8, 16]
        assert arguments["position_ids"].tolist() == [list(range(8))] * 2


def test_all_ranks_get_the_same_profile() -> None:
    def measure_rank(transport: LocalTransport) -> Profile:
        return measure_profile(CollectiveTimer(CPU, transport), parts_of("llama"), SHAPE, None)

    first, second = run_rank_threads(2, measure_rank)
    assert first == second
    assert first.num_ranks == 2
    assert first.messages.bandwidth > 0


def routed() -> ModelParts:
    """A model with a loss over its routers."""
    return ModelParts(tiny_config("mixtral", output_router_logits=True), CPU)


def test_messages_are_measured_in_the_size_in_which_a_run_sends_them() -> None:
    """Mailboxes and communicators take no other."""
    seen = set[tuple[int, ...]]()

    class SizedTransport(LocalTransport):
        def send(self, tensor: Tensor, target: int, direction: Direction) -> None:
            seen.add(tuple(tensor.shape))
            super().send(tensor, target, direction)

    def measure_rank(transport: LocalTransport) -> Profile:
        sized = SizedTransport(transport._hub, transport.rank)
        return measure_profile(CollectiveTimer(CPU, sized), of_ranks[transport.rank], SHAPE, None)

    # The 12 numbers of 6 experts are in one row behind those of 16 tokens.
    for make_parts, sent in ((partial(parts_of, "llama"), (2, 8, 32)), (routed, (17, 32))):
        of_ranks = [make_parts() for _ in range(2)]
        run_rank_threads(2, measure_rank)
        assert seen == {sent}
        seen.clear()


def test_layers_are_measured_with_the_sums_of_their_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are other graphs than layers without, which a run would have to compile once more."""
    counted = list[tuple[int, ...]]()
    sums = router_loss.router_sums

    def count(logits: Tensor, tokens: Tensor, num_experts_per_token: int) -> Tensor:
        counted.append(tuple(tokens.shape))
        return sums(logits, tokens, num_experts_per_token)

    monkeypatch.setattr(router_loss, "router_sums", count)

    def seconds(work: Callable[[], object]) -> float:
        counted.clear()
        work()
        assert counted
        assert set(counted) == {(2, 8)}
        return 1.0

    layer_seconds(LayerBench(routed(), 0, SHAPE, CPU), seconds)

    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    for tile_tokens, shapes in ((None, {(2, 8)}), (8, {(1, 8)})):
        counted.clear()
        shape = replace(SHAPE, tile_tokens=tile_tokens)
        measure_layer_bytes(routed(), shape, device=CPU, with_products=True)
        assert set(counted) == shapes


def test_slices_are_measured_at_both_ends_of_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 8 tokens that takes 1 s and 0.1 s per token it attends to, counting half of its own."""
    sequence_slices = list[SequenceSlice]()

    def seconds(work: Callable[[], object]) -> float:
        sequence_slices.clear()
        work()
        return 1 + 0.1 * (sequence_slices[0].start + 4)

    cut_arguments = sliced_layers._cut_arguments

    def seen(arguments: Mapping[str, Any], sequence_slice: SequenceSlice) -> dict[str, Any]:
        sequence_slices.append(sequence_slice)
        return cut_arguments(arguments, sequence_slice)

    monkeypatch.setattr(sliced_layers, "_cut_arguments", seen)
    bench = LayerBench(parts_of("llama"), 0, replace(SHAPE, full_seq_length=64), CPU)
    layer, attention = slice_seconds(bench, seconds)
    assert (layer.forward, layer.recomputed_backward) == pytest.approx((4.2, 4.2))
    assert (attention.forward, attention.recomputed_backward) == pytest.approx((3.2, 3.2))


def test_slices_of_layers_that_carry_a_state_are_measured() -> None:
    parts = ModelParts(tiny_config("lfm2"), CPU, packed_dtype=torch.float32)
    bench = LayerBench(parts, 0, replace(SHAPE, full_seq_length=64), CPU)
    layer, _ = slice_seconds(bench, CollectiveTimer(CPU, SingleRankTransport()).seconds)
    assert layer.forward > 0
    assert layer.recomputed_backward > 0


def test_a_profile_of_slices_knows_the_length_of_their_sequences() -> None:
    shape = replace(SHAPE, full_seq_length=32)
    found = measure_profile(CollectiveTimer(CPU, SingleRankTransport()), parts_of("llama"), shape, None)
    assert found.attention_length == 32
    assert found.microbatch_tokens == 16
    assert found.of_layer(0).forward > 0


@pytest.fixture
def profile() -> Profile:
    return measure_profile(CollectiveTimer(CPU, SingleRankTransport()), parts_of("llama"), SHAPE, None)


def never() -> Profile:
    raise AssertionError("measured again")


def test_a_profile_is_measured_once_and_then_read(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "cache" / "profile.json"
    assert cached_profile(path, lambda: profile, SingleRankTransport()) == (profile, True)
    assert cached_profile(path, never, SingleRankTransport()) == (profile, False)
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe\x00", b'{"format": 1, "loss": 1}'])
def test_a_broken_file_is_told_of_and_measured_again(
    tmp_path: Path, profile: Profile, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cached_profile(path, lambda: profile, SingleRankTransport()) == (profile, True)
    assert "measured again" in caplog.text
    assert cached_profile(path, never, SingleRankTransport()) == (profile, False)


def test_a_folder_that_cannot_be_written_costs_a_line_only(
    tmp_path: Path, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with caplog.at_level(logging.WARNING):
        assert cached_profile(tmp_path / "cache" / "p.json", lambda: profile, SingleRankTransport()) == (profile, True)
    assert "cannot be saved" in caplog.text


def test_if_one_rank_has_no_profile_all_measure(tmp_path: Path, profile: Profile) -> None:
    measured = []

    def rank(transport: LocalTransport) -> tuple[Profile, bool]:
        path = tmp_path / f"rank{transport.rank}" / "profile.json"
        if transport.rank == 0:
            path.parent.mkdir()
            path.write_text(profile.to_json())

        def again() -> Profile:
            measured.append(transport.rank)
            return profile

        return cached_profile(path, again, transport)

    assert run_rank_threads(2, rank) == [(profile, True)] * 2
    assert sorted(measured) == [0, 1]


def test_another_shape_model_or_number_of_ranks_is_another_file(tmp_path: Path) -> None:
    model = parts_of("llama").shape()
    path = partial(profile_path, tmp_path, device=CPU, is_compiled=False)
    shapes = [SHAPE, replace(SHAPE, batch=4), replace(SHAPE, dtype=torch.bfloat16)]
    paths = [path(model, shape, num_ranks=number) for shape in shapes for number in (1, 2)]
    # Of packed rows: of many documents, of few, and of few where there may be more.
    for packed in (PackedRows(1.1, 8), PackedRows(4.0, 8), PackedRows(4.0, 9), PackedRows(8.0, 1)):
        paths.append(path(model, replace(SHAPE, packed=packed), num_ranks=1))
    paths.append(path(replace(model, vocab_size=7), SHAPE, num_ranks=1))
    paths += [path(model, SHAPE, num_ranks=1, **{name: False}) for name in ("has_peer_copies", "copies_messages")]
    paths.append(path(model, SHAPE, num_ranks=1, product_share=0.5))  # another program used the GPU meanwhile
    assert len(set(paths)) == len(paths)
    assert path(model, SHAPE, num_ranks=1) == paths[0] == path(model, SHAPE, num_ranks=1, product_share=0.97)


def test_layers_in_tiles_are_never_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in tiles where the graph of all tokens would not fit."""

    def refuse(*_: object) -> None:
        raise AssertionError("a graph of all tokens was kept")

    monkeypatch.setattr(stage, "run_with_graph", refuse)
    whole, tiles = (
        LayerBench(parts_of("llama"), 0, replace(SHAPE, tile_tokens=number), CPU) for number in (SHAPE.tokens, 4)
    )

    def seconds(work: Callable[[], object]) -> float:
        work()
        return 1.0

    with pytest.raises(AssertionError, match="was kept"):
        layer_seconds(whole, seconds)
    layer_seconds(tiles, seconds)


def test_a_host_that_waits_for_its_work_tells_nothing_of_launches() -> None:
    launches = measure_launches(CollectiveTimer(CPU, SingleRankTransport()), parts_of("llama"), SHAPE, None)
    assert launches.layer == LayerSeconds(0.0, 0.0, 0.0)
    assert launches.profile_fields()["action_launch"] == ACTION_LAUNCH


def test_launches_are_measured_alone_and_beside_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*threading.enumerate()}

    def optimizers() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before and each.name.startswith("optimizer")]

    def launch_seconds(*_: object) -> float:
        assert not optimizers()
        return 2.0

    def slowest_launch(_: CollectiveTimer, work: Callable[[], object]) -> float:
        assert len(optimizers()) == 1
        work()
        return 5.0

    monkeypatch.setattr(CollectiveTimer, "launch_seconds", launch_seconds)
    monkeypatch.setattr(CollectiveTimer, "slowest_launch", slowest_launch)
    launches = measure_launches(CollectiveTimer(CPU, SingleRankTransport()), parts_of("llama"), SHAPE, None)
    assert launches == Launches(LayerSeconds(2.0, 0.0, 2.0), 2.5)
    assert not optimizers()


def test_layers_and_loss_count_as_long_as_they_take_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_two_seconds(self: CollectiveTimer, work: object, **_: object) -> float:
        return 2.0

    monkeypatch.setattr(CollectiveTimer, "seconds", of_two_seconds)
    profile = measure_profile(CollectiveTimer(CPU, SingleRankTransport()), parts_of("llama"), SHAPE, None)
    (layer,) = profile.layer_kinds
    within = 2.0 / SUSTAINED_SHARE
    assert (layer.forward, layer.recomputed_backward, profile.loss) == (within, within, within)
    assert profile.embedding_forward == 2.0


def test_measuring_gives_all_memory_back_at_once() -> None:
    """A reference cycle would keep 0.9 GB of a GPU until Python looks for cycles."""

    def tensors() -> set[int]:
        return {id(each) for each in gc.get_objects() if issubclass(type(each), Tensor)}

    parts = parts_of("llama")
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        profile = measure_profile(CollectiveTimer(CPU, SingleRankTransport()), parts, SHAPE, None)
        assert tensors() <= before
    finally:
        gc.enable()
    assert profile.gpu_adamw > 0
