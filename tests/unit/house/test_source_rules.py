"""Rules of the house that no tool knows: sizes, names, docstrings, and what must not be in the sources."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "mobius").rglob("*.py"))
SOURCE_FOLDERS = ("mobius", "scripts", "benchmarks", "tests", "configs", "docs", "assets", ".ci", ".github")
SOURCE_SUFFIXES = {".py", ".c", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jinja", ".sh", ".cff", ""}

SCRIPTS = sorted(path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
PICKLERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PICKLED_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
DETOURS = re.compile(r"(Of|Those|What|By|The same|It)\b")
"""Words that a docstring does not begin with: first comes what is returned, owned or done."""
VAGUE_NAMES = {"utils", "util", "common", "manager", "helper", "helpers", "misc"}
PERSONAL = {
    "a person's folder": r"(?<![\w.])/(?:home|Users)/[a-z]|(?<![\w.])/root/[\w.]",
    "an access token": r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9]{20,}|\bghp_[A-Za-z0-9]{20,}",
}


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def syntax_nodes(path: Path) -> Mapping[type[ast.AST], Sequence[Any]]:
    """All nodes of a file by their kind; walking the tree takes longer than a rule."""
    nodes: dict[type[ast.AST], list[Any]] = {}
    for node in ast.walk(syntax_tree(path)):
        nodes.setdefault(type(node), []).append(node)
    return nodes


def nodes_of(path: Path, *kinds: type[ast.AST]) -> list[Any]:
    return [node for kind in kinds for node in syntax_nodes(path).get(kind, ())]


def breaches(rule: Callable[[Path], object], paths: Sequence[Path] = MODULES) -> dict[str, object]:
    """File -> what `rule` finds in it, of those where it finds something: one test for all is soon done."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := rule(path))}


