"""A checkpoint is a model folder for transformers, and a source for torch's distributed checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.checkpoints import save, values_of
from harness.runs import make_checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mobius.checkpoint.model_folder import write_model_files
from mobius.checkpoint.tensor_files import StageParameter
from mobius.engine.state_codec import CODECS
from mobius.models.model_files import read_model_files


@pytest.mark.parametrize(
    ("family", "is_tied", "has_many_files"),
    [
        *(("llama", False, False), ("mistral", False, True), ("qwen2", True, True), ("qwen3", True, False)),
        ("gemma3_text", True, True),
    ],
)
def test_transformers_loads_it_at_once_with_equal_logits(
    family: str, is_tied: bool, has_many_files: bool, tmp_path: Path
) -> None:
    make_checkpoint(base := tmp_path / "base", num_layers=2, is_tied=is_tied, family=family)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, trust_remote_code=False).eval()
    weights = dict(model.named_parameters())  # a tied head is not among them
    stages = {name: int(found[1]) if (found := re.search(r"layers\.(\d+)", name)) else 0 for name in weights}
    parameters = [StageParameter(name, tuple(value.shape), stages[name]) for name, value in weights.items()]
    states = {
        f"{name}.{part}": torch.ones(value.shape, dtype=dtype)
        for name, value in weights.items()
        for part, dtype in CODECS[torch.bfloat16].parts.items()
    }
    tensors = {**{name: value.detach() for name, value in weights.items()}, **states}
    max_file_bytes = 100_000 if has_many_files else 5_000_000_000
    path = save(tmp_path / "out", 8, number=1, parameters=parameters, tensors=tensors, max_file_bytes=max_file_bytes)
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    write_model_files(path, read_model_files(base), config, dtype=torch.bfloat16)

    loaded = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False).eval()

    tokens = torch.arange(40).reshape(2, 20)
    assert loaded.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert AutoTokenizer.from_pretrained(path, trust_remote_code=False).encode("one")


@pytest.mark.parametrize("max_file_bytes", [1, 5_000_000_000])
def test_torchs_reader_of_hugging_face_folders_reads_weights_and_states(max_file_bytes: int, tmp_path: Path) -> None:
    path = save(tmp_path, 8, number=1, max_file_bytes=max_file_bytes)
    expected = values_of(8, torch.bfloat16)
    found = {name: torch.empty_like(value) for name, value in expected.items() if value.ndim}  # its slices need a row

    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)

    assert len(found) == len(expected) - 4
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
