"""UCX by its Python binding ucxx (the extra `rdma`), loaded on the first use: without it all else works.

The binding sets variables of the environment and UCX reads some of them only while it is loaded. So they are set for that time
and the environment is put back: child processes and other users of UCX in this process find it as it was. Options named here
give way to those that the user has set: `UCX_TLS=rc` or `UCX_NET_DEVICES=mlx5_0:1` work as they do everywhere.

The wheels of ucxx bring a UCX without verbs, which knows TCP and shared memory only. For InfiniBand or RoCE, install a UCX of the
system (1.19 or newer, with verbs) and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true.
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
    "UCX_ERROR_SIGNALS": "",  # no handlers of its own for SIGSEGV and the like: they are the host program's
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # it counts variables that the binding sets itself
    "UCXX_LOG_LEVEL": "FATAL",  # a peer that goes is an error there; here it is an exception, or a line of our log
}
_OPTIONS = {
    "TCP_TX_SEG_SIZE": "256k",  # the default, 8 KiB, takes twice the processor time per byte at the receiver
    "TCP_RX_SEG_SIZE": "256k",
    "KEEPALIVE_INTERVAL": "2s",  # a host that vanished without a word; the default is 20 s
    "TCP_KEEPIDLE": "4s",
    "TCP_KEEPINTVL": "1s",
}
_NUM_LANES_MAX = 32
_FIELD_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS


class UcxError(TransportError, UnavailableError):
    """UCX cannot be used here, or a connection of it is lost. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The parts of the binding that are used here."""

    api: ModuleType
    array: Any
    error: type[Exception]

    def open_worker(self) -> Any:
        """A UCXWorker of a context of its own. Raises UcxError."""
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
    """Raises UcxError where the package is missing or does not load."""
    try:
        with _environment():
            importlib.import_module("ucxx")
            api = importlib.import_module("ucxx._lib.libucxx")
            array = importlib.import_module("ucxx._lib.arr").Array
    except ImportError as err:
        raise UcxError(f"ucxx, the extra `rdma`, is not usable ({err})") from err
    except OSError as err:  # a shared library of it
        raise UcxError(f"ucxx does not load ({err})") from err
    return Library(api=api, array=array, error=api.UCXError)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Our variables during the block, none of ours or the binding's after it."""
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
    """ucp_ep_attr_t; only the transports are asked for."""

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
    """What a connected UCXEndpoint goes over, as TRANSPORT/DEVICE: ("rc_mlx5/mlx5_0:1",). Empty where UCX does not tell."""
    entries = (_Lane * _NUM_LANES_MAX)()
    attributes = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS, lanes=entries, num_lanes=_NUM_LANES_MAX, lane_bytes=ctypes.sizeof(_Lane)
    )
    library = ctypes.CDLL("libucp.so.0")  # loaded already, whichever it is: the binding has no such call
    if library.ucp_ep_query(ctypes.c_void_p(endpoint.handle), ctypes.byref(attributes)):
        return ()
    named = [lane for lane in entries[: attributes.num_lanes] if lane.device]  # not the one that only connected
    return tuple(dict.fromkeys(_name(lane) for lane in named))


def _name(lane: _Lane) -> str:
    return f"{lane.transport.decode()}/{lane.device.decode()}"
