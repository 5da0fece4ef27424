"""Prints docs/user/other_trainers.md: its text, and each tool's keys that are taken or refused."""

import sys
from pathlib import Path
from typing import Final

from mobius.config.recipes.answers import IGNORED, SHARED, TAKEN, TOOLS, Row, read_table
from mobius.files.regular_files import read_text

_AS_IT_IS: Final = "taken as the option in brackets, or as they are"


def page() -> str:
    """Markdown of docs/user/other_trainers.md."""
    lines = [read_text(Path(__file__).with_name("page.txt")).rstrip()]
    for table, title in TOOLS.items():
        if table == SHARED:
            continue
        rows = {key: row for key, row in read_table(table).items() if not row.answer.startswith(IGNORED)}
        answers = {_AS_IT_IS: [_renamed(key, row) for key, row in rows.items() if row.option is not None]}
        for key, row in rows.items():
            if row.option is None:
                answers.setdefault(_told(row), []).append(f"`{key}`")
        lines += ["", f"## {title}", "", "| key | what Mobius does with it |", "|---|---|"]
        lines += [f"| {', '.join(keys)} | {told} |" for told, keys in answers.items()]
    return "\n".join(lines) + "\n"


def _renamed(key: str, row: Row) -> str:
    """Key with the option that takes its value, unless both have one name, and the tool's default."""
    facts = [f"--{row.option}"] * (row.option != key) + [f"default {row.default}"] * bool(row.default)
    return f"`{key}` ({', '.join(facts)})" if facts else f"`{key}`"


def _told(row: Row) -> str:
    text = row.answer.replace("|", "\\|")
    return text if text.startswith(TAKEN) else f"refused: {text.removeprefix('not available').lstrip(':; ')}"


if __name__ == "__main__":
    sys.stdout.write(page())
