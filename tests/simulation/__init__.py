"""Deterministic simulation: the control plane in one process, in virtual time, with every choice drawn from a seed.

What is real: the reorder service from `headrace.reorder_service.server.serve` down (Leadership, ReorderService, JobRun, Fleet,
Sessions, StateStore, Database with its Lua scripts, the servicers, `headrace.rpc.Server` and its admission of calls), the
preprocessor's Engine and PayloadStore, and the trainer's SessionClient, Relay and RelayStream. All messages are serialized and
parsed.

What is simulated: the event loop's clock and threads (virtual_loop), wires (network) and gRPC itself (simulated_call,
simulated_server, simulated_channel), the lock and the socket by which a host's ranks find their relay (simulated_relay), the
Redis server (simulated_redis) and the client's connection to it (store_link), reading and decoding of samples (data_set), and
the trainer's StepLoader with the training around it (rank). Nodes of recoverable jobs (`headrace train --nodes`) and processes
of pipelines take no part.

What is made once for all runs: plans, which are pure functions of a step's samples and the job's spec, and parsed specs
(remembered).

A run is drawn from its seed: cluster and job (fault_plan.draw_setting), what goes wrong (fault_plan.draw_faults, striking), and
every delay. `checkers` says what must hold; `seeded_faults` are known faults that the checkers have to find.
"""
