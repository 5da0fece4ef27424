"""Records what small training runs compute on CPUs, to the bit, and compares two records.

    python scripts/record_runs.py record before.json                  # this tree, some eight minutes on two cores
    python scripts/record_runs.py record after.json --tree ../other   # another checkout
    python scripts/record_runs.py compare before.json after.json      # ends with 1 and names the runs that differ

A run's record holds the loss and gradient norm of every step, evaluation losses, and a SHA-256 over names, shapes and
bytes of all tensors that it saved. Only the command line is used, so that any two versions can be compared; they must
run on one machine, since processors round differently. A change that keeps every bit proves itself by it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "assets" / "tiny-llama"
SAMPLES = ROOT / "assets" / "docstrings" / "train.jsonl"

_SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "vocab_size": 4128},  # transformers 5.24 adds a token to its tokenizer
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 24, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3"},
    "cohere2": {"model_type": "cohere2", "sliding_window": 24},
    "glm4": {"model_type": "glm4"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite"},
    "qwen3-moe": {"model_type": "qwen3_moe", **_EXPERTS},
    "mixtral": {"model_type": "mixtral", **_EXPERTS},
    "mixtral-router-loss": {"model_type": "mixtral", **_EXPERTS, "output_router_logits": True},
}
"""Small shapes of families; their weights are drawn from the seed of the run."""

_BASE: Mapping[str, Any] = {
    "dataset": "samples.jsonl",
    "seq_length": 64,
    "batch_size": 8,
    "num_chunks": 4,
    "num_stages": 4,
    "num_iterations": 3,
    "learning_rate": 1e-3,
    "dtype": "fp32",
    "device": "cpu",
    "save_strategy": "no",
    "save_params": "none",
    "preprocessing_num_workers": 1,
}


@dataclass(frozen=True)
class Run:
    """Training of a model on a number of ranks; `after` names the runs' folders that must be there before it."""

    model: str = "llama"
    ranks: int = 2
    options: str = ""
    after: str | None = None


RUNS: Mapping[str, Run] = {
    "one rank, one stage": Run(ranks=1, options="--num_stages 1 --num_chunks 1"),
    "one rank": Run(ranks=1),
    "two ranks, one stage each": Run(options="--num_stages 2"),
    "two ranks": Run(),
    "two ranks, eight chunks": Run(options="--num_stages 8 --num_chunks 8"),
    "four ranks": Run(ranks=4),
    "no offload": Run(options="--no_offload"),
    "no prefetch": Run(options="--no_prefetch"),
    "optimizer not overlapped": Run(options="--no_overlap_optimizer"),
    "a resident stage": Run(options="--resident_stages 1"),
    "recompute none": Run(options="--no_offload --recompute none"),
    "recompute elementwise": Run(options="--no_offload --recompute elementwise"),
    "recompute linear": Run(options="--recompute linear --num_slices 2"),
    "activation offloading": Run(options="--activation_offloading on"),
    "two rounds": Run(options="--num_rounds 2"),
    "four rounds, activation offloading": Run(options="--num_rounds 4 --activation_offloading on"),
    "two slices": Run(options="--num_slices 2"),
    "four slices, one rank, two rounds": Run(ranks=1, options="--num_slices 4 --num_rounds 2"),
    "tiles": Run(options="--tile_tokens 32"),
    "not packed": Run(options="--packing off"),
    "text, joined": Run(options="--dataset text.jsonl --packing joined"),
    "two datasets, validation": Run(
        options="--dataset samples.jsonl text.jsonl:0.5 --val_size 8 --eval_strategy epoch"
    ),
    "bf16": Run(options="--dtype bf16"),
    "fp16": Run(options="--dtype fp16"),
    "bf16, fp32 gradients": Run(options="--dtype bf16 --fp32_gradients"),
    "no clipping, polynomial, decay": Run(
        options="--max_grad_norm 0 --lr_scheduler_type polynomial --weight_decay 0.1"
    ),
    "LoRA, one rank": Run(ranks=1, options="--use_lora"),
    "LoRA, head trained": Run(options="--use_lora --additional_target head"),
    "LoRA, slices": Run(model="qwen3", options="--use_lora --num_slices 2"),
    "P-tuning": Run(options="--finetuning_type p_tuning --num_virtual_tokens 4"),
    "LoRA, bf16": Run(options="--use_lora --dtype bf16 --lora_rank 4 --use_rslora"),
    "frozen parts": Run(options="--freeze embedding,layers.0-1"),
    "tied embeddings": Run(model="llama-tied"),
    **{name: Run(model=name) for name in ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "cohere2", "glm4")},
    **{name: Run(model=name) for name in ("olmo2", "granite", "qwen3-moe", "mixtral")},
    "mixtral, router loss, two rounds": Run(model="mixtral-router-loss", options="--num_rounds 2"),
    "replicas": Run(options="--pipeline_ranks 1"),
    "replicas of two ranks, bf16 sums": Run(ranks=4, options="--pipeline_ranks 2 --reduce_dtype bf16 --num_chunks 2"),
    "replicas, qwen3-moe": Run(model="qwen3-moe", options="--pipeline_ranks 1"),
    "saved": Run(options="--save_strategy steps --save_steps 2 --num_iterations 5 --save_params params.pt"),
    "resumed on one rank": Run(
        ranks=1,
        options="--resume_from_checkpoint saved/checkpoint-2 --num_iterations 5 --num_stages 2 --num_rounds 2",
        after="saved",
    ),
    "evaluated, predicted": Run(
        options="--eval_dataset samples.jsonl --eval_strategy steps --eval_steps 1 --do_predict "
        "--max_predict_samples 2 --max_new_tokens 4 --max_samples 32"
    ),
}


