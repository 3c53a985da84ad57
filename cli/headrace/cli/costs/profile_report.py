"""What `headrace profile` says of the times that it has measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.cli.costs.profile_fit import FittedKind, worst, worst_of_units
from headrace.cli.costs.profile_measuring import Patience

if TYPE_CHECKING:
    from headrace.cli.costs.stage_fit import FittedStage

_SHORT_S = 1e-3
"""Below which a forward is called short: clocks, calls and interrupts are no small part of it."""


@dataclass(slots=True, kw_only=True)
class Profile:
    """The times of a model's parts, with the curves through them."""

    patience: Patience
    kinds: list[FittedKind] = field(default_factory=list)
    stages: dict[str, FittedStage] = field(default_factory=dict)
    """By part; not of those that are too large."""
    uncertainty: dict[str, float] = field(default_factory=dict)
    """By part, half of the widest confidence interval of the times of its layers together, as a share."""
    too_large: dict[str, float] = field(default_factory=dict)
    """By part whose stage was not timed: the bytes that it takes."""
    checked: tuple[float, float] | None = None
    """Forecast and measured seconds of the whole model on a mixed microbatch."""

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON form."""
        rows = [
            {
                "unit": kind.times.part,
                "kind": kind.times.name,
                "tp": kind.times.tp,
                "positions": kind.times.positions,
                "measured_s": kind.times.forward_s,
                "fitted_s": kind.fitted_s,
                "errors": kind.errors,
                "input_gradients_s": kind.times.input_gradients_s,
                "weight_gradients_s": kind.times.weight_gradients_s,
                "rerun_s": kind.times.rerun_s,
                "uncertainty": kind.times.uncertainty,
            }
            for kind in self.kinds
        ]
        stages = [
            {
                "unit": part,
                "layers": len(stage.times.layers),
                "scale": {"forward": stage.forward[0], "backward": stage.backward[0]},
                "microbatch_s": {"forward": stage.forward[1], "backward": stage.backward[1]},
                "step_s": {"gradients": stage.times.gradients_s.value, "update": stage.times.update_s.value},
                "errors": stage.errors,
                "uncertainty": stage.times.uncertainty,
            }
            for part, stage in self.stages.items()
        ]
        whole = (
            {} if self.checked is None else {"whole_model": dict(zip(("forecast_s", "measured_s"), self.checked, strict=True))}
        )
        return {
            "kinds": rows,
            "stages": stages,
            "worst_error": worst(self.kinds),
            "worst_error_of_a_unit": worst_of_units(self.kinds),
            "uncertainty": self.uncertainty,
            **whole,
        }

    def show(self, model: str) -> None:
        """Print the tables, and what the columns are."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"Forward of one sample in one layer or end of model {model}", title_justify="left")
        for name in ("unit", "kind", "tp", "positions", "measured", "+-", "fitted", "error", "inputs", "weights", "re-run"):
            table.add_column(name, justify="left" if name in ("unit", "kind") else "right", no_wrap=True)
        for kind in self.kinds:
            times = kind.times
            for row, positions in enumerate(times.positions):
                forward = times.forward_s[row]
                ratios = (times.input_gradients_s[row], times.weight_gradients_s[row], times.rerun_s[row])
                table.add_row(
                    *(("", "", "") if row else (times.part, times.name, str(times.tp))),
                    f"{positions:,.0f}", f"{forward * 1e3:.3f} ms", f"{times.uncertainty[row]:.1%}",
                    f"{kind.fitted_s[row] * 1e3:.3f} ms", f"{kind.errors[row]:+.1%}",
                    *(f"{seconds / forward:.2f} x" for seconds in ratios), end_section=row == len(times.positions) - 1,
                )  # fmt: skip
        console = Console(highlight=False)
        console.width = max(console.width, 120)
        console.print(table)
        print("inputs, weights, re-run: times of the parts of the backward, each over the forward")
        print("+-: half of the 95 % confidence interval of forward and backward together")
        if max(kind.times.tp for kind in self.kinds) > 1:
            print("tp: one slice of a layer, without the communication between slices")
        print(
            f"the worst error of the fit is {worst(self.kinds):.1%} for a kind, {worst_of_units(self.kinds):.1%} for a whole unit"
        )
        if self.stages:
            console.print(self._stages())
            print("layers: what they take in a stage over what they take by themselves; the rest: what is not theirs")
        if self.checked is not None:
            forecast, measured = self.checked
            words = f"forecast {forecast * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms, {forecast / measured - 1:+.1%}"
            print(f"the whole model, forward and backward of a mixed microbatch: {words}")

    def _stages(self) -> Any:
        from rich.table import Table

        table = Table(title="Forward and backward of a microbatch in a stage, and what follows once a step", title_justify="left")
        for name in ("unit", "layers", "a microbatch", "+-", "worst error", "gradients", "update"):
            table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
        for part, stage in self.stages.items():
            times = stage.times
            table.add_row(
                part,
                f"{stage.forward[0]:.2f}, {stage.backward[0]:.2f} x",
                f"{stage.forward[1] * 1e3:.2f}, {stage.backward[1] * 1e3:.2f} ms",
                f"{times.uncertainty:.1%}",
                f"{max(map(abs, stage.errors)):.1%}",
                f"{times.gradients_s.value * 1e3:.2f} ms",
                f"{times.update_s.value * 1e3:.2f} ms",
            )
        return table

    def warnings(self) -> Iterator[str]:
        """Yield what the user should know of the times, one sentence each."""
        for part, share in self.uncertainty.items():
            shortest_s = min(kind.times.forward_s[0] for kind in self.kinds if kind.times.part == part and kind.times.layers)
            short = f", whose layers take {shortest_s * 1e3:.2f} ms a sample," if shortest_s < _SHORT_S else ""
            if share > self.patience.within:
                yield (
                    f"the times of {part}{short} are known to +-{share:.1%} only, not to the {self.patience.within:.1%} of "
                    "--within: give more --seconds, or stop what else runs on this machine"
                )
        for part, needed_bytes in self.too_large.items():
            yield (
                f"a stage of {part} takes {needed_bytes / 2**30:.0f} GiB, more than there is, and was not timed: what "
                "microbatches and steps take besides samples is left out"
            )
