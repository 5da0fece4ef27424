"""More seeded inputs, for what a run meets beside its options: special files, templates, adapters, mixtures, limits."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.fuzzed_inputs import (
    ADAPTER,
    CHECKPOINT,
    FAMILIES,
    FILE_KINDS,
    NODES,
    RUN,
    SMALL,
    TEXTS,
    FuzzedInput,
    broken_file,
    changed_json,
    read_checkpoint,
    spoiled,
    with_sums,
)
from transformers import GenerationConfig

from mobius.config.config import options
from mobius.config.recipes.answers import TOOLS, read_table

CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
SPECIAL = ("pipe", "socket", "/dev/zero", "/dev/null", "/dev/full", "/dev/tty", "/proc/self/mem", "folder", "loop")
"""Things that stand where a file should: made, or linked to."""
TEMPLATE_PARTS = (
    *("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}", "{{ messages[0].content }}"),
    *(
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "{{ bos_token }}",
        "{{ tools }}",
        "{{ x.y.z }}",
        "{{ x }}",
    ),
    *("{% generation %}x{% endgeneration %}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{% break %}"),
    *(
        "{% set ns = namespace(x=1) %}{{ ns.x }}",
        "{{ messages | tojson }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
    ),
    *("{% include 'x' %}", "{% import 'os' as o %}", "{{ 'a' * 100000 }}", "{{ range(100000) | list | length }}"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages[9].content }}", "{{ messages.append(1) }}"),
    *("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "{#", "{{", "{%"),
    *("}}", "\0", "é模型", "{{ messages[0].content | upper | trim | nonsense }}", "{{ lipsum() }}", "{{ loop.index }}"),
    *("{{ messages[0]['content'].encode('utf-16') }}", "{{ '%d' % 'a' }}", "{{ messages | sort }}", "{% raw %}{{"),
)
LIMITS: Mapping[int, tuple[int, ...]] = {
    resource.RLIMIT_FSIZE: (0, 1, 100, 4096, 60_000, 400_000, 1_200_000),
    resource.RLIMIT_NOFILE: (8, 12, 16, 18, 20, 22, 24, 28, 32, 40, 64),
}


def _special_files(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """A pipe, socket, device, folder or loop in a file's place."""
    run = ["--resume_from_checkpoint", "true", "--device", "cpu", "--save_dir", "out"]
    adapter = [*SMALL, *_LORA, "--adapter_path", "adapter"]
    places: dict[str, list[str]] = {
        **{f"model/{path.name}": [*SMALL] for path in sorted(model.iterdir())},
        "model/chat_template.jinja": [*SMALL],
        "model/model.safetensors": [*SMALL],
        "data.jsonl": [*SMALL],
        "folder/train.jsonl": [*SMALL, "--dataset", "folder"],
        "folder/state.json": [*SMALL, "--dataset", "folder"],
        "fuzzed.yaml": [*SMALL, "--config", "fuzzed.yaml"],
        "fuzzed.json": [*SMALL[:8], "--save_dir", "out", "--plan", "fuzzed.json"],
        "template.jinja": [*SMALL, "--chat_template", "template.jinja"],
        "result.txt": [*SMALL, "--save_results", "result.txt"],
        "params.pt": [*SMALL, "--save_params", "params.pt"],
        "out": [*SMALL],
        "cache": [*SMALL],
        **{f"out/{CHECKPOINT}/{name}": run for name in read_checkpoint(model.parent / RUN / "out" / CHECKPOINT)},
        **{f"out/{name}": run for name in ("metrics.jsonl", "trainer_log.jsonl", "config.json", "all_results.json")},
        **{f"adapter/{path.name}": adapter for path in sorted((model.parent / ADAPTER / "out").glob("*.*"))},
    }
    place = rng.choice(sorted(places))
    made.arguments = list(places[place])
    if made.arguments[0] == "--resume_from_checkpoint":
        made.family = FAMILIES[0]
        made.files |= _checkpoint_files(model)
    if "adapter" in made.arguments:
        made.family = FAMILIES[0]
        made.files |= _adapter_files(model)
    made.special[place] = rng.choice(SPECIAL)


