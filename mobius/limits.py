"""Limits of buffers and queues, shared by the engine and the planner."""

from collections.abc import Sequence

UPDATE_CHUNK_ELEMENTS = 2**26
"""Number of a streamed stage's parameters that are updated before a more urgent stage may take over; about 30 ms."""
NUM_PREPOSTED_RECEIVES = 2
"""Number of receives posted ahead of the action that needs them. Posting just in time costs 10 % on four H200."""
NUM_INCOMING_EDGES = 2
"""Number of edges on which a rank receives: activations from the previous rank, their gradients from the next."""
NUM_MAILBOXES = 2
"""Number of mailboxes of each edge: one is filled while the other is emptied."""

MIN_GRADIENT_SUMS = 2
"""Number of buffers for fp32 gradient sums if sums are copied to the host and back: one is added to, one is copied."""
NUM_STATE_BUFFERS = 3
"""Number of a rank's stages that have optimizer states in host memory at a time, if states are on disks: one is read,
one updated, one written."""
FEWEST_STATE_BUFFERS = 1
"""Minimum of NUM_STATE_BUFFERS, if host memory is short: a stage is read only after the previous one is written."""
SHARD_ALIGNMENT = 32
"""A replica's share of a stage is a multiple of this number of elements: a group of compact optimizer states, 64 bytes
in bf16. A stage's length is a multiple of 128, so 2 or 4 replicas have equal shares, and more replicas nearly equal
ones."""
REDUCE_CHUNK_ELEMENTS = 2**24
"""Number of gradients that a GPU receives from all replicas at a time: 64 MiB in fp32."""
KEYS_PER_CALL = 32768
"""Number of keys that a slice of a sequence attends to at a time; bounds the number of shapes and keys' gradients."""


def gradient_sum_elements(trained: Sequence[int], num_sums: int) -> tuple[int, ...]:
    """Elements of each fp32 gradient buffer of a rank; `trained` counts each stage's parameters, in order of backward.

    Stages use one or two buffers in rotation. If the number of stages is a multiple of `num_sums`, each stage always
    gets the same buffer. Then a large stage, such as a stage with the embedding or the head, enlarges only that buffer.
    """
    if num_sums > MIN_GRADIENT_SUMS or len(trained) % num_sums:
        return (max(trained),) * num_sums
    return tuple(max(trained[first::num_sums], default=0) for first in range(num_sums))


def num_load_buffers(num_state_buffers: int, num_stages: int) -> int:
    """Number of a rank's loads that have host memory at a time, if weights are on disks: one is read, one copied.

    The number is 1 if host memory is short: then 70B on four RTX 4090 is predicted to take 0.1 % longer.
    """
    return min(2, num_state_buffers, num_stages)


def largest_shard(elements: int, num_replicas: int) -> int:
    """Largest shard size over all replicas, in elements; `elements` if there is one replica."""
    return min(elements, -(-elements // (num_replicas * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT)


def max_pending_offloads(copy_lookahead: int) -> int:
    """Maximum number of microbatches whose layer inputs are still being copied to the host.

    Compute waits for any older copy. `copy_lookahead` is the maximum number of compute actions during a copy.
    """
    return copy_lookahead + 1


def max_prefetched(copy_lookahead: int) -> int:
    """Maximum number of microbatches whose offloaded layer inputs are back on the GPU, in backward or prefetched."""
    return copy_lookahead + 1


def max_sends_in_flight(num_messages: int) -> int:
    """Maximum number of sent messages that a rank retains; before the next one, compute waits for the oldest.

    No receiver lags by more than `num_messages`: the microbatches of one stage in a round, or depth-first a forward and
    a backward of each. A test checks this on the schedules. So compute does not wait in a steady pipeline. Without a
    bound, the host runs up to a thousand launches ahead of the GPU and retains the messages of half a step: 4 of 11 GiB
    for Llama-2-7B at 64 x 512.
    """
    return num_messages + 2
