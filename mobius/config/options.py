"""Owns the table of options made from the config's fields: names, spellings, types, texts."""

import ast
import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mobius.config.adapters import FinetuningType
from mobius.config.bounds import Bounds
from mobius.config.config import Columns, Config, DatasetEntry, Datasets, Dtype
from mobius.config.foreign_options import IGNORED, foreign_option
from mobius.config.saving_evaluation import BestMetric
from mobius.config.value_parsing import parse_dataset, parse_pairs

OptionValue = bool | int | float | str | Datasets | Columns | None

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "model_path": ("model", "model_name_or_path"),
    "num_iterations": ("max_steps",),
    "save_dir": ("output_dir",),
    "seq_length": ("cutoff_len", "max_length"),
    "learning_rate": ("lr",),
    "num_chunks": ("num_micro_batches",),
    "lora_rank": ("lora_r",),
    "lora_target": ("lora_target_modules",),
    "adapter_path": ("adapter_name_or_path",),
    "lr_scheduler_type": ("lr_scheduler",),
}
"""Other names of an option that take the same values."""
_NUMBERS_OR_WORDS: Final = ("resident_stages", "profile_steps", "tile_tokens")
"""Texts that may be a whole number, which YAML then reads as one."""
_NO_NAMES: Final = (*_NUMBERS_OR_WORDS, "cuda_visible_devices", "default_system", "resume_changes")
_BARE: Final[Mapping[str, OptionValue]] = {"preview": 3}
"""Options whose value may be left out on the command line, and the value that this means."""
_WORDS_ALONE: Final[Mapping[str, Mapping[str, OptionValue]]] = {
    "dtype": {dtype.value: dtype for dtype in Dtype},
    "finetuning_type": {"use_lora": FinetuningType.LORA},
}
"""Flags that stand for an option with its value."""
_PAIRS: Final[Mapping[str, tuple[str, str]]] = {
    "columns": ("KEY=COLUMN", "prompt=document,completion=summary"),
    "lr_scheduler_kwargs": ("NAME=NUMBER", "min_lr=1e-6"),
}
"""Options of pairs: the form of a pair, and an example."""
_SAME_WORD: Final = 0.7
"""Likeness of a word and its misspelling: letters left out, doubled or swapped leave more, min and max less."""
_SURELY_ALIKE: Final = 0.85


