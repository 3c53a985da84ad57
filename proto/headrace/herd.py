"""How clients that all lose the same service at once spread their calls to its successor."""

from __future__ import annotations

CALLS_PER_S = 2_000.0  # sessions that a service opens in a second on one core, with room for its other work
MOST_SPREAD_S = 5.0


def retry_pause_s(pause_s: float, num_clients: int, draw: float) -> float:
    """Return the pause of one of `num_clients` clients before its next try. `draw`: of its own, uniform in 0 .. 1.

    Clients with these pauses come at a steady rate of about CALLS_PER_S from the moment on at which the service is there again,
    the first of them at once, instead of all within `pause_s`. A few clients do not wait for longer than that.
    """
    return pause_s + draw * min(MOST_SPREAD_S, num_clients / CALLS_PER_S)
