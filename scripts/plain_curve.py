"""Draws the losses of a run beside those of a plain loop of transformers and torch: do both learn alike?

    python scripts/plain_curve.py output/curve -- --dataset numbers.jsonl [options of main.py]

Both begin with the weights of the folder's `start`: those of --model_path, or random ones of its shape. The pipeline
runs on two CPU processes and leaves `mobius`; then scripts/plain_training.py's loop, one sample of a packed row at a
time, leaves `plain.json`. `learning_curve.png` shows both, and how far they are apart: rounding differs, and training
amplifies it. How much, a second plain loop shows, which begins with one weight moved to the next number of fp32.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mobius.config.cli import parse_args
from mobius.config.config import ModelConfig
from mobius.errors import MobiusError
from mobius.log import printable
from mobius.models.families import load_model_config, locate_model
from mobius.models.weights import folder_has_weights

ROOT = Path(__file__).resolve().parent.parent
NUM_RANKS = 2


def write_start(options: ModelConfig, folder: Path, seed: int) -> None:
    """Write the model that both begin with: the weights of `--model_path`, or random ones if it has none, in fp32."""
    source = locate_model(options.model_path)
    config = load_model_config(source, options)
    torch.manual_seed(seed)
    if folder_has_weights(source):
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, trust_remote_code=False
        )
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)


def run_pipeline(options: Sequence[str], folder: Path) -> list[float]:
    """Losses of the steps of a run whose model is left in `folder`; raises CalledProcessError if it fails."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(NUM_RANKS), str(ROOT / "main.py")]
    saved = ["--save_dir", folder, "--save_params", folder.with_suffix(".pt")]
    saved += ["--save_results", folder.with_suffix(".txt"), "--overwrite_output_dir"]
    subprocess.run([sys.executable, *launch, *options, *map(str, saved)], check=True)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def write_nudged(start: Path, folder: Path) -> None:
    """Write the model of `start` with one weight moved by the least that fp32 can."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        weight = next(model.get_decoder().layers.parameters()).view(-1)[:1]
        weight.copy_(weight.nextafter(torch.tensor([torch.inf])))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(start, trust_remote_code=False).save_pretrained(folder)


def draw(mobius: Sequence[float], plain: Sequence[float], nudged: Sequence[float], path: Path) -> None:
    """Write the picture: losses above; below, differences from the plain loop, as shares of its loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), facecolor="white", layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    steps = range(1, len(plain) + 1)
    above.plot(steps, mobius, color="tab:blue", linewidth=4, alpha=0.4, label="Mobius, two processes, packed rows")
    above.plot(steps, plain, color="black", linewidth=0.8, label="transformers and torch, sample by sample")
    above.set(ylabel="loss", yscale="log")
    above.legend(frameon=False)
    for losses, colour, name in ((mobius, "tab:blue", "Mobius"), (nudged, "tab:orange", "plain, one weight nudged")):
        below.plot(steps, relative_differences(losses, plain), color=colour, linewidth=0.8, label=name)
    below.set(xlabel="step", ylabel="difference", yscale="log")
    below.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def relative_differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Absolute difference of each pair, as a share of what is expected."""
    return [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Run both and draw them; returns 2, with one line, on a mistake, or the exit code of a run that failed."""
    from plain_training import train

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("options", nargs="*", help="options of main.py, behind --")
    given = parser.parse_args(argv)
    folder: Path = given.folder
    start = folder / "start"
    options = [*given.options, "--dtype", "fp32", "--device", "cpu"]
    try:
        config = parse_args(options)
        write_start(config.model, start, config.optim.seed)
        options += ["--model_path", str(start)]
        mobius = run_pipeline(options, folder / "mobius")
        write_nudged(start, folder / "nudged")
        cpu = torch.device("cpu")
        plain, nudged = (
            train(parse_args([*options, "--model_path", str(model)]), cpu).losses
            for model in (start, folder / "nudged")
        )
        (folder / "plain.json").write_text(json.dumps({"plain": plain, "nudged": nudged}), encoding="utf-8")
        draw(mobius, plain, nudged, folder / "learning_curve.png")
    except (MobiusError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    for num_steps in sorted({min(10, len(plain)), min(50, len(plain)), len(plain)}):
        pairs = [relative_differences(losses[:num_steps], plain[:num_steps]) for losses in (mobius, nudged)]
        print(f"first {num_steps} steps: at most {max(pairs[0]):.1e} from the plain loss; nudged {max(pairs[1]):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