@dataclass(frozen=True)
class Option:
    """One field of one section, or of a dataset.

    `value_type` is bool, int, float, str, a StrEnum, tuple for pairs, or DatasetEntry for one or more of them.
    """

    name: str
    section: str
    text: str
    default: OptionValue
    value_type: type
    is_optional: bool
    bounds: Bounds | None

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, or nothing where any value of the type may do."""
        return tuple(member.value for member in self.value_type) if issubclass(self.value_type, enum.Enum) else ()

    @property
    def expectation(self) -> str:
        """Words for what may be given, as they read in a message."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        names = {bool: "true or false", int: "a whole number", float: "a number"}
        if self.value_type is tuple:
            names[tuple] = f"text such as {_PAIRS[self.name][1].partition(',')[0]}"
        limits = f" {self.bounds}" if self.bounds else ""
        return names.get(self.value_type, "text") + limits + (", or auto" if self.allows_auto else "")

    @property
    def pair_form(self) -> str:
        """Form of a pair, such as KEY=COLUMN, for an option of pairs."""
        return _PAIRS[self.name][0]

    @property
    def is_list(self) -> bool:
        """Whether several words may follow the option."""
        return self.value_type is DatasetEntry

    @property
    def bare_value(self) -> OptionValue:
        """Value of the option where it is typed without one; None where it needs one."""
        return _BARE.get(self.name)

    @property
    def is_name(self) -> bool:
        """Whether the text names something: a file, a folder, or what may be one."""
        return self.value_type is str and self.name not in _NO_NAMES

    @property
    def allows_auto(self) -> bool:
        """Whether the word auto is a value; in a config it is None."""
        return self.bounds is not None and self.bounds.allows_auto

    def from_words(self, words: Sequence[str]) -> OptionValue:
        """Value of an option typed on the command line; raises ValueError if it does not have the type.

        What is wrong inside of pairs raises ConfigError.
        """
        return tuple(map(parse_dataset, words)) if self.is_list else self._from_text(*words)

    def _from_text(self, text: str) -> OptionValue:
        if self.value_type is str and not text.strip().strip("-"):
            raise ValueError(text)  # `--model_path --` is a slip of the shell; no name consists of dashes
        if text == "auto" and self.allows_auto:
            return None
        if {"on", "off"} <= set(self.choices):
            text = {"true": "on", "false": "off"}.get(text.lower(), text)
        if self.value_type is BestMetric:
            text = text.removeprefix("eval_")  # as Trainer names it
        if self.value_type is tuple:
            return parse_pairs(text, form=self.pair_form, example=_PAIRS[self.name][1])
        return typing.cast(OptionValue, self.value_type(text))

    def from_yaml(self, value: object) -> OptionValue:
        """Value of a YAML key that is a word or number, whose type must already fit; raises as `from_words` does."""
        if value == "auto" if self.allows_auto else value is None and self.is_optional:
            return None
        if isinstance(value, bool) and {"on", "off"} <= set(self.choices):
            value = "on" if value else "off"  # YAML reads the bare words as booleans
        if value is False and "no" in self.choices:
            value = "no"
        if value is True and self.name == "resume_from_checkpoint":
            value = "true"
        if type(value) is int and self.name in _NUMBERS_OR_WORDS:
            value = str(value)
        if isinstance(value, str) and (self.choices or self.value_type in (str, tuple, DatasetEntry)):
            return self.from_words([value])
        if self.value_type is float and isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                return float(value)
        # bool is a subclass of int, but `batch_size: true` is a mistake.
        if isinstance(value, bool | int) and type(value) is self.value_type:
            return value
        raise ValueError(value)


@dataclass(frozen=True)
class Spelling:
    """One way to name an option; a flag carries its value and takes none on the command line."""

    name: str
    option: Option
    is_flag: bool = False
    flag_value: OptionValue = None


