"""Amounts that the runtime keeps to and the planner counts with."""

from collections.abc import Sequence

UPDATE_CHUNK_ELEMENTS = 2**26
"""Parameters that a streamed stage is updated by before a more urgent one may come between; about 30 ms."""
NUM_PREPOSTED_RECEIVES = 2
"""Receives posted before the action that needs them; just in time, communication cost 10 % on four H200."""
NUM_INCOMING_EDGES = 2
"""Edges on which a rank receives messages: from the ranks before and behind."""
NUM_MAILBOXES = 2
"""Mailboxes of each edge: one is filled while the other is emptied."""

MAX_GRADIENT_SUMS = 2
"""Stages of a rank whose fp32 sums are on the GPU at a time where sums travel: one that adds up, one on its way."""
SHARD_ALIGNMENT = 8
"""Elements that a replica's share of a stage is a multiple of: 16 bytes in bf16. A stage's length is a multiple of 128,
so that 2, 4, 8 or 16 replicas have equal shares."""
REDUCE_CHUNK_ELEMENTS = 2**24
"""Gradients that a GPU receives from all replicas at a time: 64 MiB in fp32."""
KEYS_PER_CALL = 32768
"""Keys that a slice of a sequence attends to at a time: bounds the shapes that come up, and their gradients."""


def gradient_sum_elements(trained: Sequence[int], num_sums: int) -> tuple[int, ...]:
    """Elements of a rank's fp32 sums, for stages with so many `trained` parameters, in the order of their backward.

    Stages take sums in turns, step after step. Where turns come out even, a stage has the same one always, and one that
    is larger than the others, with the embedding or the head, makes only that one larger.
    """
    if len(trained) % num_sums:
        return (max(trained),) * num_sums
    return tuple(max(trained[first::num_sums], default=0) for first in range(num_sums))


def largest_shard(elements: int, num_replicas: int) -> int:
    """Most of so many trained elements that one of the replicas owns; all of them where there is one."""
    return min(elements, -(-elements // (num_replicas * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT)


def max_pending_offloads(copy_lookahead: int) -> int:
    """Microbatches of a rank whose layers' inputs are still on the GPU while their copies to the host run.

    Compute waits for the copy before those. `copy_lookahead` is the number of computations that a copy may take.
    """
    return copy_lookahead + 1


def max_prefetched(copy_lookahead: int) -> int:
    """Microbatches of a rank whose layers' inputs have come back: the one in its backward, and the next ones."""
    return copy_lookahead + 1


def max_sends_in_flight(microbatches_per_round: int) -> int:
    """Sent messages that a rank keeps at most; before the next one, compute waits for the first of them.

    No receiver is ever further behind than the microbatches of one stage in a round (a test reads that off the
    schedules), so that compute does not wait in a steady pipeline. Without a bound the host, as much as a thousand
    launches ahead of the GPU, kept every message of half a step: 4 GiB of 11 for Llama-2-7B at 64 x 512.
    """
    return microbatches_per_round + 2
