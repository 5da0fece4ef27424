"""Access to the process environment: the rank of this process, and the variables that libraries read."""

import contextlib
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from mobius.errors import ConfigError, TransportError, error_class

# Libraries read these variables once, while they are imported. Values set by the user are kept.
_ENVIRONMENT: Final = {
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",  # else the tracker lists what it cleans up
    "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns about the fork of every data worker
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # otherwise each rank shows a bar for each file
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",  # transformers overrides a level set by `logging` before its import
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "KINETO_LOG_LEVEL": "99",  # otherwise torch's profiler logs each start and stop
    "TORCH_LOGS": "-all",  # only errors; torch sets the levels of its loggers when it is imported
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the C++ side warns about host names and barriers on standard error
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise up to 32 compilers per rank disturb the start's measurements
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # activations of changing sizes leave no unusable gaps
    "USE_TF": "0",  # otherwise datasets imports TensorFlow and JAX if they are installed
    "USE_JAX": "0",
}

_KILLS_AFTER_SECONDS: Final = 30.0
"""torchrun's default time between SIGTERM and SIGKILL of its ranks."""
_OUR_LAUNCHER: Final = "MOBIUS_LAUNCHER_WAITS"
_COMMAND: Final = "MOBIUS_COMMAND"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this process in a run of `num_replicas` pipelines of equal size; no pipeline spans nodes.

    rank         0 1 2 3 | 4 5 6 7      two nodes of four, each of them a pipeline: torchrun's own numbers
    replica      0 0 0 0 | 1 1 1 1
    place        0 1 2 3 | 0 1 2 3      in the pipeline; a place's stages are the same in all replicas
    node         0 0 0 0 | 1 1 1 1
    local_rank   0 1 2 3 | 0 1 2 3      among the processes of the node: the device
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_replicas: int = 1
    num_nodes: int = 1

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read torchrun's variables; without torchrun, this is the only rank. A node is one pipeline until it is split.

        Raises ConfigError if the variables are incomplete, are not numbers or contradict each other.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = {name: os.environ[name] for name in names if name in os.environ}
        if not given:
            return cls(rank=0, num_ranks=1, local_rank=0)
        if missing := ", ".join(name for name in names if name not in given):
            raise ConfigError(
                f"{_shown(given)} but not {missing}: start with torchrun, which sets all three, or unset them to run "
                "as a single process"
            )
        if "LOCAL_WORLD_SIZE" in os.environ:
            given["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
        shown = _shown(given)
        try:
            rank, num_ranks, local_rank, *rest = (int(text) for text in given.values())
        except ValueError:
            raise ConfigError(f"{shown}: all of them must be whole numbers") from None
        if not (0 <= rank < num_ranks and 0 <= local_rank < num_ranks):
            raise ConfigError(f"{shown}: RANK and LOCAL_RANK must be at least 0 and below WORLD_SIZE")
        num_local = rest[0] if rest else num_ranks
        if num_local < 1 or num_ranks % num_local or rank % num_local != local_rank:
            raise ConfigError(
                f"{shown}: every node must start equally many processes, numbered node by node. Give each node the "
                "same --nproc_per_node"
            )
        num_nodes = num_ranks // num_local
        if num_nodes > 1:
            _refuse_other_counts()
        return cls(rank, num_ranks, local_rank, num_replicas=num_nodes, num_nodes=num_nodes)

    def split_into_pipelines(self, pipeline_ranks: int | None) -> "Ranks":
        """Group these processes into pipelines of `pipeline_ranks` each; None: one pipeline per node.

        Raises ConfigError if a node's process count is not a multiple of `pipeline_ranks`.
        """
        if pipeline_ranks is None:
            return replace(self, num_replicas=self.num_nodes)
        if self.num_local % pipeline_ranks:
            raise ConfigError(
                f"`--pipeline_ranks` {pipeline_ranks}: each of {self.num_nodes} node(s) starts {self.num_local} "
                "processes, not a multiple of it, and a pipeline cannot span nodes. Use a divisor of "
                f"{self.num_local}, or another --nproc_per_node"
            )
        return replace(self, num_replicas=self.num_ranks // pipeline_ranks)

    @property
    def num_pipeline_ranks(self) -> int:
        """Number of ranks of a pipeline."""
        return self.num_ranks // self.num_replicas

    @property
    def pipeline_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.rank % self.num_pipeline_ranks

    @property
    def replica(self) -> int:
        """Number of this rank's pipeline."""
        return self.rank // self.num_pipeline_ranks

    @property
    def num_local(self) -> int:
        """Number of processes of this node."""
        return self.num_ranks // self.num_nodes

    @property
    def node(self) -> int:
        """Number of the node on which this rank runs."""
        return self.rank // self.num_local

    @property
    def is_first(self) -> bool:
        """Whether this is the run's first rank, which prints and writes the shared files."""
        return self.rank == 0


def _refuse_other_counts() -> None:
    """Raise ConfigError if torchrun may restart ranks with restart counts that differ between nodes.

    In a dynamic rendezvous each launcher counts only the failures of its own node, so one node would resume from a
    checkpoint while another starts from scratch.
    """
    backend = _launcher_option("--rdzv-backend") or os.environ.get("PET_RDZV_BACKEND") or "static"
    if is_started_by_torchrun() and num_restarts_allowed() and backend != "static":
        raise ConfigError(
            f"torchrun's --rdzv_backend {backend} with --max_restarts {num_restarts_allowed()}: its dynamic "
            "rendezvous counts restarts per node, so nodes would not agree on where to resume. Leave "
            "--rdzv_backend out, for the static rendezvous (--nnodes, --node_rank and --rdzv_endpoint on each "
            "node), or use --max_restarts 0."
        )


def _shown(given: Mapping[str, str]) -> str:
    return "the environment sets " + ", ".join(f"{name}={value!r}" for name, value in given.items())


def prepare_environment() -> None:
    """Make libraries quiet and GPU memory unfragmented; call it before torch, transformers or datasets is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def is_started_by_torchrun() -> bool:
    """Whether torchrun, which ends its ranks together, is the parent of this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_restarts() -> int:
    """Number of times that torchrun has restarted this rank after a rank had died (`--max_restarts`)."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def master_address() -> tuple[str, int]:
    """Host and port of the launcher's store; raises ValueError if there is no store."""
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))


