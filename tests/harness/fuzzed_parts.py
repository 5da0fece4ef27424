"""Seeded inputs for the first hour: records, files of other tools, calls, names, slots, what is saved, the board."""

from __future__ import annotations

import io
import json
import random
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from harness.fuzzed_inputs import (
    ADAPTER,
    DURABLE,
    FAMILIES,
    FILE_KINDS,
    SMALL,
    TEXTS,
    VALUES,
    FuzzedInput,
    broken_file,
    changed_json,
    spoiled,
)
from harness.tiny_families import planned_families, tiny_config
from transformers import GenerationConfig

import mobius
from mobius.board.runs import RunStore
from mobius.board.server import BoardServer
from mobius.config.cli import given_options
from mobius.config.config import options
from mobius.config.recipes.answers import TOOLS, read_table
from mobius.data.chat_templates import BUILTIN_TEMPLATES
from mobius.errors import MobiusError
from mobius.planner.forecast import forecast

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "default": None}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
CALL = {"name": "add", "arguments": {"n": None}}
TURNS: tuple[dict[str, Any], ...] = (
    *({"role": role, "content": "Zwölf <think>a</think> b."} for role in ("system", "user", "assistant", "tool", "x")),
    *({"role": "assistant", "content": text, "function_call": CALL} for text in ("", None, "So:")),
    *(
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": CALL}], key: "why"}
        for key in ("thoughts", "reasoning_content", "tool_plan", "thinking")
    ),
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]},
    {"from": "human", "value": "Who?", "weight": 0},
    {"role": "assistant", "content": "I.<|im_end|>\n", "tool_calls": [json.dumps(CALL)]},
)
RECIPES = """
{model_name_or_path: model, dataset: d, stage: sft, do_train: 1, finetuning_type: full, dataset_dir: ., template: qwen}
{model_name_or_path: model, adapter_name_or_path: adapter, export_dir: merged, export_size: 2, infer_backend: vllm}
{base_model: model, sequence_len: 64, datasets: [{path: data.jsonl, type: completion, field: a}], micro_batch_size: 1}
{model_name_or_path: model, dataset_mixture: {datasets: [{id: data.jsonl, columns: [text], weight: 0.5}]}}
{chat_template: "{{ messages }}", model_name_or_path: model, dataset_name: data.jsonl, packing: true, max_length: 64}
{model: model, train_type: lora, lora_rank: 8, target_modules: [all-linear], dataset: ["data.jsonl#3"]}
"""
TYPES = ("longrope", "dynamic", "yarn", "linear", "llama3", "default", "su", "mrope", None)


