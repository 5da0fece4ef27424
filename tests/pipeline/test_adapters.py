"""LoRA and frozen parts: loss, gradients and steps are those of peft, and of the plain model with frozen parts."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.adapted_models import (
    GivenValues,
    adapt_by_peft,
    adapted,
    give,
    gradients_of,
    parameters_of,
    train,
    train_by_peft,
)
from harness.packed_rows import LENGTH, ROWS, documents_alone, make_packed_batch
from harness.pipelines import CPU, Pipeline, Step, assert_same_bits, make_batch, make_model, plain_step
from harness.rounding import assert_as_exact, assert_near_after_adam, reordered
from harness.runs import make_checkpoint
from harness.sessions import random_samples
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from mobius.config.config import AdapterConfig, FinetuningType
from mobius.engine.saved_activations import SavedActivations
from mobius.engine.stage_layers import SavedForBackward
from mobius.engine.step_inputs import StepBatch
from mobius.errors import ConfigError
from mobius.models.adapter_dropout import DropoutArguments, token_keys
from mobius.models.block_autograd import recomputed_backward
from mobius.models.blocks import LayerArgumentsBuilder, ModelParts
from mobius.models.weights import InitialAdapterWeights

LORA = AdapterConfig(finetuning_type=FinetuningType.LORA, lora_rank=4, lora_alpha=8.0)
DORA = replace(LORA, use_dora=True)
CASES = {  # number of slots, whether everything is saved, resident stages
    "resident": (None, False, frozenset()),
    "resident, everything saved": (None, True, frozenset()),
    "streamed": (1, False, frozenset()),
    "streamed, prefetched, everything saved at last": (2, True, frozenset()),
    "mixed": (2, False, frozenset({0})),
}
NUM_STEPS, LEARNING_RATE, RATIO = 8, 2e-3, 4
OPTIONS = f"""--use_lora --lora_rank 4 --lora_alpha 8 --fp32 --packing off --num_iterations {NUM_STEPS}
    --learning_rate {LEARNING_RATE} --lr_scheduler_type constant --warmup_steps 0 --weight_decay 0.1 --max_grad_norm 0.2
    --batch_size 6 --num_chunks 3 --seq_length 24 --seed 3"""

PACKED = "--packing on --seq_length 32"


def pipeline_of(model: PeftModel, *sizes: Any, adapters: AdapterConfig = LORA, **options: Any) -> Pipeline:
    """A pipeline of what is below peft's adapters, with adapters of ours that have the same values."""
    source = GivenValues(parameters_of(model))
    return Pipeline(model.base_model.model, *sizes, adapters=adapters, source=source, **options)


def step_of(model: PeftModel, batch: StepBatch, num_microbatches: int) -> Step:
    """The step by peft."""
    loss, _ = plain_step(model, batch, num_microbatches)
    return loss, gradients_of(model)


@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
def test_loss_and_gradients_are_those_of_peft_bit_by_bit(num_ranks: int, stages_per_rank: int) -> None:
    model = adapted("llama", LORA)
    for number in (1, 3):
        batch = make_batch(number)
        expected = step_of(model, batch, number)
        for case, (num_slots, saves_all, resident) in CASES.items():
            sizes = num_ranks, stages_per_rank, number, num_slots, saves_all
            assert_same_bits(pipeline_of(model, *sizes, resident=resident).step(batch), expected, (case, sizes))


OTHERS = ("gemma3", "gemma3-softcap", "llama-tied", "mistral", "qwen2", "qwen3")
TURNS = ((2, 2, 3, 1), (1, 3, 2, 2), (2, 1, 1, None))
"""Ranks, stages of each, microbatches, slots."""


@pytest.mark.grid
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("kind", ["", "rslora, patterns"])
def test_other_families_gradients_are_those_of_peft(family: str, kind: str) -> None:
    config = LORA
    if kind:
        ranks, strengths = (("layers.1.*", "3"), ("q_proj", "2")), (("down_proj", "5.5"),)
        config = replace(LORA, use_rslora=True, lora_rank_pattern=ranks, lora_alpha_pattern=strengths)
        config = replace(config, lora_target="q_proj,v_proj,down_proj")
    model = adapted(family, config, num_layers=6)
    for sizes in TURNS:
        batch = make_batch(sizes[2])
        expected = step_of(model, batch, sizes[2])
        assert_same_bits(pipeline_of(model, *sizes, adapters=config).step(batch), expected, sizes)


