"""Forked ranks that train a tiny model once per variant of options, alone and as replicas, and messages of replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness.forked import Ranks as Processes
from harness.run_setups import make_run_setup
from harness.runs import environment, make_checkpoint
from torch import Tensor

from mobius.config.cli import parse_args
from mobius.data.batches import TrainingBatches
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedDataset
from mobius.distributed import replicas as messages
from mobius.distributed.node_checks import join_replicas
from mobius.distributed.replicas import ReplicaGroup
from mobius.distributed.shards import Shards
from mobius.distributed.transport import Transport
from mobius.distributed.world import World
from mobius.hardware.devices import MemoryMeter
from mobius.models.families import load_model_config
from mobius.models.layout import StageLayout
from mobius.process.ranks import Ranks, prepare_environment, set_cuda_max_connections
from mobius.training.session import Session, open_session

TOKENS, RATES = 8 * 16, [1e-3] * 6
"""Tokens of a step, and the learning rate of each."""
SHAPE = """--num_stages 4 --batch_size 8 --seq_length 16 --num_iterations 6 --learning_rate 1e-3 --adam_epsilon 1e-5
    --warmup_steps 0 --weight_decay 0.1 --lr_scheduler_type constant --compile off --recompute full"""
CLIPPINGS = ("--max_grad_norm 0.5", "--max_grad_norm 0")
STREAMED = "--resident_stages 0 --use_prefetch --overlap_optimizer"
OTHERS = ("--resident_stages 0 --no_prefetch --no_overlap_optimizer", "--no_offload", "--resident_stages 1")


@dataclass(frozen=True)
class Trained:
    """What one rank has after a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    host_bytes: int
    """Of streamed stages."""
    num_streamed: int
    """Elements of streamed stages, padding included."""
    digest: str
    """Of this rank's masters, moments and weights."""

    def is_equal(self, other: Trained) -> bool:
        """Whether all is the same to the bit."""
        numbers = self.losses == other.losses and self.norms == other.norms
        return numbers and all(torch.equal(value, other.weights[name]) for name, value in self.weights.items())