def num_restarts_allowed() -> int:
    """Number of times that torchrun may restart the ranks (`--max_restarts`); 0 without torchrun."""
    return _number("TORCHELASTIC_MAX_RESTARTS") or 0


def is_restart() -> bool:
    """Whether torchrun has restarted this rank."""
    return num_restarts() > 0


def launch_id() -> str | None:
    """Identifier of this launch of torchrun, the same after its restarts; None without torchrun."""
    begun = _start_of(os.getppid()) if is_started_by_torchrun() else None
    return None if begun is None else f"{os.getppid()} at {begun:.2f} s of {boot_id()}"


def seconds_since_launch() -> float:
    """Seconds since torchrun started, including time before a restart; 0 without torchrun."""
    return _age_of(os.getppid()) if is_started_by_torchrun() else 0.0


def seconds_since_start() -> float:
    """Seconds since this process began; 0 if unknown."""
    return _age_of(os.getpid())


def mark_launcher_as_patient() -> None:
    """Set a variable for this launcher's ranks: the launcher never kills ranks while they save."""
    os.environ[_OUR_LAUNCHER] = "1"


def keep_ignored_signals(ignored: Sequence[str]) -> None:
    """Keep torchrun, in this process, from handling signals that are ignored, such as SIGHUP under `nohup`."""
    handled = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if name not in ignored]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)


def seconds_until_killed() -> float | None:
    """Seconds from a signal until the launcher kills ranks that are still saving; None if it never kills them."""
    if not is_started_by_torchrun() or _OUR_LAUNCHER in os.environ:
        return None
    if (value := _launcher_option("--shutdown-timeout")) is not None:
        return _seconds(value)
    release = metadata.version("torch").split(".")[:2]
    if [int(part) for part in release] >= [2, 13]:  # older versions of torch ignore the variable
        return _seconds(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", ""))
    return _KILLS_AFTER_SECONDS


def _launcher_option(name: str) -> str | None:
    """Value of an option of torchrun, this process's parent; None if the option is not given."""
    words = _command_of(os.getppid())
    for place, word in enumerate(words):
        given, _, value = word.partition("=")
        if given.replace("_", "-") == name:
            return value or next(iter(words[place + 1 :]), "")
    return None


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else _KILLS_AFTER_SECONDS


def has_lost_rank() -> bool:
    """Whether a process that torchrun started together with this one, with the same program, is gone. Linux only."""
    num_started = _number("LOCAL_WORLD_SIZE")
    if not is_started_by_torchrun() or num_started is None or not Path("/proc/self/stat").is_file():
        return False
    parent, program = os.getppid(), _command_of(os.getpid())[:3]  # `python -u main.py`: later words may differ
    processes = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    children = (process for process in processes if _facts_of(process)[1:2] == [str(parent)])
    return sum(_command_of(child)[:3] == program for child in children) < num_started


def _age_of(process: int) -> float:
    """Seconds since a process began; 0 if unknown."""
    begun = _start_of(process)
    return 0.0 if begun is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)


def _start_of(process: int) -> float | None:
    """Seconds from the start of the machine to the start of a process; None if unknown."""
    facts = _facts_of(process)
    return int(facts[19]) / os.sysconf("SC_CLK_TCK") if facts else None