def _records(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Conversations of turns of all roles and spellings, texts with start and end tokens; bare, or in an object."""
    lines = []
    for number in range(4):
        turns = [rng.choice(TURNS) for _ in range(rng.randint(1, 4))]
        record = rng.choice([{"messages": turns, "tools": [TOOL]}, {"messages": [*TURNS[1:3], *turns]}])
        if rng.random() < 0.03:
            record = {"text": "<s> some <|im_end|>\n<|im_end|>", "functions": [SCHEMA], "chosen": number}
        lines.append(changed_json(record, rng) if rng.random() < 0.25 else json.dumps(record).encode())
    name = rng.choice([*["a.jsonl"] * 6, "a.json", "a.txt", "f/a.txt"])
    key = json.dumps(rng.choice(["train", "data", "a", ""])).encode()
    text = b"{" + key + b": [" + b",".join(lines) + b"]}" if name == "a.json" else b"\n".join(lines)
    made.files[f"../{name}"] = spoiled(text, rng, share=0.1)
    made.arguments = [*SMALL, "--dataset", name.partition("/")[0], "--seq_length", "256"]
    templates = [*BUILTIN_TEMPLATES, "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"]
    made.arguments += rng.choice([["--chat_template", rng.choice(templates)], []])
    made.arguments += rng.choice([[], ["--preview", "2"], ["--default_system", "s"], ["--mask_history"]])


def _recipes(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Files of other tools, with keys of their tables."""
    own = {"output_dir": "out", **yaml.safe_load(rng.choice(RECIPES.strip().splitlines()))}
    keys = [key for table in TOOLS for key in read_table(table)]
    own |= {rng.choice(keys): rng.choice([*VALUES[:30], True, "lora", "auto", 4]) for _ in range(rng.randint(0, 5))}
    made.files["fuzzed.yaml"] = spoiled(changed_json(own, rng), rng, share=0.1)
    made.files["../dataset_info.json"] = changed_json({"d": {"file_name": "data.jsonl", "columns": {"a": "b"}}}, rng)
    made.arguments = ["--config", "fuzzed.yaml", "--dry_run"]


def _names(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Results of earlier runs, or other files, at the names of a run's."""
    inner = [
        "config.json",
        "model.safetensors",
        "checkpoint-1/checkpoint.json",
        "training_args.yaml",
        "final.partial/config.json",
        "checkpoint-01/x",
        ".replaces_older",
    ]
    for name in rng.sample(inner, rng.randint(0, 4)):
        content = changed_json({"save_number": 1, "step": 1, "files": []}, rng)
        made.files[f"../{rng.choice(['out', 'out', 'out.replaced'])}/{name}"] = content
    if rng.random() < 0.5:
        places = [
            "out",
            "out.replaced",
            "out/checkpoint-2",
            "finetune_params.pt",
            "test_result.txt",
            "out/events.jsonl",
        ]
        made.links[rng.choice(places)] = rng.choice(["model", "nowhere"])
    more = (
        *("overwrite_output_dir", "resume_from_checkpoint true", "save_params none", "save_results none"),
        *("save_results auto", "save_dir model", "save_dir .", "save_params out", "dry_run", "save_results out/a/b"),
    )
    made.arguments = [*SMALL, *(word for each in rng.sample(more, rng.randint(0, 3)) for word in f"--{each}".split())]


def _shapes(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Shapes by options and rotary factors of all families, trained from random weights."""
    made.files |= {path.name: None for path in model.glob("*.safetensors*")}
    fields = json.loads((model / "config.json").read_text())
    if rng.random() < 0.25:
        fields = json.loads(tiny_config(rng.choice(planned_families())).to_json_string(use_diff=False))
        fields |= {"vocab_size": json.loads((model / "config.json").read_text())["vocab_size"]}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0, "low_freq_factor": 1}
    factors |= {"original_max_position_embeddings": 32, "high_freq_factor": 4}
    rope = {"rope_type": rng.choice(TYPES), "rope_theta": 1e4, **factors}
    if (turn := rng.random()) < 0.7:
        fields[rng.choice(["rope_parameters", "rope_scaling"])] = "@rope@"
    changed = changed_json(rope, rng) if turn < 0.5 else json.dumps(rope).encode()
    made.files["config.json"] = json.dumps(fields).encode().replace(b'"@rope@"', changed)
    made.arguments = [*SMALL, "--seq_length", rng.choice(["16", "32", "33", "200"]), *rng.choice([["--dry_run"], []])]
    for name in rng.sample(["num_layers", "embedding_dim", "ff_dim", "num_heads"], rng.randint(0, 2)):
        made.arguments += [
            f"--{name}",
            rng.choice([*["1", "2", "3", "8", "24", "32", "64", "0", "99", "100000"], rng.choice(TEXTS)]),
        ]


def _saved(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Texts beside a model, which a run changes and saves; then answers of it, or its export."""
    made.family = FAMILIES[0]
    generation = {**GenerationConfig().to_dict(), "eos_token_id": rng.choice([None, 3, [2, 3], 2])}
    texts = {name: json.loads((model / name).read_text()) for name in ("config.json", "tokenizer_config.json")}
    templates = [{"name": "default", "template": "{{ x.y }}"}, {"name": "tool_use", "template": 3}]
    texts["tokenizer_config.json"]["chat_template"] = rng.choice(["{{ messages[9] }}", templates, "", None, 3])
    texts["generation_config.json"] = generation
    name = rng.choice(sorted(texts))
    made.files |= {each: json.dumps(content).encode() for each, content in texts.items()}
    made.files[name] = spoiled(changed_json(texts[name], rng), rng, share=0.2)
    for name, content in _adapter_files(model).items():
        made.files[name] = broken_file(name, content or b"", rng) if rng.random() < 0.2 else content
    which, merge = rng.choice([("model", []), ("adapter", ["--merge"]), ("adapter", ["--merge"]), ("out", [])])
    base = ["--base", "model"] if merge else []
    lines = rng.choice([b"Hi\n\xff\xfe\n", b"\x1b[2J\0\n/reset\n/exit\n", b"/system x\n/nothing\n", b""])
    commands = (
        lambda: _command("chat", [which, *base, "--device", "cpu", "--max_new_tokens", "3"], lines),
        lambda: _command("export", [which, "merged", *base, *merge], b""),
    )
    made.call = rng.choice([*commands, None])
    made.arguments = [*SMALL, "--do_predict", "--eval_dataset", "data.jsonl", "--max_new_tokens", "3"]
    made.arguments += rng.choice([[], ["--chat_template", "chatml"], ["--finetuning_type", "lora", "--merge"]])


def _command(name: str, words: list[str], lines: bytes) -> None:
    from mobius.chat.command import chat
    from mobius.checkpoint.export_command import export

    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines))):
        (chat if name == "chat" else export)(words)


