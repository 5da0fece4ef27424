"""Steps, memory and the scoring pass of each objective, beside supervised fine-tuning on rows of as many tokens.

    python benchmarks/objective_rows.py 7b --num_layers 8 --gpu_memory_limit 24 --objectives sft dpo kto policy distill

Each objective is a run of its own on one GPU, on random words that fill rows: pairs of two sequences, single answers,
groups of rollouts, samples. A row of the table has seconds of a step (median without the first steps), the largest GPU
memory, both also as a multiple of sft's, the seconds of the pass before step 1 as a share of as many steps of sft, and
the first loss: dpo's is ln 2, and policy's first ratio is 1, to the bit. What stands behind ` -- ` goes to every run.
"""

import argparse
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts"))

from launch import split_words
from make_model import SIZES, write_config

from mobius.units import format_columns

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ("dpo", "orpo", "simpo", "reward")
OBJECTIVES = ("sft", *PAIRS, "kto", "policy", "distill")
SKIPPED = 3
"""Steps at the start that the medians leave out."""
PASS = re.compile(r"^reference .* scored in ([\d.]+) s|^teacher .* in ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class Measured:
    """Numbers of a run; None for a part that the run does not have."""

    objective: str
    seconds: float | None = None
    gpu_gib: float | None = None
    pass_seconds: float | None = None
    first: Mapping[str, float] | None = None
    problem: str = ""


def words(number: int, generator: random.Random) -> str:
    """Return `number` short words, each of at least one token."""
    return " ".join(generator.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(number))


def records(objective: str, number: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield records of `number` rows; each sequence is longer than its `length` tokens, so it is cut to them."""
    generator = random.Random(1)
    for row in range(number):
        prompt, one, other = words(length // 2, generator), words(length, generator), words(length, generator)
        if objective in PAIRS:
            yield {"prompt": prompt, "chosen": one, "rejected": other}
        elif objective == "kto":
            yield from ({"prompt": prompt, "completion": text, "label": text is one} for text in (one, other))
        elif objective == "policy":
            yield from (
                {"prompt": prompt, "completion": text, "reward": float(text is one), "group": row}
                for text in (one, other)
            )
        else:
            yield from ({"prompt": prompt, "completion": text} for text in (one, other))


def run(objective: str, model: Path, arguments: argparse.Namespace, further: list[str], folder: Path) -> Measured:
    """Run an objective and read its numbers."""
    data, rows, tokens = folder / f"{objective}.jsonl", arguments.batch_size * arguments.steps, arguments.seq_length
    is_pair = objective in PAIRS
    with data.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records(objective, rows, tokens))
    command = [
        *(sys.executable, str(ROOT / "main.py"), "--model_path", str(model), "--dataset", str(data)),
        *("--objective", objective, "--save_dir", str(folder / objective), "--save_params", "none"),
        *("--save_results", "auto", "--save_strategy", "no", "--num_iterations", str(arguments.steps)),
        *("--batch_size", str(arguments.batch_size), "--num_stages", "auto", "--num_chunks", "auto"),
        # A unit's sequences share its row; single samples are cut to a sequence, and two of them fill a row.
        *("--seq_length", str(2 * tokens), *(() if is_pair else ("--packing", "on"))),
        *(("--gpu_memory_limit", str(arguments.gpu_memory_limit)) if arguments.gpu_memory_limit else ()),
        *(("--teacher_model", str(arguments.teacher)) if objective == "distill" else ()),
        *further,
    ]
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    print(f"{objective}: {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode:
        return Measured(objective, problem=output.strip().splitlines()[-1][:200])
    steps = [json.loads(line) for line in (folder / objective / "metrics.jsonl").read_text().splitlines()]
    found, memory = PASS.search(output), [step["peak_gpu_memory_gib"] for step in steps]
    return Measured(
        objective,
        statistics.median(step["step_seconds"] for step in steps[min(SKIPPED, len(steps) - 1) :]),
        None if None in memory else max(memory),
        None if found is None else float(found[1] or found[2]),
        steps[0],
    )


def table(measured: list[Measured], steps: int) -> str:
    """Return the table; `steps` steps have as many rows as the pass before step 1."""
    base = next((each for each in measured if each.objective == "sft" and each.seconds), Measured("sft"))
    lines = [["objective", "step s", "x sft", "GPU GiB", "x sft", "pass s", "of sft's epoch", "first step"]]
    for each in measured:
        if each.first is None:
            lines.append([each.objective, *[""] * 6, each.problem])
            continue
        first = f"loss {each.first['loss']!r}"
        if each.objective == "dpo":
            first += ", ln 2 to fp32's bits" if each.first["loss"] == ln_2() else ", NOT ln 2"
        first += "".join(
            f", {name} {each.first[name]!r}" for name in ("ratio", "rewards/margins") if name in each.first
        )
        lines.append(
            [
                each.objective,
                number(each.seconds, "{:.3f}"),
                ratio(each.seconds, base.seconds),
                number(each.gpu_gib, "{:.2f}"),
                ratio(each.gpu_gib, base.gpu_gib),
                number(each.pass_seconds, "{:.2f}"),
                ratio(each.pass_seconds, None if base.seconds is None else steps * base.seconds),
                first,
            ]
        )
    return format_columns(lines)


def ln_2() -> float:
    """Return ln 2, rounded to fp32."""
    import torch

    return float(torch.tensor(math.log(2), dtype=torch.float32))


def number(value: float | None, form: str) -> str:
    """Return the value, or nothing."""
    return "" if value is None else form.format(value)


def ratio(one: float | None, other: float | None) -> str:
    """Return the quotient, or nothing."""
    return "" if one is None or not other else f"{one / other:.3f}"


def main() -> None:
    """Run each objective, and print the table."""
    own, further = split_words(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("--num_layers", type=int)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=["sft", "dpo"])
    parser.add_argument("--batch_size", type=int, default=16, help="rows of a step")
    parser.add_argument("--seq_length", type=int, default=1024, help="tokens of each of the two sequences of a row")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gpu_memory_limit", type=float)
    parser.add_argument("--teacher", type=Path, help="folder with weights; needed for distill")
    arguments = parser.parse_args(own)
    with tempfile.TemporaryDirectory(prefix="objectives.") as name:
        folder = Path(name)
        write_config(folder / "model", arguments.size, arguments.num_layers)
        measured = [run(each, folder / "model", arguments, further, folder) for each in arguments.objectives]
    print(table(measured, arguments.steps))


if __name__ == "__main__":
    main()
