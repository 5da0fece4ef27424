"""Measures this machine's GPU for planning: compares it with its data sheet and writes a file to send to the project.

    python scripts/calibrate.py                              # layers of 7B, two minutes, writes calibration.json
    python scripts/calibrate.py --model 1b --batch_size 16 --output mine.json

It runs what a run measures before it plans (mobius/planner/measure.py), on one GPU: a layer's passes, attention, loss,
copies and AdamW, and large products. It takes a few GiB of GPU and host memory. Without a GPU only the host's AdamW is
measured. The file has names of GPU and CPU, versions and results, and no name of a user, host or file.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mobius.process.ranks import Ranks, cache_folder, prepare_environment

prepare_environment()  # before torch is imported

import torch  # noqa: E402

from mobius import __version__  # noqa: E402
from mobius.config.config import ModelConfig, PipelineConfig  # noqa: E402
from mobius.distributed.transport import SingleRankTransport  # noqa: E402
from mobius.engine.adamw_cpu import CPUAdamW, load_adamw_cpu  # noqa: E402
from mobius.errors import MobiusError, reason_of  # noqa: E402
from mobius.hardware.devices import num_optimizer_threads, set_host_threads, use_device  # noqa: E402
from mobius.models.blocks import ModelParts  # noqa: E402
from mobius.models.families import load_planned_config  # noqa: E402
from mobius.models.published_shapes import SHORT_NAMES  # noqa: E402
from mobius.planner.gpu_specs import (  # noqa: E402
    CPU_ADAMW_PER_CORE,
    GEMM_SHARE,
    TERA,
    GpuSpec,
    Host,
    estimate_profile,
)
from mobius.planner.host_rates import measure_host_rates  # noqa: E402
from mobius.planner.layer_bench import MicrobatchShape  # noqa: E402
from mobius.planner.measure import measure_product_rate, measure_profile  # noqa: E402
from mobius.planner.profile import Profile  # noqa: E402
from mobius.planner.this_machine import machine_of_gpu  # noqa: E402
from mobius.planner.timer import CollectiveTimer  # noqa: E402
from mobius.process.log import printable  # noqa: E402
from mobius.units import GIB, format_columns  # noqa: E402

SLICES = 4
"""Slices of the sequence that attention is measured in; each has the tokens of a microbatch."""
Quantity = tuple[str, str, Callable[[Profile], float]]
"""Name, unit, and the number of a profile in that unit."""
ATTENTION: tuple[Quantity, ...] = (
    ("attention, forward", "ms", lambda profile: 1e3 * profile.attention.forward),
    ("attention, recomputed backward", "ms", lambda profile: 1e3 * profile.attention.recomputed_backward),
)
QUANTITIES: tuple[Quantity, ...] = (
    ("layer, forward", "ms", lambda profile: 1e3 * profile.layer_kinds[0].forward),
    ("layer, backward", "ms", lambda profile: 1e3 * profile.layer_kinds[0].backward),
    ("layer, recomputed backward", "ms", lambda profile: 1e3 * profile.layer_kinds[0].recomputed_backward),
    ("head and loss", "ms", lambda profile: 1e3 * profile.loss),
    ("GPU memory", "GB/s", lambda profile: profile.gpu_bandwidth / 1e9),
    ("AdamW on the GPU", "1e9/s", lambda profile: profile.gpu_adamw / 1e9),
    ("copy to the GPU", "GB/s", lambda profile: profile.copies.host_to_device / 1e9),
    ("copy from the GPU", "GB/s", lambda profile: profile.copies.device_to_host / 1e9),
    ("both at once: to the GPU", "GB/s", lambda profile: profile.copies.host_to_device_duplex / 1e9),
    ("both at once: from the GPU", "GB/s", lambda profile: profile.copies.device_to_host_duplex / 1e9),
    ("AdamW on the CPU", "1e9/s", lambda profile: profile.cpu_adamw / 1e9),
    ("AdamW on the CPU during copies", "1e9/s", lambda profile: profile.cpu_adamw_beside_copies / 1e9),
)


@dataclass(frozen=True)
class Row:
    """A measured quantity beside its estimate."""

    name: str
    unit: str
    measured: float
    estimated: float | None
    """By the data sheet and the shares measured on H200s; None for a GPU whose data sheet is not known."""

    @property
    def speed(self) -> float | None:
        """Measured speed over the estimated one: above 1 where plans take a part for slower than it is."""
        if not self.estimated or not self.measured:  # attention can be too short to measure
            return None
        return self.estimated / self.measured if self.unit == "ms" else self.measured / self.estimated

    def cells(self) -> list[str]:
        """Cells of the printed table."""
        numbers = (self.measured, self.estimated, self.speed)
        return [self.name, self.unit, *("-" if number is None else f"{number:.3g}" for number in numbers)]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="7b", choices=SHORT_NAMES, help="its layers run (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences of a microbatch (default: %(default)s)")
    parser.add_argument("--seq_length", type=int, default=512, help="tokens of each (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="layers that are not compiled")
    parser.add_argument(
        "--output", type=Path, default=Path("calibration.json"), help="file to write (default: %(default)s)",
        metavar="FILE",
    )  # fmt: skip
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Calibration:
    """Measures a GPU, and the host beside it, with layers of a model."""

    device: torch.device
    model: ModelConfig
    shape: MicrobatchShape
    """Microbatch of whole sequences."""
    gpu_spec: GpuSpec | None
    compiled: bool
    kernel: CPUAdamW | None

    def measure(self) -> tuple[list[Row], Profile]:
        """Return the rows of the table, and the profile of `shape`."""
        timer = CollectiveTimer(self.device, SingleRankTransport())
        products = measure_product_rate(timer, self.shape.dtype) / TERA
        assumed = None if self.gpu_spec is None else self.gpu_spec.tera_flops * GEMM_SHARE
        tokens = self.shape.tokens
        slices = replace(self.shape, batch=1, seq_length=tokens, full_seq_length=SLICES * tokens)
        profile, rows = self._compare(self.shape, QUANTITIES)
        _, of_attention = self._compare(slices, ATTENTION)
        return [Row("large products", "TFLOP/s", products, assumed), *of_attention, *rows], profile

    def _compare(self, shape: MicrobatchShape, quantities: Sequence[Quantity]) -> tuple[Profile, list[Row]]:
        """Return the measured profile for a shape of microbatches, and `quantities` of it."""
        packed_dtype = shape.dtype if shape.is_sliced else None  # as for a run with slices
        parts = ModelParts(
            load_planned_config(self.model)[0], self.device, compiled=self.compiled, packed_dtype=packed_dtype
        )
        measured = measure_profile(CollectiveTimer(self.device, SingleRankTransport()), parts, shape, self.kernel)
        estimated = None
        if self.gpu_spec is not None:
            estimated = estimate_profile(
                self.gpu_spec,
                parts.shape(),
                microbatch_tokens=shape.tokens,
                seq_length=shape.full_seq_length or shape.seq_length,
                num_ranks=1,
                host=this_host(),
                compiled=self.compiled,
            )
        return measured, [
            Row(name, unit, number(measured), None if estimated is None else number(estimated))
            for name, unit, number in quantities
        ]


def this_host() -> Host:
    """Return the host that plans for one GPU of this machine assume."""
    return machine_of_gpu("", 0, 1).host


def measure_host(kernel: CPUAdamW | None) -> list[Row]:
    """Return what can be measured without a GPU."""
    device = torch.device("cpu")
    rates = measure_host_rates(torch.bfloat16, device=device, transport=SingleRankTransport(), kernel=kernel)
    assumed = this_host().cores_per_rank * CPU_ADAMW_PER_CORE
    return [Row("AdamW on the CPU", "1e9/s", rates.cpu_adamw_together / 1e9, assumed / 1e9)]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Names and versions that results depend on."""
    is_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "gpu_gib": round(torch.cuda.get_device_properties(device).total_memory / GIB, 1) if is_cuda else None,
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "mobius": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
    }


