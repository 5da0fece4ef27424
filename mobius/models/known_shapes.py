"""Published shapes by a short name, and two of the hub's models that have them: a plan needs no files for these."""

LLAMA_SHAPES = {  # hidden, intermediate, layers, heads, key-value heads
    "1b": (2048, 5504, 20, 16, 16),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "30b": (6656, 17920, 60, 52, 52),
    "70b": (8192, 28672, 80, 64, 8),
}
"""Llama's published shapes, and a 1B one of the same kind; all with 32000 tokens."""
SHAPES_ON_HUB = {"meta-llama/Llama-2-7b-hf": "7b", "meta-llama/Llama-2-13b-hf": "13b"}
"""Models of the hub that are given only to who asks for access, and the shapes they have."""


def llama_fields(name: str) -> dict[str, str | int]:
    """The fields of a config.json for the known shape `name`."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {"model_type": "llama", **dict(zip(names, LLAMA_SHAPES[name], strict=True)), "vocab_size": 32000}
