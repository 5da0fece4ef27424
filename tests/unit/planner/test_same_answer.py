"""A dry run answers what a run does: plan, bytes and seconds are equal, field by field, if the facts are."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness.run_setups import make_run_setup
from transformers import PretrainedConfig

from mobius.config.cli import parse_args
from mobius.config.config import Config, MatmulDtype
from mobius.distributed import rank_context
from mobius.errors import GpuMemoryError, PlanError
from mobius.models.families import PlannedModel
from mobius.planner import forecast, planning, this_machine
from mobius.planner.gpu_specs import GPU_SPECS, SUSTAINED_SHARE
from mobius.planner.layer_bench import MicrobatchShape
from mobius.planner.peak_memory import LayerBytes, estimate_layer
from mobius.planner.planning import replan
from mobius.planner.remedies import gpu_refusal
from mobius.planner.request import OUTSIDE_BYTES
from mobius.planner.solver import PlanResult, solve
from mobius.process.ranks import Ranks
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape, QuantizedWeights
from mobius.training import run_setup
from mobius.units import GIB

COMPARED = ("plan", "gpu_estimates", "host_estimate", "layer", "profile", "step_time_prediction")


def draw_shape(draw: random.Random) -> ModelShape:
    hidden, vocab = draw.choice([1024, 2048, 4096]), draw.choice([8000, 32000, 128_000])
    inner = draw.choice([2, 3]) * hidden
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    kinds = [layer, draw.choice([layer, layer + hidden])]
    return ModelShape(
        embedding_parameters=vocab * hidden,
        layer_parameters=tuple(draw.choice(kinds) for _ in range(draw.randint(4, 9))),
        head_parameters=vocab * hidden + hidden,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        is_tied=draw.random() < 0.4,
        num_heads=hidden // 128,
        head_size=128,
    )


def draw_setting(draw: random.Random) -> tuple[ModelShape, str, int, list[str]]:
    """A model's sizes, a card, a number of ranks, and options that a run and a dry run both take."""
    shape, num_ranks = draw_shape(draw), draw.choice([1, 2, 3, 4])
    most = (shape.num_layers + 2) // num_ranks
    stages = str(num_ranks * draw.randint(1, max(1, most)))
    words = ["--num_stages", "auto" if draw.random() < 0.1 else stages]
    words += ["--batch_size", "16", "--seq_length", draw.choice(["128", "512", "2048"])]
    words += ["--num_chunks", draw.choice(["1", "2", "4", "8", "auto"])]
    words += ["--gpu_memory_limit", f"{draw.uniform(0.5, 16):.2f}"] if draw.random() < 0.8 else []
    stays = draw.random() < 0.2
    resident = draw.choice(["auto", "auto", "all", "0", "1", "2"])
    words += ["--no_offload"] if stays else ["--resident_stages", resident]
    recomputes = ["auto", "full", *(["none", "elementwise"] if stays or resident == "all" else [])]
    words += ["--recompute", draw.choice(recomputes), "--compile", draw.choice(["auto", "on", "off"])]
    words += ["--max_grad_norm", draw.choice(["0", "1"]), "--dtype", draw.choice(["bf16", "bf16", "fp16", "fp32"])]
    words += ["--matmul_dtype", draw.choice(["fp8", "int8"])] if "bf16" in words and draw.random() < 0.5 else []
    words += ["--loss_chunk_tokens", draw.choice(["256", "2048"])]
    words += (
        [] if {"none", "elementwise"} & {*words} else ["--tile_tokens", draw.choice(["auto", "auto", "off", "1024"])]
    )
    flags = ("fp32_gradients", "no_prefetch", "no_overlap_optimizer")
    words += [f"--{flag}" for flag in flags if draw.random() < 0.3]
    return shape, draw.choice(["H200", "L20", "RTX4090", "A10"]), num_ranks, words


def draw_packed(draw: random.Random) -> PackedRows | None:
    """Facts of the data, which a dry run is told here as a run is."""
    max_documents = draw.randint(2, 40)
    return PackedRows(draw.uniform(20, 600), max_documents) if draw.random() < 0.4 else None


class Parts:
    """A model of which only the sizes are asked for."""

    router_loss = None
    stores_in_order = True

    def __init__(self, shape: ModelShape, matmul_dtype: MatmulDtype, *, compiled: bool = False) -> None:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        if matmul_dtype is not MatmulDtype.BF16:
            layers, scales = (
                (each,) * shape.num_layers
                for each in (4 * hidden * hidden + 3 * hidden * inner, 8 * hidden + 3 * (hidden + inner))
            )
            shape = replace(shape, quantized=QuantizedWeights(matmul_dtype, layers, scales, hidden * inner, inner))
        self._shape, self.compiled, self.config = shape, compiled, SimpleNamespace(model_type="llama")

    def shape(self) -> ModelShape:
        return self._shape


def parts_of(shape: ModelShape) -> SimpleNamespace:
    """In the place of `ModelParts`."""

    def of(config: Config, *_: object, compiled: bool = False, **more: object) -> Parts:
        return Parts(shape, config.model.matmul_dtype, compiled=compiled)

    return SimpleNamespace(of=of)


