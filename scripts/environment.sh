# Owns the Python environment. Source it, then call `mobius_environment [dev]`: it makes or reuses ./.venv with the packages
# of requirements.txt (with `dev`: requirements-dev.txt) and sets MOBIUS_PYTHON_BIN to the interpreter's path.
#
#   PYTHON=/path/to/python3   makes .venv with this interpreter
#   MOBIUS_PYTHON=system      uses that interpreter itself, without .venv, if it has all packages (for containers)
#
# Silent when everything is in place. Installs again when a requirements file has changed.

mobius_environment() {
    local root requirements base_python venv stamp wanted options=(--disable-pip-version-check)
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    venv="$root/.venv"
    requirements="requirements.txt"
    if [[ "${1:-}" == dev ]]; then
        requirements="requirements-dev.txt"
        options+=(--no-compile) # tests compile what they import, a fifth of all files
    fi

    if [[ "${MOBIUS_PYTHON:-}" == system ]]; then
        base_python="$(_mobius_find_python)" || return 1
        _mobius_has_requirements "$base_python" "$root/$requirements" || return 1
        MOBIUS_PYTHON_BIN="$base_python"
        return 0
    fi

    # requirements-dev.txt includes requirements.txt, so a change of either counts.
    wanted="$(cd "$root" && cat requirements.txt "$requirements" | cksum)"
    stamp="$venv/.installed-$requirements"
    MOBIUS_PYTHON_BIN="$venv/bin/python"
    if [[ -x "$MOBIUS_PYTHON_BIN" && -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        return 0
    fi
    if [[ ! -x "$MOBIUS_PYTHON_BIN" ]]; then
        base_python="$(_mobius_find_python)" || return 1
        echo "Making a Python environment in $venv" >&2
        if ! "$base_python" -m venv "$venv"; then
            rm -rf "$venv"
            echo "$base_python cannot make an environment; on Debian and Ubuntu: apt install python3-venv" >&2
            return 1
        fi
    elif ! _mobius_is_new_enough "$MOBIUS_PYTHON_BIN"; then
        echo "$venv has a Python older than 3.11 or a broken one; remove the folder and run this again" >&2
        return 1
    fi
    if ! _mobius_has_requirements "$MOBIUS_PYTHON_BIN" "$root/$requirements" 2>/dev/null; then
        echo "Installing $requirements into $venv (takes minutes the first time; log: $venv/install.log)" >&2
        if ! "$MOBIUS_PYTHON_BIN" -m pip install "${options[@]}" -r "$root/$requirements" \
            >"$venv/install.log" 2>&1; then
            tail -n 15 "$venv/install.log" >&2
            echo "Installing $requirements failed; the whole log is in $venv/install.log" >&2
            return 1
        fi
    fi
    echo "$wanted" >"$stamp"
}

_mobius_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the first usable interpreter's path; says on standard error what is needed if there is none.
_mobius_find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11)
    [[ -n "${PYTHON:-}" ]] && candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null && _mobius_is_new_enough "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "Mobius needs Python 3.11 or later, and ${PYTHON:-python3} is not; install one, or set PYTHON=/path/to/python3" >&2
    return 1
}

# Whether interpreter $1 has every package of requirements file $2; names the missing ones on standard error.
_mobius_has_requirements() {
    "$1" - "$2" <<'PYTHON_SCRIPT'
import sys
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    sys.exit(f"{sys.executable} lacks the packages of {sys.argv[1]}; install them with: pip install -r {sys.argv[1]}")


def find_missing(file):
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r"):
            yield from find_missing(file.parent / text.removeprefix("-r").strip())
        elif text and not text.startswith("-"):
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            try:
                found = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                yield f"{text} (absent)"
            else:
                if not requirement.specifier.contains(found, prereleases=True):
                    yield f"{text} (has {found})"


missing = list(find_missing(Path(sys.argv[1])))
if missing:
    sys.exit(f"{sys.executable} lacks: {', '.join(missing)}; install them with: pip install -r {sys.argv[1]}")
PYTHON_SCRIPT
}
