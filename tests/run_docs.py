"""Tries every command of README and docs: runs what needs no GPU, checks the others; `scripts/run_docs` starts it.

scripts/run_docs
scripts/run_docs simulate      # only commands that contain this text
"""

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "scripts", "benchmarks")]

from harness.documents import all_commands, check_problems, make_scratch, run_problems  # noqa: E402


def main() -> int:
    """Print a line for each command, and what is wrong with it; returns 1 if anything is."""
    wanted, num_bad = sys.argv[1] if len(sys.argv) > 1 else "", 0
    with tempfile.TemporaryDirectory() as folder:
        scratch, cache = Path(folder) / "mobius", Path(folder) / "cache"
        make_scratch(scratch)
        for command in (command for command in all_commands() if wanted in command.text):
            begun = time.monotonic()
            problems = check_problems(command) if command.needs else run_problems(command, scratch, cache)
            num_bad += bool(problems)
            how = "WRONG" if problems else "checked" if command.needs else "ran"
            print(f"{how:8}{time.monotonic() - begun:6.1f} s  {command.place}: {command.text}", *problems, sep="\n")
            sys.stdout.flush()
    print(f"{num_bad} wrong")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
