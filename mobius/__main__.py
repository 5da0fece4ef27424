"""The program: `mobius [COMMAND]`, `python -m mobius` and main.py, alone or under torchrun; see --help."""

import sys

_OLDEST = (3, 11)


def main() -> None:
    """Run the program; exit with one message if Python is too old or a package is missing."""
    if sys.version_info < _OLDEST:
        versions = "{}.{} or later, and {} is {}.{}".format(*_OLDEST, sys.executable, *sys.version_info[:2])
        sys.exit(f"error: Mobius needs Python {versions}; use another Python, or `bash train.sh`")
    from mobius.process.requirements import missing_packages

    try:
        from mobius.commands import run_command
        from mobius.process.ranks import is_started_by_torchrun

        words = sys.argv[1:]
        if not words and not sys.argv[0].endswith("main.py") and not is_started_by_torchrun():
            words = ["help"]  # `mobius` alone lists the commands; main.py alone trains with the defaults
        if words and not words[0].startswith("-"):
            sys.exit(run_command(words[0], words[1:]))
        from mobius.program import run_program
    except ModuleNotFoundError as error:
        if (message := missing_packages(error)) is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
    run_program()


if __name__ == "__main__":
    main()
