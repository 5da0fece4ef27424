"""Settings that sweep.py runs, and the options of a run that it sweeps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options that can be swept; None leaves one to the planner."""

    num_stages: int | None = None
    num_chunks: int | None = None
    resident: int | None = None

    def words(self) -> list[str]:
        """Words of main.py's command line."""
        given = {"num_stages": self.num_stages, "num_chunks": self.num_chunks, "resident_stages": self.resident}
        return [
            word for name, value in given.items() for word in (f"--{name}", "auto" if value is None else str(value))
        ]

    def __str__(self) -> str:
        values = ("auto" if value is None else value for value in (self.num_stages, self.num_chunks, self.resident))
        return "{} stages, {} chunks, {} resident".format(*values)


@dataclass(frozen=True)
class Setting:
    """A workload and its limit; the rest is the planner's, or swept."""

    size: str
    batch_size: int
    seq_length: int
    limit: float | None
    """GiB of each GPU."""
    clips: bool = False
    num_chunks: int | None = None
    """Microbatches; None leaves them to the planner."""

    @property
    def name(self) -> str:
        limit = "no limit" if self.limit is None else f"{self.limit:g} GiB"
        return f"{self.size} {self.batch_size}x{self.seq_length} {limit}{' clip' if self.clips else ''}"

    def options(self) -> list[str]:
        """Words of main.py's command line."""
        options = ["--batch_size", str(self.batch_size), "--seq_length", str(self.seq_length)]
        options += ["--max_grad_norm", "1" if self.clips else "0"]
        return options if self.limit is None else [*options, "--gpu_memory_limit", f"{self.limit:g}"]


CHOICE = (
    Setting("7b", 64, 512, 12),
    Setting("7b", 64, 512, 24),
    Setting("7b", 64, 512, 24, clips=True),
    Setting("7b", 64, 512, 48),
    Setting("7b", 64, 512, None),
    Setting("13b", 64, 128, 48),
    Setting("1b", 64, 512, 8),
    Setting("1b", 32, 2048, 16),
)
PREDICTION = (
    Setting("1b", 64, 128, 8, num_chunks=4),
    Setting("1b", 64, 512, 8, clips=True, num_chunks=8),
    Setting("1b", 32, 1024, 12, num_chunks=8),
    Setting("1b", 16, 4096, 16, num_chunks=16),
    Setting("7b", 64, 128, 12, num_chunks=4),
    Setting("7b", 64, 512, 16, num_chunks=8),
    Setting("7b", 64, 512, 24, clips=True, num_chunks=8),
    Setting("7b", 32, 1024, 32, num_chunks=8),
    Setting("7b", 32, 2048, 48, num_chunks=8),
    Setting("7b", 16, 4096, 64, num_chunks=16),
    Setting("13b", 64, 128, 24, num_chunks=4),
    Setting("13b", 64, 512, 32, num_chunks=8),
    Setting("13b", 32, 1024, 48, num_chunks=8),
    Setting("13b", 16, 2048, 64, clips=True, num_chunks=8),
)
