"""`mobius chat` answers as the model does, keeps the conversation, and says what a folder without a model is."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mobius.chat.command import chat
from mobius.chat.conversation import Conversation
from mobius.checkpoint.saved_model import find_saved_model
from mobius.commands import run_command
from mobius.errors import CheckpointError, ConfigError, DataError
from mobius.training.evaluation.generation import GREEDY, TextGenerator, TokenIds

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def generator(workplace: Path) -> TextGenerator:
    made = TextGenerator.of_folder(Path("model"), torch.device("cpu"))
    made.tokenizer.chat_template = TEMPLATE
    return made


def asked(
    conversation: Conversation, generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Function that asks, and returns the text of the prompt as the model gets it."""
    seen: list[TokenIds] = []
    stream = TextGenerator.stream

    def recorded(self: TextGenerator, prompt: TokenIds, *rest: object, **named: object) -> None:
        seen.append(prompt)
        stream(self, prompt, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(TextGenerator, "stream", recorded)

    def ask(prompt: str) -> str:
        conversation.ask(prompt, lambda _: None)
        return str(generator.tokenizer.decode(seen[-1].tolist()))

    return ask


def test_an_answer_streams_in_parts_and_is_that_of_a_batch(generator: TextGenerator) -> None:
    parts: list[str] = []
    answer = Conversation(generator, GREEDY, max_new_tokens=12).ask("Count to 7.", parts.append)
    text = generator.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to 7."}], tokenize=False, add_generation_prompt=True
    )
    prompt = np.array(generator.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    (expected,) = generator.generate([prompt], max_new_tokens=12, batch_size=1)
    assert expected is not None
    assert answer == generator.tokenizer.decode(expected.tokens.tolist(), skip_special_tokens=True)
    assert "".join(parts) == answer
    assert len(parts) > 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (GREEDY, "answers of up to 7 tokens, the likeliest tokens"),
        ({"do_sample": True, "temperature": 0.5, "top_p": 0.9}, "7 tokens, drawn, temperature 0.5, top_p 0.9"),
    ],
)
def test_the_first_line_tells_model_template_and_how_answers_are_drawn(
    generator: TextGenerator, settings: dict[str, object], told: str
) -> None:
    head = Conversation(generator, settings, max_new_tokens=7).describe()
    assert head.startswith("llama, ")
    assert "torch.float32 on cpu; chat template; " in head
    assert head.endswith(told)
    generator.tokenizer.chat_template = None
    assert (
        "; no chat template: the model continues your text"
        in Conversation(generator, settings, max_new_tokens=7).describe()
    )


