"""EMULATED links with delay and loss: `python -m benchmarks.deployment.links NUMBER DELAY_S LOSS`.

The kernel's own emulator, netem, is a module that few machines have. So each link is two TAP devices, `headrace-vK` and
`headrace-wK`, and this process, which hands Ethernet frames on from one to the other: it holds each back and loses some. With the
offloads of virtual machines a frame is up to 64 KiB of a connection, as between a real card and its driver, and is lost whole.

It prints a line when the devices are there, and at SIGTERM another one with what went through, as JSON. They end with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.deployment.line import Line

OUTER, INNER = "headrace-v", "headrace-w"
"""Names of the devices, before the link's number: this machine's end, and the host's."""
READY = "ready"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # <linux/if_tun.h>
_TAP, _WITHOUT_PROTOCOL, _WITH_OFFLOADS = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _LONG_TCP4 = 0x01, 0x02
_MOST_BYTES = (1 << 16) + 64
_AT_A_TIME = 64  # frames that one device is read of before the others have their turn
_LONGEST_WAIT_S = 0.5
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What every direction of a link does to frames."""

    delay_s: float
    loss: float

    @property
    def words(self) -> str:
        """For a table."""
        return f"{2e3 * self.delay_s:g} ms there and back, {100 * self.loss:g} % of frames lost (EMULATED)"


@contextlib.contextmanager
def links(number: int, quality: Quality) -> Iterator[subprocess.Popen[str]]:
    """Run the process above for the block, once all devices are there. Raises RuntimeError where they cannot be made."""
    words = [str(number), repr(quality.delay_s), repr(quality.loss)]
    command = [sys.executable, "-m", "benchmarks.deployment.links", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if (said := process.stdout.readline().strip()) != READY:
                raise RuntimeError(f"the links do not start: {said or 'see above'}")
            yield process
        finally:
            process.terminate()


def told(process: subprocess.Popen[str]) -> tuple[int, int]:
    """End the links, and return how many frames went in, and how many of them were lost."""
    process.terminate()
    found = json.loads(process.communicate(timeout=_END_S)[0])
    return found["frames"], found["lost"]


def _device(name: str) -> int:
    """Make a TAP device, and return what reads and writes its frames. Raises OSError."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    kind = _TAP | _WITHOUT_PROTOCOL | _WITH_OFFLOADS
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), kind))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS | _LONG_TCP4)
    return device


def _hand_on(ways: dict[int, tuple[int, Line]], ending: list[int]) -> None:
    """Hand frames on until `ending` has something. `ways`: device that is read -> that which is written, and the line between."""
    while not ending:
        now_s = time.monotonic()
        wait_s = min(line.next_s for _, line in ways.values()) - now_s
        readable, _, _ = select.select(list(ways), [], [], min(max(wait_s, 0.0), _LONGEST_WAIT_S))
        for device in readable:
            line = ways[device][1]
            with contextlib.suppress(BlockingIOError):
                for _ in range(_AT_A_TIME):
                    line.put(os.read(device, _MOST_BYTES), time.monotonic())
        now_s = time.monotonic()
        for to, line in ways.values():
            while frame := line.due(now_s):
                with contextlib.suppress(OSError):  # a device that is down: lost, too
                    os.write(to, frame)


def main() -> None:
    """Make the devices, and hand frames on until SIGTERM."""
    number, delay_s, loss = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    ways: dict[int, tuple[int, Line]] = {}
    for k in range(number):
        outer, inner = _device(f"{OUTER}{k}"), _device(f"{INNER}{k}")
        ways[outer] = inner, Line(delay_s, loss, 2 * k)
        ways[inner] = outer, Line(delay_s, loss, 2 * k + 1)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the benchmark, which ends this
    print(READY, flush=True)
    _hand_on(ways, ending)
    lines = [line for _, line in ways.values()]
    frames, lost = sum(line.num_frames for line in lines), sum(line.num_lost for line in lines)
    print(json.dumps({"frames": frames, "lost": lost}), flush=True)


if __name__ == "__main__":
    main()
