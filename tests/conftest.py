"""For every test: gRPC's own log stays out of the output, children are started by exec only, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored, which children would inherit
