"""Every command of `headrace`, in families by what somebody wants to do: the order of `headrace --help` and of the reference."""

from __future__ import annotations

# Family -> command -> (module of headrace.cli, one line). A module has `add_arguments(parser)` and `run(args) -> exit code`, and
# imports the services only when it runs, so that `--help` is quick and a machine needs only the extras of the commands it runs.
FAMILIES = {
    "run a job": {
        "demo": ("demo.demo", "run a whole job on this machine, with a live display"),
        "reorder": ("run.reorder", "run the reorder service"),
        "preprocessor": ("run.preprocessor", "run a preprocessor"),
        "job": ("watch.job", "submit jobs, list, show and change them"),
        "train": ("run.train", "train the compact model on a job's batches"),
        "export": ("run.export", "write a checkpoint's weights for transformers"),
    },
    "look at data and plan": {
        "inspect": ("inspect.inspect", "look into a data set: counts, sizes, refusals"),
        "compare": ("planning.compare", "what planning would gain on your data"),
        "plan": ("planning.plan", "plan one global batch from a cost table"),
        "simulate": ("planning.simulate", "simulate every strategy on one global batch"),
        "orchestrate": ("orchestrate.orchestrate", "which GPUs each unit of your model gets: dp, tp, pp"),
        "simulate-failures": ("failures.simulate_failures", "simulate lost nodes: throughput over time"),
    },
    "watch": {
        "top": ("watch.top", "watch rates, waits, and what holds jobs up"),
        "audit": ("watch.audit", "prove that every sample of a job was used once"),
        "replay": ("watch.replay", "preprocess one sample again, and show every piece"),
    },
    "operate and secure": {
        "scale": ("scale.scale", "run as many preprocessors as trainers take from"),
        "health": ("run.health", "exit 0 if the service at an endpoint is serving"),
        "doctor": ("doctor.doctor", "what is wrong here or in a stack, and the remedy"),
        "certs": ("run.certs", "make and renew the services' certificates (--tls)"),
        "tokens": ("run.tokens", "make a folder of tokens, one for each role"),
    },
    "measure": {
        "bench": ("bench.bench", "measure what this machine can do"),
        "profile": ("costs.profile", "measure a model's layers: costs for planning"),
        "experiment": ("experiment.experiment", "an experiment of a paper beside its published row"),
    },
}
COMMANDS = {name: command for family in FAMILIES.values() for name, command in family.items()}