def measured_as_estimated(
    parts: Parts,
    shape: MicrobatchShape,
    *,
    device: torch.device,
    with_products: bool,  # a plan that has no use for them is the same with them
) -> LayerBytes:
    packed, dtype, tokens = shape.packed, shape.dtype, shape.tokens
    documents = 0 if packed is None or dtype == torch.float32 else shape.batch * packed.max_documents
    sizes, tiles = (dtype.itemsize, parts.shape(), tokens), {"tile_tokens": shape.tile_tokens}
    slices = {"rows": shape.batch, "sliced_length": shape.full_seq_length}
    return estimate_layer(*sizes, compiled=parts.compiled, num_documents=documents, **tiles, **slices)  # type: ignore[arg-type]


def as_run(
    patch: pytest.MonkeyPatch,
    shape: ModelShape,
    card: str,
    ranks: Ranks,
    words: list[str],
    packed: PackedRows | None,
) -> PlanResult | str:
    """The answer of a run on GPUs that are there in name only, its layers and rates measured as they are estimated."""
    config = parse_args(words, num_ranks=ranks.num_ranks)
    total, limit = int(GPU_SPECS[card].memory_gb * GIB), config.pipeline.gpu_memory_limit
    free = total - OUTSIDE_BYTES
    here: dict[str, Any] = {
        "has_gpus": lambda *_: True,
        "join_pipeline": lambda ranks: None,
        "order_devices": lambda *_: None,
        "choose_device": lambda *_: torch.device("cuda", ranks.rank),
        "check_dtype": lambda *_: None,
        "check_products": lambda *_: None,
        "cap_gpu_memory": lambda *_: free if limit is None else min(free, int(limit * GIB)),
        "ModelParts": parts_of(shape),
        "unpackable_reason": lambda config, on_gpu: None,
        "measure_layer_bytes": measured_as_estimated,
        "measure_product_rate": lambda *_: GPU_SPECS[card].product_rate / SUSTAINED_SHARE,
        "num_cpus_per_rank": lambda num_ranks: 16,
        "own_host_bytes": lambda: 0,
        "gpu_refusal": lambda error, _: gpu_refusal(error),
        "available_host_bytes": lambda: 2**50,
        "total_host_bytes": lambda: 2**50,
    }
    for name, value in here.items():
        for module in (rank_context, this_machine, planning, run_setup):
            if hasattr(module, name):
                patch.setattr(module, name, value)
    properties = SimpleNamespace(name=f"NVIDIA {card}", total_memory=total)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    try:
        drawn = make_run_setup(config, ranks, SimpleNamespace(), packed=packed)  # type: ignore[arg-type]
        if (
            drawn.result.step_time_prediction is None and drawn.result.profile is not None
        ):  # it is planned again when it is measured
            return replan(drawn.result, drawn.parts, drawn.device, drawn.result.profile)
    except (GpuMemoryError, PlanError) as error:
        return str(error)
    return drawn.result


def as_dry_run(
    patch: pytest.MonkeyPatch,
    shape: ModelShape,
    card: str,
    num_ranks: int,
    words: list[str],
    packed: PackedRows | None,
) -> PlanResult | str:
    """The answer that `--dry_run` prints and saves."""
    patch.setattr(forecast, "load_planned_config", lambda options: PlannedModel(cast(PretrainedConfig, None)))
    patch.setattr(forecast, "set_head", lambda model, config: model)
    patch.setattr(forecast, "ModelParts", parts_of(shape))
    patch.setattr(forecast, "solve", lambda request, **options: solve(replace(request, packed=packed), **options))
    config = parse_args(["--dry_run", "--card", card, "--num_ranks", str(num_ranks), *words])
    try:
        own = forecast.make_forecast(config, Ranks(0, 1, 0))
    except PlanError as error:
        return str(error)
    return own.found if own.found is not None and own.fits else str(own.refusals[0])


@pytest.mark.parametrize(
    ("seed", "num_settings"),
    [(17, 12), *(pytest.param(seed, 100, marks=pytest.mark.extended) for seed in (17, 18, 19, 20))],
)
def test_a_dry_run_answers_what_a_run_does(monkeypatch: pytest.MonkeyPatch, seed: int, num_settings: int) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    draw = random.Random(seed)
    num_planned = 0
    for number in range(num_settings):
        shape, card, num_ranks, words = draw_setting(draw)
        rank, packed = draw.randrange(num_ranks), draw_packed(draw)
        dry = as_dry_run(monkeypatch, shape, card, num_ranks, words, packed)
        run = as_run(monkeypatch, shape, card, Ranks(rank, num_ranks, rank), words, packed)
        case = f"setting {number}: {card} x {num_ranks}, {' '.join(words)}, {shape}, {packed}"
        if isinstance(dry, str) or isinstance(run, str):
            assert dry == run, case
            continue
        num_planned += 1
        for name in COMPARED:
            assert getattr(dry, name) == getattr(run, name), f"{name} in {case}"
        found = replace(run.request, config=dry.request.config, machine=dry.request.machine, measured_products=None)
        assert dry.request == found
        assert dry.request.packed == packed
        assert dry.request.rules == run.request.rules, case
    assert num_settings // 2 < num_planned < num_settings * 0.95  # some are refused, most are not
