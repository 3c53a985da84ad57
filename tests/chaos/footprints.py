"""Whether long-lived processes take no more memory and descriptors than they did."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.processes import Footprint, Standing

WARM_ROUNDS = 2  # after which a process has loaded and cached what it needs
ALLOWED_KIB = 48 << 10  # what malloc keeps for the next parts; a part is 0.4 MiB, a round brings 80
ALLOWED_KIB_A_ROUND = 256  # a job that is done stays known to the reorder service and to Redis
ALLOWED_FDS = 16  # connections of both ends of a wire that was mended, until their keepalive


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of one process, over so many rounds that it lived through."""

    name: str
    rounds: int
    before: Footprint
    after: Footprint

    @property
    def is_allowed(self) -> bool:
        memory_kib = self.after.memory_kib - self.before.memory_kib
        fds = self.after.num_fds - self.before.num_fds
        return memory_kib <= ALLOWED_KIB + ALLOWED_KIB_A_ROUND * self.rounds and fds <= ALLOWED_FDS

    def __str__(self) -> str:
        return (
            f"{self.name:16}{self.rounds:7}{self.before.memory_kib / 1024:12.0f}{self.after.memory_kib / 1024:8.0f}"
            f"{self.before.num_fds:10}{self.after.num_fds:8}"
        )


class Footprints:
    """Compares each life of a process, from its first rounds to its end."""

    def __init__(self) -> None:
        self._lives: dict[int, Growth] = {}

    def look(self, processes: list[Standing]) -> None:
        """At the end of a round: all is quiet."""
        for process in processes:
            process.rounds += 1
            if process.rounds == WARM_ROUNDS:
                process.baseline = process.footprint()
            elif process.baseline is not None:
                self._lives[process.popen.pid] = Growth(
                    name=process.name,
                    rounds=process.rounds - WARM_ROUNDS,
                    before=process.baseline,
                    after=process.footprint(),
                )

    @property
    def lives(self) -> list[Growth]:
        """Of all that lived long enough to say something."""
        return list(self._lives.values())

    @property
    def grown(self) -> list[Growth]:
        """Lives that ended with more than is allowed."""
        return [growth for growth in self.lives if not growth.is_allowed]

    def table(self) -> str:
        """The longest life under each name."""
        longest: dict[str, Growth] = {}
        for growth in self.lives:
            if growth.name not in longest or growth.rounds >= longest[growth.name].rounds:
                longest[growth.name] = growth
        head = f"{'lived longest':16}{'rounds':>7}{'MiB before':>12}{'after':>8}{'fds':>10}{'after':>8}"
        return "\n".join([head, *(str(growth) for _, growth in sorted(longest.items()))])
