"""Every Prometheus metric of Headrace. docs/metrics.md says how to read them.

A process exports the metrics of its service: `with exported("127.0.0.1:9100", PREPROCESSOR)`. Names end in their unit, which is a
base unit. The values of all labels are few and known beforehand: no step, no shard, and no job but the first ones that have not
ended (`job_metrics`). The code that does the work updates counters and histograms, from any thread, at about a microsecond each:
once per part or shard, never once per byte. Gauges call their source when they are read (`watch`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from headrace.errors import EndpointError
from headrace.observability.job_metrics import JobsCollector
from headrace.observability.logs import pairs
from headrace.rpc import check_endpoint

log = logging.getLogger(__name__)

PREPROCESSOR, REORDER, TRAINER = (CollectorRegistry() for _ in range(3))
REGISTRIES = {"preprocessor": PREPROCESSOR, "reorder": REORDER, "trainer": TRAINER}
for _registry in REGISTRIES.values():
    ProcessCollector(registry=_registry)  # memory, CPU seconds, open files

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

# -- preprocessor: parts in memory ------------------------------------------------------------------------------------

STAGE_PARTS = Gauge("headrace_preprocessor_stage_parts", "Parts at each stage.", ["stage"], registry=PREPROCESSOR)
STAGE_BYTES = Gauge("headrace_preprocessor_stage_bytes", "Memory of the parts at each stage.", ["stage"], registry=PREPROCESSOR)
READ_AHEAD_LIMIT_BYTES = Gauge(
    "headrace_preprocessor_read_ahead_limit_bytes", "Most that parts read and not decoded may take.", registry=PREPROCESSOR
)
STORE_BUDGET_BYTES = Gauge(
    "headrace_preprocessor_store_budget_bytes", "Budget for parts, read and decoded.", registry=PREPROCESSOR
)
STORE_LENT_BYTES = Gauge(
    "headrace_preprocessor_store_lent_bytes", "Of parts that trainers may hold in shared memory.", registry=PREPROCESSOR
)
ARENA_COLD_BYTES = Gauge(
    "headrace_preprocessor_arena_cold_bytes", "Shared memory touched for the first time, since the start.", registry=PREPROCESSOR
)

# -- preprocessor: work done ------------------------------------------------------------------------------------------

STAGE_SECONDS = Histogram(
    "headrace_preprocessor_stage_seconds", "Time of a part in a stage.", ["stage"], registry=PREPROCESSOR, buckets=_SECONDS
)
SAMPLES_DECODED = Counter("headrace_preprocessor_samples_decoded_total", "Samples decoded.", registry=PREPROCESSOR)
DECODED_BYTES = Counter("headrace_preprocessor_decoded_bytes_total", "Payload of decoded parts.", registry=PREPROCESSOR)
SAMPLES_REJECTED = Counter(
    "headrace_preprocessor_samples_rejected_total", "Samples and shards found damaged.", ["reason"], registry=PREPROCESSOR
)
TOKENS_DISARMED = Counter(
    "headrace_preprocessor_tokens_disarmed_total",
    "Names of special tokens in texts that were probed; they are text there.",
    registry=PREPROCESSOR,
)
ORDERS_FAILED = Counter(
    "headrace_preprocessor_orders_failed_total", "Orders that could not be carried out here.", registry=PREPROCESSOR
)
PARTS_EVICTED = Counter("headrace_preprocessor_parts_evicted_total", "Decoded parts dropped for room.", registry=PREPROCESSOR)
PARTS_DECODED_AGAIN = Counter(
    "headrace_preprocessor_parts_decoded_again_total", "Parts decoded after they had been dropped.", registry=PREPROCESSOR
)
PARTS_DAMAGED = Counter(
    "headrace_preprocessor_parts_damaged_total", "Parts whose checksum failed in memory.", registry=PREPROCESSOR
)
PARTS_DELIVERED = Counter(
    "headrace_preprocessor_parts_delivered_total", "Parts handed over.", ["transport"], registry=PREPROCESSOR
)

# -- preprocessor: remote shards --------------------------------------------------------------------------------------

CACHE_REQUESTS = Counter(
    "headrace_preprocessor_cache_requests_total", "Shards asked of the cache.", ["result"], registry=PREPROCESSOR
)
CACHE_DOWNLOADED_BYTES = Counter(
    "headrace_preprocessor_cache_downloaded_bytes_total", "Downloaded into the cache.", registry=PREPROCESSOR
)
RANGE_REQUESTS = Counter(
    "headrace_preprocessor_range_requests_total", "Ranges read of remote shards that are not cached.", registry=PREPROCESSOR
)
RANGE_BYTES = Counter("headrace_preprocessor_range_bytes_total", "Bytes of these ranges.", registry=PREPROCESSOR)
CACHE_EVICTIONS = Counter(
    "headrace_preprocessor_cache_evictions_total", "Shards removed from the cache for room.", registry=PREPROCESSOR
)
CACHE_BYPASSES = Counter(
    "headrace_preprocessor_cache_bypasses_total",
    "Shards read from their server, or Parquet decoded in memory, instead.",
    ["reason"],
    registry=PREPROCESSOR,
)
DOWNLOAD_RETRIES = Counter(
    "headrace_preprocessor_download_retries_total", "Requests made again.", ["reason"], registry=PREPROCESSOR
)
DOWNLOAD_PAUSE_SECONDS = Counter(
    "headrace_preprocessor_download_pause_seconds_total", "Time waited before these.", registry=PREPROCESSOR
)

# -- reorder service --------------------------------------------------------------------------------------------------

LEADERS = Gauge("headrace_reorder_leaders", "1 while this process leads, 0 while it stands by.", registry=REORDER)
TERMS = Gauge("headrace_reorder_terms", "Terms that had begun on the store when this process began to lead.", registry=REORDER)
MEMBERS = Gauge("headrace_reorder_members", "Preprocessors that are connected.", registry=REORDER)
LEASES = Gauge("headrace_reorder_leases", "Orders that preprocessors are carrying out.", registry=REORDER)
PARTS = Gauge("headrace_reorder_parts", "Parts of planned steps.", ["place"], registry=REORDER)
PLANNED_STEPS = Gauge("headrace_reorder_planned_steps", "Steps that are planned and not committed.", registry=REORDER)
STEP_SECONDS = Histogram(
    "headrace_reorder_step_seconds",
    "Time of a committed step, as forecast and as measured.",
    ["time"],
    registry=REORDER,
    buckets=_SECONDS,
)
JOBS = Gauge("headrace_reorder_jobs", "Jobs that have not ended.", registry=REORDER)
JOB_FIGURES = JobsCollector()
REORDER.register(JOB_FIGURES)
COMMITTED_STEPS = Counter("headrace_reorder_committed_steps_total", "Steps committed, of all jobs.", registry=REORDER)
COMMITTED_SAMPLES = Counter("headrace_reorder_committed_samples_total", "Samples of these steps.", registry=REORDER)
QUARANTINED_SAMPLES = Counter(
    "headrace_reorder_quarantined_samples_total", "Samples refused, of all jobs.", ["reason"], registry=REORDER
)
SAMPLES_PLACED = Counter(
    "headrace_reorder_samples_placed_total", "Samples of orders that preprocessors took.", ["shard"], registry=REORDER
)

# -- trainer ----------------------------------------------------------------------------------------------------------

DATA_WAIT_SECONDS = Histogram(
    "headrace_trainer_data_wait_seconds", "Time that a step waited for data.", registry=TRAINER, buckets=_SECONDS
)
PARTS_RECEIVED = Counter("headrace_trainer_parts_received_total", "Parts received.", ["transport"], registry=TRAINER)
RECEIVED_BYTES = Counter("headrace_trainer_received_bytes_total", "Payload received.", registry=TRAINER)
PARTS_HEDGED = Counter(
    "headrace_trainer_parts_hedged_total", "Parts asked of another preprocessor since they did not come.", registry=TRAINER
)
PARTS_REFETCHED = Counter("headrace_trainer_parts_refetched_total", "Fetches beyond the first of their part.", registry=TRAINER)
PARTS_CORRUPT = Counter("headrace_trainer_parts_corrupt_total", "Parts that came damaged.", registry=TRAINER)


def watch(gauge: Gauge, sources: Mapping[str, Callable[[], float]]) -> None:
    """Let a gauge with one label read its values from `sources`, functions by label value, which are called from the exporter's
    thread whenever the gauge is read."""
    for value, source in sources.items():
        gauge.labels(value).set_function(source)


@contextlib.contextmanager
def exported(listen: str, registry: CollectorRegistry) -> Iterator[str]:
    """Serve a registry's metrics over HTTP at `listen`, HOST:PORT, during the block, and yield the URL.

    Port 0 takes a free one. An empty `listen` serves nothing and yields "". Raises EndpointError if `listen` is malformed, taken
    or not of this machine.
    """
    if not listen:
        yield ""
        return
    host, _, port = check_endpoint(listen).rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as err:
        raise EndpointError(
            f"cannot serve metrics on {listen}: {err.strerror}; give --metrics another HOST:PORT, port 0 takes a free one"
        ) from err
    url = f"http://{host}:{server.server_port}/metrics"
    log.info("metrics %s", pairs(url=url))
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