@pytest.mark.parametrize("config", [LORA, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("options", [{"num_slices": 2}, {"tile_tokens": 5}, {"num_rounds": 2}])
def test_slices_tiles_and_rounds_leave_the_gradients(options: dict[str, Any], config: AdapterConfig) -> None:
    model, batch = adapted("llama", config), make_batch(4)
    expected = step_of(model, batch, 4)
    sizes = 2, 2, 4 * options.get("num_slices", 1), 1
    assert_near_step(pipeline_of(model, *sizes, adapters=config, **options).step(batch), expected)


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(each, marks=pytest.mark.extended) for each in ("gemma3", "llama-tied", "qwen3"))]
)
def test_the_gradients_of_dora_are_those_of_peft(family: str) -> None:
    config = replace(DORA, use_rslora=True, lora_rank_pattern=(("q_proj", "2"),))
    model, batch = adapted(family, config), make_batch(3)
    expected = step_of(model, batch, 3)
    first = pipeline_of(model, 1, 1, 3, None, adapters=config).step(batch)
    assert_near_step(first, expected)
    assert any("magnitude" in name for name in first[1])
    for case, (num_slots, saves_all, resident) in CASES.items():
        sizes = 2, 2, 3, num_slots, saves_all
        assert_same_bits(pipeline_of(model, *sizes, adapters=config, resident=resident).step(batch), first, case)


class HashedDropout(torch.nn.Module):
    """Dropout of peft's adapters with the random numbers of ours, from the words of the hash in plain integers."""

    def __init__(self, name: str, probability: float, shape: tuple[int, int], *, seed: int, step: int) -> None:
        super().__init__()
        match = re.fullmatch(r".*\.layers\.(\d+)\.(.+)", name)
        assert match is not None
        layer, linear = (zlib.crc32(text.encode()) for text in (f"layer {match[1]}", match[2]))
        first, words = zlib.crc32(f"{seed} {step}".encode()), []
        for row in range(shape[0]):
            of_row = hashed(row + first)
            words.append([hashed(hashed(of_row + place) + layer) for place in range(shape[1])])
        self.words, self.linear, self.probability = words, linear, probability

    def forward(self, input: Tensor) -> Tensor:
        features = [hashed(each + self.linear) for each in range(input.shape[-1])]
        least = int(self.probability * 2**32)
        kept = [[[hashed(word + own) >= least for own in features] for word in row] for row in self.words]
        return input * torch.tensor(kept) / (1 - self.probability)


