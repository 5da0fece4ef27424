"""Limits of the system for this process: open files, threads and memory (`ulimit -n`, `-u`).

The number of open files that a run needs is checked at its start; a later error is reported with the limit that caused
it.
"""

import errno
import resource
from collections.abc import Iterator
from typing import Final

from mobius.errors import GpuMemoryError, HostMemoryError, LimitError, MobiusError, first_line

_FILES_OF_RANK: Final = 64
"""Minimum number of open files of one rank, about 25 on a CPU, with libraries and saved files."""
_FILES_PER_PEER: Final = 16
"""Additional open files per other rank: connections, and shared memory."""
_USEFUL_FILES: Final = 65_536
"""Soft limit that is requested; a run never needs more."""
_MEMORY_WORDS: Final = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "out of host memory")


def prepare_limits(num_local: int) -> None:
    """Raise the soft limit of open files as far as allowed; call it before torch is imported.

    Raises LimitError if `num_local` ranks on this machine cannot run under the limits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USEFUL_FILES if hard == resource.RLIM_INFINITY else min(hard, _USEFUL_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    needed = _FILES_OF_RANK + _FILES_PER_PEER * (num_local - 1)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise LimitError(f"{_files_text()}; each of {num_local} rank(s) needs {needed} at least. {_FILES_ADVICE}")


def limit_error_from(error: BaseException) -> MobiusError | None:
    """Return an error with advice if a system limit has caused `error`, directly or through its cause; else None."""
    if isinstance(error, HostMemoryError | GpuMemoryError | LimitError):
        return None  # this error's message already has advice
    for cause in _causes(error):
        number, text = getattr(cause, "errno", None), str(cause)
        if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
            return LimitError(f"{_files_text()}, which do not suffice: {first_line(cause)}. {_FILES_ADVICE}")
        if "can't start new thread" in text or "Thread creation failed" in text:
            return LimitError(
                f"the system does not let this process start a thread: {first_line(cause)}. {_threads_text()}"
            )
        if isinstance(cause, MemoryError) or number == errno.ENOMEM or any(word in text for word in _MEMORY_WORDS):
            return HostMemoryError(
                f"host memory was refused: {first_line(cause)}. Stop other programs, lift limits of this process "
                "(`ulimit -v unlimited`), or use a smaller model or a host with more memory."
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    visited: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is other for other in visited):
        yield cause
        visited.append(cause)
        cause = cause.__cause__ or cause.__context__


def _files_text() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = "" if hard == soft else f" ({hard} at most)"
    return f"`ulimit -n` allows {soft} open files{more}"


def _threads_text() -> str:
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if processes == resource.RLIM_INFINITY:
        return "A container may limit threads (pids.max). Raise this limit."
    return f"`ulimit -u` allows {processes} processes and threads. Raise this limit."


_FILES_ADVICE: Final = (
    "Start with a higher limit: `ulimit -n 4096`, `docker run --ulimit nofile=4096`, or nofile in "
    "/etc/security/limits.conf."
)
