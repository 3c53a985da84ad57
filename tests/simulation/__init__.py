"""Deterministic simulation: the control plane in one process, in virtual time, with every choice drawn from a seed.

What is real: the reorder service from its `_serve` down (Leadership, ReorderService, JobRun, Fleet, Sessions, StateStore, Database
with its Lua scripts, the gRPC servicers and `headrace.rpc.Server`), the preprocessor's Engine and PayloadStore, and the trainer's
SessionClient. All messages are serialized and parsed.

What is simulated: the event loop's clock and threads (virtual_loop), the wire and gRPC itself (network, simulated_grpc), the Redis
server (simulated_redis) and the client's connection to it (store_link), reading and decoding of samples (data_set), and the
trainer's StepLoader with the training around it (rank). Processes crash, hang and come back as `processes` says.
"""
