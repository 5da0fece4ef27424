"""Prints the plan of a run and whether it fits, without GPU or weights: `main.py --dry_run` under a name of its own.

python scripts/plan.py --model_path 7b --card RTX4090 --num_ranks 4 --num_stages 32 --seq_length 512
"""

import importlib.util
import runpy
import sys
from pathlib import Path

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Start main.py with the same options and `--dry_run`."""
    sys.argv = [sys.argv[0], "--dry_run", *(argument for argument in sys.argv[1:] if argument != "--dry_run")]
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "main.py"), run_name="__main__")


if __name__ == "__main__":
    main()
