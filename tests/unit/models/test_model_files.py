"""Files beside the weights: answers end with what was trained, and there is one chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import SpecialVocab
from harness.runs import TOKENIZER
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.trainer_utils import align_special_tokens

from mobius.checkpoint.model_folder import write_model_files
from mobius.models.model_files import read_model_files

TRAINED = 2
"""End token of the tokenizer, as the data has it."""
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
NEW, OLD = "{{ 'new' }}", "{{ 'old' }}"


def base_with(folder: Path, in_config: object, in_generation: object) -> LlamaConfig:
    """A model whose two files name these end tokens; "no file" and "left out" are what they say."""
    config = LlamaConfig(vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=in_config, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if in_generation != "no file":
        named = {} if in_generation == "left out" else {"eos_token_id": in_generation}
        path.write_text(json.dumps({"do_sample": True, "temperature": 0.7, **named}))
    return config


@pytest.mark.parametrize("in_generation", ["no file", "left out", None, 3, [3, 4], 2, [4, 2]], ids=str)
@pytest.mark.parametrize("in_config", [None, 3, [3, 5], 2, [5, 2]], ids=str)
def test_answers_end_with_what_was_trained_as_after_transformers_trainer(
    tmp_path: Path, in_config: object, in_generation: object
) -> None:
    config = base_with(tmp_path / "base", in_config, in_generation)
    aligned = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = aligned.generation_config.eos_token_id
    align_special_tokens(aligned, SimpleNamespace(eos_token_id=TRAINED, bos_token_id=None, pad_token_id=None))
    wanted = {TRAINED} | ({before} if isinstance(before, int) else set(before or ()))
    assert set(torch.tensor(aligned.generation_config.eos_token_id).flatten().tolist()) == wanted

    files = read_model_files(tmp_path / "base")
    made = files.with_end_token(TRAINED, config)
    (tmp_path / "saved").mkdir()
    write_model_files(tmp_path / "saved", made, config, dtype=torch.float32)
    for path in (tmp_path / "base").glob("*.safetensors"):
        shutil.copy(path, tmp_path / "saved")

    settings = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config
    assert set(torch.tensor(settings.eos_token_id).flatten().tolist()) == wanted
    if in_generation != "no file":
        assert (settings.do_sample, settings.temperature) == (True, 0.7)
    named = before if isinstance(before, list) else [before]
    assert (made is files) == (TRAINED in named), "files that name it stay as they are, to the byte"
    assert made.end_tokens(config) == (named if made is files else [TRAINED, *(end for end in named if end)])


@pytest.mark.parametrize("kept_in", ["settings", "named list", "jinja", "json", "named files"])
def test_there_is_one_template_for_every_reader(tmp_path: Path, kept_in: str) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    LlamaConfig(**SIZES).save_pretrained(base)
    shutil.copy(TOKENIZER / "tokenizer.json", base)
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    if kept_in == "settings":
        settings["chat_template"] = OLD
    elif kept_in == "named list":
        settings["chat_template"] = [{"name": name, "template": OLD} for name in ("default", "tool_use")]
    elif kept_in == "json":
        (base / "chat_template.json").write_text(json.dumps({"chat_template": OLD}))
    else:
        (base / "chat_template.jinja").write_text(OLD)
    if kept_in == "named files":
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tool_use.jinja").write_text(OLD)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    saved.mkdir()

    files = read_model_files(base)
    write_model_files(saved, files.with_chat_template(NEW), LlamaConfig(**SIZES), dtype=torch.float32)

    assert not [path for path in saved.rglob("*") if path.is_file() and "'old'" in path.read_text()]
    assert AutoTokenizer.from_pretrained(saved).chat_template == NEW
    assert SpecialVocab(saved).chat_template == NEW
    assert files.with_chat_template(None) is files
