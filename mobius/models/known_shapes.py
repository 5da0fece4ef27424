"""Published shapes by a short name, and models of the hub that have them: a plan needs no files for these."""

LLAMA_SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, tokens, positions
    "1b": (2048, 5504, 20, 16, 16, 32000, 4096),
    "7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "8b": (4096, 14336, 32, 32, 8, 128256, 131072),
    "13b": (5120, 13824, 40, 40, 40, 32000, 4096),
    "30b": (6656, 17920, 60, 52, 52, 32000, 2048),
    "70b": (8192, 28672, 80, 64, 8, 32000, 4096),
}
"""Llama's published shapes (8b is that of Llama 3.1), and a 1B one of the same kind."""
SHAPES_ON_HUB = {
    "meta-llama/Llama-2-7b-hf": "7b",
    "meta-llama/Llama-2-13b-hf": "13b",
    "meta-llama/Llama-3.1-8B": "8b",
}
"""Models of the hub that are given only to who asks for access, and the shapes they have."""
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def llama_fields(name: str) -> dict[str, str | int]:
    """The fields of a config.json for the known shape `name`."""
    return {"model_type": "llama", **dict(zip(_FIELDS, LLAMA_SHAPES[name], strict=True))}
