"""Every supported family can be planned, and packed rows are refused by name where they would see each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from harness.run_setups import make_run_setup
from harness.tiny_families import tiny_config

from mobius.config.cli import parse_args
from mobius.errors import PlanError
from mobius.models.blocks import ModelParts
from mobius.models.family_support import checked_families
from mobius.planner.forecast import run_dry
from mobius.process.ranks import Ranks
from mobius.schedule.packed_rows import PackedRows

CHECKED = checked_families()
ONE_RANK = Ranks(0, 1, 0)
OPTIONS = ("--num_stages", "2", "--batch_size", "4", "--num_chunks", "2", "--seq_length", "16")
OF_EACH_KIND = {
    "llama",
    "gemma3_text",
    "cohere2",
    "gpt_neox",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2",
    "minicpm3",
}
OF_EACH_KIND |= {"minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "vaultgemma"}
"""Norms, biases, windows, experts, latent and linear attention; each of the others is planned on request."""
NO_SEARCH = ("--compute_order", "breadth_first", "--recompute", "full", "--activation_offloading", "off")


@pytest.mark.skipif(
    transformers.__version__ != CHECKED.transformers, reason="the families of another transformers were checked"
)
@pytest.mark.parametrize(
    "family",
    [
        family if family in OF_EACH_KIND else pytest.param(family, marks=pytest.mark.extended)
        for family in CHECKED.supported
    ],
)
def test_a_dry_run_of_a_supported_family_fits(tmp_path: Path, family: str) -> None:
    tiny_config(family).save_pretrained(tmp_path / "model")
    given = ["--model_path", str(tmp_path / "model"), "--save_dir", str(tmp_path / "output"), "--card", "H200"]

    assert run_dry(parse_args(["--dry_run", *given, *OPTIONS, *NO_SEARCH], num_ranks=1), ONE_RANK)


@pytest.mark.parametrize("family", ["minicpm3", "minimax"])
def test_packed_rows_that_would_see_each_other_are_refused(family: str) -> None:
    config = parse_args([*OPTIONS, "--device", "cpu", "--dtype", "fp32"], num_ranks=1)
    packed = PackedRows(attention_length=8.0, max_documents=4)

    with pytest.raises(PlanError, match=f"--packing auto: rows of the family '{family}' cannot hold several samples"):
        make_run_setup(config, ONE_RANK, tiny_config(family), packed=packed)


@pytest.mark.parametrize("family", ["diffllama", "qwen3_5_text"])
def test_tiles_of_layers_that_cannot_run_in_them_are_refused(family: str) -> None:
    words = [*OPTIONS, "--device", "cpu", "--dtype", "fp32", "--tile_tokens", "4"]

    with pytest.raises(PlanError, match=f"--tile_tokens 4: layers of the family '{family}' cannot run in tiles"):
        make_run_setup(parse_args(words, num_ranks=1), ONE_RANK, tiny_config(family))
    assert not ModelParts(tiny_config(family), torch.device("cpu")).shape().is_tileable
