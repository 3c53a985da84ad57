"""How many calls a second a peer may make: a bucket of permits for each host, which fills at the rate and holds a second's."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST_HOSTS = 4_096  # whose buckets are kept: some 1 MiB


@dataclass(slots=True)
class PermitBucket:
    """A token bucket: each call takes a permit, `per_s` come back every second, and it holds as many at most."""

    per_s: float
    permits: float
    at_s: float
    """When `permits` were counted."""

    def take(self, now_s: float) -> bool:
        """Take a permit; False where there is none. `now_s`: does not go back."""
        self.permits = min(self.per_s, self.permits + (now_s - self.at_s) * self.per_s)
        self.at_s = now_s
        if self.permits < 1.0:
            return False
        self.permits -= 1.0
        return True


class CallRate:
    """A bucket for each host that calls. Of more than MOST_HOSTS, the one that called least lately is forgotten."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: at least 1; infinite: every call is let through."""
        self.per_s = per_s
        self._buckets: OrderedDict[str, PermitBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, host: str, now_s: float) -> bool:
        """Whether a host may make a call now."""
        bucket = self._buckets.pop(host, None) or PermitBucket(self.per_s, self.per_s, now_s)
        self._buckets[host] = bucket
        if len(self._buckets) > MOST_HOSTS:
            self._buckets.popitem(last=False)
        return bucket.take(now_s)


def host_of(peer: str) -> str:
    """Return the host of a peer as gRPC names it, such as ipv4:10.0.0.7:51234: the address without the port."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
