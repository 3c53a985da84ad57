"""The jobs that the reorder service has announced to a preprocessor, and why it cannot work on some of them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from headrace.errors import DatasetError, SpecError
from headrace.observability.logs import pairs
from headrace.peer_spec import SAMPLE_FIELDS, load_peer_spec_json
from headrace.preprocessor.decoding import LoadedSample
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.payload.probe_cache import ProbeCache
from headrace.preprocessor.sources.blob import BlobCache
from headrace.preprocessor.sources.open_shards import OpenShards
from headrace.spec import JobSpec

log = logging.getLogger(__name__)


class KnownJobs:
    """The jobs announced to this process by name, open or refused. Not thread-safe."""

    def __init__(self, cache: BlobCache, media: ProbeCache[LoadedSample]) -> None:
        """`cache` holds the remote shards of all jobs, `media` the samples that stay in memory from probing to decoding."""
        self._cache = cache
        self._media = media
        self._open_shards = OpenShards()
        self._jobs: dict[str, JobWork] = {}
        self._refused: dict[str, str] = {}

    def __getitem__(self, name: str) -> JobWork:
        """Return an open job. Raises DatasetError, which says why, if it could not be opened here, KeyError if it is unknown."""
        if name in self._refused:
            raise DatasetError(self._refused[name])
        return self._jobs[name]

    def get(self, name: str) -> JobWork | None:
        """Return an open job; None if it could not be opened here or is unknown."""
        return self._jobs.get(name)

    def open(self, name: str, spec_json: str, ticket_key: bytes) -> None:
        """Open a job. If that fails (its spec is of another release, there is no memory for it), the job's orders are refused
        and the process goes on with the other jobs."""
        try:
            self._jobs[name] = JobWork(name, _spec(spec_json), self._cache, ticket_key, self._media, self._open_shards)
        except Exception as err:
            log.error("job not opened %s", pairs(job=name, error=f"{type(err).__name__}: {err}"))
            self._refused[name] = f"a preprocessor cannot open the job: {str(err) or type(err).__name__}"

    def is_open(self, name: str, spec_json: str, ticket_key: bytes) -> bool:
        """Whether a job with this name, spec and ticket key is open."""
        job = self._jobs.get(name)
        if job is None or job.ticket_key != ticket_key:
            return False
        try:
            return job.spec == _spec(spec_json)  # parsed, since a peer of another release may leave out other defaults
        except SpecError:
            return False

    def all_but(self, names: Collection[str]) -> set[str]:
        """Return the names of all known jobs, refused ones included, except `names`."""
        return (self._jobs.keys() | self._refused.keys()) - set(names)

    def forget(self, name: str) -> None:
        """Close and forget a job; do nothing if it is unknown."""
        self._refused.pop(name, None)
        if job := self._jobs.pop(name, None):
            job.close()


def _spec(spec_json: str) -> JobSpec:
    """Return the announced spec. Raises SpecError also where samples are made by a field that this release does not know."""
    return load_peer_spec_json(spec_json, SAMPLE_FIELDS)
