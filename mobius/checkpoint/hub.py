"""Uploads a result to the Hugging Face Hub. Only huggingface_hub has the token: no option, file or log shows it."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, validate_repo_id

from mobius.checkpoint.whole_model import PROCESSOR_FILES
from mobius.config.config import OutputConfig
from mobius.errors import ConfigError
from mobius.models.families import HUB_TIMEOUT_SECONDS
from mobius.models.model_files import COPIED_FILES, describe_error
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

_UPLOADED: Final = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "base_model.json"),
    *("README.md", "training_loss.png", "metrics.jsonl", "*_results.json", *COPIED_FILES, *PROCESSOR_FILES),
)
"""Patterns of the uploaded files. A run's other files contain paths of this machine, or prompts of the data."""


def upload_command(output: OutputConfig) -> str:
    """Command that uploads the result later."""
    words = ["hf", "upload", output.hub_name, output.save_dir, *(["--private"] if output.hub_private_repo else [])]
    return shlex.join([*words, "--exclude", "checkpoint-*/*"])


def check_hub(output: OutputConfig) -> None:
    """Check the token and the name before training starts. Raises ConfigError."""
    name, later = output.hub_name, f"or leave --push_to_hub out, and upload later: {upload_command(output)}"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--hub_model_id {name}: {error} Give a name such as me/model.") from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push_to_hub: HF_HUB_OFFLINE forbids the network. Unset it, {later}")
    try:
        if (token := get_token()) is None:
            raise ConfigError(f"--push_to_hub: there is no token. Run `hf auth login`, set HF_TOKEN, {later}")
        url, headers = f"{constants.ENDPOINT}/api/whoami-v2", build_hf_headers(token=token)
        answer = get_session().get(url, headers=headers, timeout=HUB_TIMEOUT_SECONDS)
        hf_raise_for_status(answer)
        account: dict[str, Any] = answer.json()
        owners = [account["name"], *(each["name"] for each in account.get("orgs", []))]
        role = account.get("auth", {}).get("accessToken", {}).get("role")
    except ConfigError:
        raise
    except Exception as error:  # the hub client raises many unrelated types
        raise ConfigError(
            f"--push_to_hub: {constants.ENDPOINT} cannot be reached, or refuses the token "
            f"({describe_error(error)}). Log in again with `hf auth login`, {later}"
        ) from error
    if role == "read":
        raise ConfigError(f"--push_to_hub: the token may only read. Create one that may write, {later}")
    if "/" in name and name.partition("/")[0] not in owners:
        raise ConfigError(
            f"--hub_model_id {name}: the token belongs to {', '.join(owners)}. Begin the name with one of them."
        )


def push_to_hub(output: OutputConfig) -> None:
    """Upload the result in `output.save_dir`; a failure is only a warning, with the command to upload it later."""
    folder = Path(output.save_dir)
    files = {path for pattern in _UPLOADED for path in folder.glob(pattern) if path.is_file()}
    size = format_bytes(sum(path.stat().st_size for path in files))
    logger.info("uploading %d files (%s) to %s", len(files), size, output.hub_name)
    api = HfApi()
    try:
        name = api.create_repo(output.hub_name, private=output.hub_private_repo or None, exist_ok=True).repo_id
        if output.hub_private_repo and not api.model_info(name).private:
            raise ConfigError(f"{name} is public, and --hub_private_repo asks for a private one")
        names = [path.relative_to(folder).as_posix() for path in sorted(files)]
        api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=names, commit_message="Add trained model")
    except Exception as error:  # the hub client raises many unrelated types; the result is on the disk
        logger.warning(
            "--push_to_hub: the result was not uploaded (%s). It is complete in %s; to upload it later: %s",
            *(describe_error(error), folder, upload_command(output)),
        )
    else:
        logger.info("uploaded: %s/%s", constants.ENDPOINT, name)
