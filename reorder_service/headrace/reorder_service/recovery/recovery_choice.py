"""Decide what to do after a change of nodes, from the predicted time of a step.

First, which pipelines to continue with: the ones that copy the fewest bytes, or the fastest. Whichever train more steps until the
next change are taken, because always copying the fewest bytes would add up to slow pipelines. Second, what to do after a loss in
the middle of a step: rebuild at once, so that the new pipelines repeat the step, or reroute (ReCycle). Rerouting lets the intact
pipelines finish their share and compute the microbatches of the others on top, and changes the pipelines at the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.reorder_service.recovery.instantiation import distribute, instantiate
from headrace.reorder_service.recovery.pipeline_templates import Templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline, Reconfiguration, reconfigure


class OnLoss(StrEnum):
    """What to do first after a loss in the middle of a step."""

    AUTO = "auto"
    """Whichever completes the interrupted step earlier."""
    REBUILD = "rebuild"
    REROUTE = "reroute"
    """Finish the step with rerouted microbatches, if any pipeline is intact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Costs of a recovery, and the time between changes of nodes; templates do not contain these.

    The default times were measured on two cores, with gloo on the loopback device (`make bench-recovery`), and not on GPUs.
    """

    rebuild_s: float = 0.16
    """Seconds in which surviving nodes connect anew, agree, and form process groups. Measured: in the slowest of six recoveries
    from a SIGKILL, of six nodes (benchmarks/results/recovery.json)."""
    copy_bytes_per_s: float = 2e9
    """Rate at which a node sends or receives state, with its digest and check, into new memory. Measured: about the median of
    eight runs of benchmarks/recovery/state_copies.py beside much other work, 2.2 of 1.5 to 2.7 GB/s. Links are far faster."""
    horizon_s: float = 300.0
    """Seconds between changes of nodes. More bytes are copied for faster pipelines only if that pays within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Pipelines to continue with, the predicted time of their step, and the time to copy the layers they lack."""

    after: Reconfiguration
    step_s: float
    copy_s: float

    def __str__(self) -> str:
        copied = f"{self.after.copied_bytes / 2**20:,.1f} MiB to copy in {self.copy_s:.2f} s"
        return f"{_sizes(self.after)} ({copied}, {self.step_s:.3g} s a step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The option that was taken, and the reason in words."""

    option: Option
    pause_s: float
    """Seconds without training before the new pipelines start: to rebuild the process groups and to copy layers."""
    rerouting_s: float | None
    """Seconds that rerouting adds to the step under way; None if the pipelines are rebuilt at once."""
    text: str


def choose(
    templates: Templates,
    pipelines: Sequence[Pipeline],
    circumstances: Circumstances,
    *,
    lost: Collection[str],
    joined: Sequence[str],
    num_microbatches: int,
    units_per_second: float = 1.0,
    on_loss: OnLoss = OnLoss.REBUILD,
) -> Choice:
    """Choose the pipelines after a change of nodes, and what to do first.

    units_per_second: units of the templates' time in a second. 0: unknown; then the fewest bytes decide, and AUTO means REBUILD.
    Raises UnrecoverableError and ValueError as `reconfigure` does.
    """
    few = reconfigure(templates, pipelines, lost=lost, joined=joined, max_pipelines=num_microbatches)
    options = [_option(templates, few, circumstances, num_microbatches, units_per_second)]
    if units_per_second:
        num_nodes = sum(len(pipeline.nodes) for pipeline in few.pipelines)
        best = instantiate(templates, num_nodes, num_microbatches, 1)
        sizes = [template.num_nodes for template in best.templates]
        fast = reconfigure(templates, pipelines, lost=lost, joined=joined, sizes=sizes)
        options.append(_option(templates, fast, circumstances, num_microbatches, units_per_second))

    def steps_until_next_change(option: Option) -> float:
        """Steps until the next change of nodes, if it comes after `horizon_s`."""
        return (circumstances.horizon_s - circumstances.rebuild_s - option.copy_s) / option.step_s

    taken = max(options, key=steps_until_next_change)
    text = _words(options, taken, circumstances.horizon_s)
    rerouting = _rerouting(pipelines, lost, num_microbatches) if on_loss is not OnLoss.REBUILD else None
    rerouting_s = None
    if rerouting is not None:
        rest_s, more_s = (time / (units_per_second or 1.0) for time in rerouting)
        more_s += circumstances.rebuild_s
        if on_loss is OnLoss.REROUTE or (units_per_second and rest_s + more_s < taken.step_s):
            rerouting_s = more_s
        if units_per_second:
            text += (
                f"; the step under way would be done in {rest_s + more_s:.3g} s by the pipelines that are whole, in "
                f"{taken.step_s:.3g} s by the new ones"
            )
        text += "; the lost microbatches are rerouted first" if rerouting_s is not None else "; rebuilt at once"
    pause_s = circumstances.rebuild_s + taken.copy_s
    return Choice(option=taken, pause_s=pause_s, rerouting_s=rerouting_s, text=text)


