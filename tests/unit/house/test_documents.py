"""Rules for README and docs: short, in lines that fit a screen, true to the tree, and the same in both languages."""

import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from harness.documents import commands_of

import mobius

ROOT = Path(__file__).parents[3]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
CONTRIBUTING, TESTS = ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"
OF_CONTRIBUTORS = [CONTRIBUTING, TESTS, ROOT / "CHANGELOG.md", ROOT / "CODE_OF_CONDUCT.md"]
PAGES = [README, CHINESE, *OF_CONTRIBUTORS, *sorted((ROOT / "docs").rglob("*.md"))]
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
MAX_COLUMNS = 120
MAX_README_LINES = 75
MAX_RECORD_WORDS = 200
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|c|sh|md|yaml)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


over_pages = pytest.mark.parametrize("path", PAGES, ids=name_of)


def columns(line: str) -> int:
    """Width on a screen, where a Chinese character takes two columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines that can be wrapped: all but tables, headings, pictures, and what a command prints."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith(("|", "#", "![", "    ")):
            yield number, line


@over_pages
def test_lines_wrap_at_120_columns(path: Path) -> None:
    long = [number for number, line in prose(path.read_text(encoding="utf-8")) if columns(line) > MAX_COLUMNS]

    assert not long


@pytest.mark.parametrize("path", [README, CHINESE], ids=lambda path: path.name)
def test_readme_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_decision_is_short_and_in_the_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert len(text.split()) <= MAX_RECORD_WORDS
    assert all(part in text for part in ("**Rule.**", "**Evidence.**"))
    assert f"({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8")


@over_pages
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        page = path.parent / target if target else path
        headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        if not page.exists() or (anchor and anchor not in map(anchor_of, headings)):
            broken.append(f"{target}#{anchor}")

    assert not broken


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@over_pages
def test_files_that_are_named_exist(path: Path) -> None:
    named = set(FILE.findall(path.read_text(encoding="utf-8")))
    places = (ROOT, ROOT / "mobius", path.parent, ROOT / "docs")

    assert not [name for name in named if not any((place / name).exists() for place in places)]


def test_both_readmes_have_the_same_commands_and_numbers() -> None:
    english, chinese = README.read_text(encoding="utf-8"), CHINESE.read_text(encoding="utf-8")

    assert [c.text for c in commands_of(english, "")] == [c.text for c in commands_of(chinese, "")]
    assert numbers_in_tables(english) == numbers_in_tables(chinese)


def numbers_in_tables(text: str) -> Counter[str]:
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    return Counter(re.findall(r"\d+(?:\.\d+)?", rows))


def test_the_architecture_lists_the_layers_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    packages = [name for layer in layers for name in re.findall(r"\w+", layer) if (ROOT / "mobius" / name).is_dir()]

    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = page.partition("## Rooms")[2].split("```")[1]
    assert re.findall(r"^(\w+)/ ", block, re.MULTILINE) == packages


def test_the_version_is_the_newest_of_the_changelog_and_the_one_to_cite() -> None:
    newest = re.search(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert newest is not None
    assert newest.groups() == (mobius.__version__, citation["date-released"])
    assert citation["version"] == mobius.__version__
