"""Makes a model folder of a known shape for tests and benchmarks: random weights, or the configuration only.

    python scripts/make_model.py 1b /tmp/llama-1b                # sharded safetensors
    python scripts/make_model.py 7b /tmp/llama-7b --config_only   # training starts from fresh weights

The tokenizer is the small one of assets/tiny-llama: its tokens are a part of the model's vocabulary.
"""

import argparse
import json
import shutil
from pathlib import Path

SIZES = {  # hidden, intermediate, layers, heads, key-value heads, tokens
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
TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-llama"


def num_parameters(size: str, num_layers: int | None = None) -> int:
    """Parameters of such a model: attention and feed-forward matrices, biases, norms, embedding and head."""
    hidden, intermediate, layers, heads, key_heads, tokens = SIZES[size]
    attention = 2 * hidden**2 + 2 * hidden**2 * key_heads // heads
    biases = hidden + 2 * hidden * key_heads // heads if size in QWEN2_SIZES else 0
    per_layer = attention + biases + 3 * hidden * intermediate + 2 * hidden
    return (num_layers or layers) * per_layer + 2 * tokens * hidden + hidden


def write_config(folder: Path, size: str, num_layers: int | None = None) -> None:
    """Make `folder` with the configuration and the tokenizer; needs no torch and no transformers."""
    hidden, intermediate, layers, heads, key_heads, tokens = SIZES[size]
    is_qwen2 = size in QWEN2_SIZES
    config = {
        "architectures": ["Qwen2ForCausalLM" if is_qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if is_qwen2 else "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers or layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": tokens,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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
