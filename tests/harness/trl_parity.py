"""Twenty steps of TRL's trainers on a tiny model, and the inputs of these steps.

    python -m harness.trl_parity make FOLDER                # models, data, and the units of each step
    python -m harness.trl_parity record FOLDER RESULTS      # with TRL; `bash scripts/parity` does both

A tiny Llama in fp32 on a CPU. A step is one batch of TRL: its means are over the pairs of a batch (those of cross
entropies over the tokens of a batch), and the means of Mobius are over the pairs (the tokens) of a step.

TRL's KTOTrainer makes mismatched answers inside each `per_device_train_batch_size` samples of its dataset, and Mobius
inside the whole dataset, so that size is the dataset's here. The policy trainers get the completions of a file in place
of sampling, once, and take all steps from them; so the probability before step 1 is that of both.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import json
import os
import shutil
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
SHARED = {"weight_decay": 0.1, "adam_epsilon": 1e-6, "lr_scheduler_type": "constant"}
"""Options of both, under these names."""


@dataclass(frozen=True)
class Layout:
    """Rows of a step."""

    file: str
    batch_size: int
    seq_length: int
    packing: str = "off"
    sequences: int = 2
    """Sequences of a unit."""

    @property
    def options(self) -> str:
        """Options of Mobius."""
        sizes = f"--batch_size {self.batch_size} --seq_length {self.seq_length} --packing {self.packing}"
        return f"--dataset {self.file} {sizes}"

    @property
    def max_length(self) -> int:
        """Tokens of a sequence, at which both cut it; TRL's RewardTrainer leaves it out."""
        return self.seq_length // self.sequences


LAYOUTS: Mapping[str, Layout] = {
    "rows": Layout("pairs.jsonl", 2, 46),
    "packed": Layout("pairs.jsonl", 4, 70, "on"),
    "uncut": Layout("pairs.jsonl", 2, 70),
    "margins": Layout("margins.jsonl", 2, 70),
    "judged": Layout("judged.jsonl", 6, 35, sequences=1),
    "rollouts": Layout("rollouts.jsonl", 12, 16, sequences=1),
    "sampled": Layout("sampled.jsonl", 12, 16, sequences=1),
}


@dataclass(frozen=True)
class Case:
    """One loss: options of Mobius; trainer and settings of TRL."""

    options: str
    trainer: str
    max_grad_norm: float
    """Smaller than the norms of a part of the steps."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "rows"

    @property
    def model(self) -> str:
        """Folder of the model."""
        return "reward_model" if self.trainer == "reward" else "model"


@dataclass(frozen=True)
class Trainer:
    """Trainer of TRL."""

    module: str
    name: str
    numbers: tuple[str, ...]
    """Numbers that it logs under the names of Mobius; with "/" at the end, all numbers that begin so."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 2e-4


_PAIRED = ("grad_norm", "rewards/", "logps/")
_CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean")
_SAMPLING = ("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean")
_SAMPLED = ("grad_norm", "reward", *_CLIPPED, "completions/mean_length")
_ROLLOUTS = {"num_generations": 4, "num_iterations": NUM_STEPS, "steps_per_generation": 1, "shuffle_dataset": False}
TRAINERS: Mapping[str, Trainer] = {
    "dpo": Trainer("trl", "DPO", _PAIRED, {"precompute_ref_log_probs": True}),
    "orpo": Trainer("trl.experimental.orpo", "ORPO", (*_PAIRED, "nll_loss", "log_odds_ratio")),
    "cpo": Trainer("trl.experimental.cpo", "CPO", _PAIRED),
    "reward": Trainer("trl", "Reward", ("grad_norm", "accuracy", "margin", "mean_reward")),
    "kto": Trainer(
        "trl", "KTO", (*_PAIRED, "kl"), {"precompute_ref_log_probs": True, "per_device_train_batch_size": 20}
    ),
    "grpo": Trainer("trl", "GRPO", (*_SAMPLED, "kl", *_SAMPLING), {**_ROLLOUTS, "beta": 0.0}, 5e-5),
    "rloo": Trainer("trl", "RLOO", _SAMPLED, {**_ROLLOUTS, "beta": 0.0}, 5e-5),
}
CASES: Mapping[str, Case] = {
    "sigmoid": Case("--objective dpo", "dpo", 2.0, {"loss_type": ["sigmoid"]}),
    "hinge": Case("--objective dpo --loss_type hinge --beta 0.05", "dpo", 2.4, {"loss_type": ["hinge"], "beta": 0.05}),
    "ipo": Case("--objective dpo --loss_type ipo", "dpo", 48.0, {"loss_type": ["ipo"]}),
    "robust": Case(
        "--objective dpo --loss_type robust --label_smoothing 0.1",
        "dpo",
        2.6,
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "apo_zero": Case("--objective dpo --loss_type apo_zero", "dpo", 1.2, {"loss_type": ["apo_zero"]}),
    "orpo": Case("--objective orpo", "orpo", 2.2, layout="packed"),
    "simpo": Case("--objective simpo --beta 1", "cpo", 2.6, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 1.0}),
    "packed": Case("--objective dpo", "dpo", 1.4, layout="packed"),
    "reward": Case("--objective reward", "reward", 3.8, layout="uncut"),
    "centred": Case(
        "--objective reward --center_rewards 0.1",
        "reward",
        5.2,
        {"center_rewards_coefficient": 0.1},
        layout="margins",
    ),
    "kto": Case(
        "--objective kto --desirable_weight 1.5",
        "kto",
        0.9,
        {"desirable_weight": 1.5},
        layout="judged",
    ),
    "apo_zero_unpaired": Case(
        "--objective kto --loss_type apo_zero_unpaired",
        "kto",
        0.6,
        {"loss_type": "apo_zero_unpaired"},
        layout="judged",
    ),
    "grpo": Case(
        "--objective policy --policy_loss grpo",
        "grpo",
        1.5,
        {
            "loss_type": "grpo",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
        layout="sampled",
    ),
    "dapo": Case(
        "--objective policy --kl_weight 0.1 --epsilon_high 0.28",
        "grpo",
        1.8,
        {"loss_type": "dapo", "beta": 0.1, "epsilon_high": 0.28},
        layout="rollouts",
    ),
    "gspo": Case(
        "--objective policy --policy_loss gspo --epsilon_low 0.3",
        "grpo",
        1.9,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.3},
        layout="rollouts",
    ),
    "rloo": Case(
        "--objective policy --policy_loss rloo --epsilon_low 0.5 --epsilon_high 1",
        "rloo",
        1.4,
        {"epsilon": 0.5, "epsilon_high": 1.0},
        layout="rollouts",
    ),
}

