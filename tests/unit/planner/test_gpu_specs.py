"""Estimates are arithmetic over data sheets, reproduce what they were calibrated with, and order cards sensibly."""

from dataclasses import replace

import pytest
from harness.plan_requests import find_published_shape

from mobius.errors import PlanError
from mobius.planner import gpu_specs
from mobius.planner.gpu_specs import (
    GPU_SPECS,
    Host,
    LayerEstimate,
    estimate_profile,
    find_gpu_spec,
    with_attention_length,
)
from mobius.planner.profile import LayerSeconds, Profile
from mobius.schedule.partition import ModelShape


def estimate(shape: ModelShape, card: str = "H200", *, num_ranks: int = 1, tokens: int = 4096) -> Profile:
    return estimate_profile(GPU_SPECS[card], shape, microbatch_tokens=tokens, seq_length=512, num_ranks=num_ranks)


def test_the_calibration_gives_back_what_was_measured_on_an_h200(llama_7b: ModelShape) -> None:
    profile = estimate(llama_7b)
    (layer,) = profile.layer_kinds
    alone = gpu_specs.SUSTAINED_SHARE  # measured alone, estimated as within a step
    assert layer.forward * alone == pytest.approx(2.47e-3, rel=0.02)
    assert (layer.forward + layer.backward) * alone == pytest.approx(8.40e-3, rel=0.02)
    assert profile.loss * alone == pytest.approx(5.41e-3, rel=0.02)
    assert profile.cpu_adamw == pytest.approx(5.36e9, rel=0.01)


def test_a_narrow_layer_takes_what_was_measured_and_a_wide_one_what_its_operations_do(llama_7b: ModelShape) -> None:
    narrow, wide = find_published_shape("1b"), find_published_shape("30b")
    for tokens, seq_length, measured in ((4096, 1024, 2.375e-3), (2048, 128, 1.205e-3)):
        profile = estimate_profile(
            GPU_SPECS["H200"], narrow, microbatch_tokens=tokens, seq_length=seq_length, num_ranks=1
        )
        (layer,) = profile.layer_kinds
        assert (layer.forward + layer.backward) * gpu_specs.SUSTAINED_SHARE == pytest.approx(measured, rel=0.01)
    (layer,), (seven,) = estimate(wide).layer_kinds, estimate(llama_7b).layer_kinds
    operations = [2 * shape.layer_parameters[0] + 2 * 512 * shape.hidden_size for shape in (wide, llama_7b)]
    assert layer.forward / seven.forward == pytest.approx(operations[0] / operations[1])


def test_a_layer_that_is_not_compiled_takes_what_was_measured_over_a_compiled_one(llama_7b: ModelShape) -> None:
    seconds = {}
    for compiled in (True, False):
        profile = estimate_profile(
            GPU_SPECS["H200"], llama_7b, microbatch_tokens=8192, seq_length=512, num_ranks=1, compiled=compiled
        )
        (seconds[compiled],) = profile.layer_kinds
    # 8192 tokens on one H200: forward 6.5 and 4.8 ms, recomputed backward 20.8 and 16.0.
    assert seconds[False].forward / seconds[True].forward == pytest.approx(6.5 / 4.8, rel=0.01)
    recomputed = seconds[False].recomputed_backward / seconds[True].recomputed_backward
    assert recomputed == pytest.approx(20.8 / 16.0, rel=0.02)


def test_a_layer_over_a_long_sequence_takes_what_was_measured() -> None:
    """One H200, torch 2.11: a layer of 8B, one sequence of 65,536 tokens, tiles of 8,192."""
    shape = find_published_shape("8b")
    profile = estimate_profile(GPU_SPECS["H200"], shape, microbatch_tokens=65536, seq_length=65536, num_ranks=1)
    (layer,) = profile.layer_kinds
    for seconds, measured in ((layer.forward, 0.1022), (layer.recomputed_backward, 0.3425)):
        assert seconds * gpu_specs.SUSTAINED_SHARE == pytest.approx(measured, rel=0.03)
    # 32 heads of 128, and half of all pairs of 65,536 tokens.
    assert 4 * 4096 * 65536**2 / 2 / profile.attention.forward == pytest.approx(
        573e12 * gpu_specs.SUSTAINED_SHARE, rel=0.02
    )


