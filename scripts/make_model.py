"""Makes a Llama-shaped model folder for tests and benchmarks: random weights, or the configuration only.

    python scripts/make_model.py 1b /tmp/llama-1b                # sharded safetensors
    python scripts/make_model.py 7b /tmp/llama-7b --config_only   # training starts from fresh weights

The tokenizer is the small one of assets/tiny-llama: its tokens are a part of the model's vocabulary.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

SIZES = {  # hidden, intermediate, layers, heads; Llama-2's shapes, and a 1B one of the same kind
    "tiny": (64, 128, 4, 4),
    "1b": (2048, 5504, 20, 16),
    "7b": (4096, 11008, 32, 32),
    "13b": (5120, 13824, 40, 40),
}
TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-llama"


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config_only", action="store_true", help="write no weights")
    parser.add_argument("--num_layers", type=int, help="another number of layers than the size's own")
    arguments = parser.parse_args()
    hidden, intermediate, layers, heads = SIZES[arguments.size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=arguments.num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.config_only:
        config.save_pretrained(arguments.folder)
        GenerationConfig.from_model_config(config).save_pretrained(arguments.folder)
    else:
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(arguments.folder, max_shard_size="500MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, arguments.folder / name)


if __name__ == "__main__":
    main()
