"""Builds the command that train.sh executes: the number of processes, their GPUs, and the threads of a process.

`python -m mobius.config.launch FOLDER [CONFIG.yaml] [options...]` prints the command with a NUL after every word, so
that the shell need not parse it; FOLDER is the user's working directory.
"""

import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mobius.config.cli import given_options, parse_args
from mobius.config.config import Config, Device
from mobius.config.earlier_results import refuse_taken_names
from mobius.config.gpu_count import CPU_RANKS, count_gpus
from mobius.config.sources import read_command_line
from mobius.errors import ConfigError, MobiusError, reason_of
from mobius.process.log import printable
from mobius.process.ranks import command_variable, device_list, omp_num_threads, program_words, visible_devices


@dataclass(frozen=True)
class Resources:
    """Facts that the launcher needs about its machine and environment."""

    num_gpus: int
    num_cores: int
    visible_devices: str | None = None
    omp_num_threads: int | None = None


@dataclass(frozen=True)
class Placement:
    """Number of processes, and their GPUs; `cuda_visible_devices` is None if the environment stays unchanged."""

    num_processes: int
    cuda_visible_devices: str | None = None
    notice: str | None = None


def own_resources() -> Resources:
    """Resources of this process."""
    return Resources(count_gpus(), count_cores(), visible_devices(), omp_num_threads())


