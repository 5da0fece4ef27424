#!/usr/bin/env bash
# Fine-tunes on all GPUs of this machine, or on its CPU:  bash train.sh [CONFIG.yaml] [options...]
# CONFIG.yaml is configs/fine_tune.yaml unless given; options are those of main.py (--help) and go before the file.
# Paths in the file and in options are relative to this script's folder.
set -euo pipefail

caller_folder="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
mobius_environment

# The words arrive with a NUL behind each, so that nothing from the YAML file is ever read as shell code.
mapfile -d '' -t command < <("$MOBIUS_PYTHON_BIN" -m mobius.config.launch "$caller_folder" "$@")
wait "$!"  # a problem with the configuration has been printed; `set -e` ends here with its exit code
exec "${command[@]}"
