"""Kills a small training at random moments, lets it go on each time, and compares it with one that was left alone.

Losses, norms, evaluations, final weights and every checkpoint must be equal to the bit, and nothing may be left: no
process, no unfinished file, nothing in shared memory. Linux only.

    python scripts/kill_and_resume.py --kills 60 --seed 1
    python scripts/kill_and_resume.py --kills 10 --device cuda -- --num_stages 8     # options of main.py after `--`
    python scripts/kill_and_resume.py --kills 40 --durable                           # optimizer states on disks
    python scripts/kill_and_resume.py --kills 40 --damages 40 --small_disks -- --save_steps 100          # as root

A start is either by the launcher, and then a rank or the launcher is killed and the rest has to end by itself; or its
ranks are forked from here, where everything is imported already, and those that live are killed a moment later. With
--durable a start must go on from one of the last two steps that the one before it has told.

With --damages a bit of the newest durable step, or of both, is changed after a kill. A start must go on from the newest
that is whole, of those that were whole before the damage at most one step back; if none is, it must end with one
message, whose advice must work. With --small_disks states are on file systems of which a run's slots fill three
quarters.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from started_ranks import (
    NUM_RANKS,
    ROOT,
    SHARED_MEMORY,
    StartedRun,
    descendants,
    end_descendants,
    import_everything,
    inherit_orphans,
    left_in_shared_memory,
    start,
    take_own_shared_memory,
    wait_until,
)

STEPS, SAVE_STEPS, KEPT = 12, 3, 2
OPTIONS = f"""--model_path model --dataset data.jsonl --num_stages 4 --num_chunks 2 --batch_size 4 --seq_length 32
    --learning_rate 1e-3 --num_iterations {STEPS} --save_steps {SAVE_STEPS} --val_size 6 --eval_strategy steps
    --eval_steps 4 --save_params none --save_results results.txt --save_dir out"""
OF_A_DEVICE = {"cpu": "--fp32", "cuda": "--compile off --resident_stages 1 --recompute full"}
"""Nothing that is measured may decide on the plan: a run that begins anew has to decide as the first one did."""
DURABLE = "--bf16 --offload_states_to disk-1,disk-2 --optimizer_states compact --durable_steps on --resident_stages 1"
FILLED = 0.75
"""Share of a small disk that two slots take."""
SHARE_OF_BOTH = 0.3
"""Share of the damages that both slots have, if both are whole."""
BEST_SAVED = "best_saved"
"""Key of the best evaluation with a checkpoint in what a checkpoint knows."""
PHASES = ("starting", "tokenizing", "training", "saving", "exporting")
SHARE_AT_A_SAVE = 0.4
"""Share of the kills that wait for a checkpoint to be under way, which is a small part of a run's time."""
SHARE_PREPARED = 0.75
"""Share of the runs that find a compiled kernel and fonts, as all runs of a machine do but the first."""
END_SECONDS = 60.0
HANG_SECONDS = 1200.0


class TrialError(Exception):
    """A difference, or something left."""


