"""Contents of files as a careless or a hostile hand would change them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

RAW = {
    "@digits@": "9" * 5000,
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@huge@": "1e999",
    "@deep@": "[" * 20_000 + "]" * 20_000,
    "@open@": "[" * 100_000,
    "@surrogate@": '"\\ud800"',
    "@nul@": '"\\u0000"',
}
"""Marks in JSON that are replaced, quotes included, by what Python would not write itself."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 1.5, -0.5, 1e-300, 1e300, 10**9, 10**12, 10**30, -(10**30)),
    *("", " ", "a", "8", "silu", "nonsense", "full_attention", "\x1b[2J\x07", "é模型", "x" * 5000, "../../etc/passwd"),
    *([], {}, [[]], [1, 2], ["a"], {"a": 1}, {"": []}, [None] * 50),
    *RAW,
)
TEXTS = (
    *("", " ", "0", "1", "2", "3", "-1", "1.5", "1e5", "1e-400", "1e400", "9" * 5000, "10" * 20, "1000000000000"),
    *("nan", "inf", "-inf", "１２", "٣", "1_000", "0x10", "auto", "all", "none", "true", "False", "null", "[]", "{}"),
    *(
        "--",
        "-",
        "---",
        "--x",
        "%s%n%d",
        "{0}",
        "$(id)",
        "`id`",
        "a\nb",
        "\t",
        "\x1b[31m",
        "\x00",
        "\udcff\udc80",
        "é模型",
    ),
    *("a" * 300, "a" * 5000, "/", ".", "..", "~", "~nobody-there/x", "/dev/null", "/proc/self/mem", "nowhere/at/all"),
    *("H200", "4090", "bf16", "3-4", "4-3", "1-1000000000000", "0-0", "GPU-1", "0,0", "0,1", "7b", "gpt2", "model"),
    *("data.jsonl", "model/config.json", "meta-llama/Llama-2-7b-hf"),
)


def changed_json(value: Any, rng: random.Random, values: Sequence[Any] = VALUES) -> bytes:
    """The JSON of `value` with one to three places changed, which are removed, replaced, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        parent, key = value, None
        while isinstance(parent, dict | list) and len(parent):
            keys = list(parent) if isinstance(parent, dict) else range(len(parent))
            key = rng.choice(keys)
            if not isinstance(parent[key], dict | list) or not len(parent[key]) or rng.random() < 0.3:
                break
            parent = parent[key]
        if key is None:
            return json.dumps(rng.choice(values)).encode()
        turn = rng.random()
        if turn < 0.1:
            del parent[key]
        elif turn < 0.15 and isinstance(parent, dict):
            parent[str(rng.choice(TEXTS))] = parent.pop(key)
        elif turn < 0.2 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            parent[key] = parent[key] * rng.choice([-1, 0, 2, 0.5])
        else:
            parent[key] = copy.deepcopy(rng.choice(values))
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text.encode(errors="surrogatepass")


def spoiled(content: bytes, rng: random.Random, *, share: float = 1.0) -> bytes:
    """`content`, of which a `share` of all inputs is cut, overwritten, doubled, emptied or in another encoding."""
    if rng.random() >= share:
        return content
    place = rng.randrange(len(content) + 1)
    noise = rng.choice([b"\0", b"\xff\xfe", b"\x80", b"\x1b[2J", b"\n", b'"', b"}", rng.randbytes(20)])
    return rng.choice(
        [
            content[:place],
            content[:place] + noise + content[place:],
            content[:place] + noise + content[place + len(noise) :],
            content + content,
            b"",
            b"\xef\xbb\xbf" + content,
            content.decode(errors="replace").encode("utf-16"),
            rng.randbytes(200),
        ]
    )
