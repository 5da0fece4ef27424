"""Layers are measured as a step runs them; a slice attends to tokens before it, and only its own bytes count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.live_bytes import CPU, LiveBytes
from transformers import LlamaConfig

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.engine.stage_layers import SequenceSlice
from mobius.models.blocks import ModelParts
from mobius.planner import layer_bench
from mobius.planner.layer_bench import LayerRun, MicrobatchShape, measure_layer_bytes
from mobius.planner.peak_memory import LayerBytes, estimate_layer
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.plan import RecomputeLevel

HIDDEN = 64


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveBytes]:
    """A meter of the CPU's tensors in the place of the GPU's."""
    meter = LiveBytes()

    def forget_peak(*_: object) -> None:
        meter.peak = meter.now

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: meter.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: meter.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget_peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(layer_bench, "KEYS_PER_CALL", 512)
    with meter:
        yield meter


def parts_of_two_layers(adapters: AdapterConfig = AdapterConfig()) -> ModelParts:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=100,
        max_position_embeddings=8192,
    )
    config._attn_implementation = "sdpa"
    return ModelParts(config, CPU, adapters=adapters)


@pytest.mark.usefixtures("live")
def test_dropout_and_dora_are_measured() -> None:
    lora = AdapterConfig(FinetuningType.LORA, lora_rank=2)
    shape, peaks = MicrobatchShape(1, 256, torch.float32, 64, None, None), []
    for adapters in (lora, replace(lora, lora_dropout=0.5), replace(lora, use_dora=True)):
        measured = measure_layer_bytes(parts_of_two_layers(adapters), shape, device=CPU)
        peaks.append(measured.saved_activations)
    inputs, outputs = 6 * HIDDEN + 160, 3 * HIDDEN + 2 * 160 + 2 * 32
    shared = 2 * HIDDEN + 160  # inputs of several linears, or products, which LoRA alone saves once
    assert peaks[1] - peaks[0] >= 256 * (4 * (inputs - shared) + inputs), "inputs in fp32, and a byte for what is kept"
    assert peaks[2] - peaks[0] >= 256 * 4 * outputs


def bytes_of_slice(
    tokens: int, length: int, *, tile_tokens: int | None = None, packed: PackedRows | None = None
) -> int:
    shape = MicrobatchShape(1, tokens, torch.float32, 64, packed, tile_tokens, full_seq_length=length)
    found = measure_layer_bytes(parts_of_two_layers(), shape, device=CPU)
    assert found.recomputed is not None
    return found.recomputed


@pytest.mark.usefixtures("live")
def test_a_slice_takes_as_much_in_any_sequence_and_no_more_than_its_estimate() -> None:
    found = bytes_of_slice(512, 1024)
    assert bytes_of_slice(512, 8192) == found, "keys and values of the sequence do not count"
    for number, more in ((512, {}), (1024, {}), (512, {"tile_tokens": 128})):
        estimate = estimate_layer(
            4, parts_of_two_layers().shape(), number, compiled=False, sliced_length=4096, **more
        ).recomputed
        assert estimate is not None
        assert bytes_of_slice(number, 4096, **more) < estimate
    assert bytes_of_slice(1024, 8192) == pytest.approx(2 * found, rel=0.1)
    assert bytes_of_slice(512, 1024, tile_tokens=128) < 0.6 * found


@pytest.mark.usefixtures("live")
def test_a_slice_has_the_documents_of_packed_rows_and_attends_to_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequence_slices = list[SequenceSlice]()

    def sequence_slice(*given: Any) -> SequenceSlice:
        sequence_slices.append(SequenceSlice(*given))
        return sequence_slices[-1]

    monkeypatch.setattr(layer_bench, "SequenceSlice", sequence_slice)
    bytes_of_slice(256, 4096, packed=PackedRows(64.0, 40))
    found = sequence_slices[0]
    assert (found.start, found.end, found.length) == (512, 768, 768), "512 tokens are attended to at a time"
    assert found.documents is not None
    assert len(found.documents) == 40 + 1
    assert found.documents[:3].tolist() == [0, 64, 128]
    assert found.documents[-1] == 768


def test_the_peak_of_each_level_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100, LoRA layers of width 2048 took 33.2 messages with everything saved, 40.6 with products alone."""
    taken = {RecomputeLevel.NONE: (161, 332), RecomputeLevel.ELEMENTWISE: (208, 406)}

    def bytes_of(run: LayerRun, *, runs_forward: bool = True) -> tuple[int, int]:
        return taken[run.layers._recompute_level] if runs_forward else (0, 386)

    monkeypatch.setattr(layer_bench, "_bytes_of", bytes_of)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    shape = MicrobatchShape(1, 512, torch.float32, 64)
    found = measure_layer_bytes(parts_of_two_layers(), shape, device=CPU, with_products=True)
    assert found == LayerBytes(161, 332, 386, 208, 406)
    assert [found.backward_work(level) for level in RecomputeLevel] == [332 - 161, 406 - 208]
