"""Twenty steps of TRL's trainers on a tiny model, and the inputs of these steps.

    python -m harness.trl_parity make FOLDER                # model, pairs, and the pairs of each step
    python -m harness.trl_parity record FOLDER RESULTS      # with TRL; `bash scripts/parity` does both

A tiny Llama in fp32 on a CPU. A step is one batch of TRL: its means are over the pairs of a batch (those of cross
entropies over the tokens of a batch), and the means of Mobius are over the pairs (the tokens) of a step.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.other_trainers import make_model

Floats = npt.NDArray[np.float32]
NUM_STEPS = 20
NUM_ENTRIES = 128
"""Entries of each tensor that are recorded."""
SHARED = {"learning_rate": 2e-4, "weight_decay": 0.1, "adam_epsilon": 1e-6, "lr_scheduler_type": "constant"}
"""Options of both, under these names."""


@dataclass(frozen=True)
class Layout:
    """Rows of a step."""

    batch_size: int
    seq_length: int
    packing: str

    @property
    def options(self) -> str:
        """Options of Mobius."""
        return f"--batch_size {self.batch_size} --seq_length {self.seq_length} --packing {self.packing}"


LAYOUTS: Mapping[str, Layout] = {"rows": Layout(8, 46, "off"), "packed": Layout(4, 120, "on")}


@dataclass(frozen=True)
class Case:
    """One loss: options of Mobius; trainer and settings of TRL."""

    options: str
    trainer: str
    max_grad_norm: float
    """Smaller than the norms of a part of the steps."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "rows"


TRAINERS = {
    "dpo": ("trl", "DPOConfig", "DPOTrainer"),
    "orpo": ("trl.experimental.orpo", "ORPOConfig", "ORPOTrainer"),
    "cpo": ("trl.experimental.cpo", "CPOConfig", "CPOTrainer"),
}
"""Module, configuration and trainer."""
CASES: Mapping[str, Case] = {
    "sigmoid": Case("--objective dpo", "dpo", 1.5, {"loss_type": ["sigmoid"]}),
    "hinge": Case("--objective dpo --loss_type hinge --beta 0.05", "dpo", 2.0, {"loss_type": ["hinge"], "beta": 0.05}),
    "ipo": Case("--objective dpo --loss_type ipo", "dpo", 34.0, {"loss_type": ["ipo"]}),
    "robust": Case(
        "--objective dpo --loss_type robust --label_smoothing 0.1",
        "dpo",
        2.0,
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "apo_zero": Case("--objective dpo --loss_type apo_zero", "dpo", 0.9, {"loss_type": ["apo_zero"]}),
    "orpo": Case("--objective orpo", "orpo", 2.2),
    "simpo": Case("--objective simpo --beta 1", "cpo", 2.0, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 1.0}),
    "packed": Case("--objective dpo", "dpo", 1.2, layout="packed"),
}

_NAMES = ("Ada", "Bo", "Cy", "Dora", "Eli")
_ANSWERS = {
    "sums?\n": ("The sum is clear.", "I do not know, ask me later."),
    "rivers?\n": ("In the north.", "No."),
    "giraffes?\nFi": ("ve metres, some more.", "ve inches."),
    "grass?\n": ("Green, in spring.", "Green, and brown as soon as summer has been dry."),
}


def _records() -> Iterator[dict[str, str]]:
    """Yield twenty pairs: long and short answers, with a common beginning, within a word of the prompt, and cut."""
    for name in _NAMES:
        for question, (chosen, rejected) in _ANSWERS.items():
            answer = f"{chosen} {name}." * (2 if name == "Eli" else 1)
            yield {"prompt": f"<|begin|>{name}: {question}", "chosen": answer, "rejected": rejected}


def words_of(case: Case, *options: str) -> list[str]:
    """Return the options of a run of Mobius in the folder of `make`."""
    usual = f"--model_path model --dataset pairs.jsonl --device cpu --dtype fp32 --num_iterations {NUM_STEPS}"
    shared = [word for name, value in SHARED.items() for word in (f"--{name}", str(value))]
    usual += f" --warmup_steps 0 --max_grad_norm {case.max_grad_norm} {LAYOUTS[case.layout].options} {case.options}"
    return [*usual.split(), *shared, *options]


