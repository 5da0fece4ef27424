"""The program: `mobius`, `python -m mobius` and main.py, alone or under torchrun; see --help."""

import sys

_OLDEST = (3, 11)


def main() -> None:
    """Run the program; exit with one message if Python is too old or a package is missing."""
    from mobius.requirements import missing_packages, old_python  # needs no package and no new Python

    if sys.version_info < _OLDEST:
        sys.exit(old_python(_OLDEST))
    try:
        from mobius.program import run_program
    except ModuleNotFoundError as error:
        if (message := missing_packages(error)) is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
    run_program()


if __name__ == "__main__":
    main()
