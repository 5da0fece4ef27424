"""What a run saves beside the weights says what the base said, for all but what training or an option changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.pipelines import FAMILIES
from harness.runs import TOKENIZER
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mobius.checkpoint.model_folder import write_model_files, write_params_file
from mobius.config.config import ModelConfig
from mobius.models.families import load_model_config
from mobius.models.model_files import read_model_files

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja")

ALLOWED = {
    # The dtype is that of the saved weights.
    ("config.json", "dtype"),
    ("config.json", "torch_dtype"),
}


def base_of(folder: Path, family: str) -> Path:
    """A model folder as someone published it: fields of older versions, fields nobody knows, contradictions."""
    FAMILIES[family]().save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"torch_dtype": "float16", "own_field": {"nested": [1, None]}, "transformers_version": "4.1.0"}
    fields |= {"architectures": ["OwnForCausalLM"]}
    fields.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(fields))
    settings = {
        "temperature": 0.6,
        "do_sample": False,
        "eos_token_id": [1, 2],
        "own": "kept",
        "_from_model_config": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}\n\n")
    save_file({}, folder / "model.safetensors")
    return folder


def export(base: Path, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    config = load_model_config(base, replace(ModelConfig(), model_path=str(base), **options))
    folder.mkdir()
    write_model_files(folder, read_model_files(base), config, dtype=dtype)
    return folder


def differences(base: Path, exported: Path) -> set[tuple[str, str]]:
    """File and field of everything that is not the same, fields that are missing on one side included."""
    found = set()
    for name in FILES:
        if name.endswith(".jinja"):
            found |= {(name, "")} if (base / name).read_bytes() != (exported / name).read_bytes() else set()
            continue
        before, after = (json.loads((folder / name).read_text()) for folder in (base, exported))
        found |= {
            (name, field) for field in before.keys() | after.keys() if before.get(field, ...) != after.get(field, ...)
        }
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_field_of_any_file_changes_but_the_dtype(tmp_path: Path, family: str) -> None:
    base = base_of(tmp_path / "base", family)

    exported = export(base, tmp_path / "out")

    assert differences(base, exported) <= ALLOWED
    assert json.loads((exported / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert AutoConfig.from_pretrained(exported).dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(exported).use_cache


def test_fewer_layers_change_the_fields_of_layers_only(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "gemma3")

    exported = export(base, tmp_path / "out", num_layers=7)

    own = {("config.json", "num_hidden_layers"), ("config.json", "layer_types")}
    assert differences(base, exported) <= ALLOWED | own
    assert AutoConfig.from_pretrained(exported).num_hidden_layers == 7


def test_shape_options_of_a_fresh_model_are_exported(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    (base / "model.safetensors").unlink()

    exported = AutoConfig.from_pretrained(export(base, tmp_path / "out", embedding_dim=64, ff_dim=80, num_heads=8))

    assert (exported.hidden_size, exported.intermediate_size, exported.num_attention_heads) == (64, 80, 8)
    assert exported.head_dim == 8


def test_the_base_may_vanish_before_the_export(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    config, files = load_model_config(base, replace(ModelConfig(), model_path=str(base))), read_model_files(base)
    shutil.rmtree(base)
    (tmp_path / "out").mkdir()

    write_model_files(tmp_path / "out", files, config, dtype=torch.float32)

    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_single_file_loads_strictly_into_its_class(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family](num_hidden_layers=2)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[sorted(FAMILIES).index(family) % 3]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(tmp_path)
    is_tied = config.tie_word_embeddings

    write_params_file(tmp_path / "params.pt", tmp_path)

    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert (tmp_path / "params.pt").stat().st_size < num_bytes + 200 * len(list(model.parameters())) * 4
    for mapped in (False, True):
        values = torch.load(tmp_path / "params.pt", weights_only=True, mmap=mapped)
        assert values.keys() == model.state_dict().keys()
        assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
        assert {value.dtype for value in values.values()} == {dtype}
        if is_tied:
            assert values["lm_head.weight"].data_ptr() == values["model.embed_tokens.weight"].data_ptr()
        fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
        fresh.load_state_dict(values, strict=True)
    assert not list(tmp_path.glob("*.partial"))
