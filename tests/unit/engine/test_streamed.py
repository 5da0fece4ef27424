"""Stages go through the slots: loaded when there is room, used while they are there, their gradients brought home."""

from collections.abc import Callable

import pytest
import torch
from harness.rank_memory import allocate_memory

from mobius.engine.stage_memory import StageMemory
from mobius.errors import ScheduleError
from mobius.models.layout import StageLayout

CPU = torch.device("cpu")
NOTHING: frozenset[str] = frozenset()
Stages = dict[int, StageMemory]
MakeSlots = Callable[..., Stages]


@pytest.fixture
def make_slots(layouts: dict[int, StageLayout]) -> MakeSlots:
    """Slots over stages 0, 2 and 4, whose weights are 1, 3 and 5 throughout."""

    def make(num_slots: int = 2, dtype: torch.dtype = torch.float32) -> Stages:
        slots, _ = allocate_memory(
            layouts,
            resident=(),
            num_slots=num_slots,
            dtype=dtype,
            gradient_dtype=dtype,
            deferred_updates=layouts,
            device=CPU,
        )
        for stage, own in slots.items():
            own.state.write_master(slice(None), torch.full((own.state.layout.num_units,), stage + 1))
        return slots

    return make


def test_a_loaded_stage_has_its_own_weights_in_their_shapes(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[0].weights.load()
    slots[4].weights.load()

    assert {name: tuple(view.shape) for name, view in slots[0].weights.views().items()} == {
        "norm": (7,),
        "matrix": (5, 40),
    }
    assert all(bool((view == 1).all()) for view in slots[0].weights.views().values())
    assert all(bool((view == 5).all()) for view in slots[4].weights.views().values())


def test_the_device_works_on_a_copy_of_the_host_weights(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[0].weights.load()

    slots[0].weights.views()["matrix"].zero_()

    assert bool((slots[0].state.weights == 1).all())


@pytest.mark.parametrize(("num_slots", "held"), [(1, r"all 1 slots hold stages \[0\]"), (2, r"\[0, 2\]")])
def test_loading_beyond_the_slots_is_refused_until_one_is_freed(
    make_slots: MakeSlots, num_slots: int, held: str
) -> None:
    slots = make_slots(num_slots)
    for stage in (0, 2)[:num_slots]:
        slots[stage].weights.load()

    with pytest.raises(ScheduleError, match=f"stage 4 cannot be loaded while .*{held}"):
        slots[4].weights.load()

    slots[0].offload()
    slots[4].weights.load()
    assert bool((slots[4].weights.views()["bias"] == 5).all())


@pytest.mark.parametrize(
    "use",
    [
        lambda slots: slots[4].weights.views(),
        lambda slots: slots[4].offload(),
        lambda slots: slots[4].finish_gradients(),
    ],
    ids=["weights", "offload", "seal"],
)
def test_a_stage_that_is_not_loaded_cannot_be_used(make_slots: MakeSlots, use: Callable[[Stages], object]) -> None:
    slots = make_slots()
    slots[0].weights.load()

    with pytest.raises(ScheduleError, match=r"stage 4 is used while the slots hold stages \[0, None\]"):
        use(slots)


def test_an_offloaded_stage_cannot_be_used_any_more(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[2].weights.load()
    slots[2].offload()

    with pytest.raises(ScheduleError, match="stage 2"):
        slots[2].weights.views()


def test_the_next_load_brings_what_the_optimizer_has_written(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[2].weights.load()
    slots[2].offload()
    slots[2].state.weights.fill_(7)

    slots[2].weights.load()

    assert bool((slots[2].weights.views()["matrix"] == 7).all())


def test_gradients_add_up_over_microbatches_in_fp32(make_slots: MakeSlots) -> None:
    slots = make_slots(dtype=torch.bfloat16)
    slots[0].weights.load()
    for _ in range(512):
        slots[0].sums.views()["norm"].add_(1.0)

    # In bf16 the sum would stop at 256, where 1 is half a unit in the last place.
    assert slots[0].sums.views()["norm"].tolist() == [512.0] * 7


def test_each_stage_and_each_step_begins_with_zero_gradients(make_slots: MakeSlots) -> None:
    slots = make_slots()
    for stage in (2, 0, 0):
        slots[stage].weights.load()
        gradients = slots[stage].sums.views()
        assert all(view.count_nonzero() == 0 for view in gradients.values())
        for view in gradients.values():
            view.fill_(3)
        slots[stage].finish_gradients()
        slots[stage].offload()


def test_a_stage_must_be_sealed_before_the_next_one_accumulates(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[0].weights.load()
    slots[2].weights.load()
    slots[0].sums.views()

    with pytest.raises(AssertionError, match="stages .0. have unfinished sums, no buffer is free for stage 2"):
        slots[2].sums.views()


def test_sealing_returns_the_squared_norm_of_each_tensor_and_0_for_the_excluded(make_slots: MakeSlots) -> None:
    slots = make_slots()
    for excluded, expected in ((NOTHING, [7 * 16.0, 200 * 9.0]), (frozenset({"matrix"}), [7 * 16.0, 0.0])):
        slots[0].weights.load()
        slots[0].sums.views()["matrix"].fill_(3)
        slots[0].sums.views()["norm"].fill_(-4)
        slots[0].sums.tied = excluded
        squares = slots[0].finish_gradients()
        slots[0].offload()

        assert squares.dtype == torch.float32
        assert squares.tolist() == pytest.approx(expected)


def test_excluding_everything_leaves_a_norm_of_zero(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[0].weights.load()
    slots[0].sums.views()["norm"].fill_(2)

    slots[0].sums.tied = frozenset({"matrix", "norm"})
    assert slots[0].finish_gradients().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sealed_gradients_arrive_on_the_host_in_the_dtype_of_the_weights(
    make_slots: MakeSlots, layouts: dict[int, StageLayout], dtype: torch.dtype
) -> None:
    slots = make_slots(dtype=dtype)
    values = torch.linspace(-1, 1, 200).view(5, 40)
    slots[0].weights.load()
    slots[0].sums.views()["matrix"].add_(values)
    slots[0].finish_gradients()
    slots[0].offload()
    slots[0].states.wait_for_gradients()

    state = slots[0].state
    assert torch.equal(layouts[0].views(state.gradients)["matrix"], values.to(dtype))
    assert layouts[0].views(state.gradients)["norm"].count_nonzero() == 0
    assert bool((state.weights == 1).all()), "sealing overwrites the slot, never the host's weights"


def test_the_norm_is_that_of_the_fp32_gradients_not_of_the_rounded_ones(make_slots: MakeSlots) -> None:
    slots = make_slots(dtype=torch.bfloat16)
    slots[2].weights.load()
    slots[2].sums.views()["matrix"].fill_(1.0 + 2.0**-10)  # rounds to 1 in bf16

    (square,) = slots[2].finish_gradients().tolist()

    assert square == pytest.approx(256 * (1.0 + 2.0**-10) ** 2, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "value", "is_finite"),
    [
        (torch.float16, 60_000.0, True),
        (torch.float16, -70_000.0, False),  # fp16 ends at 65504
        (torch.float16, float("nan"), False),
        (torch.bfloat16, -70_000.0, True),
        (torch.bfloat16, float("inf"), False),
        (torch.float32, 70_000.0, True),
    ],
)
def test_a_gradient_that_is_not_finite_after_the_cast_is_seen_in_the_norm(
    make_slots: MakeSlots, dtype: torch.dtype, value: float, is_finite: bool
) -> None:
    slots = make_slots(dtype=dtype)
    slots[0].weights.load()
    slots[0].sums.views()["matrix"][4, 39] = value

    assert bool(slots[0].finish_gradients().isfinite().all()) == is_finite


def test_an_overflow_in_an_excluded_gradient_is_seen_too(make_slots: MakeSlots) -> None:
    slots = make_slots(dtype=torch.float16)
    slots[0].weights.load()
    slots[0].sums.views()["norm"][0] = 70_000.0

    slots[0].sums.tied = frozenset({"norm"})
    assert slots[0].finish_gradients().isnan().all()


def test_offloading_without_gradients_leaves_those_of_the_host_alone(make_slots: MakeSlots) -> None:
    slots = make_slots()
    slots[0].state.gradients.fill_(9)
    slots[0].weights.load()
    slots[0].offload()

    assert bool((slots[0].state.gradients == 9).all())


def test_a_slot_that_sent_gradients_sends_none_for_its_next_stage(make_slots: MakeSlots) -> None:
    slots = make_slots(num_slots=1)
    slots[0].weights.load()
    slots[0].sums.views()
    slots[0].finish_gradients()
    slots[0].offload()
    slots[2].state.gradients.fill_(9)

    slots[2].weights.load()
    slots[2].offload()

    assert bool((slots[2].state.gradients == 9).all())
