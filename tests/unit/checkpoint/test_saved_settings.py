"""Each folder that a run or an export writes ends answers with what was trained, and has the template of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness.small_run import Run
from transformers import AutoTokenizer, GenerationConfig

from mobius.commands import run_command
from mobius.data.chat_templates import resolve_template

OLD = "{{ 'old' }}"


def make_base(source: Path) -> None:
    """`model` with another end token in both files, and templates in three places."""
    shutil.copytree(source, "base")
    for name in ("config.json", "generation_config.json"):
        path = Path("base", name)
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(fields | {"eos_token_id": 3}))
    path = Path("base/tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": OLD}))
    Path("base/chat_template.jinja").write_text(OLD)
    Path("base/additional_chat_templates").mkdir()
    Path("base/additional_chat_templates/tool_use.jinja").write_text(OLD)
    turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Three."}]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(8)))


@pytest.mark.parametrize("is_adapter", [False, True])
def test_all_folders_say_what_was_trained(
    run: Run, workplace: Path, is_adapter: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_base(workplace / "model")
    options = ["--use_lora", "--lora_rank", "2", "--merge"] if is_adapter else []
    given = ["--model_path", "base", "--dataset", "chat.jsonl", "--chat_template", "chatml", "--seq_length", "64"]
    with caplog.at_level("INFO", "mobius"):
        run(*given, "--save_steps", "2", *options)
    assert run_command("export", ["out/checkpoint-2", "exported", *(["--merge"] if is_adapter else [])]) == 0

    folders = ["out", "out/checkpoint-2", "exported", *(["out/merged"] if is_adapter else [])]
    for folder in map(Path, folders):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 3], folder
        assert AutoTokenizer.from_pretrained(folder).chat_template == resolve_template("chatml"), folder
        texts = [*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*")]
        assert not [path for path in texts if OLD in path.read_text()], folder
    (line,) = [line for line in caplog.messages if line.startswith("end ")]
    assert "2 (<|im_end|>), which is trained" in line
    assert "the model's own: 3" in line
