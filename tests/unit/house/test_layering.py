"""Importing does nothing, and plans need no torch; that modules import from floors below is seen by scripts/check."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "mobius").rglob("*.py")
)

HEAVY = ("torch", "transformers", "datasets")
"""Packages that take seconds to import, or are not there on a machine that only plans."""


def run_python(program: str) -> str:
    # A process of its own: what is imported here came from other tests too.
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def modules_without_torch() -> set[str]:
    """Modules and packages that the layering contracts keep free of torch, transformers and datasets."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    forbidding = [contract for contract in contracts if contract["type"] == "forbidden"]
    (modules,) = (c["source_modules"] for c in forbidding if set(c["forbidden_modules"]) == set(HEAVY))
    return set(modules)


def test_every_module_can_be_imported_without_a_gpu_and_importing_does_nothing() -> None:
    # torch brings Triton along for GPUs only.
    modules = [name for name in MODULES if ".triton_" not in name or find_spec("triton") is not None]
    printed = run_python(
        "import gc, importlib, threading\n"
        "gc.disable()  # a fifth of the time\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "import sys, torch\n"
        "assert 'torch._functorch.partitioners' not in sys.modules, 'a second for runs that compile'\n"
        "assert not torch.cuda.is_initialized(), 'the GPU was touched'\n"
        "assert not torch.distributed.is_initialized(), 'a process group was made'\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )

    assert printed == ""


def test_plan_schedule_and_the_ground_floor_work_where_torch_is_not_installed() -> None:
    without_torch = modules_without_torch()
    ground = [name for name in MODULES if name == "mobius" or ".".join(name.split(".")[:2]) in without_torch]

    run_python(
        "import importlib, sys\n"
        f"for name in {HEAVY!r}:\n"
        "    sys.modules[name] = None  # makes its import fail\n"
        f"for name in {ground!r}:\n"
        "    importlib.import_module(name)\n"
    )
