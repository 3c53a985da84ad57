"""How much of the throughput nodes come and go with, in the manner of Oobleck's evaluation on spot instances. SIMULATED.

Dissertation, section 2.7.3: 30 nodes of one GPU for 12 hours; a node is lost every 7.7 minutes (EC2) or 10.3 minutes (GCP) on
average, after a warning, and nodes come back. The traces themselves are not published with it: ours are drawn with those means.
EC2 warns two minutes before, GCP half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.report import Rival, Row, Section, at_least
from benchmarks.timing import progress
from headrace.model_shape import MODEL_SHAPES
from headrace.reorder_service.recovery.forecast.availability import draw
from headrace.reorder_service.recovery.forecast.availability_replay import replay
from headrace.reorder_service.recovery.forecast.policies import Assumptions, ForecastJob, Headrace, failure_free
from headrace.reorder_service.recovery.forecast.profiles import profile_of
from headrace.reorder_service.recovery.forecast.rivals import RIVALS
from headrace.spec import AudioSpec, ImageSpec

MODEL, TOKENS, PATCHES = "3b", 4_096, 4_096
GPU_BYTES = 60 * 10**9
NUM_NODES, MAX_FAILURES, GLOBAL_BATCH = 30, 2, 1_024
HOURS, BACK_S = 12, 1_800.0
CLOUDS = {"EC2": (462.0, 120.0), "GCP": (618.0, 30.0)}
"""Mean seconds between two losses, and the seconds of the warning."""
KEPT_GOAL = 95.0


def sections(*, quick: bool) -> Iterator[Section]:
    """A section for each trace, with and without its warnings."""
    profile = profile_of(
        MODEL_SHAPES[MODEL],
        tokens=TOKENS,
        patches=PATCHES,
        image=ImageSpec(),
        audio=AudioSpec(),
        microbatch=1,
        gpus=1,
        memory_bytes=GPU_BYTES,
    )
    job = ForecastJob.of(profile, NUM_NODES, MAX_FAILURES, global_batch=GLOBAL_BATCH)
    for cloud, (mtbf_s, notice_s) in CLOUDS.items():
        for warning_s in (notice_s, 0.0):
            progress(f"availability trace like {cloud}'s, warned {warning_s:.0f} s before")
            yield _section(job, cloud, mtbf_s, warning_s, hours=2 if quick else HOURS)


def _section(job: ForecastJob, cloud: str, mtbf_s: float, notice_s: float, *, hours: int) -> Section:
    trace = draw(np.random.default_rng(0), num_nodes=NUM_NODES, mtbf_s=mtbf_s, mttr_s=BACK_S, end_s=hours * 3600.0)
    bound, assumed = failure_free(job, trace), Assumptions()
    kept = {name: 100 * replay(rival(job, assumed), trace, notice_s=notice_s).share_of(bound) for name, rival in RIVALS.items()}
    ours = replay(Headrace(job, assumed), trace, notice_s=notice_s)
    by_links = replay(Headrace(job, replace(assumed, copy_bytes_per_s=assumed.link_bytes_per_s)), trace, notice_s=notice_s)
    best = max(kept, key=lambda name: kept[name])
    warned = f"warned {notice_s:.0f} s before" if notice_s else "without a warning"
    row = Row(
        name=f"headrace, {warned}",
        value=100 * ours.share_of(bound),
        unit="%",
        rival=Rival(value=kept[best], source=best),
        goal=at_least(KEPT_GOAL) if notice_s else None,
        detail=f"{ours.recoveries} recoveries, {ours.lost_s / 60:.0f} min lost" + (f"; {ours.stopped}" if ours.stopped else ""),
    )
    links = Row(name="headrace, if it copied as fast as a link", value=100 * by_links.share_of(bound), unit="%")
    rivals = [Row(name=name, value=value, unit="%") for name, value in kept.items()]
    title = (
        f"SIMULATED, like {cloud}: {trace.num_losses} losses in {hours} hours, {warned}, {MODEL} on {NUM_NODES} nodes; samples, "
        "of what the nodes there could do without failures"
    )
    return Section(title=title, rows=[row, links, *rivals])
