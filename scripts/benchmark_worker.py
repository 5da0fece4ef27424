"""One benchmark run of Mobius on random tokens, for benchmark.py; run by torchrun. Nothing is saved but the numbers.

torchrun --nproc_per_node 4 scripts/benchmark_worker.py OUTPUT.json [the options of main.py]
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mobius.ranks import Ranks, prepare_environment

prepare_environment()  # before torch is imported

import numpy as np  # noqa: E402

from mobius.cli import parse_args  # noqa: E402
from mobius.data.batches import Batches  # noqa: E402
from mobius.data.store import TokenizedDataset  # noqa: E402
from mobius.log import setup_logging  # noqa: E402
from mobius.models.families import load_model_config  # noqa: E402
from mobius.runtime.devices import set_host_threads  # noqa: E402
from mobius.training.build import assemble, connect, draw_blueprint, load_state, rehearse  # noqa: E402


def main() -> None:
    """Train and write one JSON list with the metrics of every step."""
    output, options = Path(sys.argv[1]), sys.argv[2:]
    ranks = Ranks.from_environment()
    setup_logging(ranks.rank)
    config = parse_args(options, num_ranks=ranks.num_ranks)
    set_host_threads(ranks)
    folder = Path(config.model.model_path)
    blueprint = draw_blueprint(config, ranks, load_model_config(folder, config.model))
    transport = connect(blueprint)
    state = load_state(blueprint, folder)
    if blueprint.device.type == "cuda" and ranks.num_ranks > 1:
        rehearse(blueprint, state)
    batches = Batches(
        random_tokens(blueprint.shape.vocab_size, config.data.seq_length, config.pipeline.batch_size),
        batch_size=config.pipeline.batch_size,
        seq_length=config.data.seq_length,
        pad_token_id=0,
        seed=config.optim.seed,
    )
    steps = [dataclasses.asdict(metrics) for metrics in assemble(blueprint, state, transport, batches).train()]
    if ranks.is_first:
        output.write_text(json.dumps(steps))
    transport.barrier()
    state.close()
    transport.close()


def random_tokens(vocab_size: int, seq_length: int, num_rows: int) -> TokenizedDataset:
    """Full rows of random tokens, every one a target."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, vocab_size, num_rows * seq_length, dtype=np.int32)
    offsets = np.arange(num_rows + 1, dtype=np.int64) * seq_length
    return TokenizedDataset(tokens, np.ones(len(tokens), dtype=bool), offsets)


if __name__ == "__main__":
    main()