def make(folder: Path) -> None:
    """Write model, pairs, and the numbers of the pairs of each step, by layout."""
    from transformers import AutoTokenizer

    from mobius.config.cli import parse_args
    from mobius.training.data import RunData

    make_model(folder / "model", num_layers=4)
    lines = "".join(f"{json.dumps(record)}\n" for record in _records())
    (folder / "pairs.jsonl").write_text(lines, encoding="utf-8")
    os.chdir(folder)
    tokenizer, steps = AutoTokenizer.from_pretrained("model"), dict[str, list[list[int]]]()
    for case in CASES.values():
        data = RunData.of(parse_args(words_of(case), num_ranks=1), tokenizer, is_first=True)
        batches = [batch for batch, _ in zip(data.batches, range(NUM_STEPS), strict=False)]
        steps[case.layout] = [pairs_of(batch.sequence_numbers) for batch in batches]
    Path("steps.json").write_text(json.dumps(steps), encoding="utf-8")


def pairs_of(sequence_numbers: npt.NDArray[np.int64] | None) -> list[int]:
    """Return the numbers of a step's pairs, in the order of its rows."""
    assert sequence_numbers is not None
    numbers = sequence_numbers[sequence_numbers >= 0]
    return [int(number) // 2 for number in numbers[::2]]


def record(folder: Path, results: Path) -> None:
    """Train each case by TRL in `folder`, and write what it logs and what it has trained."""
    os.chdir(folder)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    recorded = {name: _train(case) for name, case in CASES.items()}
    results.write_text(f"{json.dumps({'versions': versions, **recorded}, indent=1)}\n", encoding="utf-8")


def _train(case: Case) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = importlib.import_module(TRAINERS[case.trainer][0])
    config_class, trainer_class = (getattr(module, name) for name in TRAINERS[case.trainer][1:])
    steps = json.loads(Path("steps.json").read_text(encoding="utf-8"))[case.layout]
    records = list(_records())
    losses, logs = list[float](), list[dict[str, float]]()

    class Recorded(trainer_class):  # type: ignore[misc, valid-type]
        """The trainer on the batches of the steps; it keeps what it would round in its logs."""

        def get_train_dataloader(self) -> Any:
            ends = np.cumsum([len(step) for step in steps])
            batches = [list(range(end - len(step), end)) for step, end in zip(steps, ends, strict=True)]
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            losses.append(float(loss))
            return loss

        def log(self, given: dict[str, float], start_time: float | None = None) -> None:
            super().log(given, start_time)
            logs.append(dict(given))

    torch.set_num_threads(1)
    reference = {"precompute_ref_log_probs": True} if case.trainer == "dpo" else {}
    config = config_class(
        output_dir="out",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=LAYOUTS[case.layout].batch_size,
        max_length=LAYOUTS[case.layout].seq_length // 2,
        max_grad_norm=case.max_grad_norm,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **SHARED,
        **reference,
        **case.settings,
    )
    trainer = Recorded(
        AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([records[pair] for step in steps for pair in step]),
        processing_class=AutoTokenizer.from_pretrained("model"),
    )
    trainer.train()
    own = ("nll_loss", "log_odds_ratio") if case.trainer == "orpo" else ()
    kept = [name for name in logs[0] if name.startswith(("grad_norm", "rewards/", "logps/", *own))]
    numbers = {name: [log[name] for log in logs[:NUM_STEPS]] for name in kept}
    weights = {name: value.detach().numpy() for name, value in trainer.model.named_parameters()}
    return {"steps": steps, "loss": losses, **numbers, "weights": record_of(weights)}


def record_of(weights: Mapping[str, Floats]) -> dict[str, dict[str, Any]]:
    """Return some entries of each tensor, base64 of fp32, and its largest absolute value."""
    return {
        name: {"entries": base64.b64encode(sampled(value).tobytes()).decode(), "largest": float(np.abs(value).max())}
        for name, value in weights.items()
    }


def entries_of(recorded: Mapping[str, Any]) -> Floats:
    """Return the entries of a tensor in a record."""
    return np.frombuffer(base64.b64decode(recorded["entries"]), dtype=np.float32)


def sampled(values: Floats) -> Floats:
    """Return entries of a tensor, chosen by its size; of a matrix of the vocabulary only those of frequent tokens."""
    frequent = values[:512] if values.ndim > 1 and len(values) > 512 else values
    flat = np.ascontiguousarray(frequent, dtype=np.float32).reshape(-1)
    return flat[np.random.default_rng(len(flat)).permutation(len(flat))[:NUM_ENTRIES]]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder]:
            make(Path(folder))
        case ["record", folder, results]:
            record(Path(folder), Path(results).resolve())
        case _:
            sys.exit(__doc__)
