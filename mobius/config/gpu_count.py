"""Number of GPUs of this machine, found without CUDA."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

CPU_RANKS: Final = 2
"""Processes of a run on a machine without a GPU."""


def count_gpus(device_folder: Path = Path("/dev"), *, nvidia_smi: str = "nvidia-smi") -> int:
    """Number of GPUs that this process may use.

    Counts device files, because a container sees only the files of its GPUs and counting is fast. Without such files,
    asks nvidia-smi. /proc/driver would be wrong: it lists the host's GPUs in containers that have none.
    """
    files = [path for path in device_folder.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    if files or shutil.which(nvidia_smi) is None:
        return len(files)
    listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