_NAMES = ("Ada", "Bo", "Cy", "Dora", "Eli")
_ANSWERS = {
    "sums?\n": ("The sum is clear.", "I do not know, ask me later."),
    "rivers?\n": ("In the north.", "No."),
    "giraffes?\nFi": ("ve metres, some more.", "ve inches."),
    "grass?\n": ("Green, in spring.", "Green, and brown as soon as summer has been dry."),
}


def _pairs() -> Iterator[dict[str, str]]:
    """Yield twenty pairs: long and short answers, with a common beginning, within a word of the prompt, and cut."""
    for name in _NAMES:
        for question, (chosen, rejected) in _ANSWERS.items():
            answer = f"{chosen} {name}." * (2 if name == "Eli" else 1)
            yield {"prompt": f"<|begin|>{name}: {question}", "chosen": answer, "rejected": rejected}


def _judged() -> Iterator[dict[str, Any]]:
    """Yield twenty answers, more good ones than bad ones."""
    for number, pair in enumerate(_pairs()):
        side = "rejected" if number % 3 == 1 else "chosen"
        yield {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}


def _rollouts(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield four completions of each of three prompts, with rewards, and numbers of a sampler that is somewhat off."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    generator = np.random.default_rng(11)
    for name in _NAMES[:3]:
        prompt = f"<|begin|>{name}: sums?\n"
        prompt_ids = tokenizer(prompt)["input_ids"]
        for length in (1, 2, 3, 5):
            completion_ids = generator.integers(3, 500, length).tolist()
            with torch.no_grad():
                logits = model(torch.tensor([prompt_ids + completion_ids])).logits[0, len(prompt_ids) - 1 : -1]
            logps = logits.log_softmax(-1).gather(-1, torch.tensor(completion_ids).unsqueeze(-1)).squeeze(-1)
            sampler = (logps.numpy() + generator.normal(0, 0.5, len(completion_ids))).tolist()
            yield {
                "prompt": prompt,
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "reward": float(generator.integers(0, 5)) / 8,
                "logprobs": [min(number, 0.0) for number in sampler[:-1]] + [None],
            }


def words_of(case: Case, *options: str) -> list[str]:
    """Return the options of a run of Mobius in the folder of `make`."""
    usual = f"--model_path {case.model} --device cpu --dtype fp32 --num_iterations {NUM_STEPS}"
    shared = [word for name, value in SHARED.items() for word in (f"--{name}", str(value))]
    usual += f" --learning_rate {TRAINERS[case.trainer].learning_rate}"
    usual += f" --warmup_steps 0 --max_grad_norm {case.max_grad_norm} {LAYOUTS[case.layout].options} {case.options}"
    return [*usual.split(), *shared, *options]


def make(folder: Path) -> None:
    """Write models, data, and the numbers of the units of each step, by layout."""
    from transformers import AutoTokenizer

    from mobius.config.cli import parse_args
    from mobius.training.data import RunData

    make_model(folder / "model")
    _make_reward_model(folder)
    margins = [{**pair, "margin": number % 4 / 4} for number, pair in enumerate(_pairs())]
    sampled = list(_rollouts(folder))
    rollouts = [{name: value for name, value in each.items() if name != "logprobs"} for each in sampled]
    files = {"pairs": _pairs(), "margins": margins, "judged": _judged(), "rollouts": rollouts, "sampled": sampled}
    for name, records in files.items():
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    os.chdir(folder)
    tokenizer, steps = AutoTokenizer.from_pretrained("model"), dict[str, list[list[int]]]()
    for layout, case in {case.layout: case for case in CASES.values()}.items():
        data = RunData.of(parse_args(words_of(case, "--num_chunks", "1"), num_ranks=1), tokenizer, is_first=True)
        batches = [batch for batch, _ in zip(data.batches, range(NUM_STEPS), strict=False)]
        steps[layout] = [units_of(batch.sequence_numbers, LAYOUTS[layout].sequences) for batch in batches]
    Path("steps.json").write_text(json.dumps(steps), encoding="utf-8")


def _make_reward_model(folder: Path) -> None:
    """Write the model with a head that gives a score."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(folder / "model", folder / "reward_model")
    tensors = load_file(folder / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = np.random.default_rng(13).normal(0, 0.1, (1, 32)).astype(np.float32)
    save_file(tensors, folder / "reward_model" / "model.safetensors", {"format": "pt"})
    path = folder / "reward_model" / "config.json"
    fields = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def units_of(sequence_numbers: npt.NDArray[np.int64] | None, sequences: int) -> list[int]:
    """Return the numbers of a step's units of `sequences`, in the order of its rows."""
    assert sequence_numbers is not None
    numbers = sequence_numbers[sequence_numbers >= 0]
    return [int(number) // sequences for number in numbers[::sequences]]


def record(folder: Path, results: Path) -> None:
    """Train each case by TRL in `folder`, and write what it logs and what it has trained."""
    os.chdir(folder)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    recorded = {name: _train(case) for name, case in CASES.items()}
    results.write_text(f"{json.dumps({'versions': versions, **recorded}, indent=1)}\n", encoding="utf-8")


def _train(case: Case) -> dict[str, Any]:
    import torch
    import transformers
    from datasets import Dataset
    from torch.utils.data import DataLoader

    trainer, layout = TRAINERS[case.trainer], LAYOUTS[case.layout]
    module = importlib.import_module(trainer.module)
    steps = json.loads(Path("steps.json").read_text(encoding="utf-8"))[case.layout]
    records = [json.loads(line) for line in Path(layout.file).read_text(encoding="utf-8").splitlines()]
    has_logprobs = "logprobs" in records[0]
    losses, logs = list[float](), list[dict[str, float]]()

    class Recorded(getattr(module, f"{trainer.name}Trainer")):  # type: ignore[misc]
        """The trainer, which keeps what it would round in its logs."""

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            losses.append(float(loss))
            return loss

        def log(self, given: dict[str, float], start_time: float | None = None) -> None:
            super().log(given, start_time)
            logs.append(dict(given))

    class OnSteps(Recorded):
        """The trainer on the batches of the steps."""

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=steps, collate_fn=self.data_collator)

    class OnRollouts(Recorded):
        """The trainer on the completions of the file."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any) -> Any:
            assert prompt_ids == [each["prompt_ids"] for each in records]
            completions = [each["completion_ids"] for each in records]
            logprobs = [each["logprobs"] for each in records] if has_logprobs else None
            return (completions, logprobs) if trainer.name == "GRPO" else completions

    torch.set_num_threads(1)
    config = getattr(module, f"{trainer.name}Config")(
        **{
            "output_dir": "out",
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": layout.batch_size,
            "max_grad_norm": case.max_grad_norm,
            "optim": "adamw_torch",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "learning_rate": trainer.learning_rate,
            **SHARED,
            **trainer.settings,
            **case.settings,
        }
    )
    samples = "completion_ids" in records[0]
    if samples:
        given = {"reward_funcs": lambda completions, **_: [each["reward"] for each in records]}
        records_given = [{"prompt": each["prompt"]} for each in records[:: config.num_generations]]
    else:
        config.max_length, given, records_given = layout.max_length, {}, records
    auto = (
        transformers.AutoModelForSequenceClassification
        if case.trainer == "reward"
        else transformers.AutoModelForCausalLM
    )
    run = (OnRollouts if samples else OnSteps)(
        auto.from_pretrained(case.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(records_given),
        processing_class=transformers.AutoTokenizer.from_pretrained("model"),
        **given,
    )
    run.use_vllm = has_logprobs  # the correction for the sampler is made with vLLM only
    run.train()
    names = [name for name in logs[0] if name in trainer.numbers or f"{name.partition('/')[0]}/" in trainer.numbers]
    kept = [name for name in names if any(log.get(name) for log in logs)]
    # The policy trainers tell some numbers of the rollouts only once.
    numbers = {name: [log[name] for log in logs[:NUM_STEPS] if name in log] for name in kept}
    weights = {name: value.detach().numpy() for name, value in run.model.named_parameters()}
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