def _facts_of(process: int) -> list[str]:
    """Fields of /proc/PID/stat after the name in brackets: state, parent, ...; empty if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def boot_id() -> str:
    """Identifier of the current boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "this machine"


def _command_of(process: int) -> list[str]:
    """Words of a process's command line; empty if it has ended or cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []


def report_to_launcher(message: str, kind: str) -> None:
    """Write the cause of this rank's end to torchrun's error file, and to a Python caller's error file.

    torchrun prints the cause at the end of its report; our launcher prints it only if the user cannot fix the error.
    `kind`: class of the error.
    """
    if own := os.environ.get("MOBIUS_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(own).write_text(json.dumps({"type": kind, "message": message}), encoding="utf-8")
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if is_started_by_torchrun() and path:
        facts = {"py_callstack": message, "timestamp": str(int(time.time())), "kind": kind}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": facts}}), encoding="utf-8")


def has_told_user(error_file: Mapping[str, Any]) -> bool:
    """Whether the rank that left this error file has ended with a message about an error that the user can fix.

    A lost neighbour is not such an error: the user needs to know what ended the neighbour.
    """
    message = error_file.get("message")
    kind = error_class(message["extraInfo"].get("kind", "")) if isinstance(message, dict) else None
    return kind not in (None, TransportError)


def command_words() -> list[str]:
    """Command with which the user started this run: the command of train.sh, of the launcher, or of this process."""
    if typed := os.environ.get(_COMMAND):
        return shlex.split(typed)
    launcher = _command_of(os.getppid()) if is_started_by_torchrun() else []
    return launcher or list(sys.orig_argv)


def program_words() -> list[str]:
    """First words of a command as the user started this process: the installed `mobius`, or Python with `-m mobius`."""
    words = command_words()
    if ("-m", "mobius") in itertools.pairwise(words):
        return [words[0], "-m", "mobius"]
    if not {"main.py", "train.sh"} & {os.path.basename(word) for word in words}:
        return ["mobius"]
    return [path_from_here(sys.executable), "-m", "mobius"]


def path_from_here(path: str | Path) -> str:
    """Path relative to the working folder if it lies below that folder, else the unchanged path."""
    with contextlib.suppress(OSError, ValueError):  # the working folder was removed, or is not above the path
        return str(Path(path).relative_to(Path.cwd()))
    return str(path)


def is_started_by_train_sh() -> bool:
    """Whether train.sh, which applies the launch options, started this process."""
    return _COMMAND in os.environ


def child_variables(error_file: Path, import_folder: Path) -> list[str]:
    """Assignments for `env`: the run that it starts ends with this process and writes its error to `error_file`."""
    paths = os.pathsep.join([str(import_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [f"MOBIUS_CALLER={os.getpid()}", f"MOBIUS_ERROR_FILE={error_file}", f"PYTHONPATH={paths}"]


def command_variable(words: Sequence[str]) -> str:
    """Assignment of `words` for `env`; `command_words` reads it in the processes that `env` starts."""
    return f"{_COMMAND}={shlex.join(words)}"


def export_parent_pid() -> None:
    """Let later child processes read this process's number by `exported_parent_pid`, even after this one has ended."""
    os.environ["MOBIUS_PARENT"] = str(os.getpid())


def exported_parent_pid() -> int | None:
    """Number of the parent process, if it called `export_parent_pid`; otherwise None."""
    return _number("MOBIUS_PARENT")


def caller_pid() -> int | None:
    """Number of the Python program that started this launcher with `child_variables`; otherwise None."""
    return _number("MOBIUS_CALLER")


def visible_devices() -> str | None:
    """`CUDA_VISIBLE_DEVICES` as the user set it, or None; an empty text hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def device_list(text: str | None) -> list[str]:
    """Names in a list like `CUDA_VISIBLE_DEVICES`."""
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


def allows_peer_copies() -> bool:
    """Whether GPUs may write into each other's memory: `NCCL_P2P_DISABLE=1` forbids it."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") != "1"


def forbid_peer_copies() -> None:
    """Send messages between GPUs, NCCL's too, through host memory; call it on every rank before NCCL starts."""
    os.environ["NCCL_P2P_DISABLE"] = "1"


def set_cuda_max_connections() -> None:
    """Give each stream a separate hardware queue, so that no stream blocks another; call it before CUDA starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # the maximum; the default is 8


def omp_num_threads() -> int | None:
    """`OMP_NUM_THREADS` if it is set to a positive number, else None."""
    return _number("OMP_NUM_THREADS") or None


def allows_colour() -> bool:
    """Whether output may have colours: `NO_COLOR` (no-color.org) is not set and the terminal supports colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def cache_folder() -> Path:
    """Cache folder of prepared data: `mobius` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mobius"


def num_cpus_per_rank(num_ranks: int) -> int:
    """Number of CPUs that this process may use, divided among `num_ranks`."""
    return len(os.sched_getaffinity(0)) // num_ranks


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
