"""The program: `mobius [COMMAND]`, `python -m mobius` and main.py, alone or under torchrun; see --help."""

import sys

_OLDEST = (3, 11)


def main() -> None:
    """Run the program; exit with one message if Python is too old or a package is missing."""
    if sys.version_info < _OLDEST:
        versions = "{}.{} or later, and {} is {}.{}".format(*_OLDEST, sys.executable, *sys.version_info[:2])
        sys.exit(f"error: Mobius needs Python {versions}; name another one, or use `bash train.sh`")
    from mobius.requirements import missing_packages

    try:
        from mobius.commands import run_command

        if sys.argv[1:] and not sys.argv[1].startswith("-"):
            sys.exit(run_command(sys.argv[1], sys.argv[2:]))
        from mobius.program import run_program
    except ModuleNotFoundError as error:
        if (message := missing_packages(error)) is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
    run_program()


if __name__ == "__main__":
    main()
