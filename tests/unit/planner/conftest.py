import pytest

from mobius.schedule.partition import ModelShape


@pytest.fixture
def llama_7b() -> ModelShape:
    """Llama-2-7B: 32 layers of width 4096 and 11008, 32000 tokens; parameters counted by hand.

    Attention has 4 matrices, the feed-forward part 3, a layer 2 norms.
    """
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    embedding = 32000 * 4096
    return ModelShape(
        embedding_parameters=embedding,
        layer_parameters=(layer,) * 32,
        head_parameters=embedding + 4096,
        hidden_size=4096,
        intermediate_size=11008,
        vocab_size=32000,
        is_tied=False,
    )


@pytest.fixture
def small() -> ModelShape:
    """Five layers of 100 parameters, a tied embedding of 60 x 4 and a norm of 4."""
    return ModelShape(
        embedding_parameters=240,
        layer_parameters=(100,) * 5,
        head_parameters=244,
        hidden_size=4,
        intermediate_size=8,
        vocab_size=60,
        is_tied=True,
    )