def _rerouting(pipelines: Sequence[Pipeline], lost: Collection[str], num_microbatches: int) -> tuple[float, float] | None:
    """Times, in the templates' unit, of the rest of intact pipelines' step (half, on average) and of the others' microbatches.

    None if no pipeline is intact, or all are.
    """
    templates = [pipeline.template for pipeline in pipelines]
    counts = distribute(templates, num_microbatches)
    is_whole = [not any(node in lost for node in pipeline.nodes) for pipeline in pipelines]
    whole = [template for template, is_it in zip(templates, is_whole, strict=True) if is_it]
    num_more = sum(count for count, is_it in zip(counts, is_whole, strict=True) if not is_it)
    if not whole or not num_more:
        return None
    share = max(
        template.iteration_time(count) for template, count, is_it in zip(templates, counts, is_whole, strict=True) if is_it
    )
    fastest = sorted(whole, key=lambda template: template.iteration_time(1))[:num_more]
    more = distribute(fastest, num_more)
    return share / 2, max(template.iteration_time(count) for template, count in zip(fastest, more, strict=True))


def _option(
    templates: Templates, after: Reconfiguration, circumstances: Circumstances, num_microbatches: int, units_per_second: float
) -> Option:
    step_s = iteration_time(after.pipelines, num_microbatches) / (units_per_second or 1.0)
    copy_s = busiest_link(after.missing, templates) / circumstances.copy_bytes_per_s
    return Option(after=after, step_s=step_s, copy_s=copy_s)


def iteration_time(pipelines: Sequence[Pipeline], num_microbatches: int) -> float:
    """Predicted time of a step of `pipelines`, in the templates' unit of time."""
    templates = [pipeline.template for pipeline in pipelines]
    counts = distribute(templates, num_microbatches)
    return max(template.iteration_time(count) for template, count in zip(templates, counts, strict=True))


def _words(options: Sequence[Option], taken: Option, horizon_s: float) -> str:
    others = [option for option in options if option.after.pipelines != taken.after.pipelines]
    if others:
        return f"{taken} do more in {horizon_s:g} s than {others[0]}"
    if len(options) > 1:
        return f"{taken} copy the fewest bytes and are the fastest"
    return f"{_sizes(taken.after)} copy the fewest bytes; no step was measured yet that would tell which pipelines are faster"


def _sizes(after: Reconfiguration) -> str:
    """The number of nodes of each pipeline, such as "3+2"."""
    return "+".join(str(len(pipeline.nodes)) for pipeline in after.pipelines)


def busiest_link(missing: Mapping[str, Mapping[int, Sequence[str]]], templates: Templates) -> float:
    """Bytes of the node that sends or receives the most, where each layer comes in equal parts from all its holders."""
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    for node, layers in missing.items():
        for layer, holders in layers.items():
            received[node] += float(templates.layer_bytes[layer])
            for holder in holders:
                sent[holder] += float(templates.layer_bytes[layer]) / len(holders)
    return max([*sent.values(), *received.values()], default=0.0)