def text_files() -> Iterator[Path]:
    candidates = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in SOURCE_FOLDERS:
        candidates += [
            path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
    return (path for path in candidates if path.suffix in SOURCE_SUFFIXES)


def test_a_module_is_named_for_what_it_holds() -> None:
    def vague_words(path: Path) -> set[str]:
        return {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")} & VAGUE_NAMES

    assert breaches(vague_words) == {}


def test_custom_code_of_a_model_is_never_run_or_asked_for() -> None:
    def trusting_lines(path: Path) -> list[int]:
        lines = []
        for call in nodes_of(path, ast.Call):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("from_pretrained", "from_config"):
                trusted = [ast.unparse(word.value) for word in call.keywords if word.arg == "trust_remote_code"]
                lines += [] if trusted == ["False"] else [call.lineno]
        return lines

    assert breaches(trusting_lines, [*MODULES, *SCRIPTS]) == {}, "without the word transformers may ask on the terminal"


def test_only_models_ask_a_tensor_whether_it_has_memory() -> None:
    """Where a part of a stage is between its uses, the memory layout says (`StageRegions`)."""

    def asking_lines(path: Path) -> list[int]:
        asked = [node.lineno for node in nodes_of(path, ast.Attribute) if node.attr == "is_meta"]
        return [] if path.is_relative_to(ROOT / "mobius" / "models") else asked

    assert breaches(asking_lines) == {}


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


@functools.cache
def protocol_methods() -> frozenset[str]:
    """Methods that a Protocol documents for all classes that fit it."""
    return frozenset(
        name
        for path in MODULES
        for node in nodes_of(path, ast.ClassDef)
        if any(ast.unparse(base).startswith("Protocol") for base in node.bases)
        for name, method in public_definitions(node.body)
        if ast.get_docstring(method)
    )


def is_documented(name: str, node: Definition) -> bool:
    """By a docstring of its own; a property by its name and type, a method of a Protocol there."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if decorators & {"property", "cached_property", "setter", "overload", "override"}:
        return True
    return bool(ast.get_docstring(node)) or ("." in name and node.name in protocol_methods())


def test_a_module_and_everything_public_in_it_is_documented() -> None:
    def undocumented(path: Path) -> list[str]:
        tree = syntax_tree(path)
        own = [] if ast.get_docstring(tree) else ["the module itself"]
        return own + [name for name, node in public_definitions(tree.body) if not is_documented(name, node)]

    assert breaches(undocumented) == {}


def test_a_docstring_begins_with_what_is_returned_owned_or_done() -> None:
    def lines_of_detours(path: Path) -> list[int]:
        texts = (node.value for node in nodes_of(path, ast.Expr))
        return [text.lineno for text in texts if isinstance(text, ast.Constant) and DETOURS.match(str(text.value))]

    assert breaches(lines_of_detours) == {}


def test_what_a_run_is_made_of_makes_no_attribute_after_init() -> None:
    """A reader finds everything that such an object holds in one place: in its class, or in that which it extends."""

    def stored(node: ast.AST) -> set[str]:
        return {
            name.attr
            for name in ast.walk(node)
            if isinstance(name, ast.Attribute) and isinstance(name.ctx, ast.Store) and ast.unparse(name.value) == "self"
        }

    def methods(owner: ast.ClassDef) -> list[ast.FunctionDef]:
        return [each for each in owner.body if isinstance(each, ast.FunctionDef)]

    def declared(owner: ast.ClassDef) -> set[str]:
        made = [stored(each) for each in methods(owner) if each.name in ("__init__", "__post_init__")]
        return {ast.unparse(each.target) for each in owner.body if isinstance(each, ast.AnnAssign)}.union(*made)

    of_class = {owner.name: declared(owner) for path in MODULES for owner in nodes_of(path, ast.ClassDef)}

    def late_attributes(path: Path) -> set[str]:
        late = set[str]()
        for owner in nodes_of(path, ast.ClassDef):
            of_bases = [of_class.get(ast.unparse(base), set()) for base in owner.bases]
            late |= set[str]().union(*map(stored, methods(owner))) - declared(owner).union(*of_bases)
        return late

    rooms = {"training", "checkpoint", "engine", "distributed", "schedule", "hardware", "models"}
    assert breaches(late_attributes, [path for path in MODULES if rooms & {*path.parts}]) == {}


def test_a_module_logs_instead_of_printing() -> None:
    def printing_lines(path: Path) -> list[int]:
        names = (call for call in nodes_of(path, ast.Call) if isinstance(call.func, ast.Name))
        return [call.lineno for call in names if call.func.id == "print"]

    assert breaches(printing_lines) == {}


READS_ITSELF = {
    "the kernel's own files, of /proc and /sys": (
        *(
            "hardware/host_memory",
            "hardware/cpu_dtype",
            "hardware/numa",
            "hardware/topology",
            "config/launch",
            "doctor/machine",
            "process/ranks",
        ),
        *("data/chat_templates", "files/atomic_files"),
    ),
    "files of this package": (
        "engine/adamw_cpu",
        "distributed/node_checks",
        "models/family_support",
        "board/server",
    ),
    "what this very run has written": (
        *(
            "training/file_checks",
            "checkpoint/folders",
            "reporting/trace",
            "data/datasets",
            "data/token_store",
            "data/workers",
        ),
    ),
}
"""Modules that read files by themselves, by the reason."""


def test_files_of_others_are_read_by_the_one_reader() -> None:
    known = {module for modules in READS_ITSELF.values() for module in modules} | {"files/regular_files"}

    def reading_lines(path: Path) -> list[int]:
        if path.relative_to(ROOT / "mobius").with_suffix("").as_posix() in known:
            return []
        methods = (call for call in nodes_of(path, ast.Call) if isinstance(call.func, ast.Attribute))
        return [call.lineno for call in methods if call.func.attr in ("read_text", "read_bytes")]

    assert breaches(reading_lines) == {}, "a pipe would be waited for, and another encoding be a traceback"


def test_only_ranks_touches_the_environment() -> None:
    def touched(path: Path) -> set[str]:
        used = {node.attr for node in nodes_of(path, ast.Attribute)} | {node.name for node in nodes_of(path, ast.alias)}
        return used & {"environ", "environb", "getenv", "putenv", "unsetenv"}

    assert set(breaches(touched)) == {"mobius/process/ranks.py"}


def test_words_of_the_system_come_by_one_function() -> None:
    """Its `strerror` is None for an error that was made with a message alone, or with nothing."""

    def asks_itself(path: Path) -> list[int]:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [number for number, line in enumerate(lines, start=1) if "strerror" in line]

    modules = [path for path in MODULES if path != ROOT / "mobius" / "errors.py"]
    assert breaches(asks_itself, modules) == {}, "ask errors.reason_of"


def test_nothing_is_unpickled() -> None:
    """What comes from a file or another process is data; `multiprocessing` alone pickles, between its own processes."""
    kinds = ast.Import, ast.ImportFrom, ast.Attribute, ast.Call
    assert breaches(lambda path: [*unpickling(nodes_of(path, *kinds))], [*MODULES, *SCRIPTS]) == {}


def unpickling(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            yield from (name for name in names if name.partition(".")[0] in PICKLERS or name in PICKLED_COLLECTIVES)
        elif isinstance(node, ast.Attribute) and node.attr in PICKLED_COLLECTIVES:
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "load"
            and ast.unparse(node.func) == "torch.load"
        ):
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            yield from [ast.unparse(node)] if words.get("weights_only") != "True" else []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "dist.all_gather_object(values, value)",
        "from torch.distributed import broadcast_object_list",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_the_rule_against_pickles_would_find_one(source: str) -> None:
    assert [*unpickling(ast.walk(ast.parse(source)))]
    assert not [*unpickling(ast.walk(ast.parse("import json; torch.load(path, weights_only=True)")))]


@pytest.mark.parametrize("rule", PERSONAL)
def test_no_file_contains_what_belongs_to_one_person(rule: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
        for path in text_files()
        for text in [path.read_text(encoding="utf-8")]
        for match in re.finditer(PERSONAL[rule], text)
    ]

    assert not found, f"{rule} in {found}"


def test_the_rule_against_personal_folders_and_tokens_would_find_one() -> None:
    # In two pieces each, so that the rule does not find this file.
    assert re.search(PERSONAL["a person's folder"], "cd /ho" + "me/ada/models")
    assert not re.search(PERSONAL["a person's folder"], "https://example.org/home/page")
    assert re.search(PERSONAL["an access token"], "token=hf_" + "a1" * 17)