def trained(
    num_replicas: int,
    folder: Path,
    options: str,
    variants: Sequence[str],
    *,
    num_pipeline_ranks: int = 1,
    num_nodes: int = 1,
    num_layers: int = 4,
) -> list[list[Trained]]:
    """For each variant of `options` what each rank has trained; one process for each, one meeting for all.

    Ranks of a pipeline, `num_pipeline_ranks` of them, are next to each other. `num_nodes` is as in `rank_variables`.
    """
    num_ranks = num_replicas * num_pipeline_ranks
    model = folder / "model"
    if not model.exists():
        make_checkpoint(model, num_layers=num_layers, is_tied=True)
    output = folder / f"trained-{num_replicas}"
    words = [str(output), str(model), str(num_pipeline_ranks), f"{SHAPE} {options}", *variants]
    processes = Processes(
        "harness.replica_ranks",
        "train_replica_variants",
        words,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        folder=folder,
        # cuBLAS is deterministic with it only.
        environment={**environment(folder / "cache"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )
    assert processes.wait() == 0, processes.output()
    found = [torch.load(f"{output}.{rank}", weights_only=False) for rank in range(num_ranks)]
    return [list(each) for each in zip(*found, strict=True)]


def exact_results(num_ranks: int, folder: Path, options: str, variants: Sequence[str]) -> dict[str, object]:
    """Train each variant by one pipeline; equal results are equal to the bit."""
    found = trained(1, folder, options, variants, num_pipeline_ranks=num_ranks, num_layers=6)
    return {
        variant: [(rank.losses, rank.norms, rank.digest) for rank in ranks]
        for variant, ranks in zip(variants, found, strict=True)
    }


def train_replica_variants(output: str, folder: str, num_pipeline_ranks: str, shared: str, *variants: str) -> None:
    """Train each variant and leave what this rank has as `output`.RANK."""
    prepare_environment()
    set_cuda_max_connections()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    ranks = Ranks.from_environment().split_into_pipelines(int(num_pipeline_ranks))
    transport: Transport | None = None
    results = []
    for variant in variants:
        pipelines = f"--pipeline_ranks {num_pipeline_ranks}" if ranks.num_ranks > 1 else ""
        options = f"--model_path {folder} {shared} {variant} {pipelines}".split()
        session, result = _train(Path(folder), options, ranks, transport)
        transport = session.transport
        results.append(result)
    torch.save(results, f"{output}.{ranks.rank}")
    assert transport is not None
    transport.all_ranks.barrier()
    transport.close()


def _train(folder: Path, options: list[str], ranks: Ranks, transport: Transport | None) -> tuple[Session, Trained]:
    config = parse_args(options, num_ranks=ranks.num_ranks)
    replica_rendezvous = join_replicas(config, ranks)
    run_setup = make_run_setup(
        config, ranks, load_model_config(folder, config.model), replica_rendezvous=replica_rendezvous
    )
    session = open_session(run_setup, folder, transport=transport)
    size, length = config.pipeline.batch_size, config.data.seq_length
    tokens = np.random.default_rng(0).integers(0, run_setup.shape.vocab_size, 3 * size * length, dtype=np.int32)
    offsets = np.arange(3 * size + 1, dtype=np.int64) * length
    samples = [WeightedSamples(TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets))]
    batches = TrainingBatches(samples, batch_size=size, seq_length=length, pad_token_id=0, seed=1, is_packed=False)
    steps = list(session.trainer(batches).train())
    MemoryMeter(run_setup.device).synchronize()
    weights: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    for _, memory in sorted(session.stages.memory.items()):
        state = memory.state
        weights |= {name: view.float().cpu() for name, view in state.layout.views(state.weights).items()}
        owned = [each for own in state.owned for each in (own.state.read_master(), *own.state.parts.values())]
        for tensor in (*owned, state.weights.float()):
            digest.update(tensor.cpu().numpy().tobytes())
    arena = session.stages.arena
    streamed = 0 if arena is None else sum(len(state.weights) for state in arena.states.values())
    host_bytes = 0 if arena is None else arena.num_bytes
    numbers = [step.loss for step in steps], [step.grad_norm for step in steps]
    session.stages.close()
    return session, Trained(*numbers, weights, host_bytes, streamed, digest.hexdigest())


LAYOUT = StageLayout.of({"tied": (50, 32), "matrix": (33, 7), "frozen": (9, 9), "norm": (37,)}, frozen={"frozen"})
TIED = ("tied",)
DTYPES = (torch.float32, torch.bfloat16)


def values_of(replica: int) -> torch.Tensor:
    """Gradients of a replica: of all sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(replica)
    sizes = 10.0 ** torch.randint(-4, 4, (LAYOUT.num_trained,), generator=generator)
    return torch.randn(LAYOUT.num_trained, generator=generator) * sizes


def shares_of(replica: int, num_replicas: int) -> Shards:
    """Shares of one of the replicas, unequal ones."""
    return Shards.of(LAYOUT, replica, num_replicas, tied=TIED)


def use_all(output: str, device: str = "cpu") -> None:
    """Use each connection once, and leave what came of it as `output`.RANK."""
    messages.HOST_CHUNK_ELEMENTS = messages.REDUCE_CHUNK_ELEMENTS = 100  # shares take several
    ranks = Ranks.from_environment().split_into_pipelines(1)
    rank, number = ranks.rank, ranks.num_ranks
    place = torch.device(device, ranks.local_rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    world, shards = World(ranks, place), shares_of(rank, number)
    found: dict[str, torch.Tensor | None] = {}
    for dtype in DTYPES:
        replicas = ReplicaGroup(ranks, place, reduce_dtype=dtype)
        summed = values_of(rank).to(place)
        replicas.reduce_scatter(summed, shards.segments)
        found[f"reduced in {dtype}"] = summed
        found[f"total in {dtype}"] = replicas.sum_over_replicas(torch.tensor([0.1 + rank, 7.0], device=place))
    for name, give in (("spread", replicas.all_gather), ("gathered", replicas.all_gather_for_load)):
        values = values_of(rank).bfloat16().to(place)
        give(values, shards.segments)
        found[name] = values
    found["spread on hosts"] = values_of(rank).bfloat16()
    replicas.all_gather_on_host(found["spread on hosts"], shards.segments)
    own = torch.cat([values_of(rank)[part] for part in shards.own])
    found["collected"] = replicas.gather_to_first(own, shards)
    torch.save({key: None if value is None else value.cpu() for key, value in found.items()}, Path(f"{output}.{rank}"))
    world.barrier()
    world.close()
