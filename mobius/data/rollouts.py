"""Conversion of records with rollouts to `Unit`s: sampled completions with a reward or an advantage."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from mobius.config.objective import RewardScaling
from mobius.data.messages import Sample, TokenIds, Unit, as_number, is_list, is_unset
from mobius.data.preferences import judged
from mobius.data.token_store import ADVANTAGE, REWARD, Values
from mobius.errors import DataError, quoted

GROUP: Final = "group"
LOGPROBS: Final = "logprobs"
OUTCOMES: Final = (REWARD, ADVANTAGE)
IDS: Final = ("prompt_ids", "completion_ids")
_HASH: Final = ("group_high", "group_low")
"""Values that identify a group together: each has 24 bits of a hash, which fp32 holds exactly."""
_PROMPT: Final = ("prompt", "prompt_ids", "tools")
"""Columns that identify a group if there is no `group`."""
_LARGEST: Final = 1e30
_LARGEST_LOGPROB: Final = 1e-3
"""Above 0, because an engine may round."""

_EPSILON: Final = 1e-4
"""Added to a standard deviation."""

Record = Mapping[str, object]


def parse_rollout(parse: Callable[[Record], Sample | Unit], outcome: str, record: Record) -> Unit:
    """Convert a record with a completion and its `outcome`, a reward or an advantage."""
    other = next(name for name in OUTCOMES if name != outcome)
    if not is_unset(record.get(other)):
        raise DataError(
            f"there are both `{outcome}` and `{other}`. Leave one of them out: advantages are computed from rewards"
        )
    number = as_number(record[outcome])
    if not isinstance(number, int | float) or not abs(number) <= _LARGEST:
        raise DataError(f"`{outcome}` must be a finite number, not {quoted(record[outcome])}")
    sample = parse(record)
    assert not isinstance(sample, Unit)
    sample = judged("completion", sample)
    if not isinstance(sample, TokenIds) and not is_unset(record.get(LOGPROBS)):
        raise DataError(
            f"`{LOGPROBS}` belong to tokens, and the record has text. Give the sampler's tokens as `prompt_ids` and "
            f"`completion_ids`, or leave out `{LOGPROBS}`"
        )
    return Unit((sample,), {outcome: (float(number),), **_group_values(record)})


def parse_token_ids(record: Record) -> Sample:
    """Convert the sampler's token ids, with its log-probability of each token of the completion if there are any."""
    prompt, completion = (_ids_of(record, name) for name in IDS)
    return TokenIds(prompt, completion, _logprobs_of(record, len(completion)))


def _ids_of(record: Record, name: str) -> tuple[int, ...]:
    ids = record[name]
    if not is_list(ids):
        raise DataError(f"`{name}` must be a list of token ids, not {quoted(ids)}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise DataError(f"`{name}` must hold token ids, not {quoted(token)}")
    return tuple(token for token in ids if isinstance(token, int))


def _logprobs_of(record: Record, num_tokens: int) -> tuple[float, ...]:
    """Return the sampler's numbers, NaN for null; () if the record has none."""
    given = record.get(LOGPROBS)
    if is_unset(given):
        return ()
    if not is_list(given) or len(given) != num_tokens:
        found = f"{len(given)} numbers" if is_list(given) else quoted(given)
        raise DataError(f"`{LOGPROBS}` must hold one number for each of the {num_tokens} `completion_ids`, not {found}")
    numbers = [math.nan if number is None else number for number in given]
    for number in numbers:
        if not isinstance(number, int | float) or number > _LARGEST_LOGPROB or number == -math.inf:
            raise DataError(
                f"`{LOGPROBS}` must hold finite log-probabilities, at most 0, or null where there is none, not "
                f"{quoted(number)}"
            )
    return tuple(float(number) for number in numbers if isinstance(number, int | float))


def _group_values(record: Record) -> dict[str, tuple[float, ...]]:
    group = record.get(GROUP)
    key = {name: record.get(name) for name in _PROMPT} if is_unset(group) else {GROUP: group}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode("utf-8", "replace")).digest()
    return {name: (float(int.from_bytes(digest[3 * i : 3 * i + 3])),) for i, name in enumerate(_HASH)}


def with_advantages(values: Values, scaling: RewardScaling | None) -> Values:
    """Return the values that the rows of a dataset carry: rewards and advantages of all sequences.

    The advantage of a rollout is its reward minus the mean of its group's, divided by a standard deviation; `scaling`
    None: its reward minus the mean of the others of its group. Rewards that are all equal give advantages of exactly 0.
    Formulas are TRL 1.16's; a batch is the dataset. Raises DataError for a group of one.
    """
    kept = {name: each for name, each in values.items() if name not in _HASH}
    if REWARD not in values or ADVANTAGE in values:
        return kept
    rewards = np.asarray(values[REWARD], dtype=np.float64)
    high, low = (np.asarray(values[name], dtype=np.int64) for name in _HASH)
    groups, sizes = np.unique(high * 2**24 + low, return_inverse=True, return_counts=True)[1:]
    if (sizes < 2).any():
        first = int(np.flatnonzero(sizes[groups] < 2)[0])
        raise DataError(
            f"{int((sizes < 2).sum())} of {len(sizes)} groups have only one rollout, the first of them rollout "
            f"{first + 1} of {len(rewards)}: there is no other reward to compare its reward with. Sample several "
            "completions of each prompt, mark them with an equal `group`, or give an `advantage`"
        )
    order = np.argsort(groups, kind="stable")
    starts = np.cumsum(sizes) - sizes
    is_equal = np.minimum.reduceat(rewards[order], starts) == np.maximum.reduceat(rewards[order], starts)
    means = (np.add.reduceat(rewards[order], starts) / sizes)[groups]
    advantages = np.where(is_equal[groups], 0.0, rewards - means)
    squares = np.add.reduceat(advantages[order] ** 2, starts)
    if scaling is None:
        advantages *= (sizes / (sizes - 1))[groups]  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    elif scaling is RewardScaling.GROUP:
        advantages /= np.sqrt(squares / (sizes - 1))[groups] + _EPSILON
    elif scaling is RewardScaling.BATCH:
        advantages /= rewards.std(ddof=1) + _EPSILON
    return {**kept, ADVANTAGE: advantages.astype(np.float32)}
