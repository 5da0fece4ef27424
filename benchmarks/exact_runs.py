"""Trains small models in every way that a step can run, each beside plain transformers with torch's AdamW.

    python benchmarks/exact_runs.py [--models dense,wide] [--ways streamed] [--workers 10] [--tree FOLDER]
        [-- options of main.py for all runs]

Each run is a whole one, in bf16 compiled and with the attention that users' runs take: it memorizes real samples in a
dozen steps, and its saved model is compared with what plain_training.py trains on the same device from the same
weights and batches. Several processes share the device; each makes its runs one after the other.

loss     largest difference of a step's loss from the plain one, as a share of it
norm     the same of the gradients' norm
update   distance of the whole update (all trained parameters, after minus before) from the plain one in fp32, as a
         share of its norm; 1.41 for an update that has nothing to do with it
allowed  the largest update that passes. fp32: see FP32_UPDATE. 16 bits: EXTRA times that of plain training in that
         format, STATES_EXTRA times with optimizer states in fewer bytes. 8 bits: EIGHT_BIT_UPDATE

With --tree the Mobius of another checkout is trained. Exits with 1 if a way fails.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 12
FP32_LOSS, FP32_NORM = 1e-3, 2e-3
"""A step's loss and norm in fp32. Kernels differ by some 1e-6; the updates between amplify that, since AdamW divides a
gradient near zero by its own size. On an H200 at most 2.3e-4 and 2.4e-4 (packed rows of the wide model)."""
FP32_UPDATE = 2e-3
"""The same for the update, at most 4.9e-4 there: an element whose gradient is near zero may move by a whole step either
way, and few are."""
EXTRA, STATES_EXTRA = 1.5, 2.0
"""16 bits round in another order, which sends some tokens to other experts (1.26 times plain training's distance on an
H200), and moments in fewer bytes once more."""
EIGHT_BIT_UPDATE = 0.6
"""Rounding to 8 bits changes the sign of small gradients, and so the step of AdamW: on an H200 0.15 (fp8) and 0.09
(int8) of the dense model's update, 0.48 and 0.32 of the wide one's. Were a quarter of the elements wrong, it would be
0.71 alone."""
LEARNT = 0.7
"""The plain model's last loss is below this share of the first: a model that learns nothing would prove nothing."""

