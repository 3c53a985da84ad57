"""One data set of a job: where it is, which part of it is taken, how its records become samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace import limits
from headrace.filter_spec import EVERYTHING, FilterSpec
from headrace.mapping import MAPPING_PRESETS, MappingSpec
from headrace.user_document import SpecSection


class SourceSpec(SpecSection):
    """One data set of the job's mixture, and what to do about its bad samples."""

    path: Annotated[str, Field(max_length=limits.MAX_PATH)]
    """Folder, file, glob or fsspec URL of a data set, in one of the formats of docs/data.md."""
    split: Annotated[str, Field(min_length=1, max_length=limits.MAX_SOURCE_NAME)] | None = None
    """The split to take of a data set that has several: `train`, `validation`, `test` or another name; `all`: every shard. None:
    the training split where exactly one lies beside evaluation splits, else every shard."""
    media_root: Annotated[str, Field(min_length=1, max_length=limits.MAX_PATH)] | None = None
    """Folder or URL to which the paths of media in rows are relative. None: the folder of the file that names them."""
    name: Annotated[str, Field(max_length=limits.MAX_SOURCE_NAME)] = ""
    """The source's name, the first part of its samples' names; by default the last part of `path`."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Relative share of the source in the mixture. If it is None for all sources, shares follow the sources' sizes, so that an
    epoch has every sample once; several such sources are indexed completely before the first step. With weights, or with a
    single source, only the shards that are needed next are indexed."""
    repetitions: Annotated[float, Field(gt=0, le=limits.MAX_EPOCHS)] | None = None
    """How often an epoch of the job has each of the source's samples, for sources without weights: 2, or 0.5 for every other one.
    None: once."""
    filter: FilterSpec = EVERYTHING
    """Which of the source's samples are taken; by default all."""
    max_epochs: Annotated[int, Field(ge=1, le=limits.MAX_EPOCHS)] | None = None
    """Most times that the source gives each of its samples. After that the others share its part of the mixture; a job whose
    sources all end so ends with the last of them. None: a source with more weight than samples repeats as often as it takes."""
    max_bad: Annotated[int, Field(ge=0)] | None = None
    """Stop the job once more samples of the source than this have been refused. None: no limit."""
    max_bad_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Stop the job once more than this share of the source's samples has been refused, judged from its 100th sample on. None: no
    limit."""
    on_bad: Literal["skip", "substitute"] = "skip"
    """What replaces a sample that is refused when it is probed. "skip": nothing. "substitute": the next good sample of its shard
    (after the last row comes the first), which is then consumed one more time. A sample whose damage shows only when it is
    decoded is skipped in either case."""
    mapping: MappingSpec = MAPPING_PRESETS["auto"]
    """How the source's records become samples: the name of a preset, or a mapping."""

    @field_validator("mapping", mode="before")
    @classmethod
    def _preset(cls, mapping: Any) -> Any:
        if not isinstance(mapping, str):
            return mapping
        if mapping not in MAPPING_PRESETS:
            raise ValueError(f"no mapping {mapping!r}; there are {', '.join(MAPPING_PRESETS)}")
        return MAPPING_PRESETS[mapping]

    @model_validator(mode="after")
    def _weight_or_repetitions(self) -> Self:
        if self.weight is not None and self.repetitions is not None:
            raise ValueError("weight and repetitions both say how much of the mixture the source is: give one of them")
        return self

    @model_validator(mode="after")
    def _default_name(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", self.path.rstrip("/").rsplit("/", 1)[-1] or "data")
        if len(self.name) > limits.MAX_SOURCE_NAME:
            raise ValueError(f"the last part of its path makes a name of {len(self.name)} characters: give it one of at most 255")
        if "/" in self.name:
            raise ValueError(f"name {self.name!r} holds a '/', which separates the parts of a sample's name")
        return self