def test_the_template_writes_system_and_all_turns_until_a_reset(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(generator, GREEDY, max_new_tokens=3)
    ask = asked(conversation, generator, monkeypatch)
    conversation.set_system("be brief")
    assert ask("one") == "<system>be brief<user>one<assistant>"
    ((_, answer),) = conversation._turns
    assert ask("two") == f"<system>be brief<user>one<assistant>{answer}<user>two<assistant>"
    conversation.reset()
    assert ask("three") == "<system>be brief<user>three<assistant>"
    conversation.set_system(None)
    assert ask("four") == "<user>four<assistant>"


def test_without_a_template_the_model_goes_on_with_the_text(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator.tokenizer.chat_template = None
    conversation = Conversation(generator, GREEDY, max_new_tokens=3)
    ask = asked(conversation, generator, monkeypatch)
    assert ask("one") == "one"
    ((_, answer),) = conversation._turns
    assert ask("two") == f"one{answer}\ntwo"
    with pytest.raises(ConfigError, match="no chat template"):
        conversation.set_system("be brief")


def test_the_oldest_turns_go_where_the_context_is_full_and_a_prompt_without_room_is_refused(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    conversation = Conversation(generator, GREEDY, max_new_tokens=8)
    ask = asked(conversation, generator, monkeypatch)
    ask("one")
    ask("two")
    (_, (_, answer)) = conversation._turns
    context = len(conversation._tokens("three")) + 8 - 1
    generator.model.config.max_position_embeddings = context
    assert ask("three") == f"<user>two<assistant>{answer}<user>three<assistant>"
    assert "the oldest prompt and answer are forgotten" in caplog.text
    with pytest.raises(DataError, match=f"no room in the model's context of {context}"):
        ask("many " * 90)


def test_a_template_that_writes_nothing_is_told_with_what_to_change(generator: TextGenerator) -> None:
    generator.tokenizer.chat_template = "{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}"
    told = "the model's chat template writes nothing for the prompt: .* chat_template.jinja .* --chat_template"
    with pytest.raises(CheckpointError, match=told):
        Conversation(generator, GREEDY, max_new_tokens=8).ask("one", lambda _: None)


def test_ctrl_c_stops_an_answer_whose_beginning_is_a_turn(generator: TextGenerator) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    conversation = Conversation(generator, GREEDY, max_new_tokens=200)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("one", write)
    ((prompt, answer),) = conversation._turns
    assert (prompt, answer) == ("one", "".join(written))
    assert len(generator.tokenizer(answer)["input_ids"]) < 50


def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: bytes, *options: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert chat(["model", "--device", "cpu", "--max_new_tokens", "6", *options]) == 0
    return capsys.readouterr().out


def test_each_line_of_a_pipe_is_a_prompt_and_only_answers_are_written(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = b"Count to 3.\n\n/reset\nCount to 3.\n\xff\xfe\n/exit\nnever\n"
    first, second, *rest = piped(monkeypatch, capsys, lines, "--temperature", "0").splitlines()
    assert first == second != ""
    assert len(rest) == 1

    drawn = [piped(monkeypatch, capsys, b"a\n", "--seed", seed, "--temperature", "2") for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_reader_that_has_ended_ends_the_chat_without_a_word(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
        assert chat(["model", "--device", "cpu", "--max_new_tokens", "3"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "options",
    ["--top_p 0", "--temperature nan", "--seed 9223372036854775808", "--max_new_tokens 0", "--dtype int4", ""],
)
def test_a_wrong_option_is_one_message(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(run_command("chat", [*(["model"] if options else []), *options.split()]))
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "neither a Hugging Face model nor an adapter"),
        (["training_args.yaml"], "saved nothing"),
        (["q4.gguf"], "holds q4.gguf"),
        (["config.json"], "no weights"),
        (["checkpoint-8/config.json"], "neither"),
        (["config.json", "checkpoint.json"], "cannot be used"),
        (["adapter_config.json"], "has no adapter_model.safetensors"),
    ],
)
def test_a_folder_without_a_model_is_told_for_what_it_is(workplace: Path, files: list[str], told: str) -> None:
    for name in files:
        path = Path("given", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    Path("given").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=told):
        find_saved_model("given")


@pytest.mark.usefixtures("eight")
def test_a_run_that_has_not_ended_is_answered_with_its_checkpoint(workplace: Path) -> None:
    for path in (*Path("out").glob("*.safetensors*"), Path("out/config.json")):
        path.unlink()
    with pytest.raises(CheckpointError, match="Give its newest checkpoint: out/checkpoint-8"):
        find_saved_model("out")
    assert find_saved_model("out/checkpoint-4").folder == Path("out/checkpoint-4")
    with pytest.raises(CheckpointError, match="is a file"):
        find_saved_model("data.jsonl")
    with pytest.raises(ConfigError, match="no adapter"):
        find_saved_model("model", base="other")


def test_an_adapters_base_without_weights_is_no_durable_step(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    Path("base").mkdir()
    shutil.copy("model/config.json", "base")
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "base", "peft_type": "LORA", "r": 2, "lora_alpha": 2})
    )
    factors = {"lora_A": torch.zeros(2, 64), "lora_B": torch.zeros(64, 2)}
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{prefix}.{n}.weight": t for n, t in factors.items()}, "adapter/adapter_model.safetensors")

    assert run_command("chat", ["adapter", "--device", "cpu"]) == 1

    told = capsys.readouterr().err
    assert "base, the base of the adapter adapter, has a config.json, but no weights" in told
    assert "--base" in told
    assert "durable step" not in told


@pytest.mark.parametrize("command", [["chat"], ["export", "out"]], ids=lambda words: words[0])
def test_what_files_say_cannot_steer_the_terminal(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    Path("given").mkdir()
    Path("given/adapter_config.json").write_text(
        json.dumps(
            {
                "base_model_name_or_path": "./\x1b]0;owned\x07\x9b2J\u202e",
                "peft_type": "LORA",
                "r": 2,
                "lora_alpha": 2,
            }
        )
    )
    save_file({}, "given/adapter_model.safetensors")
    name, *rest = command

    assert run_command(name, ["given", *rest]) == 1

    told = capsys.readouterr()
    assert "owned" in told.err
    assert not set("\x1b\x07\x9b\u202e") & set(told.out + told.err)


def test_an_answer_and_warnings_cannot_steer_the_terminal(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def answer(self: Conversation, prompt: str, write: Callable[[str], object]) -> str:
        logging.getLogger("mobius.chat").warning("a name: \x1b[2J")
        logging.getLogger("transformers.modeling_rope_utils").warning("a key: \x1b[2J")
        write("red \x1b[31m\r")
        return ""

    monkeypatch.setattr(Conversation, "ask", answer)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n"), encoding="utf-8"))
    assert chat(["model", "--device", "cpu"]) == 0
    assert capfd.readouterr() == ("red \\x1b[31m\\r\n", "warning: a name: \\x1b[2J\n")


@pytest.mark.extended
def test_ctrl_c_at_a_terminal_stops_the_answer_and_then_the_chat(workplace: Path) -> None:
    terminal, of_chat = pty.openpty()
    words = [sys.executable, "-m", "mobius", "chat", "model", "--max_new_tokens", "10000", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    process = subprocess.Popen(
        words, stdin=of_chat, stdout=of_chat, stderr=of_chat, env=environment, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(of_chat), os.O_RDWR)),
    )  # fmt: skip
    text, sent, ends = "", 0, time.monotonic() + 120
    while process.poll() is None and time.monotonic() < ends:
        text += os.read(terminal, 4096).decode(errors="replace")
        if sent == 0 and text.endswith("> "):
            os.write(terminal, b"Count.\n")
            sent, text = 1, ""
        elif sent == 1 and len(text) > 60:
            os.write(terminal, b"\x03")
            sent, text = 2, ""
        elif sent == 2 and text.endswith("> "):
            os.write(terminal, b"\x03")
            break
    os.close(of_chat)
    assert process.wait(30) == 130
