"""`headrace train`: train the compact model on a job's batches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.endpoint import add_endpoint
from headrace.cli.log_format import add_log_format, add_metrics
from headrace.cli.planning import emulate
from headrace.cli.run.fsdp_options import add_fsdp_options, refuse_fsdp_options, settings_of, trains_fsdp
from headrace.errors import JobFailedError, UserError
from headrace.model_shape import MODEL_SHAPES
from headrace.plan import LLM

if TYPE_CHECKING:
    from headrace.spec import JobSpec
    from headrace.trainer.pipeline.topology import PipelineTopology

TRANSPORTS = ("auto", "shared_memory", "ucx", "flight")
"""Choices of --transport: auto, and the names in headrace.transport.base, which takes a moment to import."""
MIN_HANG_TIMEOUT_S = 2.0  # ranks say that they live each half second
DEFAULT_CHECKPOINT_EVERY = 100  # steps between checkpoints
_EPILOG = """\
examples:
  headrace train --submit job.yaml
  headrace train --job my-job --checkpoint checkpoints --resume checkpoints
  headrace train --submit job.yaml --nodes nodes.yaml --node node-1
  headrace train --emulate costs.parquet --global-batch 64 --replicas 1 --stages encoder=1,llm=3
  torchrun --nproc-per-node 4 --no-python headrace train --submit job.yaml --topology topology.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace train`."""
    parser.epilog = _EPILOG
    job = parser.add_argument_group("job")
    what = job.add_mutually_exclusive_group(required=True)
    what.add_argument("--job", metavar="JOB", help="a job that was submitted before")
    what.add_argument("--submit", type=Path, metavar="JOB.yaml", help="submit this job first")
    what.add_argument(
        "--emulate", metavar="COSTS", help="no job: plan batches of this cost table, and run them on processes that sleep as long"
    )
    job.add_argument(
        "--coefficients",
        type=Path,
        metavar="FILE",
        help="a file of `headrace profile`: all costs with --submit, the backward's share with --emulate",
    )
    add_endpoint(parser)
    data = parser.add_argument_group("data plane")
    data.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="how parts come; auto: through shared memory where a preprocessor is on this host, else by UCX where both have it, "
        "else by Arrow Flight (default: %(default)s)",
    )
    model = parser.add_argument_group("model, and how it learns")
    model.add_argument("--model", choices=tuple(MODEL_SHAPES), help="named size (default: the job's)")
    model.add_argument(
        "--topology",
        type=Path,
        metavar="FILE.yaml",
        help="train in a pipeline of units with their own replicas, stages and slices; under torchrun (default: the pipeline of "
        "the job where it says `trainer: pipeline`, else whole replicas)",
    )
    model.add_argument(
        "--optimizer",
        type=Path,
        metavar="FILE.yaml",
        help="a section `optimizer:` (learning_rate, warmup_steps, decay, weight_decay, betas, max_grad_norm, on_nan ...) for "
        "whole replicas or the job's own pipeline; the files of --topology and --nodes have it (default: rates of named sizes)",
    )
    model.add_argument(
        "--dropout",
        type=float,
        metavar="P",
        help="rate in the LLM's layers, drawn by sample, for whole replicas or the job's own pipeline; the files of --topology "
        "and --nodes have `dropout:` (default: 0)",
    )
    model.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of matrix products, messages and frozen weights; what learns, and the optimizer, are fp32 (default: %(default)s)",
    )
    model.add_argument(
        "--evaluate-every",
        type=int,
        metavar="N",
        help="evaluate the job's validation sets before the first step, after every N steps and after the last one, and log the "
        "loss of each (default: no evaluation)",
    )
    device = parser.add_argument_group("device")
    device.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: the GPU where there is one; --nodes there stages messages through host memory, and has run on one GPU "
        "only, as a pipeline of several processes has with emulated NCCL only (default: %(default)s)",
    )
    device.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of the model (default: OMP_NUM_THREADS, or this rank's share of the processors that may be used)",
    )
    add_fsdp_options(parser)
    checkpoints = parser.add_argument_group("checkpoints, with a pipeline, FSDP ranks or --nodes")
    checkpoints.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save there, beside training (FSDP ranks wait for it); with --nodes at the end, or when it cannot go on "
        "(default: nowhere)",
    )
    checkpoints.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help=f"steps, and after the last; not with --nodes (default: {DEFAULT_CHECKPOINT_EVERY})",
    )
    checkpoints.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go back to the newest checkpoint in it, saved from whatever topology; to the first step if it is the folder of "
        "--checkpoint and has none yet (not with --nodes)",
    )
    recovery = parser.add_argument_group("recovery")
    recovery.add_argument(
        "--fresh-weights",
        action="store_true",
        help="go on with a job that has committed steps, though without a checkpoint of theirs (default: that is refused)",
    )
    recovery.add_argument(
        "--hang-timeout",
        type=float,
        metavar="S",
        help="end the job once no rank has got on for so many seconds, none of which waits for data; under torchrun, without "
        "--nodes; at least 2, and longer than the longest computation, compilation included (default: 600)",
    )
    nodes = parser.add_argument_group("recovery, as a node of a job that outlasts the loss of others (no torchrun)")
    nodes.add_argument(
        "--nodes",
        type=Path,
        metavar="FILE.yaml",
        help="the nodes, units and failures to survive; with `gpus_per_node: P`, this starts the P processes of a node, or is "
        "one of them where LOCAL_RANK is set",
    )
    nodes.add_argument("--node", default="", metavar="NAME", help="of this node (default: HOST:PID)")
    nodes.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="by which the other nodes reach this one (default: %(default)s, for one machine)",
    )
    telling = parser.add_argument_group("log, metrics and summary")
    add_log_format(telling)
    add_metrics(telling, ", a rank at PORT plus its local rank")
    telling.add_argument("--format", choices=("table", "json"), default="table", help="of the summary (default: %(default)s)")
    emulate.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the job; rank 0 prints the summary."""
    if args.emulate:
        return emulate.run(args)
    emulate.refuse_options(args)
    import os

    from headrace.cli.run.checkpoint_folders import check_to_resume, check_to_save
    from headrace.cli.run.node_processes import own_process, processes_in, run_node
    from headrace.cli.run.trainjob_progress import progress_told
    from headrace.cli.watch.submission import read_spec
    from headrace.cli.watch.summary import print_summary, summarise
    from headrace.cluster_token import await_token_file
    from headrace.jobs_client import JobsClient, state_name
    from headrace.launcher_variables import rank
    from headrace.observability import metrics, tracing
    from headrace.observability.logs import configure_logging
    from headrace.transport import base

    if args.coefficients is not None and args.submit is None:
        raise UserError("--coefficients goes with --submit: a job that was submitted before keeps its own costs")
    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads must be at least 1, got {args.threads}")
    if args.checkpoint_every is not None and args.checkpoint_every < 1:
        raise UserError(f"--checkpoint-every must be at least 1, got {args.checkpoint_every}")
    if args.checkpoint_every is not None and args.nodes is not None:
        raise UserError("--checkpoint-every goes with a pipeline: nodes save at the end, or when training cannot go on")
    if args.evaluate_every is not None and args.evaluate_every < 1:
        raise UserError(f"--evaluate-every must be at least 1, got {args.evaluate_every}")
    if args.hang_timeout is not None and not args.hang_timeout >= MIN_HANG_TIMEOUT_S:
        raise UserError(f"--hang-timeout must be at least {MIN_HANG_TIMEOUT_S:g} seconds, got {args.hang_timeout:g}")
    if args.hang_timeout is not None and args.nodes is not None:
        raise UserError("--hang-timeout goes with ranks of torchrun: nodes that hang are left out after the service's lease")
    if args.topology is not None and args.nodes is not None:
        raise UserError("--topology and --nodes exclude each other: with --nodes, the pipelines follow from the nodes")
    if args.optimizer is not None and (args.topology is not None or args.nodes is not None):
        raise UserError("--optimizer goes with neither --topology nor --nodes: their file has a section `optimizer:` for that")
    if args.dropout is not None and (args.topology is not None or args.nodes is not None):
        raise UserError("--dropout goes with neither --topology nor --nodes: their file has `dropout:` for that")
    if args.dropout is not None and not 0 <= args.dropout < 1:
        raise UserError(f"--dropout must be from 0 to below 1, got {args.dropout:g}")
    refuse_fsdp_options(args)
    is_first = rank() == 0
    configure_logging("trainer", args.log_format)
    await_token_file()
    node = args.node or f"{args.host}:{os.getpid()}"
    num_processes = processes_in(args.nodes) if args.nodes is not None else 1
    process = own_process(num_processes)
    if process is None:
        return run_node(args.arguments, node, num_processes)
    with JobsClient(args.endpoint) as client:
        # imported here because it takes three seconds, which a wrong argument need not wait for
        from headrace.trainer.devices import local_device
        from headrace.trainer.loading.relay import check_relay
        from headrace.trainer.models.adapted_units import HuggingFaceUnits
        from headrace.trainer.optimizer_spec import OptimizerSpec, load_optimizer_yaml
        from headrace.trainer.pipeline.beginning import goes_on
        from headrace.trainer.pipeline.pipeline_training import train_pipeline
        from headrace.trainer.train import train

        device = local_device(args.device)
        check_relay()
        spec = read_spec(args.submit) if args.submit else client.spec(args.job)
        fsdp = trains_fsdp(args, spec)
        topology = None if args.nodes or fsdp else _pipeline(args, spec)
        if topology is None and args.nodes is None and not fsdp and (args.checkpoint or args.resume):
            raise UserError("--checkpoint and --resume go with a pipeline (`trainer: pipeline`, --topology), --fsdp or --nodes")
        if args.checkpoint is not None:
            check_to_save(args.checkpoint)
        if args.resume is not None:
            is_named = topology is not None and topology.model == HuggingFaceUnits()  # else folders say what the model is
            check_to_resume(
                args.resume,
                is_saved_to=args.nodes is None and goes_on(args.resume, args.checkpoint),
                job=spec.name if args.nodes is None else None,
                model=args.model or spec.model if is_named else None,
            )
        job = client.submit(_spec_of(args, spec, topology)) if args.submit else args.job
        if args.submit and args.topology is None and topology is not None:  # the job may be planned for others by now
            topology = _pipeline(args, client.spec(job))
        state = state_name(status := client.show(job))
        if state in ("failed", "cancelled"):  # else ranks would wait for each other, and load a model, before they hear of it
            raise JobFailedError(status.message)
        if args.resume is None and is_first and state == "done":
            print(
                f"headrace train: job {job!r} was done before: nothing is left to train, and this is its summary; to train "
                f"again, give it another name, or `headrace job reset {job} --step 0` first",
                file=sys.stderr,
            )
        transports = base.TRANSPORTS if args.transport == "auto" else (args.transport,)
        exported = metrics.exported(metrics_of_rank(args.metrics), metrics.TRAINER)
        with exported, tracing.exported("trainer"), progress_told(args.endpoint, job):
            options: dict[str, Any] = {
                "job": job,
                "model_name": args.model or "",
                "threads": args.threads,
                "transports": transports,
                "precision": args.precision,
                "device": device,
                "fresh_weights": args.fresh_weights,
                "evaluate_every": args.evaluate_every,
            }
            if args.nodes is not None:
                from headrace.trainer.recovery.node import train_recoverable
                from headrace.trainer.recovery.nodes_spec import load_recovery_yaml

                train_recoverable(
                    args.endpoint,
                    spec=load_recovery_yaml(args.nodes),
                    node=node,
                    process=process,
                    host=args.host,
                    checkpoint=args.checkpoint,
                    resume=args.resume,
                    **options,
                )
                return 0
            if args.hang_timeout is not None:
                options["hang_timeout_s"] = args.hang_timeout
            saving: dict[str, Any] = {
                "checkpoint": args.checkpoint,
                "checkpoint_every": args.checkpoint_every or DEFAULT_CHECKPOINT_EVERY,
                "resume": args.resume,
            }
            if fsdp:
                from headrace.trainer.orchestrated.fsdp_training import train_fsdp

                train_fsdp(args.endpoint, settings=settings_of(args), shard_ranks=args.shard_ranks, **saving, **options)
            elif topology is None:
                optimizer = OptimizerSpec() if args.optimizer is None else load_optimizer_yaml(args.optimizer)
                train(args.endpoint, optimizer=optimizer, dropout=args.dropout or 0.0, **options)
            else:
                train_pipeline(args.endpoint, topology=topology, **saving, **options)
        if is_first:
            print_summary(summarise(client, job), args.format)
    return 0


def _pipeline(args: argparse.Namespace, spec: JobSpec) -> PipelineTopology | None:
    """Return the pipeline to train in: that of --topology, or the job's own; None where neither names one."""
    from headrace.trainer.optimizer_spec import load_optimizer_yaml
    from headrace.trainer.pipeline.topology import PipelineTopology, load_topology_yaml

    of_job = spec.execution.trainer == "pipeline"
    if args.topology is not None:
        return load_topology_yaml(args.topology, spec if of_job else None)
    if not of_job:
        return None
    own = PipelineTopology.of_job(spec)
    own = own if args.dropout is None else own.model_copy(update={"dropout": args.dropout})
    return own if args.optimizer is None else own.model_copy(update={"optimizer": load_optimizer_yaml(args.optimizer)})


def _spec_of(args: argparse.Namespace, spec: JobSpec, topology: PipelineTopology | None) -> JobSpec:
    """Return the spec to submit for trainers of that topology, with the costs of --coefficients at its tensor-parallel widths."""
    from headrace.cli.watch.submission import with_coefficients

    spec = _planned_for(spec, topology)
    return spec if args.coefficients is None else with_coefficients(spec, args.coefficients)


def _planned_for(spec: JobSpec, topology: PipelineTopology | None) -> JobSpec:
    """Return the spec with stages and execution of trainers of that topology, unless it says itself how its trainers run plans.

    What is left to say is then that they are pipelines. A spec that names other stages is planned for these, as before there was
    an execution, and the user is told.
    """
    if topology is None:
        return spec
    if not spec.execution.says_nothing:
        kind = spec.execution.trainer or "pipeline"
        return spec.with_execution(spec.execution.model_copy(update={"trainer": kind}))
    if "stages" in spec.topology.model_fields_set and spec.topology.stages != topology.stages:
        print(
            f"the job's topology.stages are {_in_words(spec.topology.stages)}, but the topology of the trainers has "
            f"{_in_words(topology.stages)}: steps are planned for the former, as ideal 1F1B; leave stages out of the spec to "
            "plan for the trainers",
            file=sys.stderr,
        )
        return spec
    given = "replicas" in spec.topology.model_fields_set
    return topology.planned_for(spec, spec.topology.replicas if given else topology.replicas[LLM])


def _in_words(stages: Mapping[str, int]) -> str:
    return ", ".join(f"{unit} {number}" for unit, number in stages.items())


def metrics_of_rank(listen: str) -> str:
    """Return where this rank serves metrics: `listen` with the local rank added to a port other than 0. Raises EndpointError."""
    from headrace.launcher_variables import local_rank
    from headrace.rpc import check_endpoint

    if not listen or check_endpoint(listen).endswith(":0"):
        return listen
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + local_rank()}"
