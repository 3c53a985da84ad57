"""A gRPC channel that stands for another one, which may be replaced between calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import grpc


class ReplacedChannel(grpc.Channel):  # type: ignore[misc]  # gRPC has no types
    """A blocking gRPC channel whose calls go through the channel that is present when they begin."""

    @abstractmethod
    def present(self) -> grpc.Channel:
        """Return the channel for calls that begin now."""

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().unary_unary(*args, **options)(*request, **how)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().unary_stream(*args, **options)(*request, **how)

    def stream_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().stream_unary(*args, **options)(*request, **how)

    def stream_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().stream_stream(*args, **options)(*request, **how)

    def subscribe(self, callback: Callable[..., Any], try_to_connect: bool = False) -> None:
        self.present().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[..., Any]) -> None:
        self.present().unsubscribe(callback)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
