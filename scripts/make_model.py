"""Makes a model folder of a published shape for tests and benchmarks: random weights, or the configuration only.

    python scripts/make_model.py 1b /tmp/llama-1b                # sharded safetensors
    python scripts/make_model.py 7b /tmp/llama-7b --config_only   # training starts from fresh weights
    python scripts/make_model.py qwen3-30b-a3b /tmp/qwen3-4-layers --num_layers 4

The tokenizer is the small one of assets/tiny-llama: its tokens are a part of the model's vocabulary.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mobius.models.published_shapes import PUBLISHED_SHAPES, SHORT_NAMES

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"model_type": "llama", **_TINY, "num_key_value_heads": 4},
    "tiny-experts": {
        "model_type": "qwen3_moe",
        **_TINY,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
"""Shapes that nobody has published."""
SIZES = ("tiny", *SHORT_NAMES, "tiny-experts")
TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-llama"
_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}


def fields_of(size: str, num_layers: int | None = None) -> dict[str, Any]:
    """Fields of such a model's config.json."""
    fields: dict[str, Any] = dict(TINY[size] if size in TINY else PUBLISHED_SHAPES[SHORT_NAMES[size]])
    architecture = f"{_ARCHITECTURES[fields['model_type']]}ForCausalLM"
    fields["num_hidden_layers"] = num_layers or fields["num_hidden_layers"]
    return {"tie_word_embeddings": False, **fields, "architectures": [architecture], "dtype": "bfloat16"}


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
    norms = 2 * hidden + (2 * head_width if fields["model_type"].startswith("qwen3") else 0)
    per_layer = attention + 3 * hidden * width * counted + number * hidden + norms
    matrices = 1 if fields["tie_word_embeddings"] else 2
    return int(fields["num_hidden_layers"] * per_layer + matrices * tokens * hidden + hidden)


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
