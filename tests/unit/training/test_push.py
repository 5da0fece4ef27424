"""`--push_to_hub` uploads the result, here to a Hub of this machine, tells nobody the token, and loses nothing."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness.small_run import Run
from huggingface_hub import constants
from safetensors.torch import load

from mobius.checkpoint.hub import check_hub, push_to_hub
from mobius.config.config import OutputConfig
from mobius.errors import ConfigError

TOKEN = "hf_" + "of" + "a" * 30
ACCOUNT = {"type": "user", "name": "ada", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}


class FakeHub:
    """As much of the Hub as an upload of small files asks for; `files` has what was committed, by repository."""

    def __init__(self) -> None:
        self.account: dict[str, Any] = ACCOUNT
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.fails = ""
        """Part of a path that is answered with an error."""
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(b"")

            def do_POST(self) -> None:
                self.answer(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, body: bytes) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append(path)
                is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                code, told = 401, {"error": "who?"}
                if is_known and hub.fails and hub.fails in path:
                    code, told = 403, {"error": "no space left in this account"}
                elif is_known:
                    told = hub.answer(path, body)
                    code = 200 if told else 404
                text = json.dumps(told).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        name = "/".join(path.split("/")[3:5])
        match path.split("/")[2:]:
            case ["whoami-v2"]:
                return self.account
            case ["repos", "create"]:
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
                self.private.setdefault(name, bool(asked.get("private")) or asked.get("visibility") == "private")
                self.files.setdefault(name, {})
                return {"url": f"{self.url}/{name}"}
            case ["validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["models", _, _] if name in self.private:
                return {"id": name, "private": self.private[name], "sha": "0", "tags": [], "siblings": []}
            case ["models", _, _, "preupload", "main"]:
                files = json.loads(body)["files"]
                return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            case ["models", _, _, "commit", "main"]:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                return {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1", "hookOutput": ""}
        return {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


ONE = ["--num_iterations", "1", "--save_params", "none", "--push_to_hub"]


def test_the_result_is_uploaded_without_checkpoints_paths_or_the_token(
    run: Run, workplace: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mobius")
    run(*ONE, "--hub_model_id", "lab/tiny", "--hub_private_repo", "--save_steps", "1")

    assert hub.private == {"lab/tiny": True}
    files = hub.files["lab/tiny"]
    kept = ["README.md", "config.json", "generation_config.json", "metrics.jsonl", "model.safetensors"]
    assert {*kept, "tokenizer.json", "train_results.json", "training_loss.png"} <= files.keys()
    assert all((workplace / "out" / name).read_bytes() == content for name, content in files.items())
    assert len(load(files["model.safetensors"])) == 39
    assert not [name for name in files if "/" in name or name in ("training_args.yaml", "plan.json", "events.jsonl")]
    own = str(workplace).encode()
    assert not [name for name, content in files.items() if own in content or TOKEN.encode() in content]
    left = [path for path in workplace.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert left == []
    assert TOKEN not in caplog.text
    assert f"uploaded: {hub.url}/lab/tiny" in caplog.text


@pytest.mark.parametrize("fails", ["repos/create", "commit", "public"])
def test_an_upload_that_fails_costs_a_warning_with_its_command(
    workplace: Path, hub: FakeHub, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fails, hub.private = fails, {"ada/model": False} if fails == "public" else {}
    push_to_hub(OutputConfig(save_dir="model", push_to_hub=True, hub_private_repo=True))

    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    told = "ada/model is public" if fails == "public" else "no space left"
    assert told in warning
    assert warning.endswith("to upload it later: hf upload model model --private --exclude 'checkpoint-*/*'")
    assert hub.files.get("ada/model", {}) == {}


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_hub(OutputConfig(push_to_hub=True, **options))
    return str(error.value)


def test_token_and_name_are_tried_before_the_training(
    run: Run, workplace: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_hub(OutputConfig(push_to_hub=True, hub_model_id="lab/a"))
    assert "the token belongs to ada, lab" in refused(hub_model_id="other/a")
    for name in ("a/b/c", "a b", "-a", "a..b", "x" * 97):
        assert f"--hub_model_id {name}: " in refused(hub_model_id=name)
    hub.account = {**ACCOUNT, "auth": {"accessToken": {"role": "read"}}}
    assert "may only read" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN + "b")
    text = refused()
    assert "refuses the token" in text
    assert "or leave --push_to_hub out, and upload later: hf upload save_ckpt save_ckpt" in text
    assert TOKEN not in text
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token" in refused()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids the network"):
        run(*ONE)
    assert not Path("out").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.server.shutdown()
    hub.server.server_close()
    assert "cannot be reached" in refused()
