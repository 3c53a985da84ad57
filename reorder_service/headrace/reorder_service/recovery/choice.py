"""What to do about a change of nodes, by the predicted times of a step.

Which pipelines to go on with: those that copy the fewest bytes, or the fastest. The ones that do more until the next change are
taken: the fewest bytes at every change would add up to slow pipelines. And what comes first after a loss in the middle of a
step: those pipelines, which then repeat what was cut off, or rerouting (ReCycle), by which pipelines that are whole finish their
share and do the microbatches of the others on top, so that the pipelines change at the step's end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.reorder_service.recovery.instantiation import distribute, instantiate
from headrace.reorder_service.recovery.reconfiguration import Pipeline, Reconfiguration, reconfigure
from headrace.reorder_service.recovery.templates import Templates


class OnLoss(StrEnum):
    """What comes first after a loss in the middle of a step."""

    AUTO = "auto"
    """What is done earlier."""
    REBUILD = "rebuild"
    REROUTE = "reroute"
    """Where there is a whole pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What no template tells."""

    rebuild_s: float = 0.5
    """New process groups among processes that live on. Measured with gloo: 0.04 s."""
    copy_bytes_per_s: float = 0.36e9
    """Of the state that a node sends or gets. Measured: a core makes its digest and another one checks it, one after the other.
    Links are faster by far."""
    horizon_s: float = 300.0
    """Between changes of nodes. More bytes are copied for pipelines that are faster if that pays in such a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Pipelines to go on with, and what they would take."""

    after: Reconfiguration
    step_s: float
    copy_s: float

    def __str__(self) -> str:
        copied = f"{self.after.copied_bytes / 2**20:,.1f} MiB to copy in {self.copy_s:.2f} s"
        return f"{_sizes(self.after)} ({copied}, {self.step_s:.3g} s a step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was taken, and why in words."""

    option: Option
    pause_s: float
    """For the new pipelines, until they train."""
    rerouting_s: float | None
    """What rerouting adds to the step under way, if that is what comes first."""
    text: str


def choose(
    templates: Templates,
    pipelines: Sequence[Pipeline],
    circumstances: Circumstances,
    *,
    lost: Collection[str],
    joined: Sequence[str],
    num_microbatches: int,
    second: float = 1.0,
    on_loss: OnLoss = OnLoss.REBUILD,
) -> Choice:
    """The pipelines after a change of nodes, and what comes first.

    second: in the templates' unit of time; 0: unknown, then the fewest bytes decide, and pipelines are rebuilt at once.
    Raises UnrecoverableError and ValueError as `reconfigure` does.
    """
    few = reconfigure(templates, pipelines, lost=lost, joined=joined, max_pipelines=num_microbatches)
    options = [_option(templates, few, circumstances, num_microbatches, second)]
    if second:
        num_nodes = sum(len(pipeline.nodes) for pipeline in few.pipelines)
        best = instantiate(templates, num_nodes, num_microbatches, 1)
        sizes = [template.num_nodes for template in best.templates]
        fast = reconfigure(templates, pipelines, lost=lost, joined=joined, sizes=sizes)
        options.append(_option(templates, fast, circumstances, num_microbatches, second))

    def samples_soon(option: Option) -> float:
        """Until the next change, if it comes as soon as is assumed."""
        return (circumstances.horizon_s - circumstances.rebuild_s - option.copy_s) / option.step_s

    taken = max(options, key=samples_soon)
    text = _words(options, taken, circumstances.horizon_s)
    rerouting = _rerouting(pipelines, lost, num_microbatches) if on_loss is not OnLoss.REBUILD else None
    rerouting_s = None
    if rerouting is not None:
        rest_s, more_s = (time / (second or 1.0) for time in rerouting)
        more_s += circumstances.rebuild_s
        if on_loss is OnLoss.REROUTE or (second and rest_s + more_s < taken.step_s):
            rerouting_s = more_s
        if second:
            text += (
                f"; the step under way would be done in {rest_s + more_s:.3g} s by the pipelines that are whole, in "
                f"{taken.step_s:.3g} s by the new ones"
            )
        text += "; the lost microbatches are rerouted first" if rerouting_s is not None else "; rebuilt at once"
    pause_s = circumstances.rebuild_s + taken.copy_s
    return Choice(option=taken, pause_s=pause_s, rerouting_s=rerouting_s, text=text)


def _rerouting(pipelines: Sequence[Pipeline], lost: Collection[str], num_microbatches: int) -> tuple[float, float] | None:
    """What pipelines that are whole have left of a step, half of it on average, and then the microbatches of the others on top.

    None where no pipeline is whole, or all are.
    """
    templates = [pipeline.template for pipeline in pipelines]
    counts = distribute(templates, num_microbatches)
    is_whole = [not any(node in lost for node in pipeline.nodes) for pipeline in pipelines]
    whole = [template for template, is_it in zip(templates, is_whole, strict=True) if is_it]
    num_more = sum(count for count, is_it in zip(counts, is_whole, strict=True) if not is_it)
    if not whole or not num_more:
        return None
    share = max(template.iteration_s(count) for template, count, is_it in zip(templates, counts, is_whole, strict=True) if is_it)
    fastest = sorted(whole, key=lambda template: template.iteration_s(1))[:num_more]
    more = distribute(fastest, num_more)
    return share / 2, max(template.iteration_s(count) for template, count in zip(fastest, more, strict=True))


def _option(
    templates: Templates, after: Reconfiguration, circumstances: Circumstances, num_microbatches: int, second: float
) -> Option:
    step_s = iteration_s(after.pipelines, num_microbatches) / (second or 1.0)
    copy_s = busiest_link(after.missing, templates) / circumstances.copy_bytes_per_s
    return Option(after=after, step_s=step_s, copy_s=copy_s)


def iteration_s(pipelines: Sequence[Pipeline], num_microbatches: int) -> float:
    """Predicted time of a step, in the templates' unit."""
    templates = [pipeline.template for pipeline in pipelines]
    counts = distribute(templates, num_microbatches)
    return max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))


def _words(options: Sequence[Option], taken: Option, horizon_s: float) -> str:
    others = [option for option in options if option.after.pipelines != taken.after.pipelines]
    if others:
        return f"{taken} do more in {horizon_s:g} s than {others[0]}"
    if len(options) > 1:
        return f"{taken} copy the fewest bytes and are the fastest"
    return f"{_sizes(taken.after)} copy the fewest bytes; no step was measured yet that would tell which pipelines are faster"


def _sizes(after: Reconfiguration) -> str:
    """ "3+2": the nodes of each pipeline."""
    return "+".join(str(len(pipeline.nodes)) for pipeline in after.pipelines)


def busiest_link(missing: Mapping[str, Mapping[int, Sequence[str]]], templates: Templates) -> float:
    """Bytes that the node with the most sends or receives, where each layer comes in equal parts from all that have it."""
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    for node, layers in missing.items():
        for layer, holders in layers.items():
            received[node] += float(templates.layer_bytes[layer])
            for holder in holders:
                sent[holder] += float(templates.layer_bytes[layer]) / len(holders)
    return max([*sent.values(), *received.values()], default=0.0)
