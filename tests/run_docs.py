"""Tries every command of README and docs: runs what needs no GPU, checks the others; `scripts/run_docs` starts it.

scripts/run_docs
scripts/run_docs simulate      # only commands that contain this text
scripts/run_docs --fresh       # README from top to bottom as a new user: a clone of the last commit, a new shell for
                               # each block. train.sh installs .venv there; MOBIUS_VENV=FOLDER links one that is there
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "scripts", "benchmarks")]

from harness.documents import (  # noqa: E402
    NOT_RUN,
    all_commands,
    blocks_of,
    check_problems,
    in_fresh_shell,
    make_scratch,
    run_problems,
)

from mobius.config.gpu_count import count_gpus  # noqa: E402


def main() -> int:
    """Print a line for each command, and what is wrong with it; returns 1 if anything is."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        scratch, cache = Path(folder) / "mobius", Path(folder) / "cache"
        num_bad = try_as_new_user(scratch, cache) if wanted == "--fresh" else try_each(wanted, scratch, cache)
    print(f"{num_bad} wrong")
    return min(num_bad, 1)


def try_each(wanted: str, scratch: Path, cache: Path) -> int:
    """Run or check every command that contains `wanted`, in the environment of this process."""
    make_scratch(scratch)
    num_bad = 0
    for command in (command for command in all_commands() if wanted in command.text):
        begun = time.monotonic()
        problems = check_problems(command) if command.needs else run_problems(command, scratch, cache)
        num_bad += bool(problems)
        tell(problems, "checked" if command.needs else "ran", begun, f"{command.place}: {command.text}")
    return num_bad


def try_as_new_user(clone: Path, cache: Path) -> int:
    """Type README's blocks, one after the other, each into a new shell, in a clone of the last commit."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    if venv := os.environ.get("MOBIUS_VENV"):
        (clone / ".venv").symlink_to(Path(venv).resolve())
    num_bad = 0
    for block in blocks_of((clone / "README.md").read_text(encoding="utf-8"), "README.md"):
        begun = time.monotonic()
        problems = in_fresh_shell(block, clone, cache, has_gpus=count_gpus() > 0)
        num_bad += bool(problems)
        how = "left out" if all(command.text in NOT_RUN for command in block) else "ran"
        tell(problems, how, begun, f"{block[0].place}: {'; '.join(command.text for command in block)}")
    return num_bad


def tell(problems: list[str], how: str, begun: float, what: str) -> None:
    """Print a line, and the problems below it."""
    print(f"{'WRONG' if problems else how:8}{time.monotonic() - begun:6.1f} s  {what}", flush=True)
    for problem in problems:
        print(problem, flush=True)


if __name__ == "__main__":
    sys.exit(main())
