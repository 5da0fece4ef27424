#!/usr/bin/env python3
"""Make the embedded default: a corpus of docstrings, a tokenizer trained on it, and the config of a tiny Llama.

Usage: python scripts/make_quickstart_assets.py [FOLDER]   (default: assets/)

The corpus comes from the standard library of the Python that runs this script, read as source and never imported. The
same Python and the same version of `tokenizers` give the same files.
"""

import argparse
import ast
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

INSTRUCTION = "Summarize in one line."
# Tests, and packages that are not Python's own.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "ensurepip", "__pycache__", "lib-dynload"})
# Short samples teach more per second of computation: this is about 64 tokens with signature and chat template.
MAX_SIGNATURE_CHARACTERS = 70
MAX_DETAIL_CHARACTERS = 90
MAX_SUMMARY_CHARACTERS = 120
MAIL_ADDRESS = re.compile(r"\w@\w+\.\w")
VOCAB_SIZE = 4096

PAD, BOS, EOS, TURN = "<|pad|>", "<|begin|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.04,  # 0.02 suits models sixteen times as wide; this one learns faster from here
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def source_files(library: Path) -> Iterator[Path]:
    """The library's sources, sorted, without files that carry a copyright notice of their own."""
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            source = path.read_bytes()
            if not re.search(rb"copyright", source, re.IGNORECASE):
                yield path


def described_objects(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """(signature, docstring) of the module and of every class and function in it, in source order.

    Names are qualified within the module.
    """
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        name, node = pending.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield (f"module {module}" if isinstance(node, ast.Module) else signature(name, node)), docstring
        inner: list[tuple[str, ast.AST]] = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner.append((f"{name}.{child.name}" if name else child.name, child))
            else:
                inner.append((name, child))
        pending = inner + pending


def signature(name: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    return f"def {name}({ast.unparse(node.args)})"


def samples(library: Path) -> Iterator[dict[str, str]]:
    """One record for each docstring that has a summary and a description under it; repeated ones only once."""
    seen = set()
    for path in source_files(library):
        relative = path.relative_to(library).with_suffix("")
        module = ".".join(part for part in relative.parts if part != "__init__") or "__init__"
        for described, docstring in described_objects(ast.parse(path.read_bytes()), module):
            first, _, rest = docstring.partition("\n\n")
            summary, detail = " ".join(first.split()), rest.strip()
            # The description may go on: whole lines are kept as long as they fit.
            while len(detail) > MAX_DETAIL_CHARACTERS and "\n" in detail:
                detail = detail.rpartition("\n")[0].rstrip()
            is_fitting = (
                len(described) <= MAX_SIGNATURE_CHARACTERS
                and 10 <= len(summary) <= MAX_SUMMARY_CHARACTERS
                and 10 <= len(detail) <= MAX_DETAIL_CHARACTERS
            )
            if not is_fitting:
                continue
            if (summary, detail) not in seen and not MAIL_ADDRESS.search(docstring):
                seen.add((summary, detail))
                yield {"instruction": INSTRUCTION, "input": f"{described}\n\n{detail}", "output": summary}


def python_license(library: Path) -> str:
    """Python's own licence agreement from the text that is installed with it."""
    text = (library / "LICENSE.txt").read_text(encoding="utf-8")
    start = text.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2")
    return text[start : text.index("BEOPEN.COM LICENSE AGREEMENT", start)].strip()


def write_corpus(folder: Path, records: list[dict[str, str]], license_text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    characters = sum(len(text) for record in records for text in record.values())
    readme = f"""# Docstrings of the Python standard library

{len(records)} records, {characters} characters, made by `scripts/make_quickstart_assets.py` from the sources of Python
{platform.python_version()}. It is the quick start's corpus: small, real, and it needs no network.

`train.jsonl` has one record per line, in the alpaca format:

| column | content |
|---|---|
| `instruction` | the same request in every record |
| `input` | the name of a module or class or the signature of a function, and the description from its docstring |
| `output` | the docstring's first paragraph, its summary, on one line |

Changes made to the originals: summary and description are separated, line breaks in summaries are joined, descriptions
over {MAX_DETAIL_CHARACTERS} characters lose their last lines, repeated docstrings appear once. Left out are docstrings
with a long signature, a long summary or a mail address, tests, bundled packages, and source files that carry a
copyright notice of their own.

## Licence

Copyright © Python Software Foundation; All Rights Reserved (the years are in clause 2 below). The texts are part of
Python and are redistributed under Python's licence:

```
{license_text}
```
"""
    (folder / "README.md").write_text(readme, encoding="utf-8")


def write_tokenizer(folder: Path, records: list[dict[str, str]]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for record in records for text in (record["input"], record["output"])]
    tokenizer.train_from_iterator([INSTRUCTION, "system", "user", "assistant", *texts], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "additional_special_tokens": [TURN],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MODEL_CONFIG["max_position_embeddings"],
            "padding_side": "right",
        },
    )


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the quick start's corpus, tokenizer and model config.")
    default = Path(__file__).resolve().parent.parent / "assets"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="where to write (default: assets/)")
    folder: Path = parser.parse_args().folder
    library = Path(sysconfig.get_path("stdlib"))
    records = list(samples(library))
    write_corpus(folder / "docstrings", records, python_license(library))
    model_folder = folder / "tiny-llama"
    model_folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(model_folder, records)
    write_json(model_folder / "config.json", MODEL_CONFIG)
    write_json(
        model_folder / "generation_config.json",
        {key: MODEL_CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"do_sample": False},
    )
    print(f"{len(records)} records and a tokenizer of {VOCAB_SIZE} tokens in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