def main(argv: list[str] | None = None) -> int:
    """Kill and resume as asked; returns 1 if anything differs or is left."""
    words = sys.argv[1:] if argv is None else argv
    arguments, more = parse_arguments(words)
    inherit_orphans()
    take_own_shared_memory()
    import_everything()
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=arguments.folder))
    own = OF_A_DEVICE[arguments.device]
    durable = arguments.durable or arguments.small_disks or arguments.damages > 0
    if durable:
        own = f"{own.replace('--fp32', '')} {DURABLE}"
    options = [*f"--device {arguments.device} {OPTIONS} {own}".split(), *more]
    draw, damage = random.Random(arguments.seed), Damage(random.Random(arguments.seed), arguments.damages)
    trial = Trial(folder, options, draw, arguments.launched, damage, is_durable=durable, num_ranks=arguments.ranks)
    try:
        trial.run(arguments.kills, has_small_disks=arguments.small_disks)
    except TrialError as failure:
        print(f"{failure}\nThe run is in {folder}.")
        return 1
    finally:
        print("\n".join([trial.table(), *damage.table()]))
        end_descendants()
    shutil.rmtree(folder)
    return 0


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the words after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=NUM_RANKS, help="processes, one per GPU (default: %(default)s)")
    parser.add_argument("--device", choices=OF_A_DEVICE, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--durable", action="store_true", help="each step is a checkpoint, in folders of states")
    parser.add_argument("--damages", type=int, default=0, help="of durable steps, after kills (default: %(default)s)")
    parser.add_argument("--small_disks", action="store_true", help="states on file systems that slots nearly fill")
    parser.add_argument("--folder", type=Path, help="where to make the folder of the runs (default: the system's)")
    parser.add_argument(
        "--launched", type=float, default=0.3, help="share of starts by the launcher (default: %(default)s)"
    )
    place = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:place]), words[place + 1 :]


def digests(folder: Path) -> dict[str, str]:
    """A digest of each tensor in the safetensors files of a folder."""
    import torch
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 it is no mapping
                values = file.get_tensor(name).reshape(-1).view(torch.uint8)
                found[name] = hashlib.sha256(values.numpy().data).hexdigest()
    return found


def digests_of_step(checkpoint: Path) -> dict[str, str]:
    """The same of a durable step, whose files are none of safetensors."""
    import torch

    from mobius.checkpoint.folders import open_checkpoint
    from mobius.checkpoint.slot_reader import SlotReader

    found, reader = {}, open_checkpoint(checkpoint)
    assert isinstance(reader, SlotReader)
    for name, place in reader.tensors.items():
        values = reader.read(name, torch.empty(place.shape, dtype=place.dtype)).reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(values.numpy().data).hexdigest()
    return found


def state_of(checkpoint: Path) -> dict[str, object]:
    """Everything in a checkpoint that a run goes on with; which start of a launcher has saved it is no part of it."""
    from mobius.checkpoint.resume import LAUNCH

    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    names = ("step", "num_parameters", "dtype", "has_optimizer", "training", "metric")
    data = {name: value for name, value in manifest["data"].items() if name != LAUNCH}
    tensors = digests_of_step(checkpoint) if checkpoint.is_symlink() else digests(checkpoint)
    return {**{name: manifest[name] for name in names}, "data": data, **tensors}


def results_of(out: Path) -> dict[str, object]:
    """Numbers and weights of a whole run that have to be the same in another one."""
    measured = ("step_seconds", "tokens_per_second", "wait_seconds")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    judged = ("step", "epoch", "eval_loss", "eval_perplexity", "eval_token_accuracy")
    exact = [{k: v for k, v in step.items() if k not in measured and "memory" not in k} for step in steps]
    evaluations = [{name: entry[name] for name in judged} for entry in history if "eval_loss" in entry]
    return {"steps": exact, "evaluations": evaluations, **digests(out)}


