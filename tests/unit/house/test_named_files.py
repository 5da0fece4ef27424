"""Files that a docstring, a comment, a message or a page names are in the tree."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
READ = {".py", ".sh", ".c", ".js", ".yaml", ".yml", ".toml", ".txt", ".md", ""}
PAST = {"CHANGELOG.md"}
"""What is said of earlier days may name what there was."""
OTHERS = {"convert_hf_to_gguf.py": "llama.cpp's"}
"""Files of other projects and of users, by whose they are."""
FILE = re.compile(r"(?<![\w./*{<-])(?:\.\.?/)*((?:[\w-]+/)*[\w-]+\.(?:py|sh|md))\b(?![\w*/-]|\.\w)")


def tree() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def unknown_files(text: str, known: frozenset[str]) -> set[str]:
    """Files that `text` names and that have no such place in the tree, below whichever folder."""
    return {*FILE.findall(text)} - known - OTHERS.keys()


def words_of(source: str, *, has_messages: bool) -> str:
    """Comments and docstrings, and with `has_messages` all other text that a program may show."""
    comments = [token.string for token in tokens(source) if token.type == tokenize.COMMENT]
    nodes = [*ast.walk(ast.parse(source))]
    values = nodes if has_messages else [node.value for node in nodes if isinstance(node, ast.Expr)]
    texts = [node.value for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*comments, *texts])


def tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def test_every_file_that_is_named_is_there() -> None:
    """Strings of tests are data, and may name what a test writes."""
    files = tree()
    known = frozenset("/".join(Path(name).parts[-depth:]) for name in files for depth in range(1, name.count("/") + 2))
    broken = {}
    for name in files:
        path = ROOT / name
        if path.suffix not in READ or name in PAST:
            continue
        text = path.read_text(encoding="utf-8")
        if unknown := unknown_files(text, known):  # few files have one in their code
            if path.suffix == ".py":
                unknown = unknown_files(words_of(text, has_messages=path.parts[len(ROOT.parts)] != "tests"), known)
            broken |= {name: unknown} if unknown else {}
    assert broken == {}


def test_a_file_that_is_not_there_would_be_seen() -> None:
    known = frozenset({"plan.py", "schedule/plan.py"})
    source = '"""As in schedule/plan.py and old.py."""\nname = "run/gone.sh"  # see pages/none.md\n'
    assert unknown_files(words_of(source, has_messages=True), known) == {"old.py", "run/gone.sh", "pages/none.md"}
    assert unknown_files(words_of(source, has_messages=False), known) == {"old.py", "pages/none.md"}
    assert unknown_files("plan.py, a folder's *.py, {name}.md, models/plan.pyc", known) == set()
    assert unknown_files("models/plan.py", known) == {"models/plan.py"}