_TINY: Mapping[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"model_type": "llama", **_TINY},
    "tied": {"model_type": "qwen3", **_TINY, "tie_word_embeddings": True},
    "experts": {
        "model_type": "qwen3_moe",
        **_TINY,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
    "capped": {"model_type": "gemma2", **_TINY, "query_pre_attn_scalar": 64, "sliding_window": 128},
    "wide": {
        "model_type": "llama",
        **_TINY,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}
"""Fields of config.json by name."""
RATES, COSTS = {"wide": 2e-4}, {"wide": 2}
"""Learning rates but for 1e-3, and how long a run takes, compared with the others."""
COMMON = f"""--num_iterations {STEPS} --batch_size 8 --seq_length 512 --num_chunks 4 --max_samples 48 --train_on_prompt
    --lr_scheduler_type constant --warmup_steps 1 --weight_decay 0.1 --save_strategy no --save_params none
    --overwrite_output_dir"""
STREAMED, RESIDENT = "--num_stages 4 --resident_stages 0 --packing off", "--num_stages 4 --no_offload --packing off"
ADAPTER = "--finetuning_type lora --lora_rank 4 --lora_alpha 8 --lora_target q_proj,v_proj --adapter_path {adapter}"
DISKS = "--offload_states_to {disk}"


@dataclass(frozen=True)
class Way:
    """A way to run a step."""

    name: str
    options: str
    dtype: str = "fp32"
    models: frozenset[str] = frozenset(MODELS)
    """Models that are trained in this way: without those that refuse it, or to which it brings nothing new."""

    @property
    def is_eight_bit(self) -> bool:
        return "--matmul_dtype" in self.options

    @property
    def words(self) -> list[str]:
        """Options of main.py."""
        return [*self.options.split(), "--dtype", self.dtype]

    @property
    def plain_key(self) -> tuple[bool, bool, bool]:
        """What changes the plain run, but for the format: packed rows, no clipping, an adapter."""
        return "--packing on" in self.options, "--max_grad_norm 0" in self.options, "--finetuning_type" in self.options


def _ways() -> Iterator[Way]:
    uncapped, two = frozenset(MODELS) - {"capped"}, frozenset({"dense", "wide"})
    for level in ("full", "elementwise", "none"):
        yield Way(f"resident, {level}", f"{RESIDENT} --recompute {level} --compute_order breadth_first")
        yield Way(f"depth-first, {level}", f"{RESIDENT} --recompute {level} --compute_order depth_first")
    yield Way("streamed", f"{STREAMED} --recompute full")
    yield Way("streamed, not clipped", f"{STREAMED} --recompute full --max_grad_norm 0")
    yield Way("resident, not clipped", f"{RESIDENT} --max_grad_norm 0", models=two)
    yield Way("one resident", "--num_stages 4 --resident_stages 1 --packing off")
    yield Way("no overlap", f"{STREAMED} --no_prefetch --no_overlap_optimizer", models=two)
    yield Way("not compiled, full", f"{STREAMED} --compile off --recompute full")
    yield Way("not compiled, none", f"{RESIDENT} --compile off --recompute none", models=two)
    yield Way("two rounds", f"{STREAMED} --num_rounds 2")
    yield Way("two rounds, depth-first", f"{RESIDENT} --num_rounds 2 --compute_order depth_first", models=two)
    for level in ("full", "linear"):
        yield Way(f"slices, {level}", f"{STREAMED} --num_slices 4 --recompute {level}", models=uncapped)
    yield Way("tiles", f"{STREAMED} --recompute full --tile_tokens 256", models=uncapped)
    yield Way("offloaded inputs", f"{STREAMED} --recompute full --activation_offloading on", models=two)
    yield Way("packed", "--num_stages 4 --resident_stages 0 --packing on --recompute full")
    yield Way("packed, depth-first", "--num_stages 4 --no_offload --packing on --compute_order depth_first")
    yield Way("disks", f"{STREAMED} {DISKS} --durable_steps off", models=two)
    yield Way("disks, durable", f"{STREAMED} {DISKS} --durable_steps on", models=two)
    everything = "--gradients_on_disks --weights_on_disks --durable_steps off"
    yield Way("disks, all", f"{STREAMED} {DISKS} {everything}", models=two)
    for level in ("full", "none"):
        yield Way(f"adapter, {level}", f"{RESIDENT} {ADAPTER} --recompute {level}")
    yield Way("adapter, packed", f"--num_stages 4 --resident_stages 0 --packing on {ADAPTER}", models=two)
    for dtype in ("bf16", "fp16"):
        yield Way(f"{dtype}, streamed", f"{STREAMED} --recompute full", dtype)
        yield Way(f"{dtype}, depth-first", f"{RESIDENT} --compute_order depth_first --recompute elementwise", dtype)
    yield Way("bf16, resident, full", f"{RESIDENT} --recompute full", "bf16", two)
    yield Way("bf16, packed", "--num_stages 4 --resident_stages 0 --packing on", "bf16")
    yield Way("bf16, slices", f"{STREAMED} --num_slices 4", "bf16", two)
    yield Way("bf16, tiles", f"{STREAMED} --recompute full --tile_tokens 256", "bf16", two)
    yield Way("bf16 states", f"{STREAMED} --optimizer_states bf16", "bf16", two)
    yield Way("compact states", f"{STREAMED} --optimizer_states compact", "bf16", two)
    yield Way("compact, disks", f"{STREAMED} --optimizer_states compact {DISKS} --durable_steps off", "bf16", two)
    yield Way("bf16, adapter", f"{STREAMED} {ADAPTER}", "bf16", two)
    for dtype in ("fp8", "int8"):
        yield Way(f"{dtype}, streamed", f"{STREAMED} --matmul_dtype {dtype} --recompute full", "bf16")
        yield Way(f"{dtype}, resident", f"{RESIDENT} --matmul_dtype {dtype} --recompute none", "bf16", two)


WAYS = tuple(_ways())
_TITLES = ["model", "way", "s", "", "loss", "norm", "update", "allowed"]
_PLACES = {way.name: place for place, way in enumerate(WAYS)}


@dataclass
class Result:
    """One row."""

    model: str
    way: str
    seconds: float
    problem: str | None = None
    loss: float = 0.0
    norm: float = 0.0
    update: float = 0.0
    allowed: float = 0.0

    @property
    def passes(self) -> bool:
        return self.problem is None and self.update <= self.allowed

    def cells(self) -> list[str]:
        """The row as text."""
        numbers = [f"{self.loss:.1e}", f"{self.norm:.1e}", f"{self.update:.2e}", f"{self.allowed:.2e}"]
        numbers = numbers if self.problem is None else [""] * len(numbers)
        return [self.model, self.way, f"{self.seconds:.0f}", "ok" if self.passes else "FAILED", *numbers]


class Trainings:
    """Runs of one process: Mobius in each way, and what plain training comes to, made once."""

    def __init__(self, folder: Path, device_name: str, more: Sequence[str]) -> None:
        import torch

        self._folder, self._device, self._more = folder, torch.device(device_name), more
        self._plain: dict[tuple[str, str, tuple[bool, bool, bool]], tuple[Any, float]] = {}
        self._work = Path(tempfile.mkdtemp(dir=folder))

    def compare(self, model: str, way: Way) -> Result:
        """Train in this way, and compare."""
        from mobius.hardware.devices import free_cached_memory

        start, result = time.perf_counter(), Result(model, way.name, 0.0)
        try:
            self._compare(model, way, result)
        except Exception as error:  # of any kind: the others go on, and the row says what happened
            result.problem = " ".join(f"{type(error).__name__}: {error}".split())
        free_cached_memory(self._device)
        result.seconds = time.perf_counter() - start
        return result

    def _compare(self, model: str, way: Way, result: Result) -> None:
        (exact, _), (same, spread) = self._plain_run(model, way, "fp32"), self._plain_run(model, way, way.dtype)
        learnt = exact.losses[-1] / exact.losses[0]
        if learnt > LEARNT and not way.plain_key[2]:
            raise ValueError(f"the plain model's last loss is {learnt:.2f} of its first: it learns nothing")
        losses, norms, after = self._mobius(model, way)
        result.loss = max(abs(a - b) / b for a, b in zip(losses, same.losses, strict=True))
        result.norm = max(abs(a - b) / b for a, b in zip(norms, same.grad_norms, strict=True))
        result.update = distance(after, exact)
        if way.dtype == "fp32":
            result.allowed = FP32_UPDATE
            if result.loss > FP32_LOSS or result.norm > FP32_NORM:
                raise ValueError(
                    f"loss {result.loss:.1e} ({FP32_LOSS:g} allowed), norm {result.norm:.1e} ({FP32_NORM:g}), "
                    f"update {result.update:.4f}; last loss {losses[-1]:.3f}, plain {same.losses[-1]:.3f}"
                )
        else:
            extra = STATES_EXTRA if "--optimizer_states" in way.options else EXTRA
            result.allowed = EIGHT_BIT_UPDATE if way.is_eight_bit else extra * spread

    def _options(self, model: str, way: Way) -> list[str]:
        options = [*COMMON.split(), *way.words, "--model_path", str(self._folder / model)]
        options += ["--dataset", str(ROOT / "assets/docstrings/train.jsonl"), "--device", self._device.type]
        options += ["--learning_rate", str(RATES.get(model, 1e-3)), "--save_dir", str(self._work / "out")]
        options += ["--save_results", str(self._work / "out.txt"), *self._more]
        places = {"{adapter}": str(self._folder / f"{model}-adapter"), "{disk}": str(self._work / "disk")}
        return [places.get(word, word) for word in options]

    def _mobius(self, model: str, way: Way) -> tuple[list[float], list[float], Mapping[str, Any]]:
        """Losses, norms, and the trained tensors that the run saves."""
        from mobius.config.cli import parse_args
        from mobius.process.ranks import Ranks
        from mobius.training.run import run_training

        out = self._work / "out"
        (self._work / "disk").mkdir(exist_ok=True)
        try:
            run_training(parse_args(self._options(model, way), num_ranks=1), Ranks(0, 1, 0))
            steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            return [step["loss"] for step in steps], [step["grad_norm"] for step in steps], saved_tensors(out)
        finally:
            for name in ("out", "disk"):
                shutil.rmtree(self._work / name, ignore_errors=True)

    def _plain_run(self, model: str, way: Way, dtype: str) -> tuple[Any, float]:
        """Plain training in `dtype`, and how far its update is from that in fp32. Only the latter keeps its tensors."""
        key = model, dtype, way.plain_key
        if key not in self._plain:
            self._plain = {other: run for other, run in self._plain.items() if other[0] == model}
            made = self._train_plainly(model, way, dtype)
            if dtype == "fp32":
                self._plain[key] = made, 0.0
            else:
                spread = distance(made.after, self._plain_run(model, way, "fp32")[0])
                self._plain[key] = made._replace(before={}, after={}), spread
        return self._plain[key]

    def _train_plainly(self, model: str, way: Way, dtype: str) -> Any:
        import plain_training
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        from mobius.config.cli import parse_args
        from mobius.hardware.devices import TORCH_DTYPES, free_cached_memory

        same = dataclasses.replace(way, dtype=dtype, options=way.options.partition(" --matmul_dtype")[0])
        config = parse_args(self._options(model, same), num_ranks=1)
        loaded: Any = plain_training.load_model(str(self._folder / model), TORCH_DTYPES[config.model.dtype])
        if way.plain_key[2]:
            loaded = with_adapter(loaded)
            file = self._folder / f"{model}-adapter/adapter_model.safetensors"
            set_peft_model_state_dict(loaded, load_file(file))
        with contextlib.redirect_stdout(io.StringIO()):  # its steps
            made = plain_training.train(config, self._device, loaded)
        del loaded
        free_cached_memory(self._device)
        return made


def saved_tensors(folder: Path) -> Mapping[str, Any]:
    """The parameters of a saved model as transformers loads it, or the tensors of an adapter."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    if (adapter := folder / "adapter_model.safetensors").is_file():
        tensors: Mapping[str, Any] = load_file(adapter)
        return tensors
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def distance(after: Mapping[str, Any], plain: Any) -> float:
    """Norm of the difference between the update to `after` and that of the plain run, as a share of the latter's."""
    difference = size = 0.0
    for name, start in plain.before.items():
        found = after[name] if name in after else after[name.replace(".default", "")]
        expected = plain.after[name] - start
        difference += float((found.float().cpu() - start - expected).double().square().sum())
        size += float(expected.double().square().sum())
    return float((difference / size) ** 0.5)


def with_adapter(model: Any) -> Any:
    """The model with a fresh adapter of peft's, as ADAPTER describes it, in the model's format."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def make_models(names: Sequence[str], folder: Path) -> None:
    """Write each model with random weights, and an adapter of it that peft made, whose update is not zero."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in names:
        torch.manual_seed(0)
        fields = dict(MODELS[name])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.save_pretrained(folder / name)
        for file in (ROOT / "assets/tiny-llama").glob("tokenizer*"):
            shutil.copy(file, folder / name)
        adapted = with_adapter(model)
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(str(folder / f"{name}-adapter"))


def jobs_of(models: Sequence[str], words: Sequence[str]) -> list[tuple[str, int]]:
    """Model and number of the way of each run."""
    return [
        (model, number)
        for model in models
        for number, way in enumerate(WAYS)
        if model in way.models and (not words or any(word in way.name for word in words))
    ]


def work(arguments: argparse.Namespace) -> None:
    """Make the runs that come in, a line of JSON each; answer each with its row. What they print goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trainings = Trainings(arguments.folder, arguments.device, arguments.options)
    for line in sys.stdin:
        model, number = json.loads(line)
        print(json.dumps(dataclasses.asdict(trainings.compare(model, WAYS[number]))), file=answers, flush=True)


class Jobs:
    """Runs that are left. A process goes on with its model, of which it has the graphs and the plain runs."""

    def __init__(self, jobs: Sequence[tuple[str, int]]) -> None:
        self._left, self._lock = list(jobs), threading.Lock()
        self._busy: dict[str, int] = dict.fromkeys((model for model, _ in jobs), 0)
        self.results: list[Result] = []

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: IO[str], ends: float) -> None:
        """Let a process make runs until none is left or the time is over."""
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Timer(max(1.0, ends - time.monotonic()), process.kill).start()
        model: str | None = None
        with contextlib.suppress(BrokenPipeError):
            while (job := self._take(model)) is not None:
                model = job[0]
                print(json.dumps(job), file=process.stdin, flush=True)
                if not (line := process.stdout.readline()):
                    break
                with self._lock:
                    self.results.append(Result(**json.loads(line)))
        process.kill()
        process.wait()

    def _take(self, model: str | None) -> tuple[str, int] | None:
        """The next run of `model`, or of the model for whose number of runs the fewest processes work."""
        with self._lock:
            if not self._left:
                return None
            left = Counter(name for name, _ in self._left)
            if model not in left:
                model = max(left, key=lambda name: left[name] * COSTS.get(name, 1) / (1 + self._busy[name]))
                self._busy[model] += 1
            job = next(job for job in self._left if job[0] == model)
            self._left.remove(job)
            return job


def main(argv: Sequence[str] | None = None) -> int:
    """Make all runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between them")
    parser.add_argument("--ways", default="", help="words with commas between them; ways that have one in their name")
    parser.add_argument("--workers", type=int, default=10, help="processes that share the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose Mobius is trained")
    parser.add_argument("--folder", type=Path, help="for models and results (default: a new one)")
    parser.add_argument("--seconds", type=float, default=570, help="after which runs that are left are not made")
    parser.add_argument("options", nargs="*", help="options of main.py for all runs, behind --")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    tree = arguments.tree.resolve() if arguments.worker else ROOT
    sys.path[:0] = [str(tree), str(ROOT / "scripts")]
    from mobius.process.ranks import prepare_environment

    prepare_environment()  # before torch is imported
    if arguments.worker:
        work(arguments)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        return _run_all(arguments, arguments.folder or Path(temporary))


def _run_all(arguments: argparse.Namespace, folder: Path) -> int:
    from mobius.units import format_columns

    ends, models = time.monotonic() + arguments.seconds, arguments.models.split(",")
    make_models(models, folder)
    wanted = jobs_of(models, [word for word in arguments.ways.split(",") if word])
    cores, jobs = len(os.sched_getaffinity(0)), Jobs(wanted)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, cores // arguments.workers)),
        "OMP_WAIT_POLICY": "passive",  # threads that spin would take the cores of other processes
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, __file__, "--worker", "--folder", str(folder), "--device", arguments.device]
    command += ["--tree", str(arguments.tree), "--", *arguments.options]
    with (folder / "log.txt").open("w") as log:
        threads = [
            threading.Thread(target=jobs.run, args=(command, environment, log, ends)) for _ in range(arguments.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results = sorted(jobs.results, key=lambda each: (models.index(each.model), _PLACES[each.way]))
    print(format_columns([_TITLES, *(each.cells() for each in results)], num_left=2, indent=""))
    for each in results:
        if each.problem is not None:
            print(f"{each.model}, {each.way}: {each.problem[:300]}")
    failed, seconds = sum(not each.passes for each in results), time.monotonic() - ends + arguments.seconds
    print(f"{len(results)} of {len(wanted)} runs made in {seconds:.0f} s, {failed} failed")
    if len(results) < len(wanted):
        print(*(folder / "log.txt").read_text().splitlines()[-25:], sep="\n")
    return int(failed > 0 or len(results) < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
