"""train.sh's command fits the machine, and nothing from a file reaches the shell as code."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import runs

from mobius.config.config import Device, LaunchConfig, config_from
from mobius.config.gpu_count import count_gpus
from mobius.config.launch import Resources, count_cores, launch_command, plan_processes, resume_command
from mobius.config.options import OptionValue
from mobius.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = Resources(num_gpus=0, num_cores=6)
BOX = Resources(num_gpus=4, num_cores=64)


@pytest.fixture(autouse=True)
def no_earlier_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh clone."""
    monkeypatch.setattr("mobius.config.launch.refuse_taken_names", lambda _: None)


@pytest.fixture
def free_port() -> str:
    return str(runs.free_port())


def words_of(arguments: list[str], machine: Resources, folder: Path = ROOT) -> list[str]:
    return launch_command(arguments, folder, machine)[0]


def test_the_readme_config_starts_four_ranks_in_its_device_order(
    monkeypatch: pytest.MonkeyPatch, free_port: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert words_of(["--lr", "2e-5", "--master_port", free_port], BOX) == [
        "env", f"MOBIUS_COMMAND=bash train.sh --lr 2e-5 --master_port {free_port}", "OMP_NUM_THREADS=16",
        "CUDA_VISIBLE_DEVICES=0,2,1,3", sys.executable, "-m", "mobius.launcher", "--nproc_per_node", "4",
        "--master_port", free_port, "main.py", "--lr", "2e-5", "--master_port", free_port,
        "--config", "configs/fine_tune.yaml",
    ]  # fmt: skip


def test_each_of_several_nodes_is_told_where_all_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(["--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "node0:29502", "--num_stages", "8"], BOX)
    assert words[words.index("--nproc_per_node") :][:8] == [
        *("--nproc_per_node", "4", "--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "node0:29502")
    ]


def test_a_machine_without_gpus_starts_as_many_ranks_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, free_port: str
) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(["configs/fine_tune.yaml", "--master_port", free_port], LAPTOP)
    assert words[2] == "OMP_NUM_THREADS=1"
    assert words[words.index("--nproc_per_node") + 1] == "4"
    assert not any(word.startswith("CUDA_VISIBLE_DEVICES") for word in words)


def test_a_config_beside_the_caller_goes_before_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: str
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.yaml").write_text(f"num_stages: 6\nnproc_per_node: 3\nmaster_port: {free_port}\n")
    for arguments in (["mine.yaml"], ["--config", "mine.yaml"], ["--conf=mine.yaml"]):
        assert words_of(arguments, LAPTOP, tmp_path)[-2:] == ["--config", str(tmp_path / "mine.yaml")]
    arguments = ["configs/quickstart.yaml", "--master_port", free_port]
    assert words_of(arguments, LAPTOP, tmp_path)[-1] == "configs/quickstart.yaml"


def test_help_is_asked_of_the_program_itself() -> None:
    assert words_of(["--help"], LAPTOP) == [sys.executable, "main.py", "--help"]
    assert words_of(["configs/quickstart.yaml", "-h"], LAPTOP) == [sys.executable, "main.py", "--help"]


def test_a_preview_is_one_process_that_needs_no_gpu_and_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["--num_stages", "6", "--device", "cuda", "--preview"]
    assert words_of(arguments, LAPTOP) == [
        sys.executable, "main.py", *arguments, "--config", "configs/fine_tune.yaml",
    ]  # fmt: skip


def test_many_datasets_are_handed_over_as_they_are(monkeypatch: pytest.MonkeyPatch, free_port: str) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["--master_port", free_port, "--dataset", "a.jsonl", "b.parquet:0.3"]
    words = words_of(arguments, BOX)
    assert words[words.index("main.py") + 1 :] == [*arguments, "--config", "configs/fine_tune.yaml"]


@pytest.mark.parametrize(
    ("values", "machine", "is_typed", "expected"),
    [
        # nproc_per_node, then the list, then all GPUs, then 2
        ({}, LAPTOP, False, (2, None)),
        ({"nproc_per_node": 3}, LAPTOP, False, (3, None)),
        ({}, BOX, False, (4, None)),
        ({"cuda_visible_devices": "3,1"}, BOX, False, (2, "3,1")),
        ({"cuda_visible_devices": "3,1,0", "nproc_per_node": 2}, BOX, False, (2, "3,1,0")),
        # the environment goes before the file, what is typed before both
        ({"cuda_visible_devices": "0,1,2"}, Resources(4, 8, "2,3"), False, (2, None)),
        ({"cuda_visible_devices": "0,1,2"}, Resources(4, 8, "2,3"), True, (3, "0,1,2")),
        # GPUs that are hidden or not wanted
        ({}, Resources(4, 8, ""), False, (2, None)),
        ({}, Resources(4, 8, "-1"), False, (2, None)),
        ({"device": Device.CPU}, BOX, False, (2, None)),
        # too few GPUs without having asked for them: all ranks go to the CPU
        ({"nproc_per_node": 2}, Resources(1, 8), False, (2, "")),
        ({"cuda_visible_devices": "GPU-5f,MIG-1,MIG-2"}, Resources(1, 8), False, (3, "GPU-5f,MIG-1,MIG-2")),
    ],
)
def test_processes_and_devices(
    values: dict[str, OptionValue], machine: Resources, is_typed: bool, expected: tuple[int, str | None]
) -> None:
    placement = plan_processes(config_from(values), machine, is_device_list_typed=is_typed)
    assert (placement.num_processes, placement.cuda_visible_devices) == expected


def test_a_device_list_that_is_overruled_is_mentioned() -> None:
    config = config_from({"cuda_visible_devices": "0,1"})
    assert "CUDA_VISIBLE_DEVICES=2,3" in (
        plan_processes(config, Resources(4, 8, "2,3"), is_device_list_typed=False).notice or ""
    )
    assert plan_processes(config, Resources(4, 8, "0,1"), is_device_list_typed=False).notice is None


@pytest.mark.parametrize(
    ("words", "machine", "part"),
    [
        ("--cuda_visible_devices 0,2,1,3", Resources(2, 8), "--cuda_visible_devices 0,1"),
        ("--num_stages 8", Resources(2, 8, "0,5"), "CUDA_VISIBLE_DEVICES lists GPU 5"),
        ("--nproc_per_node 3 --num_stages 6 --cuda_visible_devices 0,1", BOX, "`--nproc_per_node` 3"),
        ("--device cuda", LAPTOP, "`--device cuda`"),
        ("--device cuda", Resources(2, 8, ""), "hides all GPUs"),
        ("--num_stages 6", BOX, "use --num_stages 4 or 8"),
        ("--nnodes 3 --node_rank 1 --rdzv_endpoint a:1", BOX, "shared by 3 replicas"),
        ("--max_restarts -1", BOX, "`--max_restarts` is -1"),
        ("a.yaml --config b.yaml", LAPTOP, "two YAML files"),
        ("nowhere.yaml", LAPTOP, "{here}/nowhere.yaml"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, machine: Resources, part: str
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        words_of(words.split(), machine, tmp_path)
    assert part.format(here=tmp_path) in str(caught.value)


def test_a_default_port_in_use_gives_way_to_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another program has it, which is as good
            busy.bind(("", LaunchConfig().master_port))
            busy.listen()
        words = words_of(["--config", "configs/quickstart.yaml"], LAPTOP)
    assert words[words.index("--master_port") + 1] == "0"


def test_a_port_in_use_is_told_with_who_asked_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"`--master_port` {port} cannot be used"):
            words_of(["--master_port", str(port)], BOX)
        (tmp_path / "mine.yaml").write_text(f"master_port: {port}\n")
        told = rf"^`master_port` in {tmp_path}/mine.yaml: {port} cannot be used .*; give another one, such as --master_"
        with pytest.raises(ConfigError, match=told):
            words_of([str(tmp_path / "mine.yaml")], BOX)


def test_the_users_thread_count_is_kept(monkeypatch: pytest.MonkeyPatch, free_port: str) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(["--master_port", free_port], Resources(4, 64, omp_num_threads=3))
    assert not any(word.startswith("OMP_NUM_THREADS") for word in words)


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
    assert count_gpus(tmp_path / "absent", nvidia_smi="no-such-program") == 0


def test_nvidia_smi_is_asked_where_there_are_no_device_files(tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA L20 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA L20 (UUID: GPU-2)'\n")
    script.chmod(0o755)
    assert count_gpus(tmp_path, nvidia_smi=str(script)) == 2


def test_cores_are_limited_by_the_containers_share(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    assert count_cores(quota) == 1
    quota.write_text("max 100000\n")
    assert count_cores(quota) == count_cores(tmp_path / "absent") >= 1


def project_that_shows_its_arguments(folder: Path) -> Path:
    """A copy of the launcher whose ranks print what reaches them instead of training."""
    shutil.copy(ROOT / "train.sh", folder)
    for name in ("mobius", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "requirements.txt").touch()
    (folder / "mobius/launcher.py").write_text("import sys\nprint('\\n'.join(sys.argv[1:]))\n")
    return folder


def test_train_sh_hands_words_over_unread_and_returns_the_exit_code(tmp_path: Path, free_port: str) -> None:
    folder = project_that_shows_its_arguments(tmp_path)
    trap = tmp_path / "ran"
    dataset = f"a b; touch {trap}; $(touch {trap}) `touch {trap}` \"'*"
    (folder / "my run.yaml").write_text(f"master_port: {free_port}\ndevice: cpu\nsave_dir: $(touch {trap})\n")
    environment = {**os.environ, "MOBIUS_PYTHON": "system", "PYTHON": sys.executable}
    command = ["bash", str(folder / "train.sh"), "my run.yaml", "--dataset", dataset]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "--nproc_per_node", "2", "--master_port", free_port, "main.py", "--dataset", dataset, "--config", "my run.yaml",
    ]  # fmt: skip
    assert run.stderr == ""
    assert not trap.exists()

    run = subprocess.run([*command, "--batchsize", "3"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert "did you mean `--batch_size`?" in run.stderr


def test_the_environment_is_refused_if_a_package_is_missing(tmp_path: Path) -> None:
    folder = project_that_shows_its_arguments(tmp_path)
    (folder / "requirements.txt").write_text("pyyaml>=6\nno-such-package-here>=2  # a reason\n")
    environment = {**os.environ, "MOBIUS_PYTHON": "system", "PYTHON": sys.executable}
    run = subprocess.run(["bash", str(folder / "train.sh")], env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert "no-such-package-here>=2 (absent)" in run.stderr
    assert "pyyaml" not in run.stderr


@pytest.mark.parametrize("name", ["train.sh", "scripts/environment.sh"])
def test_a_shell_script_parses(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_restarts_are_torchruns(monkeypatch: pytest.MonkeyPatch, free_port: str) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(["--master_port", free_port, "--max_restarts", "3"], BOX)
    launcher = words[: words.index("main.py")]
    assert launcher[launcher.index("--max_restarts") + 1] == "3"


def test_the_command_to_go_on_starts_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: str
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my run.yaml").write_text(f"master_port: {free_port}\nnum_stages: 4\n")
    monkeypatch.chdir(ROOT)
    words = words_of(["my run.yaml"], LAPTOP, tmp_path / "runs")
    script = os.path.relpath(ROOT / "train.sh", tmp_path / "runs")
    assert words[1] == f"MOBIUS_COMMAND=bash {script} 'my run.yaml'"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bash", "train.sh", "my run.yaml"], "bash train.sh 'my run.yaml'"),
        (["bash", "train.sh"], "bash train.sh"),
        (
            ["/venv/bin/python", "/venv/bin/torchrun", "--nproc_per_node", "2", "main.py", "--lr", "1e-5"],
            "torchrun --nproc_per_node 2 main.py --lr 1e-5",
        ),
        (["/usr/bin/python3", "main.py", "--resume_from_checkpoint", "out/checkpoint-5"], "python3 main.py"),
        (["python", "-m", "mobius", "--resume_from_checkpoint=true", "--fp32"], "python -m mobius --fp32"),
        (["mobius", "--resume-from-checkpoint", "out/checkpoint-5", "--fp32"], "mobius --fp32"),
        (["/venv/bin/mobius", "--overwrite_output_dir", "--resume_changes", "lr"], "mobius --resume_changes lr"),
    ],
)
def test_the_command_to_go_on_is_the_one_that_started_the_run(words: list[str], expected: str) -> None:
    assert resume_command(words) == f"{expected} --resume_from_checkpoint true"
    assert resume_command(words, save_dir="my out") == f"{expected} --save_dir 'my out' --resume_from_checkpoint true"
