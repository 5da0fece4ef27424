"""The plan of a run that knows its data from the start."""

from __future__ import annotations

from transformers import PretrainedConfig

from mobius.config.config import Config
from mobius.distributed.rendezvous import Rendezvous
from mobius.process.ranks import Ranks
from mobius.schedule.packed_rows import PackedRows
from mobius.training.run_setup import RunSetup, complete_run, draft_run


def make_run_setup(
    config: Config,
    ranks: Ranks,
    model_config: PretrainedConfig,
    *,
    packed: PackedRows | None = None,
    replica_rendezvous: Rendezvous | None = None,
) -> RunSetup:
    """Draft and complete the plan of a run at once; arguments and errors are those of both."""
    draft = draft_run(config, ranks, model_config, packed=packed, replica_rendezvous=replica_rendezvous)
    return complete_run(draft, config, packed=packed)
