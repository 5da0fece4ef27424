"""Owns rendering a conversation by the tokenizer's chat template, and what to say when that fails.

A template is a small program that came with the model: it may refuse a conversation, which is the data's matter, or be
broken, which is not.
"""

import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from mobius.data.formats import Turn
from mobius.errors import DataError, first_line
from mobius.excerpt import excerpt, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SECONDS: Final = 20.0
"""CPU time for one conversation; a template takes milliseconds."""
_MOST_CHARACTERS: Final = 1 << 20
"""Longest rendered text, beside a hundred times its turns."""


class _UnusableError(Exception):
    """The reason why a template had to be stopped, or its text cannot be used."""


def render(
    tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Turn], where: str, *, add_generation_prompt: bool = False
) -> str:
    """The conversation as the template writes it; raises DataError that names `where`."""
    from jinja2 import TemplateError

    messages = [{"role": turn.role.value, "content": turn.content} for turn in turns]
    try:
        with _limited_time():
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        if len(text) > _MOST_CHARACTERS + 100 * sum(len(turn.content) for turn in turns):
            raise _UnusableError(f"it made {len(text):,} characters of {len(turns)} turns")
        text.encode()
        return text
    except Exception as error:  # a template is foreign code and raises what it likes
        if type(error) is TemplateError:  # what `raise_exception` in a template raises; broken ones raise subclasses
            roles = listed(turn.role for turn in turns)
            raise DataError(
                f"{where}: the tokenizer's chat template refuses the conversation ({roles}): "
                f"{excerpt(str(error), 400)}. Change the order or the roles of the turns"
            ) from error
        raise DataError(
            f"{where}: the tokenizer's chat template is broken: {_reason(error)}. The conversation is not the cause: "
            "mend the template (chat_template.jinja in the model's folder, or `chat_template` in its "
            "tokenizer_config.json), or use the tokenizer files of a model like it"
        ) from error


def _reason(error: Exception) -> str:
    """Words for what a template did, with its line where that is known."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, UnicodeEncodeError):
        return f"it wrote half of a character, {error.object[error.start]!r}"
    if isinstance(error, _UnusableError):
        return str(error)
    if isinstance(error, TemplateSyntaxError):
        line: int | None = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)
    place = f" (line {line} of the template)" if line is not None else ""
    return f"{type(error).__name__}: {excerpt(first_line(error), 200)}{place}"


@contextmanager
def _limited_time() -> Iterator[None]:
    """Stop a template that does not end, as nested loops do not; only a main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise _UnusableError(f"it had not ended after {MOST_SECONDS:g} seconds")

    # CPU time, and not the clock: the process may have to wait, and the clock's timer may be another's.
    earlier = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
