"""Seeded inputs as a careless hand would make them: options, YAML, files of models, data and runs.

Input number n of a kind is the same in every run. Each is a folder's files and a command line; some are in order.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from harness.durable_runs import DISKS, fail_after_step_5
from harness.runs import VOCAB, make_checkpoint, make_dataset
from transformers import AutoConfig

from mobius.config.config import options

SMALL = (
    *("--model_path", "model", "--dataset", "data.jsonl", "--device", "cpu", "--dtype", "fp32", "--save_dir", "out"),
    *("--num_stages", "2", "--num_chunks", "2", "--batch_size", "4", "--seq_length", "16", "--num_iterations", "1"),
)
"""A run of one step on the base folder's files; what is appended goes before it."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
CONTENTS = ("", " ", "a", "Zwölf 模型 \x1b[2J\x07", "many words " * 500, "\u202e", "<|im_end|>", "@nul@", None)
NODES = (
    *("2024-99-99", "!!int abc", "!foo bar", "{[1]: 2}", "!!python/object:os.system x", "&a [*a]", "*nowhere"),
    "a: b: c",
    *("!!float x", "!!timestamp x", "!!binary '*'", "!!set {a}", "!!omap [a: 1]", "!!bool x", "!!merge x", "!!null x"),
    *("[1, 2", "{a: b", "'open", '"open', "? a", "|", ">", "- a", "@x", "`x`", "%x", "1e5", ".inf", ".nan"),
    *("0o17", "~"),
    *("1:30:00", "yes", "on", "2024-01-01", '"\\0"', "é模型", "\x07"),
    *("\x1b[2J", "<<: 3", "''", "1", "2", "4", "8", "auto", "true", "false", "model", "fp32", "cosine", "0.5", "1.0"),
)
DATASETS = (
    *("data.jsonl:0.5", "data.jsonl:3", "a:0", "a:-1", "a:nan", "a:1e999", "a:" + "9" * 5000, ":" * 5000, ":1"),
    "data.jsonl:",
    *("a=b", "prompt=document,completion=summary", "a=b,a=c", "=" * 300, "," * 300, "prompt"),
)
"""Words of datasets and columns, right and wrong."""
DATASET_NODES = (
    *("[data.jsonl, {path: data.jsonl, weight: 0.5}]", "{path: data.jsonl, max_samples: 3, split: train}", "[]"),
    "[[a]]",
    *("[{path: a, columns: {prompt: b, completion: c}}]", "[{weight: 1}]", "[{path: a, wieght: 1}]", "[1, null, a:0]"),
    *("&a {path: b, columns: *a}", "&a [*a, *a]", "[{path: {a: b}}, {[a]: b}]", "{prompt: document}", "{prompt: [a]}"),
    *("[{path: a, weight: .inf}, {path: a, weight: 1e999, subset: 3}]", "[{name: a, path: b}]", "[{<<: {path: a}}]"),
)
_NOT_TYPED = {"config", "help", "dry_run", "overwrite_output_dir", "preprocessing_num_workers", "compile", "trace"}
_OUTPUTS = {"save_dir", "save_params", "save_results", "plan_output"}
"""Options that name what is written: they get no path outside of the input's folder."""


@dataclass
class FuzzedInput:
    """Contents that are written over a folder's files, and the arguments of main.py; None deletes a file."""

    kind: str
    number: int
    arguments: list[str] = field(default_factory=list)
    files: dict[str, bytes | None] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    """What stands in a file's place leads to, by its path."""
    family: str = "llama"
    call: Callable[[], object] | None = None
    """What is done in the place of main.py, in the input's folder."""


def make_base(folder: Path) -> None:
    """Write what inputs start from: a model folder of each family with weights and tokenizer, data, a checkpoint."""
    make_dataset(folder / "data.jsonl", 8)
    for family in FAMILIES:
        make_checkpoint(
            folder / family, num_layers=2, family=family, is_tied=family == "gemma3_text", vocab_size=VOCAB + 64
        )
    with _run_folder(folder / ADAPTER, folder / FAMILIES[0]):
        _train(*SMALL, "--finetuning_type", "lora", "--lora_rank", "2", "--save_params", "none")
    with _run_folder(folder / DURABLE, folder / FAMILIES[0]):
        fail_after_step_5(_train, shlex.join([*SMALL[:-2], *DISKS.split()]))


