"""gRPC servicer for the nodes of recoverable jobs: each node has one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from headrace.errors import UserError
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.nodes.node_stream import NodeStream
from headrace.reorder_service.nodes.nodes import Nodes
from headrace.rpc import stream_method
from headrace.v1 import membership_pb2, membership_pb2_grpc


class MembershipServicer(membership_pb2_grpc.MembershipServicer):
    """Serves one bidirectional stream per node: it takes the node's messages and sends snapshots of the pipelines."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    @stream_method
    async def Join(
        self, messages: AsyncIterator[membership_pb2.NodeMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[membership_pb2.Snapshot]:
        service, said = self._leadership.service, aiter(messages)
        first = await anext(said, membership_pb2.NodeMessage())
        if first.WhichOneof("message") != "hello":
            raise UserError("the stream of a node begins with its hello")
        nodes = await service.find_nodes(first.hello.job)
        stream = nodes.join(first.hello)
        reader = asyncio.create_task(_read(nodes, stream, said))
        try:
            async for snapshot in stream.snapshots():
                yield snapshot
            if reader.done():
                await reader  # raises its error, if it had one
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(nodes: Nodes, stream: NodeStream, said: AsyncIterator[membership_pb2.NodeMessage]) -> None:
    """Pass a node's messages on to `nodes` until its stream ends, and then say that it has ended."""
    done = False
    try:
        async for message in said:
            nodes.hear(stream)
            kind = message.WhichOneof("message")
            if kind == "hello":
                raise UserError("the stream of a node begins with its one hello, got another one")
            if kind == "leave":
                done = message.leave.done
                if not done:
                    nodes.leave(stream)
            elif kind == "recovered":
                nodes.recovered(stream, message.recovered)
            elif kind == "cut_off":
                nodes.cut_off(stream, message.cut_off.generation)
    finally:
        nodes.end(stream, "its stream ended", done=done)
        stream.end()
