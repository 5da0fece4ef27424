"""Parser of a command's arguments; it reports problems in the same form as problems of a run's options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mobius.config.config import nearest_name
from mobius.errors import ConfigError, excerpt, listed


class CommandParser(argparse.ArgumentParser):
    """argparse's parser that raises ConfigError instead of printing its usage and exiting."""

    def parse_among(self, args: Sequence[str], others: Iterable[str]) -> tuple[Any, list[str]]:
        """Return the values of this command's options, and the words of `others`: options that another parser reads.

        Raises ConfigError for an unknown option whose nearest name belongs to this command.
        """
        own = self._names()
        names = [*own, *others]
        if mistyped := [name for name in _unknown(args, names) if nearest_name(name.removeprefix("--"), names) in own]:
            self._refuse(*(f"unknown option `{excerpt(name)}`{_hint(name, own)}" for name in mistyped))
        return self.parse_known_args(args)

    def _names(self) -> list[str]:
        return [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the values. Raises ConfigError; unknown options are reported first, and alone."""
        names = self._names()
        if unknown := _unknown(args, names):
            self._refuse(*(f"unknown option `{excerpt(name)}`{_hint(name, names)}" for name in unknown))
        given, others = self.parse_known_args(args, namespace)
        if others:
            self._refuse(*(f"`{excerpt(word)}` belongs to no option" for word in others))
        return given

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's words about one option."""
        self._refuse(message.removeprefix("argument "))

    def _refuse(self, *problems: str) -> NoReturn:
        raise ConfigError(*problems, hint=f"Run `{self.prog} --help` to see all options.")


def _unknown(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the typed options that are not in `names` and abbreviate none of them."""
    typed = [word.partition("=")[0] for word in args if word.startswith("--") and word != "--"]
    return [name for name in typed if not any(f"--{known}".startswith(name) for known in names)]


def _hint(name: str, names: Sequence[str]) -> str:
    nearest = nearest_name(name.removeprefix("--"), names)
    return f"; did you mean `--{nearest}`?" if nearest else f"; there are {listed(f'--{each}' for each in names)}"
