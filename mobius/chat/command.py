"""The command `mobius chat`: its options, prompts from a terminal or a pipe, and commands with a slash."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mobius.config.command_parser import CommandParser
from mobius.errors import CheckpointError, ConfigError, MobiusError
from mobius.process.log import printable, redirect_to_devnull, setup_logging
from mobius.process.ranks import Ranks, prepare_environment

if TYPE_CHECKING:
    from mobius.chat.conversation import Conversation
    from mobius.checkpoint.saved_model import SavedModel

_INTERRUPTED = 130
_HELP = (
    "/system TEXT sets the system message, /image PATH shows an image to a model that sees, /reset forgets the "
    "conversation, /exit ends. Ctrl-C stops an answer."
)
_OPTIONS = (
    ("--base", str, None, "folder or id of an adapter's base; default: the one that the adapter names"),
    ("--system", str, None, "system message, for a model with a chat template"),
    ("--max_new_tokens", int, 512, "default: 512"),
    ("--temperature", float, None, "0 takes the likeliest token; default: as generation_config.json says"),
    ("--top_p", float, None, "draw from the likeliest tokens of this total probability"),
    ("--seed", int, None, "seed of the draws; default: a different seed each time"),
)
_LIMITS = {"max_new_tokens": (1, 1e9), "temperature": (0, 100), "top_p": (1e-6, 1), "seed": (0, 2**63 - 1)}


def chat(words: Sequence[str]) -> int:
    """Answer prompts until there are no more; returns 130 after Ctrl-C at a prompt. Raises MobiusError."""
    given = parser().parse_args(words)
    for name, (least, largest) in _LIMITS.items():
        value = getattr(given, name)
        if value is not None and not least <= value <= largest:
            raise ConfigError(f"--{name} {value:g}: use a number from {least:g} to {largest:g}.")
    prepare_environment()
    setup_logging(0, only_warnings=True)
    is_terminal = sys.stdin.isatty()
    if not is_terminal:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        conversation = _open(given)
        if is_terminal:
            _say(f"{given.model}: {conversation.describe()}\n{_HELP}")
        for prompt in _terminal_prompts() if is_terminal else sys.stdin:
            if prompt.strip() == "/exit":
                break
            _answer(conversation, prompt.strip(), is_terminal=is_terminal)
    except KeyboardInterrupt:
        _say("")
        return _INTERRUPTED
    except BrokenPipeError:  # the program that reads the answers has ended, as in `mobius chat | head`
        redirect_to_devnull(sys.stdout)
    return 0


def parser() -> CommandParser:
    """Options of the command."""
    text = "Answer in the terminal, token by token, with a trained model. From a pipe, each line is a prompt."
    made = CommandParser(prog="mobius chat", description=text, epilog=_HELP)
    made.add_argument("model", help="folder of a result, checkpoint or adapter, or a Hugging Face id")
    for name, kind, default, text in _OPTIONS:
        made.add_argument(name, type=kind, default=default, help=text)
    made.add_argument(
        "--device", choices=["auto", "cuda", "cpu"], default="auto", help="default: a GPU if there is one"
    )
    made.add_argument(
        "--dtype", choices=["bf16", "fp16", "fp32"], help="default: the model's; fp32 on a CPU if it fits"
    )
    return made


def _open(given: argparse.Namespace) -> Conversation:
    """Load the model. Raises MobiusError."""
    import torch

    from mobius.chat.conversation import Conversation
    from mobius.checkpoint.saved_model import find_saved_model
    from mobius.config.config import Device, Dtype
    from mobius.hardware.devices import TORCH_DTYPES, choose_device
    from mobius.models.weights import folder_has_weights
    from mobius.training.evaluation.generation import GREEDY, TextGenerator

    saved = find_saved_model(given.model, base=given.base)
    if not folder_has_weights(saved.folder):
        raise CheckpointError(_why_no_weights(given.model, saved))
    device = choose_device(Device(given.device), Ranks(0, 1, 0), [0])
    dtype = None if given.dtype is None else TORCH_DTYPES[Dtype(given.dtype)]
    generator = TextGenerator.of_folder(saved.folder, device, dtype=dtype, adapter=saved.adapter, sees=None)
    drawn = {name: value for name in ("temperature", "top_p") if (value := getattr(given, name)) is not None}
    settings = {"do_sample": True, **drawn} if drawn else {}
    if given.seed is not None:
        torch.manual_seed(given.seed)
    conversation = Conversation(
        generator, GREEDY if given.temperature == 0 else settings, max_new_tokens=given.max_new_tokens
    )
    conversation.set_system(given.system)
    return conversation


def _why_no_weights(given: str, saved: SavedModel) -> str:
    if saved.adapter is None:
        return f"{given} is a durable step: `mobius export {given} FOLDER` writes its model."
    return (
        f"{saved.folder}, the base of the adapter {given}, has a config.json, but no weights (*.safetensors). Give a "
        "folder that has them with --base."
    )


def _terminal_prompts() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # the user can edit lines and recall earlier ones
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")


def _answer(conversation: Conversation, prompt: str, *, is_terminal: bool) -> None:
    """Execute a line: a prompt or a command. At a terminal, Ctrl-C or an error ends only the answer."""
    command, _, text = prompt.partition(" ")
    try:
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.set_system(text.strip() or None)
        elif command == "/image":
            conversation.show(text.strip())
        elif prompt:
            conversation.ask(prompt, _write)
            _write("\n")
    except (KeyboardInterrupt, MobiusError) as error:
        if not is_terminal:
            raise
        _say(f"\nerror: {error}" if isinstance(error, MobiusError) else "")


def _write(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout))
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"{printable(text, sys.stderr)}\n")
