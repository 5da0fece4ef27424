"""Measures what a model of 135M learns: from preferences, rewards and a teacher, and by a prompt.

    python scripts/convert_smollm2.py output/smollm2
    python benchmarks/learning_after_sft.py output/after_sft --model output/smollm2 --seeds 5 --workers 5

- `preference`: SFT on descriptions, then DPO on pairs that a rule made (after_sft_tasks.py). The score is the share of
  sampled answers to new prompts that the rule prefers to those of the model before DPO; chance is a half. Where TRL is
  installed, its DPOTrainer learns from the same pairs in the same steps.
- `reward`: a little SFT on sums, then rounds of sampling and `--objective policy`, with reward 1 for a right sum. The
  score is the share of right answers to new sums.
- `teacher`: a small model with random weights learns text from its tokens (`hard`), and also from the likeliest tokens
  of the 135M model (`distill`). The score is the loss of new text; the gain is how much lower it is with the teacher.
- `prompt`: a prompt of 20 vectors learns sums in front of the frozen model, as itself and by P-tuning, by Mobius and by
  peft in the same steps. The score is the share of right answers to new sums.

Writes each measurement as a line of FOLDER/results.jsonl, draws FOLDER/TASK.png, and prints a table. A second call goes
on where the first one ended. What stands behind ` -- ` goes to every run of Mobius.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import after_sft_steps as steps
import after_sft_tasks as tasks
from launch import die_with_parent, end_runs_when_terminated, split_words
from learning import draw

from mobius.process.ranks import prepare_environment
from mobius.units import format_columns

Row = dict[str, Any]
Trainer = Callable[[Sequence[str]], list[float]]
TRAINERS: Mapping[str, Trainer] = {"mobius": steps.train} | ({"trl": steps.train_by_trl} if find_spec("trl") else {})
CORPUS = Path(__file__).resolve().parents[1] / "assets" / "docstrings" / "train.jsonl"
USUAL = (
    "--dtype fp32 --num_stages 1 --num_chunks 1 --warmup_steps 0 --lr_scheduler_type constant --save_strategy no "
    "--save_params none --save_results auto --overwrite_output_dir"
)
"""Options of all runs. fp32, because each result is a next run's start, and bf16 would round small updates away."""
FORM = "--packing off --batch_size 16 --seq_length 16 --num_train_epochs 2 --learning_rate 5e-5"
DPO = "--objective dpo --packing off --batch_size 16 --seq_length 32 --num_train_epochs 1 --learning_rate 4e-6"
SUMS = "--packing off --batch_size 16 --seq_length 12 --num_train_epochs 3 --learning_rate 5e-5"
POLICY = "--objective policy --packing on --batch_size 8 --seq_length 256 --num_train_epochs 1 --learning_rate 4e-6"
TEXT = (
    "--num_layers 4 --embedding_dim 144 --ff_dim 512 --learning_rate 1e-3 --packing on --batch_size 8 --seq_length 256 "
    "--val_size 400 --do_eval --eval_strategy steps"
)
PROMPT = "--packing off --batch_size 16 --seq_length 32 --num_train_epochs 15 --num_virtual_tokens 20"
KINDS = {
    "prompt": "--finetuning_type prompt --learning_rate 3e-2",
    "p_tuning": "--finetuning_type p_tuning --encoder_hidden_size 576 --learning_rate 1e-3",
}
"""How prompts are trained: options by kind."""
DISTILL = "--objective distill --top_k_logprobs 32 --divergence forward --sft_weight 0.5 --teacher_model"


@dataclass(frozen=True)
class Sizes:
    """Numbers of samples, steps and rounds; `answers` and `completions` are those of a prompt."""

    descriptions: int = 256
    pairs: int = 768
    answers: int = 8
    sums: int = 128
    rounds: int = 10
    prompts: int = 128
    completions: int = 8
    student_steps: int = 400
    prompted_sums: int = 200


