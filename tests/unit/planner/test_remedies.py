"""A refusal says what is needed and there, and lists single changes that were planned and fit GPUs and host."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from harness.plan_requests import refusal_by, request_of
from transformers import LlamaConfig

from mobius.config.cli import parse_args
from mobius.config.config import ActivationOffloading, Order, Recompute
from mobius.errors import HostMemoryError
from mobius.models.blocks import ModelParts
from mobius.planner.fit import DoesNotFitError, fit_plan, fits_gpus, fits_host
from mobius.planner.gpu_specs import GPU_SPECS
from mobius.planner.memory_estimates import estimate_host_memory, estimated_layer
from mobius.planner.remedies import check_host_memory, find_remedies
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import Effort, PlanResult, resolve_auto, solve
from mobius.schedule.partition import ModelShape
from mobius.units import GIB

TWO = Machine(2, GPU_SPECS["RTX4090"])
LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=16, num_attention_heads=32, vocab_size=32000
)
"""The configuration of the model that `half` is of."""


@pytest.fixture
def half(llama_7b: ModelShape) -> ModelShape:
    return replace(llama_7b, layer_parameters=llama_7b.layer_parameters[:16])


@cache
def planned(request: PlanRequest) -> PlanResult:
    settled = resolve_auto(request)
    return solve(settled, layer=estimated_layer(settled), effort=Effort.NUMBERS)


def short_of_host(shape: ModelShape, limit: float, **options: object) -> PlanResult:
    """The plan of 16 stages and 16 microbatches on two RTX 4090 that takes more than `limit` GiB of the host."""
    usual: dict[str, object] = {"num_stages": 16, "num_chunks": 16, "host_memory_limit": limit}
    found = planned(request_of(shape, TWO, **(usual | options)))
    assert found.host_estimate.total > limit * GIB
    return found


def listed(text: str) -> dict[str, str]:
    """The changes that a refusal lists, and what it says about each."""
    return dict(re.findall(r"^  (--.*?)  +(\d.*)$", text, re.MULTILINE))


def long_request(shape: ModelShape, **options: object) -> PlanRequest:
    """64 x 2048 tokens in four microbatches, in eight stages on four ranks."""
    usual: dict[str, object] = {"seq_length": 2048, "num_stages": 8, "num_chunks": 4, "loss_chunk_tokens": 8192}
    return request_of(shape, **(usual | options))


def test_exactly_enough_host_memory_is_enough_and_a_byte_less_is_not(half: ModelShape) -> None:
    found = planned(request_of(half, TWO, num_stages=16, num_chunks=16))
    check_host_memory(found, found.host_estimate.total)
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(found, found.host_estimate.total - 1)
    assert f"2 rank(s) need {found.host_estimate.total / GIB:.1f} GiB of host memory" in str(caught.value)


def test_exactly_enough_gpu_memory_is_enough_and_a_byte_less_is_not(llama_7b: ModelShape) -> None:
    request = long_request(llama_7b, gpu_memory_limit=22.0, tile_tokens="off", num_rounds=1)
    with pytest.raises(DoesNotFitError) as caught:
        fit_plan(request)
    (gib,) = re.findall(r" = (\d+\.\d+) GiB\)", str(caught.value))
    fit_plan(request.with_pipeline(gpu_memory_limit=float(gib) + 0.01))
    with pytest.raises(DoesNotFitError):
        fit_plan(request.with_pipeline(gpu_memory_limit=float(gib) - 0.01))


@pytest.mark.parametrize(("use_offload", "advice"), [(True, "raise --num_stages"), (False, "use --use_offload")])
def test_where_no_single_change_fits_the_sum_and_usual_changes_are_told(
    llama_7b: ModelShape, use_offload: bool, advice: str
) -> None:
    request = long_request(llama_7b, gpu_memory_limit=1.0, use_offload=use_offload)
    text = refusal_by(lambda: fit_plan(request))
    assert re.match(
        r"rank \d needs \d+\.\d GiB of GPU memory \(weights \d.* \+ libraries \d.* = .* GiB\), 1.0 GiB", text
    )
    assert f"is available. To fit: {advice}" in text
    assert "--num_chunks" in text
    assert "--batch_size" in text


def test_the_smallest_change_of_each_kind_is_listed_and_fits(llama_7b: ModelShape) -> None:
    request = long_request(llama_7b, gpu_memory_limit=22.0, tile_tokens="off")
    changes = listed(refusal_by(lambda: fit_plan(request)))
    assert {"--num_chunks 8", "--tile_tokens 32768"} & changes.keys()
    for options in changes:
        words = ["--num_stages", "8", "--num_chunks", "4", "--batch_size", "64", "--seq_length", "2048"]
        words += ["--loss_chunk_tokens", "8192", "--gpu_memory_limit", "22", "--tile_tokens", "off", *options.split()]
        config = parse_args([*words, "--compute_order", "breadth_first", "--num_slices", "1"])
        resolved = resolve_auto(PlanRequest.of(config, llama_7b, request.machine))
        fit_plan(resolved)
    (length,) = (int(options.split()[1]) for options in changes if options.startswith("--seq_length"))
    with pytest.raises(DoesNotFitError):
        fit_plan(request.with_options("data", seq_length=length + 64))


def test_options_that_were_fixed_are_left_to_the_planner(llama_7b: ModelShape) -> None:
    on_gpus = long_request(llama_7b, use_offload=False, recompute=Recompute.NONE, gpu_memory_limit=70.0)
    changes = listed(refusal_by(lambda: fit_plan(on_gpus)))
    assert {"--recompute auto", "--use_offload --recompute auto"} <= changes.keys()
    deep = request_of(llama_7b, compute_order=Order.DEPTH_FIRST, gpu_memory_limit=6.5)
    assert "--compute_order auto" in listed(refusal_by(lambda: solve(deep)))
    shared = request_of(llama_7b, spread_head=True, gpu_memory_limit=6.5)
    assert "--no_spread_head" in listed(refusal_by(lambda: solve(shared)))


def test_more_microbatches_are_found_in_as_many_rounds_as_a_depth_first_order_can_have(llama_7b: ModelShape) -> None:
    options = {"num_chunks": 8, "seq_length": 2048, "gpu_memory_limit": 10.5, "recompute": Recompute.FULL}
    deep = request_of(llama_7b, compute_order=Order.DEPTH_FIRST, **options)
    assert "--num_chunks 16" in listed(refusal_by(lambda: solve(deep)))
    more = deep.trying(num_chunks=16)
    for rounds, fits in ((1, False), (4, True)):  # 16 microbatches have no more rounds on four ranks
        assert fits_gpus(more.trying(num_rounds=rounds), None) is fits


def test_more_resident_stages_than_fit_are_refused_with_the_arithmetic(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, num_chunks=4, gpu_memory_limit=20.0, resident_stages="8")
    text = refusal_by(lambda: fit_plan(request))
    # The first rank has 7 x 202,383,360 + 333,455,360 = 1,750,138,880 parameters, and a sum of 4 x 333,455,360 bytes.
    assert "rank 0 needs " in text
    assert "weights 3.26 + gradients 4.50 + optimizer 16.30" in text
    assert "20.0 GiB is available." in text
    assert "--resident_stages auto" in listed(text)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"resident_stages": "0"}, "--resident_stages auto"),
        pytest.param({"num_rounds": 1}, "--num_rounds auto", marks=pytest.mark.extended),
    ],
)
def test_too_little_host_memory_names_the_option_without_which_it_fits(
    half: ModelShape, options: dict[str, object], advice: str
) -> None:
    usual = {"seq_length": 2048, "activation_offloading": ActivationOffloading.AUTO}
    found = short_of_host(half, 28, **usual, **options)
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(found, 28 * GIB, LLAMA)
    assert re.match(r"\d\d\.\d GiB of host memory, ", listed(str(caught.value))[advice])
    del options[next(iter(options))]
    changed = request_of(half, TWO, num_stages=16, num_chunks=16, host_memory_limit=28, **usual)
    assert planned(changed).host_estimate.total <= 28 * GIB


def test_each_listed_change_typed_into_a_run_of_its_own_fits_and_is_as_fast(half: ModelShape) -> None:
    remedies = find_remedies(short_of_host(half, 13).request, None, LLAMA, 13 * GIB)
    frozen = next(options for options in remedies if options.startswith("--freeze"))
    larger = next(options for options in remedies if "--host_memory_limit" in options)
    assert "--use_lora" in remedies

    words = ["--num_stages", "16", "--num_chunks", "16", "--batch_size", "64", "--host_memory_limit", "13"]
    words += ["--activation_offloading", "off"]
    for options in (frozen, "--use_lora", larger):
        config = parse_args([*words, *options.split()])
        parts = ModelParts(LLAMA, torch.device("cpu"), adapters=config.adapters)
        again = resolve_auto(PlanRequest.of(config, parts.shape(), TWO))
        plan = fit_plan(again, layer=estimated_layer(again))
        assert fits_host(again, plan)
        assert estimate_host_memory(again, plan).total == remedies[options].host_estimate.total

    number = int(frozen.removeprefix("--freeze embedding,layers.0-"))  # one layer less does not fit
    config = parse_args([*words, "--freeze", f"embedding,layers.0-{number - 1}"])
    fewer = ModelParts(LLAMA, torch.device("cpu"), adapters=config.adapters).shape()
    settled = resolve_auto(PlanRequest.of(config, fewer, TWO))
    assert not fits_host(settled, fit_plan(settled, layer=estimated_layer(settled)))


def test_where_less_is_free_than_plans_count_on_it_is_stated_alone_or_with_each_change(half: ModelShape) -> None:
    found = planned(request_of(half, replace(TWO, host_bytes=100 * GIB), num_stages=16, num_chunks=16))
    assert found.host_estimate.total > 30 * GIB
    assert list(find_remedies(found.request, None, LLAMA, 30 * GIB)) == ["--host_memory_limit 30"]

    remedies = find_remedies(found.request, None, LLAMA, 15 * GIB)
    *here, larger = remedies
    assert "--host_memory_limit 15 --use_lora" in here
    assert all(options.startswith("--host_memory_limit 15 --") for options in here)
    assert all(remedies[options].host_estimate.total <= 15 * GIB for options in here)
    assert re.fullmatch(r"--host_memory_limit \d+", larger)


def test_disks_are_named_with_the_bytes_there_and_what_the_prediction_leaves_out(half: ModelShape) -> None:
    streamed: dict[str, object] = {"resident_stages": "0", "num_stages": 16, "num_chunks": 16, "num_rounds": 1}
    in_memory = planned(request_of(half, TWO, **streamed)).host_estimate
    needed = planned(request_of(half, TWO, **streamed, offload_states_to="/a")).host_estimate
    option = "--offload_states_to FOLDER"
    text = host_refusal(short_of_host(half, in_memory.total / GIB - 0.1, **streamed))[option]
    assert f"{needed.total / GIB:.1f} GiB of host memory, {needed.disk / GIB:.1f} GiB on disks" in text
    assert text.endswith("tokens/s if disks were no limit")
    on_disk = {**streamed, "offload_states_to": "/a"}
    fewest = planned(replace(request_of(half, TWO, **on_disk), num_state_buffers=1)).host_estimate
    little = fewest.total / GIB - 0.1
    tight = host_refusal(short_of_host(half, little, **streamed))
    assert option not in tight
    assert f"{option} --optimizer_states bf16" in tight
    on_disks = host_refusal(short_of_host(half, little, **streamed, offload_states_to="/a"))
    assert not any("offload_states_to" in options for options in on_disks)
    assert "--gradients_on_disks" in on_disks
    assert not any("weights_on_disks" in options for options in on_disks), "gradients are moved once each"


def test_weights_on_disks_are_named_where_nothing_simpler_fits(half: ModelShape) -> None:
    small: dict[str, object] = {"resident_stages": "0", "num_stages": 18, "num_chunks": 16, "num_rounds": 1}
    on_disk = small | {"offload_states_to": "/a"}
    assert "--gradients_on_disks --weights_on_disks" in host_refusal(short_of_host(half, 14, **on_disk))
    assert "--weights_on_disks" in host_refusal(short_of_host(half, 14, **on_disk, max_grad_norm=0.0))
    both = "--offload_states_to FOLDER --weights_on_disks --optimizer_states"
    assert f"{both} fp32" in host_refusal(short_of_host(half, 14, **small, max_grad_norm=0.0))
    assert f"{both} bf16" in host_refusal(short_of_host(half, 10, **small, max_grad_norm=0.0))


def test_replicas_are_offered_no_weights_on_disks(half: ModelShape) -> None:
    options: dict[str, object] = {"resident_stages": "0", "num_stages": 16, "num_chunks": 8, "num_rounds": 1}
    request = request_of(half, replace(TWO, num_replicas=2), **options, offload_states_to="/a")
    needed = planned(replace(request, num_state_buffers=1)).host_estimate.total
    remedies = find_remedies(request, None, None, needed - GIB // 10)
    assert not any("weights_on_disks" in each for each in remedies)


def host_refusal(found: PlanResult) -> dict[str, str]:
    """The changes that a run without enough host memory is told."""
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(found, found.request.host_bytes or 0)
    return listed(str(caught.value))


@pytest.mark.parametrize(("gib", "way"), [(8, "--use_lora --base_dtype int8"), (6, "--use_lora --base_dtype nf4")])
def test_a_base_in_fewer_bytes_is_named_where_a_plain_one_does_not_fit(
    llama_7b: ModelShape, gib: int, way: str
) -> None:
    model = LlamaConfig(**LLAMA.to_dict() | {"num_hidden_layers": 32})
    short = short_of_host(llama_7b, gib, gpu_memory_limit=4.5, num_stages=32)
    assert [each for each in find_remedies(short.request, None, model, gib * GIB) if "lora" in each] == [way]

    words = "--num_stages 32 --num_chunks 16 --batch_size 64 --use_lora --gpu_memory_limit 4.5"
    config = parse_args(words.split())
    shape = ModelParts(model, torch.device("cpu"), adapters=config.adapters).shape()
    adapted = resolve_auto(PlanRequest.of(config, shape, TWO))
    assert [each for each in find_remedies(adapted, None, model, gib * GIB) if each.startswith("--base_dtype ")]
