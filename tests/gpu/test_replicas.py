"""On GPUs: two replicas train what one pipeline trains with the same batch, and repeat to the bit.

Where there are fewer GPUs than ranks, each replica takes itself for a node of its own, and they share them: NCCL goes
over sockets then. tests/pipeline/test_replicas.py compares the same on CPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.forked import Ranks
from harness.replica_ranks import CLIPPINGS, OTHERS, RATES, STREAMED, TOKENS, shares_of, trained, values_of
from harness.rounding import assert_near_after_adam, reordered
from harness.runs import environment, tensors_of

pytestmark = pytest.mark.gpu
NUM_REPLICAS = 2


def nodes_for(num_ranks: int) -> int:
    """As how many nodes ranks are started: as replicas, where they have to share GPUs."""
    return NUM_REPLICAS if torch.cuda.device_count() < num_ranks else 1


def test_sums_over_nccl_are_those_on_hosts_to_the_bit(tmp_path: Path) -> None:
    ranks = Ranks(
        "harness.replica_ranks",
        "use_all",
        [str(tmp_path / "made"), "cuda"],
        num_ranks=2,
        num_nodes=nodes_for(2),
        folder=tmp_path,
        environment=environment(tmp_path / "cache"),
    )
    assert ranks.wait(seconds=300) == 0, ranks.output()
    given = [values_of(replica) for replica in range(2)]
    for owner in range(2):
        made = torch.load(tmp_path / f"made.{owner}")
        for dtype in (torch.float32, torch.bfloat16):
            sent = [value if replica == owner else value.to(dtype).float() for replica, value in enumerate(given)]
            for part in shares_of(owner, 2).own:
                assert torch.equal(made[f"reduced in {dtype}"][part], (sent[0] + sent[1])[part])
        for name in ("spread", "gathered", "spread on hosts"):
            for replica in range(2):
                for part in shares_of(replica, 2).own:
                    assert torch.equal(made[name][part], given[replica].bfloat16()[part]), name


def test_in_fp32_two_replicas_train_what_one_pipeline_trains(tmp_path: Path) -> None:
    variants = [f"{where} {clipping}" for where in (STREAMED, OTHERS[1]) for clipping in CLIPPINGS]
    shared = trained(2, tmp_path, "--device cuda --fp32 --num_chunks 2", variants, num_nodes=nodes_for(2))
    alone = trained(1, tmp_path, "--device cuda --fp32 --num_chunks 4", variants)
    share, before = reordered(TOKENS), tensors_of(tmp_path / "model")
    num_elements = sum(value.numel() for value in before.values())
    before["lm_head.weight"] = before["model.embed_tokens.weight"]  # they are one matrix
    for replicas, (single,) in zip(shared, alone, strict=True):
        assert replicas[0].is_equal(replicas[1])
        assert replicas[0].losses == pytest.approx(single.losses, rel=share)
        assert replicas[0].norms[0] == pytest.approx(single.norms[0], rel=reordered(num_elements))
        assert_near_after_adam(replicas[0].weights, single.weights, before, rates=RATES, share=share)


def test_in_bf16_overlaps_change_no_bit_and_runs_repeat(tmp_path: Path) -> None:
    streamed = [f"{STREAMED} {clipping}" for clipping in CLIPPINGS]
    variants = [f"{where} {clipping}" for where in (STREAMED, STREAMED, *OTHERS) for clipping in CLIPPINGS]
    options = "--device cuda --bf16 --num_chunks 2 --num_rounds 1"
    shared = trained(2, tmp_path, options, variants, num_nodes=nodes_for(2))
    rounded = trained(2, tmp_path, f"{options} --reduce_dtype bf16", streamed, num_nodes=nodes_for(2))
    alone = trained(1, tmp_path, "--device cuda --bf16 --num_chunks 4 --num_rounds 1", streamed)
    for number, (single,) in enumerate(alone):
        first = shared[number][0]
        for replicas in shared[number :: len(CLIPPINGS)]:
            assert all(each.is_equal(first) for each in replicas)
        assert first.host_bytes == (2 + 12 / 2) * first.num_streamed > 0
        assert rounded[number][0].is_equal(rounded[number][1])
        for near in (first, rounded[number][0]):  # weights of bf16 are 2**-8 apart
            assert near.losses == pytest.approx(single.losses, rel=2e-3)
            assert near.norms == pytest.approx(single.norms, rel=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("messages", ["--copy_messages", "--no_copy_messages"])
def test_pipelines_of_two_train_what_one_rank_trains(tmp_path: Path, messages: str) -> None:
    """Reductions and gathers run next to the messages of the pipelines, be they copies or NCCL's."""
    wheres = (STREAMED, OTHERS[0], "--resident_stages 1")
    variants = [f"{where} {clipping}" for where in wheres for clipping in CLIPPINGS]
    shared = trained(
        2,
        tmp_path,
        f"--device cuda --bf16 --num_chunks 2 {messages}",
        variants,
        num_pipeline_ranks=2,
        num_nodes=nodes_for(4),
    )
    alone = trained(1, tmp_path, "--device cuda --bf16 --num_chunks 4", variants[: len(CLIPPINGS)])
    for number, (single,) in enumerate(alone):
        first = shared[number]
        for ranks in shared[number :: len(CLIPPINGS)]:
            for place in range(2):
                assert ranks[place].is_equal(first[place])
                assert ranks[2 + place].is_equal(first[place])
        assert first[0].losses == pytest.approx(single.losses, rel=2e-3)
        assert first[0].norms == pytest.approx(single.norms, rel=2e-2)
