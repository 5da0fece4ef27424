"""Options from one source, the command line or a file: their values, and everything that is wrong with them."""

from dataclasses import dataclass, field

from mobius.config.foreign_options import IGNORED, foreign_option
from mobius.config.options import OptionValue, Spelling, nearest_name, read_truth, spellings
from mobius.errors import ConfigError
from mobius.excerpt import excerpt


@dataclass
class OptionSource:
    """Values by the options' own names, problems, and notices about options that are ignored."""

    values: dict[str, OptionValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    invalid_options: set[str] = field(default_factory=set)
    """Options that were given in a way that could not be read."""
    place: str = ""
    """Beginning of every problem."""
    dashes: str = ""
    _spelled: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, given: object, *, written: str, begun: str | None = None) -> None:
        """Record that the option `name` is `given` (`Option.read`), which the user has `written` so.

        `begun` is a spelling of which `name` is the beginning, but not surely one.
        """
        if (spelling := spellings().get(name)) is None:
            self._reject_unknown(name, given, begun)
            return
        option = spelling.option
        try:
            if not spelling.is_flag:
                self._put(spelling, option.read(given))
            elif given is None and option.value_type is not bool:
                pass  # `fp16:` says nothing
            elif read_truth(given):
                self._put(spelling, spelling.flag_value)
            elif spelling.opposite is not None:
                self._put(spelling, spelling.opposite)
        except ValueError:
            needed = "true or false" if spelling.is_flag else option.expectation
            self.reject(spelling, f"`{written}`; {needed} is needed")
        except ConfigError as error:
            self.reject(spelling, *(f"`{self.dashes}{name}`: {problem}" for problem in error.problems))

    def reject(self, spelling: Spelling, *problems: str) -> None:
        """Record that the option was given, but not in a usable way."""
        self.problems += [self.place + problem for problem in problems]
        self.invalid_options.add(spelling.option.name)

    def _put(self, spelling: Spelling, value: OptionValue) -> None:
        """Record a value; two spellings of an option must agree, a repeated one overrides itself."""
        name = spelling.option.name
        earlier = self._spelled.setdefault(name, spelling.name)
        if earlier != spelling.name and self.values[name] != value:
            names = f"`{self.dashes}{earlier}` and `{self.dashes}{spelling.name}`"
            self.reject(spelling, f"{names} set the same option differently; keep one")
        self.values[name] = value

    def _reject_unknown(self, name: str, given: object, begun: str | None) -> None:
        """Record a name that is no option; what it was meant for is then unreadable.

        One that changes nothing here is only noticed.
        """
        typed = f"{'option' if self.dashes else 'key'} `{excerpt(name)}`"
        # `deepspeed: null` asks for nothing; a list or mapping asks for something, and so does a bare `--deepspeed`.
        value = given if isinstance(given, str) else "" if given is None else None
        name = name.lstrip("-")
        if foreign := foreign_option(name, value):
            if foreign.is_ignored:
                self.notices.append(f"{self.place}{typed} is ignored{foreign.message.removeprefix(IGNORED)}")
            else:
                self.problems.append(f"{self.place}unknown {typed}: {foreign.message}")
                self.invalid_options.update(foreign.replacements)
            return
        nearest = begun or nearest_name(name)
        hint = f"; did you mean `{self.dashes}{nearest}`?" if nearest else ""
        self.problems.append(f"{self.place}unknown {typed}{hint}")
        if meant := spellings().get(nearest or ""):
            self.invalid_options.add(meant.option.name)