def hashed(word: int) -> int:
    """The hash lowbias32 of a word."""
    word &= 0xFFFFFFFF
    word = (word ^ (word >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return word ^ (word >> 16)


@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_is_that_of_peft_with_the_same_random_numbers(use_dora: bool) -> None:
    config = replace(LORA, lora_dropout=0.25, use_dora=use_dora, lora_target="q_proj,down_proj")
    model, batch = adapted("llama", config, num_layers=4), make_batch(4)
    shape = (*batch.input_ids.shape,)
    keys = torch.from_numpy(token_keys(shape, seed=3, step=2))
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"] = HashedDropout(name, 0.25, shape, seed=3, step=2)
    expected = step_of(model.train(), batch, 1)
    without = pipeline_of(model, 1, 1, 4, None, adapters=config).step(batch)
    assert not torch.equal(without[0], expected[0])
    batch = replace(batch, dropout_keys=keys)
    found = pipeline_of(model, 1, 1, 4, None, adapters=config).step(batch)
    assert_near_step(found, expected)
    for sizes, options in (((2, 2, 4, 1, False), {}), ((2, 2, 4, 2, True), {"resident": frozenset({0})})):
        assert_same_bits(pipeline_of(model, *sizes, adapters=config, **options).step(batch), found, sizes)
    for options in ({"num_slices": 2}, {"tile_tokens": 5}, {"num_rounds": 2}):
        sizes = 2, 2, 4 * options.get("num_slices", 1), 1
        assert_near_step(pipeline_of(model, *sizes, adapters=config, **options).step(batch), expected)


def test_a_row_of_zeros_stays_finite_with_dora() -> None:
    model, batch = adapted("llama", DORA), make_batch(1)
    values = parameters_of(model)
    for name in ("weight", "lora_B.weight", "lora_magnitude_vector"):
        values[f"model.layers.1.mlp.up_proj.{name}"][3] = 0
    pipeline = Pipeline(model.base_model.model, 1, 1, 1, None, adapters=DORA, source=GivenValues(values))
    loss, gradients = pipeline.step(batch)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def assert_near_step(found: Step, expected: Step) -> None:
    loss, gradients = found
    expected_loss, expected_gradients = expected
    assert loss == pytest.approx(float(expected_loss), abs=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= 5e-6 * gradient.abs().max(), name


@pytest.mark.parametrize(
    "config", [LORA, DORA, replace(DORA, lora_dropout=0.25)], ids=["lora", "dora", "dora, dropout"]
)
@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.extended)])
def test_a_compiled_layers_gradients_are_those_of_peft(
    compiler: str, config: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "none":  # graphs run as they were traced
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, _: graph)
    model = adapted("llama", config, num_layers=1)
    values = parameters_of(model)
    generator = torch.Generator().manual_seed(4)
    inputs, gradient = torch.randn(2, 1, 8, 32, generator=generator)
    found = []
    for compiled in (False, True):
        parts = ModelParts(model.config, CPU, compiled=compiled, adapters=config)
        layer, arguments = parts.layers[0], LayerArgumentsBuilder(parts, device=CPU, dtype=torch.float32)(8)
        if config.lora_dropout:
            arguments = DropoutArguments(arguments, torch.from_numpy(token_keys((1, 8), seed=1, step=1)))
        sums = {name: torch.zeros_like(values[name]) for name in layer.parameter_shapes() if "lora_" in name}
        (back,) = recomputed_backward(layer, values, (inputs,), arguments[0], sums, gradient)
        assert not compiled or (layer.graphs is not None and not layer.graphs._is_broken)
        found.append({**sums, "inputs": back})
    for name, expected in found[0].items():
        assert (found[1][name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.extended) for each in ("mistral", "qwen3")), "qwen2", "gemma3"],
)
def test_packed_rows_give_what_each_document_gives_alone(family: str) -> None:
    config = DORA if family == "qwen2" else LORA
    model = adapted(family, config, num_layers=6)
    batch = make_packed_batch(ROWS, LENGTH, 2)
    expected_loss, _ = documents_alone(model, ROWS, batch)
    expected = gradients_of(model)
    loss, gradients = pipeline_of(model, 2, 2, 2, 1, adapters=config).step(batch)

    exact_model = copy.deepcopy(model).double()
    exact_loss, _ = documents_alone(exact_model, ROWS, batch)
    exact = exact_loss, gradients_of(exact_model)
    assert_as_exact((loss, gradients), (expected_loss, expected), exact, share=reordered(batch.num_tokens))


@pytest.mark.parametrize("part", ["head", "embedding", "norms", "down_proj"])
def test_parts_that_are_trained_in_full_with_adapters_have_their_gradients(part: str) -> None:
    config = replace(LORA, additional_target=part, lora_target="q_proj,up_proj")
    saved = {"head": ["lm_head"], "embedding": ["embed_tokens"], "norms": ["norm"]}.get(part, [part])
    model, batch = adapted("llama", config, modules_to_save=saved), make_batch(2)
    found = pipeline_of(model, 2, 2, 2, 1, adapters=config).step(batch)
    assert_same_bits(found, step_of(model, batch, 2))
    assert any(saved[0] in name for name in found[1])


