"""Published shapes, built without memory, have their published sizes; parameters of 7B are counted by hand."""

import pytest
from harness.plan_requests import known_shape

from mobius.models.known_shapes import LLAMA_SHAPES
from mobius.plan.partition import ModelShape


def test_llama_7b_is_what_was_counted_by_hand() -> None:
    # Attention has 4 matrices, the feed-forward part 3, a layer 2 norms.
    layer, embedding = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096, 32000 * 4096
    assert known_shape("7b") == ModelShape(
        embedding_parameters=embedding,
        layer_parameters=(layer,) * 32,
        head_parameters=embedding + 4096,
        hidden_size=4096,
        intermediate_size=11008,
        vocab_size=32000,
        is_tied=False,
        num_heads=32,
        head_size=128,
        num_key_heads=32,
        is_sliceable=True,
    )


@pytest.mark.parametrize(
    ("name", "billions"), [("1b", 1.14), ("7b", 6.74), ("8b", 8.03), ("13b", 13.0), ("30b", 32.5), ("70b", 69.0)]
)
def test_known_shapes_have_their_published_size(name: str, billions: float) -> None:
    assert known_shape(name).num_parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert name in LLAMA_SHAPES


def test_grouped_queries_have_fewer_keys_and_values() -> None:
    # Queries and output 8192 x 8192 each, keys and values 8192 x 1024 each, three of 8192 x 28672, two norms.
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert known_shape("70b").layer_parameters == (layer,) * 80