def record(tree: Path, chosen: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Play the runs whose names contain `chosen` in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="recorded-") as place:
        folder = Path(place)
        _make_inputs(folder)
        wanted = {name for name in RUNS if chosen is None or chosen in name}
        wanted |= {after for name in wanted if (after := RUNS[name].after) is not None}
        for name in filter(wanted.__contains__, RUNS):
            yield name, _play(name, tree.resolve(), folder)


def _make_inputs(folder: Path) -> None:
    for name, fields in MODELS.items():
        model = folder / "models" / name
        shutil.copytree(TOKENIZER, model, ignore=shutil.ignore_patterns("*.safetensors"))
        vocabulary = json.loads((TOKENIZER / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        config = {"vocab_size": vocabulary, **_SHAPE, **fields}
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = SAMPLES.read_text(encoding="utf-8").splitlines()[:200]
    (folder / "samples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    texts = [json.dumps({"text": " ".join(map(str, json.loads(line).values()))}) for line in lines[:60]]
    (folder / "text.jsonl").write_text("\n".join(texts), encoding="utf-8")


def _play(name: str, tree: Path, folder: Path) -> dict[str, Any]:
    run, save_dir = RUNS[name], folder / name.replace(" ", "-").replace(",", "")
    given = [f"--{option}={value}" for option, value in _BASE.items() if f"--{option} " not in f"{run.options} "]
    given += ["--model_path", str(folder / "models" / run.model), *run.options.split(), "--save_dir", str(save_dir)]
    given += ["--save_results", f"{save_dir}.txt"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run.ranks), str(tree / "main.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *launch, *given], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return {"numbers": list(_numbers(save_dir)), "tensors": dict(_tensors(save_dir))}


def _numbers(save_dir: Path) -> Iterator[dict[str, float]]:
    """Losses and norms of every line of metrics.jsonl, as they were written."""
    for line in (save_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        yield {key: value for key, value in fields.items() if key.endswith("loss") or key == "grad_norm"}


def _tensors(save_dir: Path) -> Iterator[tuple[str, str]]:
    """Path of each file of tensors below the run's folder, and the hash of what is in it."""
    import torch
    from safetensors import safe_open

    for path in sorted(save_dir.rglob("*.safetensors")):
        digest = hashlib.sha256()
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        yield str(path.relative_to(save_dir)), digest.hexdigest()
    for path in sorted(save_dir.rglob("generated_predictions.jsonl")):
        yield str(path.relative_to(save_dir)), hashlib.sha256(path.read_bytes()).hexdigest()


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Print the runs that differ; the exit code."""
    names = [name for name in before if name in after]
    differing = [name for name in names if before[name] != after[name]]
    for name in differing:
        kinds = [kind for kind in ("numbers", "tensors") if before[name][kind] != after[name][kind]]
        print(f"{name}: {' and '.join(kinds)} differ")
    missing = sorted(set(before) ^ set(after))
    if missing:
        print(f"in one record only: {', '.join(missing)}")
    print(f"{len(names) - len(differing)} of {len(names)} runs are the same to the bit")
    return int(bool(differing or not names))


def main() -> int:
    """Record or compare; the exit code is 1 where two records differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    recording = modes.add_parser("record", help="play the runs and write what they computed")
    recording.add_argument("output", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT, help="checkout to run (default: this one)")
    recording.add_argument("--only", help="runs whose names contain this")
    comparing = modes.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.mode == "compare":
        return compare(*(json.loads(path.read_text(encoding="utf-8")) for path in (arguments.before, arguments.after)))
    found = {}
    for name, result in record(arguments.tree, arguments.only):
        found[name] = result
        arguments.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{name}: {result['numbers'][-1] if result['numbers'] else 'no step'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