QUICK = Sizes(
    descriptions=32, pairs=32, answers=1, sums=32, rounds=2, prompts=8, completions=4, student_steps=2, prompted_sums=16
)


class Runs:
    """The folder of all runs: the results of steps, and the rows of measurements."""

    def __init__(self, folder: Path, model: Path, sizes: Sizes, options: Sequence[str], deadline: float) -> None:
        self.folder, self.model, self.sizes, self.options, self.deadline = folder, model, sizes, options, deadline
        self._file, self._lock = folder / "results.jsonl", threading.Lock()
        self.rows: list[Row] = [json.loads(line) for line in self._file.open()] if self._file.exists() else []
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["__main__", "mobius.training.run"])  # imported once, then forked

    def has(self, task: str, side: str, seed: int, step: int, name: str = "score") -> bool:
        """Whether a value has been measured."""
        return seed in curves_of(self.rows, task, name).get(side, {}).get(step, {})

    def add(self, task: str, side: str, seed: int, name: str, values: Mapping[int, float]) -> None:
        """Write values by their steps."""
        with self._lock, self._file.open("a") as file:
            for step, value in values.items():
                if not self.has(task, side, seed, step, name):
                    row = {"task": task, "side": side, "seed": seed, "step": step, "name": name, "value": value}
                    self.rows.append(row)
                    file.write(json.dumps(row) + "\n")
        if name == "score":
            print(f"{task:10}  {side:15}  seed {seed}  step {max(values):3}  {values[max(values)]:.4f}", flush=True)

    def do(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a step in a process of its own; a step that has ended is not done again."""
        output, log = (self.folder / f"{name}.{kind}" for kind in ("json", "log"))
        if not output.is_file():
            output.parent.mkdir(parents=True, exist_ok=True)
            process = self._processes.Process(target=_be_step, args=(function, arguments, output, log))
            process.start()
            while process.is_alive() and time.monotonic() < self.deadline:
                process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
                raise RuntimeError("out of time; the same command goes on")
            if not output.is_file():
                raise RuntimeError(f"{name} failed:\n{log.read_text(errors='replace')[-3000:]}")
        return json.loads(output.read_text())

    def train(
        self, name: str, model: Path, data: Path, words: str, seed: int, trainer: Trainer = steps.train
    ) -> tuple[Path, list[float]]:
        """Train a model; returns its folder, and the loss of each step."""
        folder = self.folder / name
        own = ["--model_path", str(model), "--dataset", str(data), "--save_dir", str(folder), "--seed", str(seed)]
        return folder, self.do(name, trainer, [*own, *USUAL.split(), *words.split(), *self.options])


def _be_step(function: Callable[..., Any], arguments: Sequence[Any], output: Path, log: Path) -> None:
    """Be the process of a step."""
    die_with_parent()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(function(*arguments)))
    partial.rename(output)


def prefer(runs: Runs, seed: int) -> None:
    """Learn from pairs, by Mobius and by TRL."""
    sizes, chance, own, task = runs.sizes, random.Random(seed), f"preference-{seed}", "preference"
    forms = tasks.write(runs.folder / own / "forms.jsonl", tasks.descriptions(sizes.descriptions, chance))
    pairs = tasks.write(runs.folder / own / "pairs.jsonl", tasks.description_pairs(sizes.pairs, chance))
    asked = [thing for thing in tasks.split(tasks.THINGS, held_out=True) for _ in range(sizes.answers)]
    questions = [tasks.question(thing) for thing in asked]
    for side, trainer in TRAINERS.items():
        if not runs.has(task, side, seed, sizes.pairs // 16):
            start, _ = runs.train(f"{own}/start", runs.model, forms, FORM, seed)
            tuned, losses = runs.train(f"{own}/{side}", start, pairs, DPO, seed, trainer)
            after, before = (
                runs.do(f"{own}/{folder.name}-answers", steps.answer, str(folder), [(questions, noise)])[0]
                for noise, folder in enumerate((tuned, start), start=2 * seed)
            )
            score = tasks.win_rate(asked, *([made["text"] for made in each] for each in (after, before)))
            runs.add(task, side, seed, "loss", dict(enumerate(losses, start=1)))
            runs.add(task, side, seed, "score", {0: 0.5, len(losses): score})


def practise(runs: Runs, seed: int) -> None:
    """Learn sums by rounds of samples and rewards."""
    sizes, chance, own, task = runs.sizes, random.Random(seed), f"reward-{seed}", "reward"
    if runs.has(task, "mobius", seed, sizes.rounds):
        return
    trained, tested = (tasks.split(tasks.SUMS, held_out=held_out) for held_out in (False, True))
    data = tasks.write(runs.folder / own / "sums.jsonl", tasks.sum_samples(sizes.sums, chance))
    policy, _ = runs.train(f"{own}/round-0", runs.model, data, SUMS, seed)
    for number in range(sizes.rounds + 1):
        asked = [prompt for prompt in chance.sample(trained, sizes.prompts) for _ in range(sizes.completions)]
        prompts = [(tested, None), (asked, 100 * seed + number)]
        greedy, sampled = runs.do(f"{own}/answers-{number}", steps.answer, str(policy), prompts)
        for prompt, made in zip((*tested, *asked), (*greedy, *sampled), strict=True):
            made |= {"reward": float(made["text"].strip() == tasks.right_sum(prompt)), "group": prompt}
        for name, answers in (("score", greedy), ("reward", sampled)):
            runs.add(task, "mobius", seed, name, {number: statistics.mean(each["reward"] for each in answers)})
        is_mixed = len({(made["group"], made["reward"]) for made in sampled}) > sizes.prompts
        if number < sizes.rounds and is_mixed:  # else there is nothing to learn, and Mobius refuses the data
            data = tasks.write(runs.folder / own / f"rollouts-{number}.jsonl", sampled)
            before, (policy, _) = policy, runs.train(f"{own}/round-{number + 1}", policy, data, POLICY, seed)
            shutil.rmtree(before, ignore_errors=True)


def imitate(runs: Runs, seed: int) -> None:
    """Learn text with and without a teacher."""
    own, last = f"teacher-{seed}", runs.sizes.student_steps
    data = tasks.write(runs.folder / own / "texts.jsonl", tasks.texts(CORPUS))
    no_weights = shutil.ignore_patterns("*.safetensors*")
    student = shutil.copytree(runs.model, runs.folder / own / "student", ignore=no_weights, dirs_exist_ok=True)
    words = f"{TEXT} --num_iterations {last} --eval_steps {max(1, last // 10)}"
    for side, options in (("hard", ""), ("distill", f"{DISTILL} {runs.model}")):
        if not runs.has("teacher", side, seed, last):
            folder, _ = runs.train(f"{own}/{side}", student, data, f"{words} {options}", seed)
            events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
            numbers = {event["step"]: event["numbers"] for event in events if event["event"] == "evaluation"}
            losses = {step: each.get("cross_entropy", each["loss"]) for step, each in numbers.items()}
            runs.add("teacher", side, seed, "score", losses)


def prompt(runs: Runs, seed: int) -> None:
    """Learn sums by prompts, by Mobius and by peft."""
    own, tested = f"prompt-{seed}", tasks.split(tasks.SUMS, held_out=True)[: runs.sizes.prompts]
    samples = tasks.sum_samples(runs.sizes.prompted_sums, random.Random(seed))
    data = tasks.write(runs.folder / own / "sums.jsonl", samples)

    def share_of_right(name: str, folder: Path) -> float:
        (made,) = runs.do(f"{own}/{name}-answers", steps.answer, str(folder), [(tested, None)])
        texts = [str(answer["text"]).strip() for answer in made]
        return sum(map(str.__eq__, texts, map(tasks.right_sum, tested))) / len(tested)

    for kind, words in KINDS.items():
        for by, trainer in (("mobius", steps.train), ("peft", steps.train_by_peft)):
            name = f"{kind}-{by}"
            if not runs.has("prompt", name, seed, 1):
                folder, losses = runs.train(f"{own}/{name}", runs.model, data, f"{PROMPT} {words}", seed, trainer)
                score = {0: share_of_right("base", runs.model), 1: share_of_right(name, folder)}
                runs.add("prompt", name, seed, "loss", dict(enumerate(losses, start=1)))
                runs.add("prompt", name, seed, "score", score)


TASKS: dict[str, Callable[[Runs, int], None]] = {
    "reward": practise,
    "preference": prefer,
    "teacher": imitate,
    "prompt": prompt,
}
LABELS = {
    "reward": ("round", "share of right answers"),
    "preference": ("step", "loss"),
    "teacher": ("step", "loss"),
    "prompt": ("step", "loss"),
}


def curves_of(rows: Sequence[Row], task: str, name: str) -> dict[str, dict[int, dict[int, float]]]:
    """Return values by side, step and seed."""
    curves = dict[str, dict[int, dict[int, float]]]()
    for row in rows:
        if (row["task"], row["name"]) == (task, name):
            curves.setdefault(row["side"], {}).setdefault(row["step"], {})[row["seed"]] = row["value"]
    return curves


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return cells: the mean gain, its standard deviation over the seeds, their quotient, and the gain of each seed."""
    cells = [["task", "by", "seeds", "mean gain", "spread", "gain / spread", "gains"]]
    for task in TASKS:
        for side, by_step in (scores := curves_of(rows, task, "score")).items():
            last, first = by_step[max(by_step)], by_step[min(by_step)]
            if side == "distill":  # a loss, and the gain is over learning without a teacher
                last, first = scores["hard"].get(max(by_step), {}), last
            gains = [last[seed] - first[seed] for seed in sorted(last) if seed in first and side != "hard"]
            if gains and len(by_step) > 1:
                mean, spread = statistics.mean(gains), statistics.stdev(gains) if len(gains) > 1 else 0.0
                numbers = [str(len(gains)), f"{mean:.4f}", f"{spread:.4f}", f"{mean / spread:.1f}" if spread else "-"]
                cells.append([task, side, *numbers, " ".join(f"{gain:.3f}" for gain in gains)])
    return cells


def report(runs: Runs) -> None:
    """Print the table, and draw what there is if matplotlib is installed."""
    print(format_columns(table(runs.rows), num_left=2, indent=""))
    for task, labels in LABELS.items() if find_spec("matplotlib") else ():
        of_seeds = curves_of(runs.rows, task, "loss" if task in ("preference", "prompt") else "score")
        curves = {side: {step: [*by_seed.values()] for step, by_seed in at.items()} for side, at in of_seeds.items()}
        if curves:
            draw(curves, task, runs.folder / f"{task}.png", *labels)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; returns 1 if something failed or the time ran out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="runs that share the machine (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit (default: none)")
    parser.add_argument("--quick", action="store_true", help="few samples, steps and rounds: does everything run?")
    own, options = split_words(sys.argv[1:] if argv is None else argv)
    arguments, is_complete = parser.parse_args(own), True
    folder, deadline = arguments.folder.resolve(), time.monotonic() + arguments.seconds
    folder.mkdir(parents=True, exist_ok=True)
    prepare_environment()
    end_runs_when_terminated()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.workers)))
    if "trl" not in TRAINERS:
        print("TRL is not installed: no curve of TRL")
    runs = Runs(folder, arguments.model.resolve(), QUICK if arguments.quick else Sizes(), options, deadline)
    with ThreadPoolExecutor(arguments.workers) as threads:
        chosen = [(task, seed) for task in TASKS if task in arguments.tasks for seed in range(arguments.seeds)]
        chains = [threads.submit(TASKS[task], runs, seed) for task, seed in chosen]
        try:
            for problem in filter(None, (chain.exception() for chain in chains)):
                is_complete = False
                print(problem, file=sys.stderr)
        finally:
            runs.deadline = 0.0  # ends the processes, also after Ctrl-C
    report(runs)
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