def count_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Number of CPU cores that this process may use: its affinity, limited by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota, period = quota_file.read_text(encoding="ascii").split() if quota_file.is_file() else ("max", "1")
    return cores if quota == "max" else min(cores, max(1, int(quota) // int(period)))


def plan_processes(config: Config, resources: Resources, *, is_device_list_typed: bool) -> Placement:
    """Decide the number of processes and their GPUs; raises ConfigError if requested GPUs do not exist.

    Priority of device lists: command line, then environment, then YAML file.
    """
    asked = config.launch.cuda_visible_devices
    inherited = None if is_device_list_typed else resources.visible_devices
    listed = device_list(asked if inherited is None else inherited)
    is_hidden = inherited is not None and (not listed or listed[0] == "-1")
    if config.pipeline.device is Device.CPU or resources.num_gpus == 0 or is_hidden:
        if config.pipeline.device is Device.CUDA:
            reason = "CUDA_VISIBLE_DEVICES hides all GPUs" if is_hidden else "this machine has no NVIDIA GPU"
            raise ConfigError(f"`--device cuda`: {reason}; use --device cpu, or auto")
        return Placement(config.launch.nproc_per_node or len(device_list(asked)) or CPU_RANKS)

    if absent := [name for name in listed if name.isdecimal() and int(name) >= resources.num_gpus]:
        source = "CUDA_VISIBLE_DEVICES" if inherited is not None else "`--cuda_visible_devices`"
        every = ",".join(map(str, range(resources.num_gpus)))
        raise ConfigError(
            f"{source} lists GPU {', '.join(absent)}, but this machine has {resources.num_gpus}, numbered from 0; "
            f"use --cuda_visible_devices {every}, or fewer of them"
        )
    num_devices = len(listed) or resources.num_gpus
    num_processes = config.launch.nproc_per_node or num_devices
    if num_processes <= num_devices:
        if inherited is None:
            return Placement(num_processes, asked)
        notice = f"CUDA_VISIBLE_DEVICES={inherited} of the environment is used instead of the YAML file's {asked}"
        return Placement(num_processes, notice=notice if asked not in (None, inherited) else None)
    problem = f"`--nproc_per_node` {num_processes} needs a GPU for each process, and there are {num_devices}"
    if listed or config.pipeline.device is Device.CUDA:
        raise ConfigError(f"{problem}; use --nproc_per_node {num_devices}, or --device cpu")
    return Placement(num_processes, "", f"{problem}: training on the CPU (use --nproc_per_node {num_devices} for GPUs)")


def rendezvous_port(port: int, *, giver: str | None) -> int:
    """Return `port`, or 0 (any free port) if another program listens on it and the user did not choose it.

    `giver`: the option as typed, or the key with its file; None if the user chose no port. Raises ConfigError if the
    chosen port is in use: torchrun would report the problem in forty lines.
    """
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if giver is None:
                return 0
            advice = "without this option, any free port is used"
            if not giver.startswith("`--"):
                advice = f"give another one, such as --master_port {port + 1}"
            raise ConfigError(
                f"{giver} {port} cannot be used ({reason_of(error)}), perhaps by another run; {advice}"
            ) from None
    return port


def launch_command(
    arguments: Sequence[str], caller_folder: Path | None, resources: Resources
) -> tuple[list[str], str | None]:
    """Return the command that train.sh or `mobius train` executes for `arguments`, and a notice for the user or None.

    `caller_folder`: the user's current folder, for train.sh, which runs in the project's folder and has a default file;
    None for `mobius train`.
    """
    program, is_command = ["main.py"] if caller_folder is not None else ["-m", "mobius"], caller_folder is None
    options = list(arguments)
    positional = options.pop(0) if options and not options[0].startswith("-") else None
    command_line = read_command_line(options)
    if command_line.wants_help:
        return [sys.executable, *program, "--help"], None
    if positional is not None and command_line.config_path is not None:
        raise ConfigError(f"two YAML files are given, {positional} and --config {command_line.config_path}; keep one")
    path = positional or command_line.config_path
    if caller_folder is not None:
        path = _path_from_project(path or "configs/fine_tune.yaml", caller_folder)
    words = options if path is None else [*options, "--config", path]
    config = parse_args(words, is_command=is_command)
    if config.data.preview is not None:  # a preview is one process on any machine
        return [sys.executable, *program, *(["preview"] if is_command else []), *words], None
    placement = plan_processes(config, resources, is_device_list_typed="cuda_visible_devices" in command_line.values)
    if not (config.planning.dry_run or config.launch.node_rank):
        refuse_taken_names(config)
    num_nodes, num_processes = config.launch.nnodes, placement.num_processes
    parse_args(words, num_ranks=num_nodes * num_processes, num_nodes=num_nodes, is_command=is_command)
    typed = (
        [*program_words(), "train"] if caller_folder is None else ["bash", os.path.relpath("train.sh", caller_folder)]
    )
    command = ["env", command_variable([*typed, *arguments])]
    if resources.omp_num_threads is None:
        command.append(f"OMP_NUM_THREADS={max(1, resources.num_cores // num_processes)}")
    if placement.cuda_visible_devices is not None:
        command.append(f"CUDA_VISIBLE_DEVICES={placement.cuda_visible_devices}")
    command += [sys.executable, "-m", "mobius.launcher", "--nproc_per_node", str(num_processes)]
    if num_nodes == 1:
        giver = f"`master_port` in {path}:" if "master_port" in given_options(words) else None
        giver = "`--master_port`" if "master_port" in command_line.values else giver
        port = rendezvous_port(config.launch.master_port, giver=giver)
        command += ["--master_port", str(port)]
    names = [] if num_nodes == 1 else ["nnodes", "node_rank", "rdzv_endpoint"]
    for name in (*names, *(["max_restarts"] if config.launch.max_restarts else [])):
        command += [f"--{name}", str(getattr(config.launch, name))]
    return [*command, *program, *(["train"] if is_command else []), *words], placement.notice


def _path_from_project(path: str, caller_folder: Path) -> str:
    """Path of a file that the user names, for a program that runs in the project's folder.

    A path that exists in both folders, or in neither, is relative to the user's folder.
    """
    is_in_project = caller_folder == Path.cwd() or (os.path.isfile(path) and not os.path.isfile(caller_folder / path))
    return path if is_in_project else str(caller_folder / path)


def resume_command(words: Sequence[str], *, save_dir: str | None = None) -> str:
    """Return the command that resumes a run from its newest checkpoint; `words`: the run's command (`command_words`).

    Omits the interpreter's folder, environment variables, and options that would restart the run or choose an older
    checkpoint. `save_dir`: the run's folder if `words` do not give it, else None.
    """
    command: list[str] = []
    is_value = False
    for word in words:
        is_resume = word.replace("-", "_").startswith("__resume_f")  # also abbreviations, from `--resume_f` on
        if not (is_resume or is_value or word == "--overwrite_output_dir"):
            command.append(word)
        is_value = is_resume and "=" not in word
    folder, name = os.path.split(command[0])
    if len(command) > 1 and os.path.dirname(command[1]) == folder != "":
        command = [os.path.basename(command[1]), *command[2:]]  # omit the interpreter: both programs are in its folder
    else:
        command[0] = name
    place = [] if save_dir is None else ["--save_dir", save_dir]
    return shlex.join([*command, *place, "--resume_from_checkpoint", "true"])


def main(argv: Sequence[str]) -> int:
    """Print the command, or the problem on standard error; returns the exit code."""
    try:
        command, notice = launch_command(argv[1:], Path(argv[0]), own_resources())
    except MobiusError as error:
        sys.stderr.write(f"{printable(str(error), sys.stderr)}\n")
        return error.exit_code
    if notice:
        sys.stderr.write(f"{printable(notice, sys.stderr)}\n")
    sys.stdout.buffer.write(b"".join(os.fsencode(word) + b"\0" for word in command))  # bytes: names need not be UTF-8
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    logging.disable()  # not here: the first rank logs the notices
    sys.exit(main(sys.argv[1:]))