def _options(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    made.arguments = [*SMALL, "--dry_run"]
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(sorted(set(options()) - _NOT_TYPED))
        texts = [text for text in TEXTS if name not in _OUTPUTS or not text.startswith(("/", ".", "~"))]
        spelled = rng.choice([name, name, name, name.replace("_", "-"), name[:-1], name + "s", "no_" + name])
        if options()[name].is_list or options()[name].value_type is tuple:
            texts += 5 * DATASETS
        num_words = rng.choice([1, 2, 3]) if options()[name].is_list else 1
        made.arguments += [f"--{spelled}", *(rng.choice(texts) for _ in range(num_words) if rng.random() < 0.9)]
    if rng.random() < 0.1:
        made.arguments.insert(rng.randrange(len(made.arguments)), rng.choice(TEXTS))


def _yaml(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    made.arguments = ["--config", "fuzzed.yaml", "--dry_run"]
    names = dict(zip((name.removeprefix("--") for name in SMALL[::2]), SMALL[1::2], strict=True))
    lines = [f"{name}: {value}" for name, value in names.items()]
    for _ in range(rng.randint(1, 4)):
        known_lists = 3 * ["dataset", "eval_dataset", "columns"]
        name = rng.choice([*options(), *names, *known_lists, "<<", "? x", "num_epochs", "fsdp", "é", "[a]", "{}", "''"])
        nodes = DATASET_NODES if name in ("dataset", "eval_dataset", "columns") else NODES
        value = yaml.safe_dump(rng.choice(TEXTS[:30])).strip() if rng.random() < 0.2 else rng.choice(nodes)
        if name == "dataset":
            lines = [line for line in lines if not line.startswith("dataset:")]
        if name not in _NOT_TYPED | _OUTPUTS:
            lines.insert(rng.randrange(len(lines) + 1), f"{' ' * (rng.random() < 0.05)}{name}: {value}")
    made.files["fuzzed.yaml"] = spoiled("\n".join(lines).encode(), rng, share=0.15)


def _config(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    made.arguments = [*SMALL, *(["--dry_run"] if rng.random() < 0.7 else [])]
    if rng.random() < 0.5:  # trained from fresh weights
        made.files |= {path.name: None for path in model.glob("*.safetensors*")}
    full = json.loads(AutoConfig.from_pretrained(model).to_json_string(use_diff=False))
    stored = json.loads((model / "config.json").read_text())
    fields = stored if rng.random() < 0.5 else full
    made.files["config.json"] = changed_json(fields, rng)


def _data(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]
    records = rng.choice(
        [
            [{"prompt": f"Count to {n}.", "completion": "one two"} for n in range(4)],
            [{"messages": chat} for _ in range(4)],
            [{"conversations": turns} for _ in range(4)],
            [{"instruction": "Say", "input": "", "output": "yes"} for _ in range(4)],
            [{"text": "some words of a text"} for _ in range(4)],
        ]
    )
    lines = [json.dumps(record).encode() for record in records]
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(len(lines))
        lines[place] = changed_json(records[place], rng, VALUES if rng.random() < 0.3 else CONTENTS)
    suffix = rng.choice([".jsonl", ".jsonl", ".jsonl", ".json", ".json", ".JSONL", ".csv", ".parquet", ""])
    joined = b"[" + b",".join(lines) + b"]" if suffix == ".json" and rng.random() < 0.7 else b"\n".join(lines)
    name = f"fuzzed{suffix}"
    made.files[f"../{name}"] = spoiled(joined, rng, share=0.25)
    made.arguments = [*SMALL, "--dataset", name]


FILE_KINDS: Mapping[str, Callable[[FuzzedInput, random.Random, Path], None]] = {
    "options": _options,
    "YAML": _yaml,
    "model configs": _config,
    "dataset lines": _data,
}


RAW = {
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@huge@": "1e999",
    "@nul@": '"\\u0000"',
}
"""Marks in JSON that are replaced, quotes included, by what Python would not write itself."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 1.5, -0.5, 1e-300, 1e300, 10**9, 10**12, 10**30, -(10**30)),
    *("", " ", "a", "8", "silu", "nonsense", "full_attention", "\x1b[2J\x07", "é模型", "x" * 5000, "../../etc/passwd"),
    *([], {}, [[]], [1, 2], ["a"], {"a": 1}, {"": []}, [None] * 50),
    *RAW,
)
TEXTS = (
    *("", " ", "0", "1", "2", "3", "-1", "1.5", "1e5", "1e-400", "1e400", "9" * 5000, "10" * 20, "1000000000000"),
    *("nan", "inf", "-inf", "１２", "٣", "1_000", "0x10", "auto", "all", "none", "true", "False", "null", "[]", "{}"),
    *("--", "-", "---", "--x", "%s%n%d", "{0}", "$(id)", "`id`", "a\nb", "\t", "\x1b[31m", "é模型"),
    *("a" * 300, "a" * 5000, "/", ".", "..", "~", "~nobody-there/x", "/dev/null", "/proc/self/mem", "nowhere/at/all"),
    *("H200", "4090", "bf16", "3-4", "4-3", "1-1000000000000", "0-0", "GPU-1", "0,0", "0,1", "7b", "gpt2", "model"),
    *("data.jsonl", "model/config.json", "meta-llama/Llama-2-7b-hf"),
)


def changed_json(value: Any, rng: random.Random, values: Sequence[Any] = VALUES) -> bytes:
    """The JSON of `value` with one to three places changed, which are removed, replaced, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        parent, key = value, None
        while isinstance(parent, dict | list) and len(parent):
            keys = list(parent) if isinstance(parent, dict) else range(len(parent))
            key = rng.choice(keys)
            if not isinstance(parent[key], dict | list) or not len(parent[key]) or rng.random() < 0.3:
                break
            parent = parent[key]
        if key is None:
            return json.dumps(rng.choice(values)).encode()
        turn = rng.random()
        if turn < 0.1:
            del parent[key]
        elif turn < 0.15 and isinstance(parent, dict):
            parent[str(rng.choice(TEXTS))] = parent.pop(key)
        elif turn < 0.2 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = parent[key] * rng.choice([-1, 0, 2, 0.5])
        else:
            parent[key] = copy.deepcopy(rng.choice(values))
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text.encode()


def spoiled(content: bytes, rng: random.Random, *, share: float = 1.0) -> bytes:
    """`content`, of which a `share` of all inputs is cut, overwritten, doubled, emptied or in another encoding."""
    if rng.random() >= share:
        return content
    place = rng.randrange(len(content) + 1)
    noise = rng.choice([b"\0", b"\xff\xfe", b"\x80", b"\x1b[2J", b"\n", b'"', b"}", rng.randbytes(20)])
    return rng.choice(
        [
            content[:place],
            content[:place] + noise + content[place:],
            content[:place] + noise + content[place + len(noise) :],
            content + content,
            b"",
            b"\xef\xbb\xbf" + content,
            content.decode(errors="replace").encode("utf-16"),
            rng.randbytes(200),
        ]
    )


ADAPTER = "adapter run"
"""Name of the folder of a run that trained adapters."""
DURABLE = "durable run"
"""Name of the folder of a run with durable steps that was killed."""


def _train(*words: str) -> None:
    from mobius.config.cli import given_options, parse_args
    from mobius.process.ranks import Ranks
    from mobius.training.run import run_training

    run_training(parse_args(words, num_ranks=1), Ranks(0, 1, 0), given=given_options(words))


@contextlib.contextmanager
def _run_folder(place: Path, model: Path) -> Iterator[None]:
    place.mkdir()
    (place / "model").symlink_to(model)
    (place / "data.jsonl").symlink_to(place.parent / "data.jsonl")
    with contextlib.chdir(place):
        yield


def broken_file(name: str, content: bytes, rng: random.Random) -> bytes:
    """Contents of a file of a checkpoint or adapter, changed within its format or beyond it."""
    if name.endswith(".json") and rng.random() < 0.8:
        with contextlib.suppress(ValueError, RecursionError):  # broken before
            return changed_json(json.loads(content), rng)
    if name.endswith(".safetensors") and rng.random() < 0.3:
        length = int.from_bytes(content[:8], "little")
        with contextlib.suppress(ValueError, RecursionError):
            header = changed_json(json.loads(content[8 : 8 + length]), rng)
            return len(header).to_bytes(8, "little") + header + content[8 + length :]
    return spoiled(content, rng)
