"""What a run says of foreign data steers no terminal; tests/unit/data/test_preview.py has all characters."""

from __future__ import annotations

import gzip
import unicodedata
from pathlib import Path

from harness.runs import TOKENIZER, run_main


def steering_of(text: str) -> set[str]:
    """Characters that a terminal acts on, and those that hide or turn text; a line ends with both of its own."""
    return {
        character
        for character in text.replace("\r\n", "").replace("\n", "")
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    }


def test_a_broken_record_is_one_message_that_steers_nothing(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a", "completion": "b"}\n' * 400 + '{"prompt": "\x1b[2J\u202e" "completion"}\n')
    done = run_main(1, tmp_path, "--preview", "--model_path", str(TOKENIZER), "--dataset", "a.jsonl.gz")
    assert done.returncode == 1
    assert "line 401" in done.stdout
    assert "Traceback" not in done.stdout
    assert steering_of(done.stdout) == set()
