"""Loading of UCX through its Python binding ucxx (the extra `rdma`) on first use; without it everything else works.

The binding sets environment variables, and UCX reads some of them only while it is loaded. So they are set for that time and the
environment is restored afterwards: child processes and other users of UCX in this process find it unchanged. Options that the
user has set take precedence over those set here: `UCX_TLS=rc` or `UCX_NET_DEVICES=mlx5_0:1` work as they do everywhere.

The wheels of ucxx bundle a UCX without verbs, which supports TCP and shared memory only. For InfiniBand or RoCE, install a system
UCX (1.19 or newer, with verbs) and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from headrace.errors import UnavailableError
from headrace.transport.base import TransportError

_WHILE_STARTING = {
    "UCX_ERROR_SIGNALS": "",  # no signal handlers for SIGSEGV and the like: they are up to the host program
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # the warning is about variables that the binding itself sets
    "UCXX_LOG_LEVEL": "FATAL",  # it logs a lost peer as an error; here that is an exception, or a line of our log
}
_OPTIONS = {
    "TCP_TX_SEG_SIZE": "256k",  # the default of 8 KiB takes twice the CPU time per byte at the receiver
    "TCP_RX_SEG_SIZE": "256k",
    "KEEPALIVE_INTERVAL": "2s",  # to notice a host that vanished; the default is 20 s
    "TCP_KEEPIDLE": "4s",
    "TCP_KEEPINTVL": "1s",
}
_NUM_LANES_MAX = 32
_FIELD_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS


class UcxError(TransportError, UnavailableError):
    """UCX cannot be used in this process, or one of its connections is lost. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The loaded binding ucxx: its low-level module, its array class and its error class."""

    api: ModuleType
    array: Any
    error: type[Exception]

    def open_worker(self) -> Any:
        """Return a UCXWorker with a context of its own. Raises UcxError if UCX does not start."""
        features = (self.api.Feature.TAG, self.api.Feature.STREAM, self.api.Feature.WAKEUP)
        options = {name: value for name, value in _OPTIONS.items() if f"UCX_{name}" not in os.environ}
        try:
            with _environment():
                worker = self.api.UCXWorker(self.api.UCXContext(options, features))
            worker.init_blocking_progress_mode()
        except self.error as err:
            raise UcxError(f"UCX does not start ({err})") from err
        return worker


@functools.cache
def load() -> Library:
    """Load ucxx and return its parts; later calls return the same. Raises UcxError if the package is missing or does not load."""
    try:
        with _environment():
            importlib.import_module("ucxx")
            api = importlib.import_module("ucxx._lib.libucxx")
            array = importlib.import_module("ucxx._lib.arr").Array
    except ImportError as err:
        raise UcxError(f"ucxx, the extra `rdma`, is not usable ({err})") from err
    except OSError as err:  # one of its shared libraries does not load
        raise UcxError(f"ucxx does not load ({err})") from err
    return Library(api=api, array=array, error=api.UCXError)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set our environment variables during the block, and remove them and those that the binding adds after it."""
    found = dict(os.environ)
    os.environ.update({name: value for name, value in _WHILE_STARTING.items() if name not in found})
    try:
        yield
    finally:
        for name in os.environ.keys() - found.keys():
            del os.environ[name]


class _Lane(ctypes.Structure):
    _fields_ = [("transport", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class _EndpointAttributes(ctypes.Structure):
    """The C struct ucp_ep_attr_t; only the transports are asked for."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("lanes", ctypes.POINTER(_Lane)),
        ("num_lanes", ctypes.c_uint),
        ("lane_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    ]


def lanes(endpoint: Any) -> tuple[str, ...]:
    """Return the lanes of a connected UCXEndpoint, each as TRANSPORT/DEVICE: ("rc_mlx5/mlx5_0:1",). Empty if UCX reports none."""
    entries = (_Lane * _NUM_LANES_MAX)()
    attributes = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS, lanes=entries, num_lanes=_NUM_LANES_MAX, lane_bytes=ctypes.sizeof(_Lane)
    )
    library = ctypes.CDLL("libucp.so.0")  # the one that the binding, which has no such call, has loaded
    if library.ucp_ep_query(ctypes.c_void_p(endpoint.handle), ctypes.byref(attributes)):
        return ()
    named = [lane for lane in entries[: attributes.num_lanes] if lane.device]  # leaves out the lane that served only to connect
    return tuple(dict.fromkeys(_name(lane) for lane in named))


def _name(lane: _Lane) -> str:
    return f"{lane.transport.decode()}/{lane.device.decode()}"
