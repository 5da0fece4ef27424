"""What a profile says of copies, CPU updates and messages, as flows over links and host memory that ranks share."""

from __future__ import annotations

from collections.abc import Hashable

from mobius.plan.profile import Profile
from mobius.plan.tasks import Flow


class SharedRates:
    """Makes the flows of a run, and tells the capacities of what they share."""

    HOST, BOTH_WAYS, DOWN, UP = "host memory", "copies both ways", "copies down", "copies up"
    UPDATES = "CPU optimizers"

    def __init__(self, profile: Profile, num_ranks: int) -> None:
        copies = profile.copies
        self._profile = profile
        self.capacities: dict[Hashable, float] = {
            self.HOST: max(profile.host_bandwidth, num_ranks * profile.cpu_adamw_together * profile.cpu_adamw_bytes),
            self.BOTH_WAYS: num_ranks * (copies.both_down + copies.both_up),
            self.DOWN: num_ranks * copies.down_together,
            self.UP: num_ranks * copies.up_together,
            self.UPDATES: num_ranks * profile.cpu_adamw_together,
        }
        for rank in range(num_ranks):
            self.capacities[self.DOWN, rank], self.capacities[self.UP, rank] = copies.down, copies.up
        # What the optimizers lose beside copies is what these take of the host's memory, in bytes per byte copied;
        # where both want more than there is they share it as they were seen to.
        lost, beside = profile.cpu_adamw_together - profile.cpu_adamw_beside_copies, profile.copies_beside_cpu_adamw
        self._host_share = max(lost, 0.0) * profile.cpu_adamw_bytes / (2 * beside)
        self._update_weight = profile.cpu_adamw_beside_copies / beside
        self._messages: dict[tuple[int, int, float], float | Flow] = {}

    def load(self, rank: int, num_bytes: float) -> Flow:
        """A copy to the GPU."""
        return Flow(num_bytes, self._profile.copies.down, self._down(rank))

    def offload(self, rank: int, num_bytes: float) -> Flow:
        """A copy to the host."""
        return Flow(num_bytes, self._profile.copies.up, self._up(rank))

    def update(self, parameters: float) -> Flow:
        """A part of a CPU update."""
        uses: dict[Hashable, float] = {self.HOST: self._profile.cpu_adamw_bytes, self.UPDATES: 1.0}
        return Flow(parameters, self._profile.cpu_adamw, uses, self._update_weight)

    def message(self, source: int, target: int, num_bytes: float) -> float | Flow:
        """Seconds of a message over a link of its own, or a flow up to the host and down again."""
        key = (source, target, num_bytes)
        if key not in self._messages:  # a step has thousands, all alike
            self._messages[key] = self._new_message(source, target, num_bytes)
        return self._messages[key]

    def _new_message(self, source: int, target: int, num_bytes: float) -> float | Flow:
        messages = self._profile.messages
        if not messages.is_through_host:
            return messages.latency + num_bytes / messages.bandwidth
        uses = self._up(source)
        for resource, share in self._down(target).items():
            uses[resource] = uses.get(resource, 0.0) + share
        return Flow(num_bytes + messages.latency * messages.bandwidth, messages.bandwidth, uses)

    def _down(self, rank: int) -> dict[Hashable, float]:
        return {**self._host(), self.BOTH_WAYS: 1.0, self.DOWN: 1.0, (self.DOWN, rank): 1.0}

    def _up(self, rank: int) -> dict[Hashable, float]:
        return {**self._host(), self.BOTH_WAYS: 1.0, self.UP: 1.0, (self.UP, rank): 1.0}

    def _host(self) -> dict[Hashable, float]:
        return {self.HOST: self._host_share} if self._host_share else {}