@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        pytest.param("llama", 1, "--num_stages 1 --no_offload", marks=pytest.mark.extended),
        pytest.param("llama", 1, "--num_stages 2 --resident_stages 1", marks=pytest.mark.extended),
        pytest.param("llama", 2, "--num_stages 4", marks=pytest.mark.extended),
        pytest.param("llama", 2, f"--num_stages 2 {PACKED}", marks=pytest.mark.extended),
        pytest.param("llama", 1, "--num_stages 2 --additional_target norms --num_rounds 3", marks=pytest.mark.extended),
        pytest.param("mistral", 2, "--num_stages 4", marks=pytest.mark.extended),
        pytest.param("qwen2", 1, f"--num_stages 2 --no_prefetch {PACKED}", marks=pytest.mark.extended),
        pytest.param("qwen3", 2, "--num_stages 2 --resident_stages 1", marks=pytest.mark.extended),
        pytest.param("gemma3_text", 2, "--num_stages 4", marks=pytest.mark.extended),
        ("qwen2", 1, f"--num_stages 2 {PACKED} --use_dora"),
        ("gemma3_text", 2, f"--num_stages 4 --loraplus_lr_ratio {RATIO}"),
        ("qwen3_moe", 2, f"--num_stages 2 {PACKED} --lora_target q_proj,o_proj --lora_target_parameters all"),
    ],
)
def test_clipped_steps_are_those_of_peft(tmp_path: Path, family: str, num_ranks: int, options: str) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    base = make_checkpoint(tmp_path, family=family, **(sizes if "moe" in family else {}))
    samples = random_samples(30, 24)
    losses, ours, batches = train(num_ranks, tmp_path, f"{OPTIONS} {options}", samples)
    has_norms = "norms" in options
    config = DORA if "dora" in options else LORA
    if "parameters" in options:
        config = replace(config, lora_target="q_proj,o_proj", lora_target_parameters="gate_up_proj,down_proj")
    model = adapt_by_peft(base, config, modules_to_save=["norm"] if has_norms else None)
    given = parameters_of(model)
    fresh = InitialAdapterWeights(GivenValues(given), {name: (*each.shape,) for name, each in given.items()}, seed=3)
    before = {name: fresh.read(name, each.shape).clone() for name, each in given.items()}
    give(model, before)
    ratio = RATIO if "ratio" in options else None
    expected = train_by_peft(model, batches, ratio=ratio)

    share = reordered(batches[0].input_ids.size)
    assert losses == pytest.approx(expected, rel=share)
    assert expected[-1] < expected[0]
    after, trained = parameters_of(model), dict[str, Tensor]()
    for name, value in after.items():
        is_frozen = "lora_" not in name and not (has_norms and "norm" in name)
        assert torch.equal(value, before[name]) == is_frozen, name
        if is_frozen:
            assert torch.equal(ours[name], value), f"{name} is frozen"
        else:
            trained[name] = ours[name]
    assert_near_after_adam(
        trained,
        {name: after[name] for name in trained},
        before,
        rates=[LEARNING_RATE * (ratio or 1)] * NUM_STEPS,
        share=share,
    )


FROZEN = {
    "embedding": "model.embed_tokens.",
    "head": "lm_head.",
    "layers.0-2": ("model.layers.0.", "model.layers.1.", "model.layers.2."),
    "embedding,layers.0-1": ("model.embed_tokens.", "model.layers.0.", "model.layers.1."),
    "layers.3,layers.1": ("model.layers.3.", "model.layers.1."),
}
"""What is typed, and how the names of the parameters begin."""


@pytest.mark.grid
@pytest.mark.parametrize(
    ("num_ranks", "num_slots", "keeps_graphs"), [(1, None, True), (1, 1, False), (2, 2, False), (4, None, False)]
)
@pytest.mark.parametrize("freeze", FROZEN)
def test_gradients_of_the_rest_are_the_plain_models_bit_by_bit(
    freeze: str, num_ranks: int, num_slots: int | None, keeps_graphs: bool
) -> None:
    model, batch, adapters = make_model("llama", 4), make_batch(2), AdapterConfig(freeze=freeze)
    expected_loss, expected = plain_step(model, batch, 2)
    rest = {name: gradient for name, gradient in expected.items() if not name.startswith(FROZEN[freeze])}
    sizes = num_ranks, 2 if num_ranks < 4 else 1, 2, num_slots, keeps_graphs
    assert_same_bits(Pipeline(model, *sizes, adapters=adapters).step(batch), (expected_loss, rest), sizes)