def compare(name: str, expected: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Raise TrialError with the first things that differ."""
    differing = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
    if differing:
        shown = "\n".join(f"  {key}: {expected.get(key)} expected, {found.get(key)} found" for key in differing[:5])
        raise TrialError(f"{name}: {len(differing)} of {len(expected)} things differ:\n{shown}")


class Damage:
    """Changes bits of durable steps, and knows what a start must go on from."""

    def __init__(self, draw: random.Random, num_damages: int) -> None:
        self._draw, self._num_damages = draw, num_damages
        self._rows: list[tuple[str, int, int | None]] = []

    @property
    def is_on(self) -> bool:
        """Whether steps are damaged at all."""
        return self._num_damages > 0

    @property
    def left(self) -> int:
        """Damages that are still to be done."""
        return self._num_damages - len(self._rows)

    def after_kill(self, out: Path) -> None:
        """Change a bit of one or two steps, if there are some and damages are left."""
        whole = [path for path in durable_steps(out) if newest_whole([path]) is not None]
        if not (self.left and whole):
            return
        before = step_of(whole[0])
        is_both = len(whole) > 1 and self._draw.random() < SHARE_OF_BOTH
        kind = "both slots" if is_both else "newer of two" if len(whole) > 1 else "newer, older torn by the kill"
        for path in whole if is_both else whole[:1]:
            file = self._draw.choice([file for file in path.resolve().glob("*.raw") if file.stat().st_size])
            place = self._draw.choice(places_of(path, file))
            with file.open("r+b") as opened:
                opened.seek(place)
                (value,) = opened.read(1)
                opened.seek(place)
                opened.write(bytes([value ^ 1 << self._draw.randrange(8)]))
        newest = newest_whole(durable_steps(out))
        if newest is not None and before - step_of(newest) > 1:
            raise TrialError(f"{out}: damage of {before} leaves {newest}")
        if kind == "newer of two" and newest is None:
            raise TrialError(f"{out}: damage of {before} leaves no durable step")
        self._rows.append((kind, before, None if newest is None else step_of(newest)))
        print(f"{len(self._rows):>4} damaged: {kind}, step {before}; the newest whole one is {newest}", flush=True)

    def table(self) -> list[str]:
        """Damages by kind, and the durable steps that each has cost."""
        if not self._rows:
            return []
        lines = [f"{'damaged':<32}{'times':>7}{'one step lost':>15}{'no whole step left':>20}"]
        for kind in dict.fromkeys(kind for kind, _, _ in self._rows):
            left = [(before, newest) for each, before, newest in self._rows if each == kind]
            one = sum(newest is not None and before - newest == 1 for before, newest in left)
            lines.append(f"{kind:<32}{len(left):>7}{one:>15}{sum(newest is None for _, newest in left):>20}")
        return lines


def durable_steps(out: Path) -> list[Path]:
    """The links of a run to its durable steps, the newest first."""
    links = [path for path in out.glob("checkpoint-*") if path.is_symlink() and step_of(path)]
    return sorted(links, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint by its name; 0 for one without its final name."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match[1]) if match else 0


def newest_whole(paths: list[Path]) -> Path | None:
    """The first of some checkpoints that is whole to its last byte."""
    from mobius.checkpoint.folders import find_whole

    return find_whole(paths)[0]


def places_of(step: Path, file: Path) -> list[int]:
    """A byte in the middle of each chunk that a step has in a file."""
    found = []
    for table in step.resolve().glob("stages-*.json"):
        stages = json.loads(table.read_text())
        names = [name for name, _ in stages["files"]]
        chunks = [chunk for region in stages["regions"] for chunk in region["chunks"]]
        found += [offset + length // 2 for number, offset, length, _ in chunks if names[number] == file.name]
    return found


class Trial:
    """Owns the runs of one call, in `folder`: the one that is left alone, and lives that are killed till they end."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        draw: random.Random,
        launched: float,
        damage: Damage,
        *,
        is_durable: bool = False,
        num_ranks: int = NUM_RANKS,
    ) -> None:
        self._folder, self._options, self._draw, self._launched = folder, options, draw, launched
        self._damage, self._disk_bytes = damage, 0
        self._is_durable, self._num_ranks = is_durable, num_ranks
        self._shared = {path.name for path in SHARED_MEMORY.iterdir()}
        self._seconds = {False: 0.0, True: 0.0}
        self._expected: dict[str, object] = {}
        self._checkpoints: dict[str, dict[str, object]] = {}
        self._kills: Counter[tuple[str, str]] = Counter()
        self._counts: Counter[str] = Counter()
        self._begun = time.monotonic()

    def run(self, num_kills: int, *, has_small_disks: bool = False) -> None:
        """Kill `num_kills` times, and damage as often as asked; raises TrialError."""
        self._make_inputs()
        for is_launched in (False, True) if self._launched > 0 else (False,):
            self._leave_alone(is_launched)
        if has_small_disks:
            self._disk_bytes = self._measure_slots()
        self._num_kills = num_kills
        while self._must_kill():
            self._live()

    def _must_kill(self) -> bool:
        return self._kills.total() < self._num_kills or self._damage.left > 0

    def _measure_slots(self) -> int:
        """Return the bytes of a small disk, from those of the slots of a run that is killed once both are there."""
        life = self._new_life("measured")
        started = start(life, self._options, is_launched=False, num_ranks=self._num_ranks)
        if not wait_until(lambda: started.is_over() or len(durable_steps(life / "out")) == 2, HANG_SECONDS):
            raise TrialError("the run whose slots are measured hangs")
        for process in started.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._see_the_end(started)
        taken = max(sum(path.stat().st_size for path in disk.rglob("*.raw")) for disk in life.glob("disk-*"))
        print(f"two slots take {taken / 2**20:.1f} MiB of each disk of {taken / FILLED / 2**20:.1f} MiB", flush=True)
        shutil.rmtree(life)
        return int(taken / FILLED)

    def table(self) -> str:
        """What was killed in which phase, and what came of it."""
        victims = [*(f"rank {rank}" for rank in range(self._num_ranks)), *(["launcher"] if self._launched > 0 else [])]
        lines = ["killed while  " + "".join(f"{name:>10}" for name in [*victims, "all"])]
        for phase in (*PHASES, "all"):
            row = [
                sum(n for (p, v), n in self._kills.items() if phase in (p, "all") and name in (v, "all"))
                for name in (*victims, "all")
            ]
            lines.append(f"{phase:<14}" + "".join(f"{number:>10}" for number in row))
        told = ", ".join(f"{number} {name}" for name, number in self._counts.items())
        return "\n".join([*lines, f"{told}; {time.monotonic() - self._begun:.0f} s"])

    def _make_inputs(self) -> None:
        model, source = self._folder / "model", ROOT / "assets" / "tiny-llama"
        shutil.copytree(source, model)
        config = json.loads((source / "config.json").read_text())
        config |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        (model / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
        numbers = [" ".join(str(first + i) for i in range(1 + first % 40)) for first in range(2000)]
        lines = [json.dumps({"prompt": f"Count from {i}.", "completion": text}) for i, text in enumerate(numbers)]
        (self._folder / "data.jsonl").write_text("\n".join(lines) + "\n")

    def _new_life(self, name: str) -> Path:
        life = self._folder / name
        life.mkdir()
        for entry in ("model", "data.jsonl"):
            (life / entry).symlink_to(self._folder / entry)
        for number in (1, 2) if self._disk_bytes else ():
            (disk := life / f"disk-{number}").mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={self._disk_bytes}", "tmpfs", str(disk)]
            subprocess.run(command, check=True)
        made = self._folder / "forked" / "cache"
        if made.is_dir() and self._draw.random() < SHARE_PREPARED:
            shutil.copytree(made, life / "cache", ignore=shutil.ignore_patterns("tokenized"))
        return life

    def _leave_alone(self, is_launched: bool) -> None:
        """Train to the end once, with all checkpoints kept: what the others are compared with."""
        life = self._new_life("launched" if is_launched else "forked")
        begin = time.monotonic()
        words = ["--save_total_limit", "0"]
        if self._is_durable:  # the checkpoint of every step, by the usual way
            words += ["--save_steps", "1", "--durable_steps", "off"]
        started = start(life, [*self._options, *words], is_launched=is_launched, num_ranks=self._num_ranks)
        if not wait_until(started.is_over, HANG_SECONDS) or started.code():
            raise TrialError(f"the run that was left alone failed:\n{started.output}")
        self._seconds[is_launched] = time.monotonic() - begin
        found = {path.name: self._state_of(path) for path in (life / "out").glob("checkpoint-*")}
        if len(found) != STEPS // (1 if self._is_durable else SAVE_STEPS):
            raise TrialError(f"the run that was left alone has the checkpoints {sorted(found)}")
        if self._expected:
            compare("the launched run", self._expected, results_of(life / "out"))
            for name, state in found.items():
                compare(f"{name} of the launched run", self._checkpoints[name], state)
        self._expected, self._checkpoints = results_of(life / "out"), found

    def _live(self) -> None:
        """One run from its first start to its end, killed as long as kills or damages are left."""
        self._counts["runs"] += 1
        life = self._new_life(f"life-{self._counts['runs']}")
        out, refused, told = life / "out", "", 0
        while True:
            resumes = self._has_checkpoint(out) if not refused else refused == "anew"
            self._counts["resumed" if resumes else "begun anew"] += not refused
            words = [*self._options, "--save_total_limit", str(KEPT)]
            words += ["--resume_from_checkpoint", "true"] if resumes else []
            words += ["--overwrite_output_dir"] if refused == "overwrite" else []
            newest = self._newest_step(out) if resumes and self._is_durable else 0
            is_launched = self._draw.random() < self._launched
            started = start(life, words, is_launched=is_launched, num_ranks=self._num_ranks)
            was_killed = self._must_kill() and self._kill_at_random(started, out)
            self._see_the_end(started)
            told = self._check_lost_steps(started, told, newest)
            self._check_checkpoints(out)
            if was_killed and "\nresults saved to " in started.output:  # only its launcher was left
                break
            if was_killed:
                refused = ""
                self._damage.after_kill(out)
                told = min(told, self._newest_step(out) + 2)
            elif self._is_damaged(started, newest):
                refused, told = "overwrite", 0
                self._counts["told that none is whole"] += 1
            elif started.code() == 0:
                break
            elif not refused and "--resume_from_checkpoint true" in started.output:  # it says how to go on, or not
                refused = "resumed" if resumes else "anew"
                self._counts["told the other way"] += 1
            else:
                raise TrialError(f"{life}: a start failed with code {started.code()}:\n{started.output}")
        compare(str(life), self._expected, results_of(out))
        self._check_leftovers(life)
        for disk in life.glob("disk-*") if self._disk_bytes else ():
            subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(life)

    def _newest_step(self, out: Path) -> int:
        """Return the step of the newest whole checkpoint; 0 if there is none."""
        from mobius.checkpoint.folders import find_checkpoints

        newest = newest_whole([path for path, _ in find_checkpoints(out).valid])
        return 0 if newest is None else step_of(newest)

    def _is_damaged(self, started: StartedRun, newest: int) -> bool:
        """Whether a start has ended with the one message that no checkpoint is whole, as it has to."""
        is_told = "none of the checkpoints in" in started.output
        if is_told and (newest or "Traceback" in started.output or "--overwrite_output_dir" not in started.output):
            raise TrialError(f"a start could have gone on from {newest}, or says too little:\n{started.output}")
        return is_told

    def _check_lost_steps(self, started: StartedRun, told: int, newest: int) -> int:
        """Return the last step that a start has told; the one before it had told `told`, and `newest` is whole."""
        if (found := re.search(r"resumed from .*: (\d+) steps are done", started.output)) is not None:
            done = int(found[1])
            self._counts["steps lost"] += max(0, told - done)
            if self._is_durable and (done < told - 2 or done != newest):
                raise TrialError(
                    f"{told} was told and {newest} is whole, but a start went on from {done}:\n{started.output}"
                )
            told = done
        return max([told, *map(int, re.findall(r"^step +(\d+)/", started.output, re.MULTILINE))])

    def _has_checkpoint(self, out: Path) -> bool:
        from mobius.checkpoint.folders import find_checkpoints

        return bool(find_checkpoints(out).valid)

    def _kill_at_random(self, started: StartedRun, out: Path) -> bool:
        """Kill one process at a random moment; False if the run ends before."""
        draw = self._draw
        if draw.random() < SHARE_AT_A_SAVE:
            for _ in range(draw.randint(1, STEPS // SAVE_STEPS)):
                for wanted in (False, True):
                    wait_until(lambda: started.is_over() or is_saving(out, started) is wanted, HANG_SECONDS)  # noqa: B023
            time.sleep(draw.uniform(0, 0.2))
        else:
            end = time.monotonic() + draw.uniform(0, self._seconds[started.is_launched])
            wait_until(lambda: started.is_over() or time.monotonic() > end, HANG_SECONDS)
        if started.is_over():
            return False
        name, process = draw.choice(sorted(started.victims().items()))
        phase = phase_of(out, started)
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self._kills[phase, name] += 1
        print(f"{self._kills.total():>4} killed: {name} while {phase}", flush=True)
        if not started.is_launched:
            time.sleep(draw.choice([0, draw.uniform(0, 0.5)]))
            for other in started.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
        return True

    def _see_the_end(self, started: StartedRun) -> None:
        """Wait for the end of the run; all of it has to end with it."""
        if not wait_until(started.is_over, HANG_SECONDS):
            raise TrialError(f"a run hangs:\n{started.output}")
        if not wait_until(lambda: not descendants(), END_SECONDS, pause=0.02):
            raise TrialError(f"a minute after the end these processes live: {descendants()}\n{started.output}")

    def _check_checkpoints(self, out: Path) -> None:
        """Compare every checkpoint that is there with the one of its step."""
        from mobius.checkpoint.folders import find_checkpoints

        found = find_checkpoints(out)
        if found.invalid and not self._damage.is_on:
            raise TrialError(f"a checkpoint that is not complete has its name: {found.invalid}")
        for path, _ in found.valid:
            if self._damage.is_on and newest_whole([path]) is None:
                continue
            expected, own = dict(self._checkpoints[path.name]), self._state_of(path)
            compare(str(path), expected, own)
            self._counts["checkpoints compared"] += 1

    def _state_of(self, checkpoint: Path) -> dict[str, object]:
        """As `state_of`, without the best of the usual checkpoints, if there are others than in the first runs."""
        state = state_of(checkpoint)
        data = state["data"]
        assert isinstance(data, dict)
        return state | {
            "data": {name: value for name, value in data.items() if name != BEST_SAVED or not self._is_durable}
        }

    def _check_leftovers(self, life: Path) -> None:
        endings = (".partial", ".replaced", ".removed", ".moving", ".replaces_older")
        left = [str(path) for path in life.rglob("*") if path.name.endswith(endings) and "cache" not in path.parts]
        left += [str(path) for path in life.glob("disk-*/*")]
        if left:
            raise TrialError(f"left behind: {', '.join(left)}")
        # Programs beside this one leave files there, too, for a moment.
        if not wait_until(lambda: not left_in_shared_memory(self._shared), END_SECONDS, pause=0.5):
            raise TrialError(f"left in shared memory: {', '.join(left_in_shared_memory(self._shared))}")


def is_saving(out: Path, started: StartedRun) -> bool:
    """Whether a checkpoint is being written, named or removed; what an earlier start left there is none."""
    with contextlib.suppress(OSError):
        names = os.listdir(out)
        return any(re.match(r"checkpoint-\d+\.", name) for name in names) and "start-up  " in started.output
    return False


def phase_of(out: Path, started: StartedRun) -> str:
    """Whatever a run does now."""
    output = started.output
    if is_saving(out, started):
        return "saving"
    if (out / "final.partial").exists() or f"step {STEPS}/{STEPS} " in output:
        return "exporting"
    if "start-up  " in output:
        return "training"
    if "tokenizing" in output and "data  " not in output:
        return "tokenizing"
    return "starting"


if __name__ == "__main__":
    sys.exit(main())
