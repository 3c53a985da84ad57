"""Validation sets of a job, and the job that one evaluation of such a set is."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from headrace import limits
from headrace.errors import UserError
from headrace.source_spec import SourceSpec
from headrace.user_document import SpecSection

if TYPE_CHECKING:
    from headrace.spec import JobSpec

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

EVALUATION = "eval"
MAX_NAME = 63  # of a job (`JobSpec.name`)
WINDOW = 2
"""Most steps of an evaluation that are planned ahead: its parts share the preprocessors' memory with those of the training."""
_DIGEST = 4  # hexadecimal digits
_ONCE = {"weight": None, "repetitions": None, "max_epochs": None, "on_bad": "skip"}


class ValidationSpec(SpecSection):
    """One validation set: it is not trained on, and an evaluation has each of its samples once, in order."""

    sources: Annotated[tuple[SourceSpec, ...], Field(min_length=1, max_length=limits.MAX_SOURCES)]
    """Its data sets, as in the job's `sources`, but without weight, repetitions, max_epochs and `on_bad: substitute`."""

    @model_validator(mode="after")
    def _has_each_sample_once(self) -> Self:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources need different names, got {names}")
        for source in self.sources:
            if source.path.endswith((".yaml", ".yml")):
                raise ValueError(f"source {source.name!r}: {source.path} is a blend of data sets: name its data sets one by one")
            for field, usual in _ONCE.items():
                if (value := getattr(source, field)) != usual:
                    raise ValueError(
                        f"source {source.name!r} has {field} {value}, but an evaluation has each sample of a set once: leave "
                        f"{field} out"
                    )
        return self


def check_names(job: str, sets: dict[str, ValidationSpec]) -> None:
    """Raise ValueError where the name of a set's evaluation would be longer than that of a job may be."""
    for name in sets:
        if (length := len(_prefix(job, name)) + _DIGEST) > MAX_NAME:
            raise ValueError(
                f"an evaluation of set {name!r} is a job of its own, whose name would have {length} characters, more than "
                f"{MAX_NAME}: shorten the name of the job or of the set"
            )


def evaluation_of(spec: JobSpec, name: str) -> JobSpec:
    """Return the spec of the job that an evaluation of a job's validation set is: one epoch of the set, without shuffling.

    It is read, planned and packed as the job is now: after a change of topology it has another name. Raises UserError where the
    job has no such set.
    """
    if name not in spec.validation:
        known = ", ".join(spec.validation)
        remedy = f"it has {known}" if known else "name its sources in `validation:` of the spec"
        raise UserError(f"job {spec.name!r} has no validation set {name!r}: {remedy}")
    of_set = spec.model_copy(
        update={
            "name": "",
            "sources": spec.validation[name].sources,
            "validation": {},
            "epochs": 1,
            "steps": None,
            "shuffle": False,
            "window": min(spec.window, WINDOW),
        }
    )
    digest = hashlib.blake2b(of_set.to_peer_json().encode(), digest_size=_DIGEST // 2).hexdigest()
    return of_set.model_copy(update={"name": _prefix(spec.name, name) + digest})


def is_evaluation_of(name: str, spec: JobSpec) -> bool:
    """Whether a job is an evaluation of one of the validation sets of the job with that spec, by its name."""
    digests = (name.removeprefix(prefix) for one in spec.validation if name.startswith(prefix := _prefix(spec.name, one)))
    return any(len(digest) == _DIGEST and not digest.strip("0123456789abcdef") for digest in digests)


def _prefix(job: str, name: str) -> str:
    return f"{job}.{EVALUATION}.{name}-"
