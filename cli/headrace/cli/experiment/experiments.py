"""The experiments by name: one table, from which `headrace experiment` lists and runs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from headrace.cli.experiment.findings import Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment of a paper. Its module is loaded when it runs, so that listing is quick."""

    source: str
    """Paper, and where in it."""
    line: str
    """What is compared, in a line."""
    module: str
    """Of this folder."""
    function: str

    def run(self) -> Findings:
        """Compute ours and put it beside what was published."""
        module = importlib.import_module(f"headrace.cli.experiment.{self.module}_experiments")
        return cast("Callable[[], Findings]", getattr(module, self.function))()


def _of(source: str, module: str, function: str, line: str) -> Experiment:
    return Experiment(source=source, line=line, module=module, function=function)


EXPERIMENTS: Mapping[str, Experiment] = {
    "disttrain-fig15": _of("DistTrain, figure 15", "disttrain", "figure_15", "use of up to 1,296 GPUs over Megatron-LM's"),
    "disttrain-fig16": _of("DistTrain, figure 16", "disttrain", "figure_16", "throughput on up to 1,296 GPUs over Megatron-LM's"),
    "disttrain-fig17": _of(
        "DistTrain, figure 17", "disttrain", "figure_17", "use of up to 98 GPUs over Megatron-LM and in proportion"
    ),
    "disttrain-fig18": _of("DistTrain, figure 18", "disttrain", "figure_18", "steps in random order over reordered ones"),
    "disttrain-fig19": _of("DistTrain, figure 19", "disttrain", "figure_19", "use of up to 98 GPUs with units frozen"),
    "disttrain-fig22": _of("DistTrain, figure 22", "stepccl", "figure_22", "a stage of the LLM without over that with StepCCL"),
    "disttrain-table2": _of("DistTrain, table 2", "disttrain", "table_2", "time of the search for a placement"),
    "entrain-table4.1": _of("Entrain, tables 4.1 and C.1", "entrain", "table_4_1", "stages of encoder and LLM"),
    "entrain-table4.2": _of(
        "Entrain, tables 4.2 and C.2 to C.8", "entrain", "table_4_2", "divisions that profiling batches lead to"
    ),
    "entrain-table4.3": _of("Entrain, table 4.3", "entrain", "table_4_3", "spread of microbatches, DistTrain's over Entrain's"),
    "entrain-fig4.12": _of("Entrain, figure 4.12", "entrain", "figure_4_12", "steps of DistTrain and DIP over Entrain's"),
    "entrain-fig4.15": _of("Entrain, figure 4.15", "entrain", "figure_4_15", "throughput of all divisions of 8 stages"),
    "orchmllm-fig8": _of("OrchMLLM, figures 8 and 9", "orchmllm", "figure_8", "2,560 ranks with and without balancing"),
    "orchmllm-fig10": _of("OrchMLLM, figure 10", "orchmllm", "figure_10", "balancing all phases, the LLM alone, and none"),
    "orchmllm-fig11": _of("OrchMLLM, figure 11", "orchmllm", "figure_11", "one balancing algorithm for all encoders"),
    "orchmllm-fig13": _of("OrchMLLM, figure 13", "orchmllm", "figure_13", "what crosses nodes after node-wise rearrangement"),
    "orchmllm-table2": _of("OrchMLLM, table 2", "orchmllm", "table_2", "time of balancing on 64 to 2,560 ranks"),
    "optimus-table1": _of("Optimus, table 1", "optimus", "table_1", "shares of bubbles in a step"),
    "optimus-table3": _of("Optimus, table 3 and figure 15", "optimus", "table_3", "steps of Megatron-LM's on 64 to 512 GPUs"),
    "optimus-table5": _of("Optimus, table 5", "optimus", "table_5", "steps of Megatron-LM's on 1,536 to 3,072 GPUs"),
    "optimus-table6": _of("Optimus, table 6 and figure 16", "optimus", "table_6", "steps of Megatron-LM with two encoders"),
    "optimus-table7": _of("Optimus, table 7", "optimus", "table_7", "shares of the encoder in bubbles, and the planner's time"),
    "cornstarch-fig3.1": _of("Cornstarch, figure 3.1", "cornstarch", "figure_3_1", "backward over forward of frozen stages"),
    "cornstarch-fig3.3": _of("Cornstarch, figure 3.3a", "cornstarch", "figure_3_3", "blocks of attention dealt to two GPUs"),
    "cornstarch-table3.2": _of("Cornstarch, table 3.2", "cornstarch", "table_3_2", "stages that know what is frozen"),
    "cornstarch-table3.2-stages": _of(
        "Cornstarch, table 3.2", "cornstarch", "table_3_2_stages", "the steps that the table's own stages make"
    ),
    "oobleck-table2.2": _of("Oobleck, table 2.2", "oobleck", "table_2_2", "throughput while nodes are lost"),
    "oobleck-table2.3": _of("Oobleck, table 2.3", "oobleck", "table_2_3", "time to plan templates"),
}
"""Of the papers that docs/glossary.md names; docs/experiments.md says which of theirs are not here, and why."""
