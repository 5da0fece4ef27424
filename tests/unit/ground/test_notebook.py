"""`mobius.finetune` in a cell of a real kernel: one bar that replaces itself, and no traceback."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from harness.runs import ROOT
from jupyter_client.manager import start_new_kernel

CELL = """
import sys
import mobius
from mobius import api
api.launch_command = lambda *_: (["env", sys.executable, {program!r}], None)
mobius.finetune("m", "a.jsonl", save_dir={folder!r})
"""
PROGRAM = """
import pathlib
pathlib.Path({feed!r}).write_text({events!r})
print("<first line>")
"""


def test_a_cell_shows_a_bar_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    later = time.time() + 60
    events = [
        {"event": "start", "num_steps": 4, "time": later},
        {"event": "step", "step": 2, "loss": 1.5, "time": later},
    ]
    feed, program = tmp_path / "events.jsonl", tmp_path / "program.py"
    lines = "".join(f"{json.dumps(event)}\n" for event in events)
    program.write_text(PROGRAM.format(feed=str(feed), events=lines))
    messages: list[tuple[str, dict[str, Any]]] = []
    manager, client = start_new_kernel(startup_timeout=120, kernel_name="python3")
    try:
        cell = CELL.format(program=str(program), folder=str(tmp_path))
        client.execute_interactive(
            cell, timeout=120, output_hook=lambda each: messages.append((each["msg_type"], each["content"]))
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert [kind for kind, _ in messages if kind in ("stream", "error")] == []
    bars = [content["data"]["text/html"] for kind, content in messages if kind.endswith("display_data")]
    assert bars[0] == "<progress value=0 max=1></progress> starting<pre></pre>"
    assert bars[-1] == "<progress value=2 max=4></progress> step 2 of 4, loss 1.5000<pre>&lt;first line&gt;</pre>"
    shown = [content["transient"]["display_id"] for kind, content in messages if kind.endswith("display_data")]
    assert len(set(shown)) == 1, "the bar replaces itself"
