"""What `headrace orchestrate` says: the searches in one table, the alternatives, and where time and memory go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.judgement import (
    GIB,
    IDLE,
    PARTS,
    SERVICES,
    Judgement,
    RankMemory,
    in_words,
    num_idle,
    seconds_beside,
    why_it_loses,
)

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.orchestrate.placement_files import PlacementFiles
    from headrace.cli.orchestrate.placement_problem import PlacementProblem
    from headrace.reorder_service.planning.batch import Floats
    from headrace.reorder_service.planning.orchestration.headrace_search import Found
    from headrace.reorder_service.planning.orchestration.judge import Simulated
    from headrace.reorder_service.planning.orchestration.memory_curve import MemoryCurve

BASELINE = "megatron"
SIMULATED = "SIMULATED"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """All that was found, and how long each search took."""

    problem: PlacementProblem
    found: Found
    searched_s: Mapping[str, float]
    """Seconds by search, `headrace` among them, with the judge's simulations."""
    refused: Mapping[str, str]
    """Searches that found nothing, and why."""
    step: Simulated
    """The first of the global batches, on the best placement."""
    curves: Sequence[MemoryCurve]
    """What a GPU of each of its stages holds meanwhile; empty where that is not known."""

    @property
    def judged(self) -> Mapping[str, Judgement]:
        """The answer of every search, the best one first."""
        return {"headrace": self.found.best, **self.found.answers}

    def speedup(self, judgement: Judgement) -> float | None:
        """Return how many times as fast as Megatron's answer a candidate is; None without that."""
        baseline = self.found.answers.get(BASELINE)
        return None if baseline is None else self.seconds(baseline) / self.seconds(judgement)

    def seconds(self, judgement: Judgement) -> float:
        """Return the seconds of a step as they compare with those of the best, whatever batches they were judged on."""
        return seconds_beside(judgement, self.found.best)

    def to_json(self, files: PlacementFiles, picture: str | None) -> dict[str, Any]:
        """Return the public JSON form."""
        demand, best = self.problem.demand, self.found.best
        cluster = demand.cluster
        return {
            "simulated": True,
            "model": self.problem.model,
            "cluster": {"name": cluster.name, "gpus": cluster.num_gpus, "nodes": cluster.nodes, "memory_gib": cluster.memory_gib},
            "global_batch": demand.global_batch,
            "batches": len(self.found.batches),
            "estimated": self.found.num_estimated,
            "simulated_steps": self.found.num_simulated,
            "searches": [
                {"search": name, **self._row(judgement), "searched_s": self.searched_s[name]}
                for name, judgement in self.judged.items()
            ],
            "refused": dict(self.refused),
            "alternatives": [
                {**self._row(judgement), "search": judgement.candidate.search, "loses": why_it_loses(judgement, best)}
                for judgement in self.found.alternatives
            ],
            "placements": [
                {**self._row(judgement), "loses": "" if judgement is best else why_it_loses(judgement, best)}
                for judgement in self.found.of_placements.values()
            ],
            "bubble_bound_s": self.found.bubble_bound_s,
            "steps_s": best.steps_s.tolist(),
            "time": {part: best.share(part) for part in PARTS},
            "ranks": [_of_rank(rank) for rank in best.ranks],
            "memory_over_step": {"step_s": self.step.step_s, "stages": [_of_curve(curve) for curve in self.curves]},
            "notes": list(self.problem.notes),
            "files": [str(path) for path in files.paths],
            "picture": picture,
            "processes": files.processes,
            "commands": {
                "launch": files.launch.torchrun,
                "slurm": files.launch.slurm,
                "kubernetes": files.launch.kubernetes,
                "emulate": files.emulate,
                "emulate_small": files.small,
            },
        }

    def _row(self, judgement: Judgement) -> dict[str, Any]:
        candidate, batch = judgement.candidate, self.problem.demand.global_batch
        step_s = self.seconds(judgement)
        return {
            "placement": candidate.placement,
            "units": {unit: {"dp": grid.dp, "tp": grid.tp, "pp": grid.pp} for unit, grid in candidate.grids.items()},
            "on_llm": list(candidate.guests),
            "gpus": candidate.gpus,
            "microbatches": candidate.microbatches,
            "pieces": candidate.pieces,
            "in_flight": candidate.in_flight,
            "strategy": judgement.strategy,
            "step_s": step_s,
            "samples_per_s": batch / step_s,
            "judged_on": judgement.steps_s.size,
            "speedup": self.speedup(judgement),
            "memory_gib": judgement.fullest.total / GIB,
            "fits": judgement.fits,
        }

    def tables(self) -> list[Table]:
        """Return the tables to be printed, in order."""
        return [self._searches(), self._placements(), self._alternatives(), self._time(), _memory(self.found.best)]

    def _searches(self) -> Table:
        from rich.table import Table

        demand = self.problem.demand
        title = (
            f"{self.problem.model} on {demand.cluster.num_gpus} x {demand.cluster.name}: {demand.global_batch} samples a step, "
            f"{len(self.found.batches)} global batches, {SIMULATED}"
        )
        table = Table(title=title, title_justify="left")
        names = ("GPUs", "K", "step", "samples/s", f"x {BASELINE}", "memory", "batches", "searched in")
        for name in ("search", *demand.unit_names, *names):
            table.add_column(name, justify="left" if name == "search" else "right", no_wrap=True)
        best = min(self.judged.values(), key=lambda one: one.key)
        for name, judgement in self.judged.items():
            candidate, speedup = judgement.candidate, self.speedup(judgement)
            table.add_row(
                name,
                *(_grid(judgement, unit) for unit in demand.unit_names),
                str(candidate.gpus), str(candidate.microbatches), f"{self.seconds(judgement):.3f} s",
                f"{demand.global_batch / self.seconds(judgement):.1f}", "" if speedup is None else f"{speedup:.2f} x",
                f"{judgement.fullest.total / GIB:.1f} GiB" + ("" if judgement.fits else ", too much"),
                str(judgement.steps_s.size), f"{self.searched_s[name]:.2f} s",
                style="bold" if judgement is best else None,
            )  # fmt: skip
        return table

    def _placements(self) -> Table:
        from rich.table import Table

        best, bound_s = self.found.best, self.found.bubble_bound_s
        table = Table(title="The best of each placement, and why the others lose", title_justify="left")
        for name in ("placement", "layout", "step", "why it loses"):
            table.add_column(name, justify="right" if name == "step" else "left", no_wrap=True)
        for placement, judgement in self.found.of_placements.items():
            loses = "" if judgement is best else why_it_loses(judgement, best)
            if placement == "nested" and bound_s is not None:
                loses += f"{'; ' * bool(loses)}its kernels in bubbles (Optimus) take {bound_s:.3f} s at least"
            table.add_row(placement, in_words(judgement.candidate), f"{seconds_beside(judgement, best):.3f} s", loses)
        return table

    def _alternatives(self) -> Table:
        from rich.table import Table

        best = self.found.best
        title = "The next best, and why they lose (dp x tp x pp of each unit)"
        table = Table(title=title, title_justify="left")
        for name in ("placement", "by", "step", "why it loses"):
            table.add_column(name, justify="right" if name == "step" else "left", no_wrap=True)
        for judgement in self.found.alternatives:
            step = f"{seconds_beside(judgement, best):.3f} s"
            table.add_row(in_words(judgement.candidate), judgement.candidate.search, step, why_it_loses(judgement, best))
        return table

    def _time(self) -> Table:
        from rich.table import Table

        best, cluster = self.found.best, self.problem.demand.cluster
        table = Table(title=f"Where the time of all GPUs goes: {in_words(best.candidate)}", title_justify="left")
        table.add_column("part", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        for part, words in PARTS.items():
            if part == SERVICES and cluster.cores_per_node is None:
                continue
            idle = num_idle(best.candidate, cluster)
            table.add_row(f"{words} ({idle} of {cluster.num_gpus})" if part == IDLE else words, f"{best.share(part):.1%}")
        return table


def _memory(judgement: Judgement) -> Table:
    """Return the table of what the fullest GPU of every stage holds; stages that hold as much as the one before are one row."""
    from rich.table import Table

    table = Table(
        title=f"Most GiB on a GPU of each stage, of {judgement.memory_bytes / GIB:.1f} that may be used", title_justify="left"
    )
    for name in ("GPUs of", "weights", "gradients", "optimizer", "activations", "in all"):
        table.add_column(name, justify="left" if name == "GPUs of" else "right")
    for first, last in _runs(judgement.ranks):
        name = first.unit if len([rank for rank in judgement.ranks if rank.unit == first.unit]) == 1 else (
            f"{first.unit} {first.stage}" + ("" if last is first else f" to {last.stage}")
        )  # fmt: skip
        sizes = (first.weights, first.gradients, first.optimizer, first.activations, first.total)
        table.add_row(name, *(f"{size / GIB:.2f}" for size in sizes))
    return table


def _runs(ranks: Sequence[RankMemory]) -> list[tuple[RankMemory, RankMemory]]:
    """Return the first and the last of neighbouring stages of a unit that hold the same, to a hundredth of a GiB."""
    runs: list[tuple[RankMemory, RankMemory]] = []
    for rank in ranks:
        if runs and runs[-1][0].unit == rank.unit and round(runs[-1][0].total / GIB, 2) == round(rank.total / GIB, 2):
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def _grid(judgement: Judgement, unit: str) -> str:
    candidate = judgement.candidate
    if candidate.placement == "colocated" and unit != LLM:
        return f"on {LLM}"
    grid = candidate.grids[unit]
    words = f"{grid.dp} x {grid.tp} x {grid.pp}"
    if unit in candidate.guests:
        words += f" on {LLM}" + f", {candidate.pieces} pieces" * (candidate.pieces > 1)
    return words


def _of_rank(rank: RankMemory) -> dict[str, Any]:
    sizes = ("weights", "gradients", "optimizer", "activations", "total")
    return {"unit": rank.unit, "stage": rank.stage, **{f"{name}_gib": getattr(rank, name) / GIB for name in sizes}}


def _of_curve(curve: MemoryCurve) -> dict[str, Any]:
    return {
        "unit": curve.unit,
        "stage": curve.stage,
        "replica": curve.replica,
        "peak_gib": curve.peak / GIB,
        "weights_gib": curve.weights / GIB,
        "optimizer_gib": curve.optimizer / GIB,
        "time_s": _rounded(curve.time_s),
        "gradients_gib": _rounded(curve.gradients / GIB),
        "activations_gib": _rounded(curve.activations / GIB),
    }


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def nowhere(problem: PlacementProblem, best: Judgement) -> str:
    """Return the sentence for a model that fits no placement: by how much the one does not that exceeds memory least."""
    rank, cluster = best.fullest, problem.demand.cluster
    unit = rank.unit if rank.unit in problem.demand.unit_names else problem.demand.unit_names[0]
    if rank.largest == "activations":
        knob = f"--checkpointing {unit}" if unit not in problem.checkpointing else "a smaller --global-batch"
    else:
        knob = f"--frozen {unit}" if unit not in problem.frozen else "devices with more memory"
    return (
        f"{problem.model} fits nowhere on {cluster.num_gpus} x {cluster.name}: {in_words(best.candidate)} comes nearest, and "
        f"takes {best.over_bytes / GIB:.3g} GiB more than the {best.memory_bytes / GIB:.3g} GiB that a GPU may use, most of it "
        f"{rank.largest} of {rank.unit}: {knob} or more --gpus help"
    )
