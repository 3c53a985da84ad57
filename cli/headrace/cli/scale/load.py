"""What a service's jobs have their preprocessors do, from the latest looks at them. Pure: looks in, a load out."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.scale.scaling_policy import Load
from headrace.cli.watch.bottleneck import Stages, bottleneck, is_over
from headrace.cli.watch.rates import Look, data_wait, samples_per_s


def load_of(jobs: Sequence[Sequence[Look]]) -> Load:
    """Return the load of all jobs of a service, of which there is one at least, from one look or more at each, earliest first.

    All jobs share the preprocessors, so that those of any job's looks are those of all.
    """
    running = [looks for looks in jobs if not is_over(looks[-1].status)]
    shown = running or list(jobs[-1:])
    waits = [data_wait(looks) or 0.0 for looks in shown]
    wait = max(waits)
    slowest = shown[waits.index(wait)]
    count = len(slowest[-1].status.preprocessors)
    stages, finding = Stages.of(slowest), bottleneck(slowest)
    return Load(
        preprocessors=count,
        busy=count * stages.decoding / stages.decoders if stages.decoders and running else 0.0,
        wait=wait if running else 0.0,
        helps=finding.more_preprocessors,
        samples_per_s=sum(samples_per_s(looks) for looks in running),
        why=finding.sentence,
    )
