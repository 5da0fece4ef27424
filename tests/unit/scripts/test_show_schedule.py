"""scripts/show_schedule.py, as a user runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def show(*options: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "show_schedule.py"
    return subprocess.run(
        [sys.executable, str(script), *options], cwd=folder, capture_output=True, text=True, check=False
    )


def test_it_runs_from_any_folder_and_prints_grid_and_actions(tmp_path: Path) -> None:
    result = show("--num_ranks", "2", "--num_stages", "4", "--num_chunks", "1", "--actions", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "B3.0-----" in result.stdout
    assert "\nrank 1\n  generate_data -1 3 -1 -1\n  load -1 1 -1 -1\n" in result.stdout


def test_schedules_traces_and_their_pictures_need_no_torch() -> None:
    imports = "import sys, mobius.schedule.render, mobius.reporting.pictures, mobius.reporting.pictures"
    code = f"{imports}; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