def test_a_tied_matrix_is_frozen_as_embedding_and_as_head() -> None:
    model, batch = make_model("llama-tied", 4), make_batch(2)
    _, expected = plain_step(model, batch, 2)
    for word in ("embedding", "head"):
        pipeline = Pipeline(model, 2, 2, 2, 2, adapters=AdapterConfig(freeze=word))
        pipeline.run(batch)
        assert pipeline.gradients.keys() == expected.keys() - {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("options", [{"num_slices": 2}, {"tile_tokens": 5}])
def test_frozen_layers_in_slices_and_tiles_leave_the_others_gradients(options: dict[str, int]) -> None:
    model, batch, number = make_model("llama", 4), make_batch(2), 2 * options.get("num_slices", 1)
    frozen = AdapterConfig(freeze="embedding,layers.0-1,norms")
    both = [Pipeline(model, 2, 2, number, 1, adapters=each, **options) for each in (AdapterConfig(), frozen)]
    losses = [pipeline.run(batch) for pipeline in both]
    expected, found = (pipeline.gradients for pipeline in both)

    assert torch.equal(*losses)
    trained = ("model.layers.2.", "model.layers.3.", "lm_head.")
    assert found.keys() == {name for name in expected if name.startswith(trained) and "norm" not in name}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("freeze", "expected"), [("embedding,layers.0-1", 2), ("layers.0-1", 4), ("embedding", 4)])
def test_layers_before_which_nothing_is_trained_have_no_backward(
    freeze: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mobius.engine import stage

    run, ran = stage.recomputed_backward, []

    def count(*args: object) -> torch.Tensor:
        ran.append(args)
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "recomputed_backward", count)
    Pipeline(make_model("llama", 4), 1, 2, 1, 1, adapters=AdapterConfig(freeze=freeze)).run(make_batch(1))
    assert len(ran) == expected


@pytest.mark.parametrize("options", [{}, {"num_slices": 2}])
@pytest.mark.parametrize("offloaded_activation_stages", [frozenset(), frozenset({0, 1})])
def test_layers_without_a_backward_save_nothing_for_it(
    options: dict[str, int], offloaded_activation_stages: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 to 2 of 8 are frozen: stage 0 of 4 saves nothing, and stage 1 the input of one of its two layers."""
    model, batch, number = make_model("llama", 8), make_batch(2), 2 * options.get("num_slices", 1)
    put, saved_now = SavedActivations.put, dict[int, list[int]]()

    def seen(self: SavedActivations, stage: int, microbatch: int, tensors: Sequence[SavedForBackward]) -> None:
        saved_now[stage] = [each.numel() for each in tensors if isinstance(each, torch.Tensor)]
        put(self, stage, microbatch, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(SavedActivations, "put", seen)
    frozen = AdapterConfig(freeze="embedding,layers.0-2")
    both = [
        Pipeline(
            model, 2, 2, number, 1, adapters=each, offloaded_activation_stages=offloaded_activation_stages, **options
        )  # type: ignore[arg-type]
        for each in (AdapterConfig(), frozen)
    ]
    losses, found = [], []
    for pipeline in both:
        losses.append(pipeline.run(batch))
        found.append(dict(saved_now))
    whole = found[0][0][0]
    assert [each[:2] for each in (found[0][0], found[0][1])] == [[whole, whole]] * 2
    assert (found[1][0], found[1][1]) == ([0, 0], [0, whole])
    assert torch.equal(*losses)
    for name, gradient in both[1].gradients.items():
        assert torch.equal(gradient, both[0].gradients[name]), name


@pytest.mark.parametrize(
    ("freeze", "named"),
    [
        ("layers.2-4", "layers.0-3"),
        ("layers.3-1", "layers.0-3"),
        ("attention", "embedding, head, norms, layers.0-15"),
        ("embedding,head,norms,layers.0-3", "nothing to train"),
    ],
)
def test_a_part_that_is_not_there_is_refused(freeze: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelParts(make_model("llama", 4).config, CPU, adapters=AdapterConfig(freeze=freeze))
