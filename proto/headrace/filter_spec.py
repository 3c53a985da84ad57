"""Which samples of a source a job takes: conditions on the fields of records and on the sizes of samples."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from headrace.mapping import Path
from headrace.user_document import SpecSection

Scalar = StrictBool | StrictInt | StrictFloat | StrictStr
Size = Literal["tokens", "targets", "images", "recordings"]


class Bounds(SpecSection):
    """A condition on a number, which may be equal to the bounds."""

    min: float | None = None
    """Least value. None: no bound below."""
    max: float | None = None
    """Greatest value. None: no bound above."""

    @model_validator(mode="after")
    def _some_number_is_within(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min:g}) is above max ({self.max:g}), so that no sample would be left")
        return self


class FieldCondition(Bounds):
    """A condition on the value of a field. A value that is null fulfils none."""

    one_of: Annotated[tuple[Scalar, ...], Field(max_length=10_000)] | None = None
    """Values of which the field has one."""
    none_of: Annotated[tuple[Scalar, ...], Field(max_length=10_000)] = ()
    """Values of which the field has none."""

    @model_validator(mode="after")
    def _is_a_condition(self) -> Self:
        if (self.min, self.max, self.one_of, self.none_of) == (None, None, None, ()):
            raise ValueError("names no condition: give min, max, one_of or none_of")
        return self


class FilterSpec(SpecSection):
    """Conditions that all samples of a source fulfil; the others are filtered out, which is not counted as damage."""

    fields: Annotated[dict[Path, FieldCondition], Field(max_length=100)] = Field(default_factory=dict)
    """Conditions on fields of records, by their paths as in a mapping. Records that do not fulfil them are left out when a shard
    is counted, as if it did not have them. A record without the field, or with a value that cannot be compared, is refused."""
    sizes: Annotated[dict[Size, Bounds], Field(max_length=100)] = Field(default_factory=dict)
    """Conditions on the tokens of a sample, its tokens to learn, its images and its recordings. Samples that do not fulfil them
    are left out when they are probed, and their steps have fewer samples unless `on_bad` substitutes them."""


EVERYTHING = FilterSpec()
"""The filter that admits every sample."""