@dataclass
class OptionSource:
    """Values that one source (the file or the command line) gives, by the options' own names, and its problems.

    `notices` are lines about options that are ignored.
    """

    values: dict[str, OptionValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    invalid_options: set[str] = field(default_factory=set)
    dashes: str = ""
    _spelled: dict[str, str] = field(default_factory=dict)

    def put(self, spelling: Spelling, value: OptionValue, *, place: str) -> None:
        """Record a value; two spellings of an option must agree, a repeated one overrides itself."""
        name = spelling.option.name
        earlier = self._spelled.setdefault(name, spelling.name)
        if earlier != spelling.name and self.values[name] != value:
            names = f"`{self.dashes}{earlier}` and `{self.dashes}{spelling.name}`"
            self.reject(spelling, f"{place}: {names} set the same option differently; keep one")
        self.values[name] = value

    def reject(self, spelling: Spelling, *problems: str) -> None:
        """Record that the option was given, but not in a usable way."""
        self.problems += problems
        self.invalid_options.add(spelling.option.name)

    def reject_unknown(
        self, name: str, *, shown: str, place: str = "", value: str | None = None, begun: str | None = None
    ) -> None:
        """Record a name that is no option but may begin the spelling `begun`; what it was meant for is unreadable.

        `shown` is the name with its kind, as in "option `--x`". One that changes nothing here is only noticed.
        """
        problem = f"{place}unknown {shown}"
        if foreign := foreign_option(name, value):
            if foreign.is_ignored:
                self.notices.append(f"{place}{shown} is ignored{foreign.message.removeprefix(IGNORED)}")
                return
            self.problems.append(f"{problem}: {foreign.message}")
            self.invalid_options.update(foreign.replacements)
            return
        nearest = begun or nearest_name(name)
        self.problems.append(f"{problem}; did you mean `{self.dashes}{nearest}`?" if nearest else problem)
        if meant := spellings().get(nearest or ""):
            self.invalid_options.add(meant.option.name)


def section_titles() -> Mapping[str, str]:
    """Section name -> its title in the help."""
    return {name: str(section.__doc__) for name, section in _sections().items()}


@functools.cache
def options() -> Mapping[str, Option]:
    """All options by name, in the order of the config's fields."""
    return {option.name: option for name, section in _sections().items() for option in _options_of(name, section)}


@functools.cache
def dataset_spellings() -> Mapping[str, Spelling]:
    """Keys of a dataset that YAML gives as a mapping; a path is what it is usually named by."""
    keys = {option.name: Spelling(option.name, option) for option in _options_of("dataset", DatasetEntry)}
    return {"path": Spelling("path", keys["name"].option), "dataset": Spelling("dataset", keys["name"].option), **keys}


def _options_of(section_name: str, section: type) -> list[Option]:
    texts, hints = _field_texts(section), typing.get_type_hints(section, include_extras=True)
    fields: Any = dataclasses.fields(section)
    return [
        Option(known.name, section_name, texts[known.name], known.default, *_take_apart(hints[known.name]))
        for known in fields
    ]


@functools.cache
def spellings() -> Mapping[str, Spelling]:
    """All accepted names, without dashes; the option's own name comes before its aliases and flags."""
    found: list[Spelling] = []
    for option in options().values():
        if option.value_type is bool:
            negative = "no_" + option.name.removeprefix("use_")
            found += [Spelling(option.name, option, True, True), Spelling(negative, option, True, False)]
        else:
            found += [Spelling(name, option) for name in (option.name, *_ALIASES.get(option.name, ()))]
            words = _WORDS_ALONE.get(option.name, {})
            found += [Spelling(word, option, True, value) for word, value in words.items()]
    return {spelling.name: spelling for spelling in found}


def nearest_name(name: str) -> str | None:
    """The known spelling that `name` is a misspelling of, or None: no hint is better than one of another meaning."""
    typed = name.replace("-", "_").lower()
    alike = {known: _likeness(typed, known) for known in spellings() if abs(len(known) - len(typed)) <= 3}
    return max((known for known in alike if alike[known] >= _SURELY_ALIKE), key=alike.__getitem__, default=None)


def _likeness(typed: str, known: str) -> float:
    """From 0 to 1; 0 where a word or a digit is another one, which makes another meaning of a likely name."""
    if [c for c in typed if c.isdigit()] != [c for c in known if c.isdigit()]:
        return 0.0
    words, others = typed.split("_"), known.split("_")
    if len(words) == len(others) and any(_ratio(*pair) < _SAME_WORD for pair in zip(words, others, strict=True)):
        return 0.0
    return _ratio("".join(words), "".join(others))


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()


def option_values(config: Config) -> dict[str, OptionValue]:
    """The flat form of a config: option name -> value."""
    return {option.name: getattr(getattr(config, option.section), option.name) for option in options().values()}


def config_from(values: Mapping[str, OptionValue]) -> Config:
    """A config with `values` in place of defaults; neither types nor bounds are checked."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    for name, value in values.items():
        sections[options()[name].section][name] = value
    return Config(**{name: section(**sections[name]) for name, section in _sections().items()})


def _sections() -> dict[str, type]:
    return typing.get_type_hints(Config)


def _take_apart(hint: Any) -> tuple[type, bool, Bounds | None]:
    """`Annotated[int, Bounds(...)] | None` -> (int, True, Bounds(...))."""
    is_optional = type(None) in typing.get_args(hint)
    if is_optional:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is tuple:
        return DatasetEntry if hint == Datasets else tuple, is_optional, None
    value_type, bounds = typing.get_args(hint) or (hint, None)
    return value_type, is_optional, bounds


def _field_texts(section: type) -> dict[str, str]:
    """Field name -> the string literal under it, on one line; Python itself drops these literals."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), f"{section.__name__}.{statement.target.id} has no text under it"
            texts[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts
