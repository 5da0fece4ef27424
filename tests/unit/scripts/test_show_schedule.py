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


def test_it_writes_a_picture_where_it_is_told(tmp_path: Path) -> None:
    result = show("--num_chunks", "2", "--no_prefetch", "--output", "schedule.svg", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 weight slot per GPU" in (tmp_path / "schedule.svg").read_text()


def test_resident_stages_have_no_loads(tmp_path: Path) -> None:
    options = ("--num_ranks", "2", "--num_stages", "6", "--num_chunks", "1", "--resident_stages", "1")
    result = show(*options, "--actions", "--output", str(tmp_path / "mixed.svg"))
    assert result.returncode == 0, result.stderr
    assert "\nrank 1\n  generate_data -1 5 -1 -1\n  load -1 3 -1 -1\n  load -1 5 -1 -1\n" in result.stdout
    assert "2 of the stages resident" in (tmp_path / "mixed.svg").read_text()


def test_schedules_traces_and_their_pictures_need_no_torch() -> None:
    imports = "import sys, mobius.schedule.render, mobius.reporting.pictures, mobius.reporting.pictures"
    code = f"{imports}; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
