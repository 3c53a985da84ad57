"""A gRPC proxy that keeps every message that it passes on, in both directions."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tests.histories.history import Said

_OPEN = ("/grpc.", "/headrace.v1.Jobs/Show")  # health checks and looks say nothing that is worth keeping


class RecordingProxy(grpc.GenericRpcHandler):
    """Passes every call on to `upstream`, HOST:PORT. `endpoint` is its own."""

    def __init__(self, upstream: str) -> None:
        self.said: list[Said] = []
        self._calls = itertools.count()
        self._lock = threading.Lock()
        self._channel = grpc.insecure_channel(upstream)
        self._server = grpc.server(ThreadPoolExecutor(32), handlers=[self])
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, handler_call_details: Any) -> Any:
        """Every method is passed on as one of streams: a call with one message looks no different on the wire."""
        method = handler_call_details.method
        pass_on = self._channel.stream_stream(method)

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._lock:
                call = next(self._calls)
            metadata = [
                (key, value) for key, value in context.invocation_metadata() if not key.startswith(("user-agent", "grpc-"))
            ]
            answers = pass_on(self._kept(call, method, requests, by_client=True), metadata=metadata)
            context.add_callback(answers.cancel)
            try:
                yield from self._kept(call, method, answers, by_client=False)
            except grpc.RpcError as err:
                context.abort(err.code(), err.details())

        return grpc.stream_stream_rpc_method_handler(handle)

    def _kept(self, call: int, method: str, messages: Iterator[bytes], *, by_client: bool) -> Iterator[bytes]:
        for message in messages:
            if not method.startswith(_OPEN):
                with self._lock:
                    self.said.append(Said(call=call, method=method, by_client=by_client, message=message))
            yield message
