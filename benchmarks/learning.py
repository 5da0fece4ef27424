"""Fine-tunes a model with each value of an option and several seeds, and compares the evaluation losses.

    python scripts/convert_smollm2.py output/smollm2
    python benchmarks/learning.py output/learning --option optimizer_states --seeds 5 -- --model_path output/smollm2 \\
        --bf16 --dataset assets/docstrings/train.jsonl --val_size 200 --batch_size 8 --num_chunks 2 --num_stages 4 \\
        --seq_length 512 --num_train_epochs 3 --learning_rate 1e-4 --eval_strategy steps --eval_steps 20 --do_eval

With --variant, runs with other options are compared instead: `--variant "DoRA=--use_dora"`.

A seed decides on the order of samples and on the noise with which states are rounded. What stands behind ` -- ` goes to
every run. It prints a table, and draws the mean of the evaluation losses over the steps into FOLDER/learning.png. Runs
that have ended in FOLDER are not made again.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import free_port, split_words

from mobius.units import format_columns

ROOT = Path(__file__).resolve().parents[1]
VALUES = {"optimizer_states": ("fp32", "bf16", "compact"), "matmul_dtype": ("bf16", "fp8", "int8")}
"""Values of each option that can be compared."""


def train(folder: Path, name: str, variant: str, seed: int, options: Sequence[str]) -> Path:
    """Run once with the options of `variant`, unless that is done; returns the run's folder."""
    own = folder / f"{name.replace(' ', '-')}-{seed}"
    if (own / "eval_results.json").is_file():
        return own
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", str(free_port()), "main.py"]
    words = [*shlex.split(variant), "--seed", str(seed), "--save_dir", str(own), "--save_params", "none"]
    words += ["--save_results", str(folder / f"{own.name}.txt"), "--save_strategy", "no", "--overwrite_output_dir"]
    done = subprocess.run(
        [sys.executable, *command, *options, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")},
    )
    if done.returncode:
        raise SystemExit(f"{own.name} failed:\n{done.stdout[-3000:]}")
    return own


def losses_of(run: Path) -> dict[int, float]:
    """Evaluation loss by step."""
    events = map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return {event["step"]: event["numbers"]["loss"] for event in events if event["event"] == "evaluation"}


def draw(
    curves: dict[str, dict[int, list[float]]], title: str, path: Path, x: str = "step", y: str = "evaluation loss"
) -> None:
    """Draw means over the seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for value, by_step in curves.items():
        steps = sorted(by_step)
        axes.plot(steps, [statistics.mean(by_step[step]) for step in steps], label=value)
        lowest, highest = ([edge(by_step[step]) for step in steps] for edge in (min, max))
        axes.fill_between(steps, lowest, highest, alpha=0.2)
    axes.set(xlabel=x, ylabel=y)
    axes.legend(title=title)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--option", choices=VALUES, default="optimizer_states", help="(default: %(default)s)")
    parser.add_argument("--variant", action="append", default=[], help="NAME=OPTIONS; may be given several times")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at_once", type=int, default=1, help="runs that share the machine (default: %(default)s)")
    own, options = split_words(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    option = "variant" if arguments.variant else arguments.option
    variants = {value: f"--{option} {value}" for value in VALUES.get(option, ())}
    variants |= dict(each.split("=", 1) for each in arguments.variant)
    places = [(value, seed) for seed in range(arguments.seeds) for value in variants]
    with ThreadPoolExecutor(arguments.at_once) as threads:
        runs = dict(
            zip(
                places,
                threads.map(lambda place: train(folder, place[0], variants[place[0]], place[1], options), places),
                strict=True,
            )
        )
    rows, curves = [[option, "mean", "spread", "exact match", *map(str, range(arguments.seeds))]], {}
    for value in variants:
        own_runs = [runs[value, seed] for seed in range(arguments.seeds)]
        curves[value] = {step: [losses_of(run)[step] for run in own_runs] for step in losses_of(own_runs[0])}
        last = [json.loads((run / "eval_results.json").read_text())["eval_loss"] for run in own_runs]
        answers = [run / "predict_results.json" for run in own_runs if (run / "predict_results.json").is_file()]
        matches = [json.loads(path.read_text())["predict_exact_match"] for path in answers]
        shown = f"{statistics.mean(matches):.1f}" if matches else "-"
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        rows.append([value, f"{statistics.mean(last):.4f}", f"{spread:.4f}", shown, *(f"{loss:.4f}" for loss in last)])
    print(format_columns(rows, indent=""))
    draw(curves, option, folder / "learning.png")


if __name__ == "__main__":
    main()
