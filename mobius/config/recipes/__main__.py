"""Prints docs/user/other_trainers.md: its text, and each tool's keys that are taken or refused."""

import sys
from pathlib import Path

from mobius.config.recipes.answers import IGNORED, SHARED, TAKEN, TOOLS, Row, read_table
from mobius.files.regular_files import read_text


def page() -> str:
    """Markdown of docs/user/other_trainers.md."""
    lines = [read_text(Path(__file__).with_name("page.txt")).rstrip()]
    for table, title in TOOLS.items():
        if table == SHARED:
            continue
        answers = dict[str, list[str]]()
        for key, row in read_table(table).items():
            if not row.answer.startswith(IGNORED):
                answers.setdefault(_told(row), []).append(f"`{key}`")
        lines += ["", f"## {title}", "", "| key | what Mobius does with it |", "|---|---|"]
        lines += [f"| {', '.join(keys)} | {told} |" for told, keys in answers.items()]
    return "\n".join(lines) + "\n"


def _told(row: Row) -> str:
    text = row.answer.replace("|", "\\|")
    if text.startswith(TAKEN):
        return f"{text}{f'. Default: {row.default}' if row.default else ''}"
    return f"refused: {text.removeprefix('not available').lstrip(':; ')}"


if __name__ == "__main__":
    sys.stdout.write(page())