def write(path: Path, facts: dict[str, Any], rows: list[Row], profile: Profile | None) -> None:
    """Write everything as JSON; raises OSError."""
    measured = [asdict(row) | {"speed": row.speed} for row in rows]
    content = {**facts, "rows": measured, "profile": None if profile is None else json.loads(profile.to_json())}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure, print the table and write the file."""
    arguments.output.touch()  # a file that cannot be written is refused before two minutes are spent
    set_host_threads(Ranks(0, 1, 0), device, (0,))
    kernel = load_adamw_cpu(cache_folder(), num_threads=num_optimizer_threads(1))
    facts, profile = describe_machine(device), None
    if device.type == "cuda":
        use_device(device)
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        properties = torch.cuda.get_device_properties(device)
        gpu_spec = machine_of_gpu(properties.name, properties.total_memory, 1).gpu_spec
        sheet = "none known here" if gpu_spec is None else f"{gpu_spec.name}, {gpu_spec.tera_flops:g} TFLOP/s"
        print(f"{properties.name}, {facts['gpu_gib']} GiB, {dtype}; data sheet: {sheet}", flush=True)
        shape = MicrobatchShape(arguments.batch_size, arguments.seq_length, dtype, PipelineConfig().loss_chunk_tokens)
        facts |= {"model": arguments.model, "batch_size": shape.batch, "seq_length": shape.seq_length}
        model, compiled = ModelConfig(model_path=arguments.model), not arguments.eager
        rows, profile = Calibration(device, model, shape, gpu_spec, compiled, kernel).measure()
    else:
        print("no GPU here: products, layers, attention and copies need one; only the host is measured", flush=True)
        rows = measure_host(kernel)
    titles = ["", "unit", "measured", "estimated", "speed"]
    print(format_columns([titles, *(row.cells() for row in rows)], num_left=2))
    write(arguments.output, facts, rows, profile)
    print(f"written to {printable(str(arguments.output), sys.stdout)}; docs/user/planning.md says where to send it")


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, and turn what a user can mend into a line and an exit code."""
    arguments = parse_arguments(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        run(arguments, device)
    except OSError as error:
        print(f"error: {printable(str(arguments.output), sys.stderr)}: {reason_of(error)}", file=sys.stderr)
        return 2
    except MobiusError as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"error: {error}\nEnd what else uses the GPU, or use a smaller --batch_size or --model", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
