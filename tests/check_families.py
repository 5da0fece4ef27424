"""Compares every family of the installed transformers with its own model, and writes what is supported and what not.

Run by `scripts/check_families`, after transformers or what takes models apart has changed; takes some two minutes. The
results are read by the program (mobius/models/families.json) and by people (docs/user/families.md).
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 12 << 30
"""Address space of the check: a family whose model stays large, by names of fields that are not known, is refused."""
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "scripts", "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402
from harness.family_checks import check_family, check_text_part, families_with_text, why_no_decoder  # noqa: E402  # noqa: E402
from harness.tiny_families import DOCUMENT, VERSIONS, causal_families, other_versions, planned_families, written_table  # noqa: E402  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from mobius.models import family_support  # noqa: E402
from mobius.models.family_support import CheckedFamilies, checked_families  # noqa: E402


def main() -> int:
    """Check all families, or those that are named, which writes nothing; 1 if a named one is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", help="check these only and write nothing")
    parser.add_argument("--beside", action="store_true", help="check what is supported with another transformers")
    given = parser.parse_args()
    named = given.families
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    if given.beside:
        return _check_beside()
    planned = planned_families()
    larger = family_support.checked_text_parts().keys()
    found = {family: (check_text_part if family in larger else check_family)(family) for family in named or planned}
    _tell(found)
    if named:
        return int(any("refused" in results for results in found.values()))
    supported = {family: results for family, results in found.items() if "refused" not in results}
    refused = {family: results["refused"] for family, results in found.items() if "refused" in results}
    parts = _check_text_parts(supported)
    taken_apart = {family for family, results in parts.items() if "parity" in results}
    for family in sorted(set(causal_families()) - set(planned) - taken_apart):
        results = {"refused": reason} if (reason := why_no_decoder(family, supported)) else check_family(family)
        _tell({family: results})
        if "refused" in results:
            refused[family] = results["refused"]
        else:
            supported[family] = results
    checked = CheckedFamilies(transformers.__version__, *(dict(sorted(each.items())) for each in (supported, refused)))
    family_support.FAMILIES_PATH.write_text(
        json.dumps(vars(checked), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    family_support.TEXT_PARTS_PATH.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (ROOT / DOCUMENT).write_text(written_table(checked, parts, other_versions()), encoding="utf-8")
    print(f"{len(supported)} families are supported, {len(refused)} are not: {DOCUMENT}")
    return 0


def _check_text_parts(supported: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """What is found for each family of larger models whose text part is of a supported family."""
    families = families_with_text(supported)
    parts = {family: {"text": text, **check_text_part(family)} for family, text in families.items()}
    _tell(parts)
    return parts


def _check_beside() -> int:
    """Check what is supported with the installed transformers, and note how it differs from what was found."""
    checked, parts = checked_families(), family_support.checked_text_parts()
    expected = dict(checked.supported) | {name: found for name, found in parts.items() if "parity" in found}
    known = [family for family in expected if family in CONFIG_MAPPING]
    different = {}
    for family in known:
        found = (check_text_part if family in parts else check_family)(family)
        _tell({family: found})
        if off := {name: value for name, value in found.items() if expected[family].get(name) != value}:
            different[family] = off
    unknown = [family for family in expected if family not in known]
    results = {"num_same": len(known) - len(different), "different": different, "unknown": unknown}
    versions = {**other_versions(), transformers.__version__: results}
    VERSIONS.write_text(json.dumps(versions, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (ROOT / DOCUMENT).write_text(written_table(checked, parts, versions), encoding="utf-8")
    print(f"transformers {transformers.__version__}: {len(known) - len(different)} families as before, {different}")
    return 0


def _tell(found: Mapping[str, Mapping[str, str]]) -> None:
    for family, results in found.items():
        print(f"{family:24}", ", ".join(f"{name}: {result}" for name, result in results.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