def _calls(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Calls from Python, whose process is not started."""
    deep: dict[str, Any] = {}
    deep["a"] = deep
    odd = [None, True, 3, 1.5, b"x", object(), len, {1, 2}, Path("data.jsonl"), Ellipsis, deep, [deep], 10**5000]
    rows = [{"text": "a b"}, {"prompt": "a", "completion": rng.choice([*odd, *VALUES])}, rng.choice([*odd, *VALUES])]
    data = [*odd, *TEXTS[:40], rows, rows[:2], {"train": rows}, {"a": 1}, iter(rows), [], ["data.jsonl", Path("a")]]
    names = [*options(), *read_table("trl"), "on_event", "eval_dataset", "learning_rat", "help", "", "é", "a b"]
    keywords = {rng.choice(names): rng.choice([*odd, *VALUES, *TEXTS, rows]) for _ in range(rng.randint(0, 3))}
    keywords = {name: value for name, value in keywords.items() if name not in ("model", "dataset", "progress")}
    first, second = rng.choice(["model"] * 60 + [*odd, *TEXTS]), rng.choice(data)
    plans = rng.random() < 0.4

    def call() -> None:
        with mock.patch("mobius.api._run", return_value=(1, ["ended"])):
            if plans:
                repr(mobius.plan(first, **keywords))
            else:
                mobius.finetune(first, second, progress=False, **{"save_dir": "out", **keywords})

    made.call, made.arguments = call, [*keywords, str(type(first)), str(type(second)), str(plans)]


def _commands(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Plans of the page and of Python, whose command must be one."""
    words = ["--model_path", rng.choice(["7b", "1b", "model", "qwen3-30b-a3b", rng.choice(TEXTS)]), "--card", "RTX4090"]
    more = ("num_ranks 2", "num_stages auto", "num_chunks 4", "batch_size 8", "seq_length 512", "host_memory_limit 20")
    words += [word for each in rng.sample(more, 4) for word in f"--{each}".split()]
    names = sorted(set(options()) - {"config", "help", "compile", "plan_output", "trace"})
    for name in rng.sample(names, rng.randint(0, 2)):
        value = rng.choice([*(options()[name].choices or ("2", "8")), "auto", "true", rng.choice(TEXTS)])
        words += [f"--{name}", value] if rng.random() < 0.7 else [f"--{name}={value}"]

    def call() -> None:
        found = forecast(words, is_draft=True)
        json.dumps([found.to_json(), repr(found), found._repr_html_(), found.describe()])
        typed = shlex.split(found.command)[2:]
        try:
            given_options(typed)
        except MobiusError as error:
            raise AssertionError(f"this is no command: {typed}") from error

    made.call, made.arguments = call, words


def _slots(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Durable steps of a killed run, some of them damaged, from which it is to go on."""
    made.family, run = FAMILIES[0], model.parent / DURABLE
    paths = sorted(path for path in run.rglob("*") if path.is_file() or path.is_symlink())
    own = [path for path in paths if path.name not in ("model", "data.jsonl") and "cache" not in path.parts]
    files = {path: path.read_bytes() for path in own if path.is_file() and not path.is_symlink()}
    made.links = {str(path.relative_to(run)): str(path.readlink()) for path in own if path.is_symlink()}
    in_slots = [path for path in files if "slot-" in str(path)]
    for path in rng.sample(in_slots, rng.choice([1, 1, 2, 4])):
        files[path] = broken_file(path.name, files[path], rng)
    made.files |= {f"../{path.relative_to(run)}": content for path, content in files.items() if rng.random() < 0.98}
    made.arguments = ["--resume_from_checkpoint", "true", "--save_dir", "cut", "--device", "cpu"]
    folders = ("disk/", "./disk,other/disk", "disk,disk", "other/disk,disk", "disk,link", "cut", "model", "", *TEXTS)
    if rng.random() < 0.4:
        made.arguments += ["--offload_states_to", rng.choice(folders), "--resume_changes", "offload_states_to"]


def _board(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Files of runs as the board finds them, and addresses and questions that it gets."""
    events = (
        {"event": "start", "num_steps": 9, "step": 0},
        {"event": "step", "step": 1, "loss": 2.5, "time": 1.0},
        {"event": "evaluation", "step": 1, "numbers": {"loss": 1}},
        {"event": "end", "reason": "time"},
    )
    for name in ("events.jsonl", "metrics.jsonl", "trainer_log.jsonl"):
        lines = [changed_json(each, rng) if rng.random() < 0.5 else json.dumps(each).encode() for each in events * 3]
        made.files[f"../runs/{rng.choice(['a', 'b/c', 'é'])}/{name}"] = spoiled(b"\n".join(lines), rng, share=0.2)
    parts = [
        "run=a",
        "run=b/c",
        "run=../..",
        "first=0",
        "last=1e999",
        "last=nan",
        "first=9",
        "file=plan.json",
        "%E0%A4%A",
    ]
    asked = []
    for _ in range(4):
        path = rng.choice(["api/section", "api/file", "api/events", "", "app.js", "../x", "\u00e9\u0100"])
        asked.append(f"GET /t/{path}?{'&'.join(rng.sample(parts, 3))} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    question = changed_json({"words": ["--x"], "run": "a", "config": "{}", "is_draft": True}, rng)
    head = f"POST /t/api/plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(question)}\r\n\r\n"
    made.call = lambda: _ask_board([*asked, head.encode() + question])


class _Board(BoardServer):
    """A board whose errors are kept."""

    error: BaseException | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(found := sys.exception(), OSError):
            self.error = found


def _ask_board(requests: list[bytes]) -> None:
    store = RunStore(Path("runs"))
    for row in store.summaries():
        json.dumps([store.history(row["id"], (0, 0), 10), row], allow_nan=False)
    with _Board(store, token="t", planner=lambda question, _: {"words": list(question["words"])}) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for request in requests:
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as asking:
                asking.sendall(request)
                assert asking.recv(100).startswith(b"HTTP/1.0 "), request
        server.shutdown()
    if server.error is not None:
        raise server.error


def _adapter_files(model: Path) -> dict[str, bytes | None]:
    files = [
        path for path in (model.parent / ADAPTER / "out").glob("*.*") if {"adapter", "base"} & {*path.stem.split("_")}
    ]
    return {f"../adapter/{path.name}": path.read_bytes() for path in sorted(files)}


KINDS: Mapping[str, Callable[[FuzzedInput, random.Random, Path], None]] = {
    **FILE_KINDS,
    "records": _records,
    "files of tools": _recipes,
    "taken names": _names,
    "shapes": _shapes,
    "saved texts": _saved,
    "Python calls": _calls,
    "plans' commands": _commands,
    "durable steps": _slots,
    "board": _board,
}


def fuzzed_input(kind: str, number: int, base: Path) -> FuzzedInput:
    """Input `number` of `kind`, one of KINDS."""
    rng = random.Random(f"{kind} {number}")
    made = FuzzedInput(kind, number, family=rng.choice(FAMILIES))
    KINDS[kind](made, rng, base / made.family)
    return made
