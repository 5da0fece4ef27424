"""Peers of the benchmarks compute what they are compared on: packed rows, adapters, chunks of a loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.forked import HANG_SECONDS
from launch import run_ranks
from make_model import write_config
from peers.packed import PackedSteps
from transformers import AutoConfig, AutoModelForCausalLM

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CPU = torch.device("cpu")


def steps(lengths: list[int], **changes: Any) -> PackedSteps:
    given: dict[str, Any] = {
        "seq_length": 16,
        "rows_per_microbatch": 2,
        "accumulations": 1,
        "rank": 0,
        "num_ranks": 1,
        "vocab_size": 100,
        "attention": "sdpa",
        "device": CPU,
    }
    return PackedSteps(lengths, **{**given, **changes})


def test_samples_of_a_microbatch_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=100
    )
    config.use_cache = False  # as read_config sets it: with a cache transformers does not look for restarts
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    (microbatch,) = steps([5, 9, 2, 12, 4]).next()
    assert isinstance(microbatch["input_ids"], torch.Tensor)

    together = model(**microbatch).logits[0]

    lengths = [12, 4, 9, 5, 2]  # two rows of 16
    parts = microbatch["input_ids"][0].split(lengths)
    alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
    assert torch.allclose(together, alone, atol=1e-5)
    starts = np.cumsum([0, *lengths[:-1]])
    assert [int(index) for index in (microbatch["labels"][0] == -100).nonzero()] == starts.tolist()


def test_ranks_share_a_step_and_an_epoch_begins_anew_at_its_end() -> None:
    lengths = [16, 15, 14, 13, 12, 11]  # six rows
    ranks = [steps(lengths, rows_per_microbatch=1, rank=rank, num_ranks=2) for rank in (0, 1)]

    seen = [int(rank.next()[0]["input_ids"].shape[1]) for _ in range(3) for rank in ranks]

    assert sorted(seen) == sorted(lengths)
    assert ranks[0].tokens == ranks[1].tokens == [sum(seen[index : index + 2]) for index in (0, 2, 4)]
    assert ranks[0].next()[0]["input_ids"].shape[1] == seen[0]


@pytest.mark.extended  # a peer's benchmark
@pytest.mark.usefixtures("forked_starts")
def test_two_ranks_of_fsdp2_train_on_packed_rows(tmp_path: Path) -> None:
    write_config(tmp_path / "model", "tiny", 2)
    lengths = np.random.default_rng(5).integers(2, 33, 60).tolist()
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    output = tmp_path / "row.json"
    options = "--batch_size 8 --seq_length 32 --steps 3 --accumulations 2 --warmup 1 --max_grad_norm 1"
    command = [sys.executable, str(BENCHMARKS / "peers" / "fsdp2.py"), str(tmp_path / "model"), *options.split()]

    result = run_ranks(
        [*command, "--lengths", str(tmp_path / "lengths.json"), "--output", str(output)],
        num_ranks=2,
        environment={"OMP_NUM_THREADS": "1"},
        output=output,
        timeout_seconds=300,
    )

    assert result.problem is None, result.log_end
    printed = result.output
    assert printed["attention"] == "sdpa"
    assert printed["step_tokens"] == printed["step_positions"]  # nothing is padded
    assert all(0.8 * 8 * 32 < tokens <= 8 * 32 for tokens in printed["step_tokens"])
    rate = sum(printed["step_tokens"][1:]) / sum(printed["step_seconds"][1:])
    assert printed["real_tokens_per_second"] == pytest.approx(rate)
    assert printed["loss"] == pytest.approx(10.37, abs=0.2)  # ln 32000


BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_the_loss_and_gradients_of_chunks_are_the_plain_models(tmp_path: Path, chunk_tokens: int) -> None:
    from lora import adapt, make_lora_parser, read_base_config

    write_config(tmp_path, "tiny", 2)
    words = [str(tmp_path), "--batch_size", "2", "--seq_length", "12", "--output", "x"]
    arguments = make_lora_parser("").parse_args([*words, "--loss_chunk_tokens", str(chunk_tokens)])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_base_config(arguments), dtype=torch.float32)
    tokens = torch.randint(0, 32000, (2, 12))
    adapted = adapt(model, arguments, has_fp32_adapters=True)
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    plain = adapted.model(input_ids=tokens, labels=tokens).loss
    expected = torch.autograd.grad(plain, list(trained.values()))

    loss = adapted(tokens)

    assert len(trained) == 2 * 7 * 2  # two matrices beside each of a layer's seven
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for got, wanted in zip(torch.autograd.grad(loss, list(trained.values())), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.extended
def test_two_ranks_of_fsdp2_train_adapters(tmp_path: Path) -> None:
    write_config(tmp_path / "model", "tiny", 1)
    output = tmp_path / "output.json"
    words = f"{tmp_path / 'model'} --output {output}"
    words += (
        " --batch_size 4 --seq_length 8 --steps 2 --max_grad_norm 1 --rows_per_microbatch 1 2 --loss_chunk_tokens 8"
    )
    result = run_ranks(
        [sys.executable, str(BENCHMARKS / "peers" / "lora_fsdp2.py"), *words.split()],
        num_ranks=2,
        environment={"OMP_NUM_THREADS": "1"},
        output=output,
        timeout_seconds=HANG_SECONDS,
    )

    assert result.problem is None, result.log_end
    assert set(result.output["trial_seconds_per_row"]) == {"1", "2"}
    assert result.output["loss"] == pytest.approx(10.37, abs=0.2)