def _templates(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    text = "".join(rng.choice(TEMPLATE_PARTS) for _ in range(rng.randint(1, 4)))
    name = rng.choice(["../template.jinja", "../template.jinja", "chat_template.jinja", "chat_template.json"])
    content = json.dumps({"chat_template": text}) if name.endswith(".json") else text
    made.files[name] = spoiled(content.encode(), rng, share=0.1)
    made.files["../chat.jsonl"] = b"\n".join([json.dumps({"messages": CHAT}).encode()] * 6)
    made.arguments = [*SMALL, "--dataset", "chat.jsonl"]
    if name.startswith(".."):
        made.arguments += ["--chat_template", "template.jinja"]
    made.arguments += rng.choice([[], [], ["--mask_history"], ["--train_on_prompt"], ["--default_system", "{{ x }}"]])


def _generation(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    fields = {**GenerationConfig().to_dict(), "eos_token_id": 2, "pad_token_id": 0}
    made.files["generation_config.json"] = changed_json(fields, rng)
    made.arguments = [*SMALL, "--do_predict", "--eval_dataset", "data.jsonl", "--max_predict_samples", "2"]
    made.arguments += ["--max_new_tokens", rng.choice(["1", "2", "40"]), *rng.choice([[], ["--no_do_train"]])]


def _adapters(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    made.family = FAMILIES[0]
    made.files |= _adapter_files(model)
    name = rng.choice(sorted(made.files))
    content = made.files[name]
    made.files[name] = None if content is None or rng.random() < 0.05 else broken_file(name, content, rng)
    given = rng.choice([[], [], ["--merge"], ["--lora_rank", "3"], ["--lora_target", "q_proj"], ["--num_layers", "1"]])
    made.arguments = [*SMALL, *_LORA, "--adapter_path", "adapter", *given]


def _foreign_keys(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """A YAML file of another trainer, with some of our lines."""
    lines = [f"{name.removeprefix('--')}: {value}" for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)]
    values = ("true", "false", "1", "4", "0.1", "auto", "eval_loss", "lora", "sft", "dpo", "[a, b]", "null", *NODES)
    for _ in range(rng.randint(1, 5)):
        name = rng.choice([*(key for table in TOOLS for key in read_table(table)), *options()])
        if name not in ("save_dir", "save_params", "save_results", "plan_output", "trace", "compile"):
            lines.insert(rng.randrange(len(lines) + 1), f"{name}: {rng.choice(values)}")
    made.files["fuzzed.yaml"] = "\n".join(lines).encode(errors="surrogatepass")
    made.arguments = ["--config", "fuzzed.yaml", *rng.choice([["--dry_run"], ["--dry_run"], [f"--{name}", "1"]])]


def _mixtures(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """Several datasets of their own formats with weights, columns and parts."""
    records = (
        [{"prompt": f"Count to {n}.", "completion": "one two"} for n in range(5)],
        [{"messages": CHAT} for _ in range(4)],
        [{"text": "some words of a text"} for _ in range(4)],
        [{"document": "words", "summary": "w", "label": n} for n in range(4)],
    )
    names, weights = [], ("", "", ":0.5", ":2", ":0", ":-1", ":nan", ":1e9", ":1e-9", ":1e400", ":x")
    for index in range(rng.randint(1, 4)):
        own, suffix = rng.choice(records), rng.choice([".jsonl", ".json", ".csv"])
        lines = [json.dumps(record).encode() for record in own]
        if suffix == ".csv":
            lines = [",".join(own[0]).encode(), *[b",".join(b'"x y"' for _ in record) for record in own]]
        elif rng.random() < 0.3:
            lines[rng.randrange(len(lines))] = changed_json(own[0], rng)
        text = b"[" + b",".join(lines) + b"]" if suffix == ".json" else b"\n".join(lines)
        made.files[f"../part{index}{suffix}"] = spoiled(text, rng, share=0.05)
        names.append(f"part{index}{suffix}{rng.choice(weights)}")
    made.arguments = [*SMALL, "--dataset", *names]
    choices = (
        *("--val_size 1", "--val_size 0.5", "--val_size 100", "--max_samples 1", "--max_samples 3", "--packing off"),
        *("--packing joined", "--packing on", "--seq_length 8", "--seq_length 256", "--num_train_epochs 0.3"),
        *("--columns prompt=document,completion=summary", "--mask_history", "--train_on_prompt", "--preview 2"),
        *(f"--eval_dataset {names[0]} --eval_strategy steps --eval_steps 1", "--preprocessing_num_workers 1"),
        *("--columns text=label", "--batch_size 8 --num_chunks 4", "--chat_template chatml", "--seed 7", "--do_eval"),
    )
    for _ in range(rng.randint(0, 3)):
        made.arguments += rng.choice(choices).split()


def _flipped_bytes(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """A checkpoint in which some bytes of one text are other ones."""
    made.family = FAMILIES[0]
    files = read_checkpoint(model.parent / RUN / "out" / CHECKPOINT)
    texts = sorted(name for name in files if not name.endswith(".safetensors"))
    name = rng.choice([*texts, *["trainer_state.json", "plan.json", "training_args.yaml"] * 2])
    content = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 2, 5])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    changed: dict[str, bytes | None] = {**files, name: bytes(content)}
    if rng.random() < 0.8 and name != "checkpoint.json":
        changed = with_sums(changed, json.loads(files["checkpoint.json"]))
    made.files |= {f"../out/{CHECKPOINT}/{each}": text for each, text in changed.items()}
    made.arguments = ["--resume_from_checkpoint", "true", "--device", "cpu", "--save_dir", "out"]


def _resumes(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """A whole checkpoint, from which a run under other options is to go on."""
    made.family = FAMILIES[0]
    made.files |= _checkpoint_files(model)
    places = ["true", f"out/{CHECKPOINT}"] * 4 + ["out", f"out/{CHECKPOINT}/checkpoint.json"]
    place = rng.choice(places if rng.random() < 0.9 else TEXTS)
    made.arguments = [
        "--resume_from_checkpoint",
        place,
        "--device",
        "cpu",
        "--save_dir",
        "out" if place == "true" else rng.choice(["out", "new"]),
    ]
    taken = set()
    fitting = ("1", "2", "4", "8", "0", "0.5", "auto", "none", "data.jsonl", "model", "adapter", "lora", "bf16", "true")
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(set(options()) - _LEFT_OUT))
        taken.add(name)
        option = options()[name]
        is_flag = option.value_type is bool
        numbers = ("1", "2", "4", "8") if option.value_type in (int, float) else ()
        made.arguments += [f"--{rng.choice(['', 'no_'])}{name}" if is_flag else f"--{name}"]
        made.arguments += [] if is_flag else [rng.choice(option.choices or numbers or fitting)]
        if not is_flag and rng.random() < 0.1:
            made.arguments[-1] = rng.choice(TEXTS)
    if rng.random() < 0.5:
        made.arguments += ["--resume_changes", ",".join(sorted(taken))]


def _limits(made: FuzzedInput, rng: random.Random, model: Path) -> None:
    """A run in order under a limit of the system."""
    kind = rng.choice(sorted(LIMITS))
    made.limits[kind] = rng.choice(LIMITS[kind])
    choices = ("", "", "--save_steps 1", "--report_to tensorboard", "--preprocessing_num_workers 2", "--dry_run")
    made.arguments = [*SMALL, *rng.choice(choices).split()]


def _checkpoint_files(model: Path) -> dict[str, bytes | None]:
    files = read_checkpoint(model.parent / RUN / "out" / CHECKPOINT)
    return {f"../out/{CHECKPOINT}/{name}": content for name, content in files.items()}


def _adapter_files(model: Path) -> dict[str, bytes | None]:
    files = sorted((model.parent / ADAPTER / "out").glob("*.*"))
    return {
        f"../adapter/{path.name}": path.read_bytes() for path in files if "adapter" in path.name or "base" in path.name
    }


_LORA = ("--finetuning_type", "lora", "--lora_rank", "2")
_LEFT_OUT = {"help", "config", "compile", "trace", "overwrite_output_dir", "save_dir", "resume_from_checkpoint"} | {
    *("save_params", "save_results", "plan_output", "preprocessing_num_workers", "dry_run", "device")
}

KINDS: Mapping[str, Callable[[FuzzedInput, random.Random, Path], None]] = {
    **FILE_KINDS,
    "special files": _special_files,
    "chat templates": _templates,
    "generation settings": _generation,
    "adapters": _adapters,
    "foreign keys": _foreign_keys,
    "mixtures": _mixtures,
    "flipped bytes": _flipped_bytes,
    "resumes": _resumes,
    "limits": _limits,
}


def fuzzed_input(kind: str, number: int, base: Path) -> FuzzedInput:
    """Input `number` of `kind`, one of KINDS."""
    rng = random.Random(f"{kind} {number}")
    made = FuzzedInput(kind, number, family=rng.choice(FAMILIES))
    KINDS[kind](made, rng, base / made.family)
    return made
