"""Makes a model folder of a published shape for tests and benchmarks: random weights, or the configuration only.

    python scripts/make_model.py 1b /tmp/llama-1b                # sharded safetensors
    python scripts/make_model.py 7b /tmp/llama-7b --config_only   # training starts from fresh weights
    python scripts/make_model.py qwen3-30b-a3b /tmp/qwen3-4-layers --num_layers 4

The tokenizer is the small one of assets/tiny-llama: its tokens are a part of the model's vocabulary.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA = {  # hidden, intermediate, layers, heads, key-value heads, tokens
    "tiny": (64, 128, 4, 4, 4, 32000),
    "1b": (2048, 5504, 20, 16, 16, 32000),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "13b": (5120, 13824, 40, 40, 40, 32000),
    "14b": (5120, 13824, 48, 40, 8, 152064),
    "30b": (6656, 17920, 60, 52, 52, 32000),
    "70b": (8192, 28672, 80, 64, 8, 32000),
}
"""Llama-2's shapes, a 1B one of the same kind, that of Llama-3.1-8B, and that of Qwen2.5-14B (14b)."""
QWEN2_SIZES = ("14b",)
"""Those of the family qwen2, whose queries, keys and values have biases."""
EXPERTS = {  # family, the same, positions, a head's width, an expert's width, experts, those of a token
    "tiny-experts": ("qwen3_moe", (64, 128, 4, 4, 2, 32000), 4096, 16, 32, 8, 2),
    "qwen3-30b-a3b": ("qwen3_moe", (2048, 6144, 48, 32, 4, 151936), 40960, 128, 768, 128, 8),
    "mixtral-8x7b": ("mixtral", (4096, 14336, 32, 32, 8, 32000), 32768, 128, 14336, 8, 2),
}
"""Mixtures of experts, and a tiny one."""
SIZES = (*LLAMA, *EXPERTS)
TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-llama"
_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)


def fields_of(size: str, num_layers: int | None = None) -> dict[str, Any]:
    """Fields of such a model's config.json."""
    if size in LLAMA:
        fields: dict[str, Any] = dict(zip(_NAMES, LLAMA[size], strict=True))
        family, name = ("qwen2", "Qwen2ForCausalLM") if size in QWEN2_SIZES else ("llama", "LlamaForCausalLM")
        fields |= {"architectures": [name], "model_type": family, "max_position_embeddings": 4096}
    else:
        family, common, positions, head_width, width, number, per_token = EXPERTS[size]
        fields = dict(zip(_NAMES, common, strict=True))
        fields |= {"model_type": family, "max_position_embeddings": positions, "num_experts_per_tok": per_token}
        if family == "mixtral":  # an expert is as wide as the file says of the layer, a head what is left to it
            fields |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": number}
        else:
            fields |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": number, "norm_topk_prob": True}
            fields |= {"moe_intermediate_size": width, "head_dim": head_width}
    fields["num_hidden_layers"] = num_layers or fields["num_hidden_layers"]
    return fields | {"tie_word_embeddings": False, "dtype": "bfloat16"}


def num_parameters(size: str, num_layers: int | None = None) -> int:
    """Parameters of such a model: attention and feed-forward matrices, biases, norms, embedding and head."""
    return _count(fields_of(size, num_layers), experts_of_token=None)


def num_active(size: str, num_layers: int | None = None) -> int:
    """Those of them that compute for a token: of a layer's experts a few."""
    fields = fields_of(size, num_layers)
    return _count(fields, experts_of_token=fields.get("num_experts_per_tok"))


def _count(fields: Mapping[str, Any], *, experts_of_token: int | None) -> int:
    hidden, heads, tokens = fields["hidden_size"], fields["num_attention_heads"], fields["vocab_size"]
    head_width = fields.get("head_dim", hidden // heads)
    attention = 2 * hidden * head_width * (heads + fields["num_key_value_heads"])
    number = fields.get("num_experts", fields.get("num_local_experts", 0))
    counted = experts_of_token or number or 1
    width = fields.get("moe_intermediate_size", fields["intermediate_size"])
    if fields["model_type"] == "qwen2":
        attention += head_width * (heads + 2 * fields["num_key_value_heads"])
    norms = 2 * hidden + (2 * head_width if fields["model_type"] == "qwen3_moe" else 0)
    per_layer = attention + 3 * hidden * width * counted + number * hidden + norms
    return int(fields["num_hidden_layers"] * per_layer + 2 * tokens * hidden + hidden)


def write_config(folder: Path, size: str, num_layers: int | None = None) -> None:
    """Make `folder` with the configuration and the tokenizer; needs no torch and no transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields_of(size, num_layers), indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def write_weights(folder: Path) -> None:
    """Add random weights, sharded, and the generation settings to a folder that has a configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.bfloat16, trust_remote_code=False
        )
    model.save_pretrained(folder, max_shard_size="500MB")


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config_only", action="store_true", help="write no weights")
    parser.add_argument("--num_layers", type=int, help="another number of layers than the size's own")
    arguments = parser.parse_args()
    write_config(arguments.folder, arguments.size, arguments.num_layers)
    if not arguments.config_only:
        write_weights(arguments.folder)


if __name__ == "__main__":
    main()
