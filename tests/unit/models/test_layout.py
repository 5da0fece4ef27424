"""A stage's parameters lie in one flat buffer: aligned, apart from each other, the decayed ones first."""

import pytest
import torch

from mobius.models.layout import FlatRange, StageLayout, WeightFormats

# Padded to multiples of 128: matrices 150 -> 256 and 128 -> 128, then vectors 5 -> 128 and 130 -> 256.
SHAPES = {"norm": (5,), "up": (3, 50), "bias": (130,), "down": (2, 64)}


def test_matrices_come_first_then_vectors_each_at_a_multiple_of_128() -> None:
    layout = StageLayout.of(SHAPES)

    assert list(layout.offsets) == list(SHAPES), "in the stage's own order"
    assert dict(layout.offsets) == {
        "up": (0, (3, 50)),
        "down": (256, (2, 64)),
        "norm": (384, (5,)),
        "bias": (512, (130,)),
    }
    assert layout.num_units == 768
    assert layout.ranges == (FlatRange(0, 384, has_decay=True), FlatRange(384, 768, has_decay=False))


def test_frozen_parameters_lie_behind_those_that_are_trained() -> None:
    layout = StageLayout.of(SHAPES, frozen={"up", "bias"})
    assert layout.num_units == StageLayout.of(SHAPES).num_units
    assert list(layout.offsets) == list(SHAPES), "in the stage's own order"
    assert {name for name in SHAPES if layout.is_trained(name)} == {"norm", "down"}
    assert layout.ranges == (FlatRange(0, 128, has_decay=True), FlatRange(128, layout.num_trained, has_decay=False))
    assert [piece for group in layout.pieces(100) for piece in group][-1].end == layout.num_trained
    assert list(layout.trained_views(torch.zeros(layout.num_trained))) == ["norm", "down"]
    flat = torch.zeros(layout.num_units)
    layout.views(flat)["up"].fill_(1)
    assert flat[: layout.num_trained].count_nonzero() == 0


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"experts": (2, 3, 4)}, FlatRange(0, 128, has_decay=True)),
        ({"norm": (4,), "bias": (4,)}, FlatRange(0, 256, has_decay=False)),
    ],
)
def test_tensors_of_two_dimensions_or_more_are_decayed(shapes: dict[str, tuple[int, ...]], expected: FlatRange) -> None:
    assert StageLayout.of(shapes).ranges == (expected,)


def test_matrices_that_are_named_lie_with_what_is_not_decayed_also_after_a_split() -> None:
    layout = StageLayout.of(SHAPES, frozen={"up"}, no_weight_decay={"down", "bias"})

    assert layout.ranges == (FlatRange(0, 128, has_decay=True), FlatRange(128, 512, has_decay=False))
    assert layout.slice_of("norm") == slice(0, 5)
    assert layout.split()[1].ranges == layout.ranges


def test_views_write_through_to_the_flat_buffer() -> None:
    layout, flat = StageLayout.of(SHAPES), torch.zeros(768)

    layout.views(flat)["down"][1, 2] = 3.0

    assert flat.nonzero().tolist() == [[256 + 64 + 2]]
    assert flat[256 + 64 + 2] == 3.0


def test_views_have_the_parameters_shapes_and_leave_only_the_padding_also_of_a_longer_buffer() -> None:
    layout, flat = StageLayout.of(SHAPES), torch.zeros(10_000)

    views = layout.views(flat)
    for view in views.values():
        view += 1

    assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES
    assert flat.max() == 1
    assert flat.sum() == 5 + 150 + 130 + 128


@pytest.mark.parametrize("max_elements", [128, 200, 256, 640, 10_000])
def test_pieces_are_the_ranges_in_order_in_groups_of_at_most_the_given_size(max_elements: int) -> None:
    layout = StageLayout.of({"a": (4, 100), "norm": (64,), "b": (3, 33)})

    pieces = layout.pieces(max_elements)

    elements = [(i, part.has_decay) for group in pieces for part in group for i in range(part.start, part.end)]
    assert elements == [(i, whole.has_decay) for whole in layout.ranges for i in range(whole.start, whole.end)]
    sizes = [sum(part.end - part.start for part in group) for group in pieces]
    assert all(size == max_elements for size in sizes[:-1])
    assert 0 < sizes[-1] <= max_elements


def test_elements_are_known_by_their_place_in_their_parameter() -> None:
    layout = StageLayout.of({"norm": (7,), "matrix": (5, 40), "other": (3, 4)})
    ranges = list(layout.named_ranges(slice(150, 390)))
    assert [(each.name, each.offset, each.place) for each in ranges] == [
        ("norm", 0, slice(384, 390)),
        ("matrix", 150, slice(150, 200)),
        ("other", 0, slice(256, 268)),
    ]
    assert list(layout.named_ranges(slice(200, 256))) == [], "padding"


def test_parameters_with_one_learning_rate_follow_each_other() -> None:
    shapes = {"a.A": (3, 3), "a.B": (3, 3), "a.norm": (3,), "b.A": (3, 3), "b.B": (3, 3)}
    layout = StageLayout.of(shapes, frozen={"a.A"}, rates={"a.B": 4.0, "b.B": 4.0, "a.norm": 4.0})
    assert layout.ranges == (
        FlatRange(0, 128, has_decay=True),
        FlatRange(128, 384, has_decay=True, rate=4.0),
        FlatRange(384, 512, has_decay=False, rate=4.0),
    )
    assert [layout.offsets[name][0] for name in ("b.A", "a.B", "b.B", "a.norm")] == [0, 128, 256, 384]
    assert layout.split()[1].ranges == layout.ranges
    assert layout.part(slice(128, 512)).ranges[0] == FlatRange(0, 256, has_decay=True, rate=4.0)


def test_weights_in_fp32_take_two_numbers_behind_those_of_the_working_format() -> None:
    shapes = {**SHAPES, "router": (4, 32), "scale": (7,), "constant": (6,)}
    layout = StageLayout.of(shapes, frozen={"bias", "constant"}, formats=WeightFormats({"router", "scale", "constant"}))
    assert layout.ranges == (
        FlatRange(0, 384, has_decay=True),
        FlatRange(384, 512, has_decay=False),
        FlatRange(512, 640, has_decay=True),
        FlatRange(640, 768, has_decay=False),
    )
    assert (layout.first_in_fp32, layout.num_trained, layout.num_trained_units) == (512, 768, 1024)
    assert layout.num_units == 1024 + 256 + 256, "bias, then the constant"
    flat = torch.zeros(layout.num_units, dtype=torch.bfloat16)
    for number, view in enumerate(layout.views(flat).values(), start=1):
        view.fill_(number + 2**-20)
    found = {name: (view.dtype, set(view.flatten().tolist())) for name, view in layout.views(flat).items()}
    for number, name in enumerate(shapes, start=1):
        is_wide = name in ("router", "scale", "constant")
        assert found[name] == ((torch.float32, {number + 2**-20}) if is_wide else (torch.bfloat16, {number}))
    frozen, trained = layout.split()
    assert list(frozen.offsets) == ["bias", "constant"]
    assert frozen.num_units == 256 + 256
    assert (trained.ranges, trained.num_units) == (layout.ranges, layout.num_trained_units)
