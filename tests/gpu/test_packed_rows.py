"""Packed rows on a GPU: the kernels against a dense mask, no leak to the bit, and what documents give alone."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.packed_rows import LENGTH, ROWS, assert_no_leaks, documents_alone, make_packed_batch
from harness.pipelines import Pipeline, make_model
from harness.runs import ROOT, environment, make_checkpoint, make_dataset
from torch import Tensor, nn

from mobius.engine.documents import position_ids_and_cu_seqlens
from mobius.models.attention import BlockMasks, DocumentAttention, DocumentLayout, attend_documents, choose_attention

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FAMILIES = ["gemma3", "llama", "llama-tied", "mistral", "qwen3"]


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    position_ids: Tensor,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Scores of all pairs, a mask of those that see each other, and one more logit for each sink; in fp32."""
    places = torch.arange(position_ids.shape[1], device=CUDA)
    document, distance = places - position_ids, places.unsqueeze(1) - places
    seen = (distance >= 0) & (document.unsqueeze(2) == document.unsqueeze(1))
    seen = seen if window is None else seen & (distance < window)
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.float(), *(each.float().repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : len(places)] @ value).transpose(1, 2)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(
    ("dtype", "heads", "size", "softcap"),
    [
        (torch.bfloat16, (8, 8), 128, None),
        (torch.float16, (8, 2), 64, None),
        (torch.bfloat16, (4, 1), 256, None),
        (torch.float32, (8, 2), 64, None),
        (torch.bfloat16, (8, 2), 64, 20.0),
        (torch.float32, (4, 4), 8, None),
        (torch.bfloat16, (4, 2), 512, None),
    ],
)
def test_kernels_give_what_a_dense_mask_gives(
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    softcap: float | None,
    window: int | None,
    has_sinks: bool,
) -> None:
    rows = [[300, 100, 7, 93], [512], [1, 511], [128, 128, 130, 120]]
    places = position_ids_and_cu_seqlens(rows, seq_length=512, num_microbatches=1, max_documents=6)
    position_ids, (cu_seqlens,) = (torch.from_numpy(each).to(CUDA) for each in places)
    torch.manual_seed(0)
    given = [torch.randn(4, number, 512, size, device=CUDA, dtype=dtype) for number in (heads[0], heads[1], heads[1])]
    if has_sinks:
        given.append(torch.linspace(-3, 5, heads[0], device=CUDA, dtype=dtype))
    kind = choose_attention(CUDA, dtype, head_size=size, softcap=softcap)
    assert (kind is DocumentAttention.FLEX) == (dtype == torch.float32 or softcap is not None or size > 256)
    is_flex = kind is DocumentAttention.FLEX
    documents = BlockMasks(DocumentLayout(position_ids, cu_seqlens)) if is_flex else cu_seqlens

    def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        settings = {"sliding_window": window, "softcap": softcap, "documents": documents, "s_aux": sinks}
        return attend_documents(nn.Identity(), query, key, value, None, **settings)[0]

    results = []
    for attend in (
        ours,
        partial(dense, position_ids=position_ids, window=window, softcap=softcap),
    ):
        leaves = [each.clone().requires_grad_() for each in given]
        output = attend(*leaves)
        gradient = torch.randn(output.shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
        results.append([output, *torch.autograd.grad(output, leaves, gradient.to(output.dtype))])
    for actual, expected in zip(*results, strict=True):
        share = 2e-5 if dtype == torch.float32 else 2e-2
        assert (actual.float() - expected.float()).abs().max() <= share * expected.abs().max()


@pytest.mark.parametrize(("keeps_graphs", "compiled"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("family", ["gemma3", "llama", "mistral"])
def test_no_document_sees_another_one(family: str, keeps_graphs: bool, compiled: bool) -> None:
    """bf16, with variable lengths; deterministic kernels."""
    model = make_model(family, 2 if family != "gemma3" else 6)
    assert_no_leaks(model, keeps_graphs=keeps_graphs, compiled=compiled, device=CUDA, dtype=torch.bfloat16)


def test_no_document_sees_another_one_in_fp32() -> None:
    assert_no_leaks(make_model("mistral", 2), keeps_graphs=False, device=CUDA, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_what_each_document_gives_alone(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, 6)
    batch = make_packed_batch(ROWS, LENGTH, 2)
    expected_loss, expected = documents_alone(model, ROWS, batch)
    compiled = dtype == torch.bfloat16
    for keeps_graphs in (False, True):
        pipeline = Pipeline(model, 1, 2, 2, None, keeps_graphs, device=CUDA, dtype=dtype, compiled=compiled)
        loss = pipeline.run(batch)
        assert torch.allclose(loss, expected_loss, rtol=5e-3 if compiled else 1e-5)
        for name, gradient in expected.items():
            difference = (pipeline.gradients[name].float().cpu() - gradient).norm() / gradient.norm()
            assert difference <= (0.1 if compiled else 1e-4), f"{name}: {difference}"


def test_twenty_steps_of_packed_rows_lose_as_much_as_their_samples_alone(tmp_path: Path) -> None:
    """bf16 on both sides; transformers attends each sample by itself."""
    make_checkpoint(tmp_path / "model")
    make_dataset(tmp_path / "data.jsonl", 60)
    options = """--model_path model --dataset data.jsonl --bf16 --num_stages 4 --num_chunks 2 --batch_size 4
        --seq_length 96 --num_iterations 20 --learning_rate 1e-3 --device cuda"""
    outputs = ["--save_dir", "out", "--save_params", "p.pt", "--save_results", "r.txt"]
    for words in (
        ["scripts/plain_training.py", "--output", "plain.json", *options.split()],
        ["main.py", *options.split(), *outputs],
    ):
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]
    plain = json.loads((tmp_path / "plain.json").read_text())
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["num_samples"] for step in steps) > 1.2 * 4 * 20, "rows hold more than one"
    for step, expected in zip(steps, plain, strict=True):
        assert step["loss"] == pytest.approx(expected, rel=5e-3)
