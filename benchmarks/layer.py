"""Times the parts of a step on one device: forward and backward of a layer, recomputed and not, and head with loss.

    python benchmarks/layer.py 7b --batch_size 4 8 16 --seq_length 512 [--compile off] [--sdpa cudnn]

For each part: milliseconds (median) and the TFLOP/s of its matrix products, 2 operations per parameter and token
forward and 4 backward, without those of attention. --back_to_back enqueues one after the other, as within a step, and
tells the mean.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from mobius.ranks import prepare_environment

prepare_environment()  # before torch is imported

import torch  # noqa: E402
from make_model import SIZES, write_config  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from mobius.config.config import ModelConfig  # noqa: E402
from mobius.engine.documents import typical_arguments  # noqa: E402
from mobius.engine.stage import StageModule  # noqa: E402
from mobius.engine.stage_layers import MicrobatchContext  # noqa: E402
from mobius.models.blocks import ModelParts  # noqa: E402
from mobius.models.families import load_model_config  # noqa: E402
from mobius.schedule.packed_rows import PackedRows  # noqa: E402
from mobius.schedule.partition import StageCut  # noqa: E402

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--batch_size", type=int, nargs="+", default=[16], help="sequences of a microbatch")
    parser.add_argument("--seq_length", type=int, default=512)
    parser.add_argument("--loss_chunk_tokens", type=int, default=2048)
    parser.add_argument("--tile_tokens", type=int, help="of a recomputed layer (default: it runs whole)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--back_to_back", action="store_true", help="the device is never idle")
    parser.add_argument("--compile", choices=("on", "off"), default="on" if torch.cuda.is_available() else "off")
    parser.add_argument("--documents", type=int, default=0, help="equal documents in a row, which are kept apart")
    parser.add_argument(
        "--most_documents", type=int, help="bound that the kernel is told (default: as many as there are)"
    )
    parser.add_argument("--sdpa", choices=BACKENDS, help="attention kernel (default: torch's choice)")
    return parser.parse_args()


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `work`, the device idle before and after each."""
    return statistics.median(run_seconds(work, device, 1) for _ in range(repeats))


def run_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean seconds of `work`, so often in a row, the device idle before and after all."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if is_cuda:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def main() -> None:
    """Print one line per part and microbatch."""
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.size, 1)
        parts = ModelParts(
            load_model_config(Path(folder), ModelConfig()),
            device,
            compiled=arguments.compile == "on",
            packed_dtype=torch.bfloat16 if arguments.documents else None,
        )
    for batch_size in arguments.batch_size:
        print(f"{batch_size} x {arguments.seq_length}")
        torch._dynamo.reset()  # of a few shapes it compiles one after the other, then it runs eagerly
        time_parts(parts, arguments, batch_size, device)


def time_parts(parts: ModelParts, arguments: argparse.Namespace, batch_size: int, device: torch.device) -> None:
    """Print one line per part for microbatches of `batch_size` sequences."""
    dtype = torch.bfloat16
    stage = StageModule(
        parts,
        StageCut(0, 0, 1, is_first=True, is_last=True),
        loss_chunk_tokens=arguments.loss_chunk_tokens,
    )
    packed = None
    if arguments.documents:
        packed = PackedRows(arguments.seq_length / arguments.documents, arguments.most_documents or arguments.documents)
    layer_arguments = typical_arguments(
        parts, packed, batch=batch_size, seq_length=arguments.seq_length, dtype=dtype, device=device
    )
    context = MicrobatchContext(layer_arguments)
    layout = stage.layout()
    weights = layout.views(torch.randn(layout.num_elements, device=device, dtype=dtype) * 0.02)
    gradients = layout.views(torch.zeros(layout.num_elements, device=device))
    shape = (batch_size, arguments.seq_length)
    tokens = torch.randint(0, parts.config.vocab_size, shape, device=device)
    hidden = torch.randn(*shape, parts.config.hidden_size, device=device, dtype=dtype)
    inner, keeping = (
        StageModule(
            parts,
            StageCut(0, 0, 1, is_first=False, is_last=False),
            loss_chunk_tokens=arguments.loss_chunk_tokens,
            tile_tokens=arguments.tile_tokens,
            keep_graphs=keep_graphs,
        )
        for keep_graphs in (False, True)
    )

    def forward_backward(module: StageModule) -> None:
        _, kept = module.forward(weights, hidden, context)
        module.backward(weights, gradients, kept, hidden, context)

    def recomputed_backward() -> None:
        inner.backward(weights, gradients, [hidden], hidden, context)

    def loss() -> None:
        stage.loss(weights, gradients, hidden, tokens, num_targets=tokens.numel(), loss_scale=1.0)

    layer, head = parts.layers[0].num_parameters, parts.head.num_parameters
    cases: list[tuple[str, Callable[[], object], int]] = [
        ("layer, forward without a graph", lambda: inner.forward(weights, hidden, context), 2 * layer),
        ("layer, backward with recompute", recomputed_backward, 6 * layer),
        ("layer, forward and backward, graph kept", lambda: forward_backward(keeping), 6 * layer),
        ("norm, head, loss and their backward", loss, 6 * head),
    ]
    backend = sdpa_kernel(BACKENDS[arguments.sdpa]) if arguments.sdpa else contextlib.nullcontext()
    measure = run_seconds if arguments.back_to_back else seconds_of
    with backend:
        for name, work, operations in cases:
            run_seconds(work, device, 3)  # compiles, and fills what is cached
            seconds = measure(work, device, arguments.repeats)
            rate = operations * tokens.numel() / seconds / 1e12
            print(f"  {name:40} {seconds * 1e3:8.2f} ms {rate:7.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