def test_attention_has_rates_of_its_own_beyond_what_the_shares_were_measured_with() -> None:
    shape, length = find_published_shape("8b"), gpu_specs.WITHIN

    def per_pair(card: str, length: int, *, is_packed: bool = False) -> float:
        """Seconds of forward by pair of a token and one that it attends to."""
        layers = LayerEstimate(GPU_SPECS[card], shape, is_packed=is_packed)
        attention = layers.attention(4096, length).forward
        assert layers.layer(0, 4096, length).forward - layers.layer(0, 4096, 0).forward == pytest.approx(attention)
        return attention / length

    assert per_pair("H200", length) == pytest.approx(per_pair("H200", 512))
    assert per_pair("H200", 64 * length) > 1.1 * per_pair("H200", length)
    assert per_pair("H200", 64 * length, is_packed=True) > 1.6 * per_pair("H200", 64 * length)
    # Of these nothing was measured.
    assert per_pair("RTX4090", 64 * length) == pytest.approx(per_pair("RTX4090", 512))


@pytest.mark.parametrize("card", ["H200", None])
def test_measured_layers_attend_over_more_by_the_cards_rates_or_else_by_operations(card: str | None) -> None:
    shape = find_published_shape("8b")
    estimate = None if card is None else LayerEstimate(GPU_SPECS[card], shape)
    measured = replace(estimate_profile(GPU_SPECS["H200"], shape, microbatch_tokens=4096, seq_length=4096, num_ranks=1),
                       attention=LayerSeconds(0, 0, 0))  # fmt: skip
    found = with_attention_length(measured, shape, measured_length=4096, length=65536, estimate=estimate)
    (before,), (after,), (count,) = measured.layer_kinds, found.layer_kinds, set(shape.layer_parameters)
    if estimate is not None:
        assert after.recomputed_backward == pytest.approx(estimate.layer(0, 4096, 65536).recomputed_backward)
        assert found.attention == estimate.attention(4096, 65536)
    else:
        operations = [count + 4096 * length for length in (4096, 65536)]
        assert after.forward / before.forward == pytest.approx(operations[1] / operations[0])
        assert found.attention.forward / after.forward == pytest.approx(4096 * 65536 / operations[1])
    assert with_attention_length(measured, shape, measured_length=4096, length=4096).layer_kinds == measured.layer_kinds


def test_four_gpus_at_once_copy_as_fast_as_was_measured(llama_7b: ModelShape) -> None:
    copies = estimate(llama_7b, num_ranks=4).copies
    assert (copies.host_to_device_all_gpus, copies.device_to_host_all_gpus) == (
        pytest.approx(41e9),
        pytest.approx(34e9),
    )
    assert copies.host_to_device_duplex + copies.device_to_host_duplex == pytest.approx(47e9)


@pytest.mark.parametrize("card", sorted(GPU_SPECS))
def test_every_card_gives_a_profile_that_can_be_stored(llama_7b: ModelShape, card: str) -> None:
    profile = estimate(llama_7b, card, num_ranks=4)
    assert Profile.from_json(profile.to_json()) == profile


def test_an_older_slot_slows_copies_and_a_newer_one_does_not_speed_them_up(llama_7b: ModelShape) -> None:
    def down(pcie: int) -> float:
        host = Host(pcie=pcie)
        profile = estimate_profile(
            GPU_SPECS["L20"], llama_7b, microbatch_tokens=4096, seq_length=512, num_ranks=1, host=host
        )
        return profile.copies.host_to_device

    assert down(3) < down(4) == down(5)
    with pytest.raises(PlanError, match="generation 2"):
        down(2)


def test_cores_or_memory_bound_the_cpu_optimizer(llama_7b: ModelShape) -> None:
    def rate(cores: int) -> float:
        host = Host(cores_per_rank=cores)
        profile = estimate_profile(
            GPU_SPECS["H200"], llama_7b, microbatch_tokens=4096, seq_length=512, num_ranks=1, host=host
        )
        return profile.cpu_adamw

    assert rate(8) == pytest.approx(rate(16) / 2)
    assert rate(64) * gpu_specs.CPU_ADAMW_BYTES["fp32"] == pytest.approx(gpu_specs.HOST_BANDWIDTH)


@pytest.mark.parametrize(("name", "card"), [("h200", "H200"), ("rtx 4090", "RTX4090"), ("4090", "RTX4090"),
                                            ("NVIDIA L20", "L20"), ("A100-80", "A100-80")])  # fmt: skip
def test_a_card_is_found_in_any_spelling(name: str, card: str) -> None:
    assert find_gpu_spec(name).name == card


@pytest.mark.parametrize("name", ["", "B300", "A100"])
def test_a_card_that_is_not_known_is_an_error_with_those_that_are(name: str) -> None:
    with pytest.raises(PlanError, match=r"H200"):
        find_gpu_spec(name)
