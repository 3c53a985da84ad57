"""The job spec: everything that decides what a job's global batches contain and how they are planned.

Written by users as YAML, checked here once, and handed between the services as canonical JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from headrace import limits
from headrace.errors import SpecError
from headrace.mapping import MAPPING_PRESETS, MappingSpec
from headrace.model_shape import MODEL_SHAPES
from headrace.plan import GENERATOR, LLM, Topology
from headrace.user_document import parse as parse
from headrace.user_document import parse_json
from headrace.user_document import read_yaml as read_yaml

STRATEGIES = ("random", "disttrain", "entrain", "orchmllm", "joint", "taper", "auto")
CROSSING = ("orchmllm",)
"""Strategies whose plans may have a sample pass its units on different replicas."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(f"must be a number or a text, got {str(value).lower()}")
        return value


class SourceSpec(_Part):
    """One data set of the mixture."""

    path: Annotated[str, Field(max_length=limits.MAX_PATH)]
    """Folder, file, glob or fsspec URL of WebDataset tar shards, Parquet files or JSONL files."""
    name: Annotated[str, Field(max_length=limits.MAX_SOURCE_NAME)] = ""
    """First part of its samples' names; by default the last part of `path`."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the mixture. None for all sources: shares follow the sizes, so that an epoch has every sample once. To know them,
    several sources are indexed as a whole before the first step; with weights, or of one source, only the shards that come next
    are."""
    max_bad: Annotated[int, Field(ge=0)] | None = None
    """Stop the job when more of its samples than this were refused. None: skip however many."""
    max_bad_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Likewise, as a share of its samples so far, once these are 100."""
    on_bad: Literal["skip", "substitute"] = "skip"
    """What stands in for a sample that is refused when it is probed: nothing, or the next good one of its shard (behind the last
    one comes the first), which is then consumed one more time. One whose damage shows only when it is decoded is skipped."""
    mapping: MappingSpec = MAPPING_PRESETS["auto"]
    """A preset's name, or a mapping."""

    @field_validator("mapping", mode="before")
    @classmethod
    def _preset(cls, mapping: Any) -> Any:
        if not isinstance(mapping, str):
            return mapping
        if mapping not in MAPPING_PRESETS:
            raise ValueError(f"no mapping {mapping!r}; there are {', '.join(MAPPING_PRESETS)}")
        return MAPPING_PRESETS[mapping]

    @model_validator(mode="after")
    def _default_name(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", self.path.rstrip("/").rsplit("/", 1)[-1] or "data")
        if len(self.name) > limits.MAX_SOURCE_NAME:
            raise ValueError(f"the last part of its path makes a name of {len(self.name)} characters: give it one of at most 255")
        if "/" in self.name:
            raise ValueError(f"name {self.name!r} holds a '/', which separates the parts of a sample's name")
        return self


class ImageSpec(_Part):
    """The patch grid (Qwen2-VL's rule: sides are multiples of patch * merge, the aspect ratio is kept)."""

    patch: Annotated[int, Field(ge=1, le=limits.MAX_PATCH)] = 14
    merge: Annotated[int, Field(ge=1, le=limits.MAX_MERGE)] = 2
    min_pixels: Annotated[int, Field(ge=1)] = 56 * 56
    max_pixels: Annotated[int, Field(ge=1, le=limits.MAX_PIXELS)] = 28 * 28 * 1280
    max_source_pixels: Annotated[int, Field(ge=1, le=limits.MAX_SOURCE_PIXELS)] = 100_000_000
    """Images with more pixels are refused from their header (too_large)."""
    max_decode_mib: Annotated[int, Field(ge=1, le=limits.MAX_DECODE_MIB)] = 768
    """And those whose decoding would hold more than this: 8 bytes a pixel, 14 of a progressive JPEG, 18 of a WebP."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] = 200.0
    background: tuple[int, int, int] = (255, 255, 255)
    """Colour under transparent pixels."""
    reduced_scale: bool = False
    """Decode JPEGs at 1/2, 1/4 or 1/8 where 1.5 times the grid's sides are left, before bicubic: large photographs take half of
    the time. Pixels then differ from those of the full size, by up to 3 of 255 where the photograph is not sharp to the pixel,
    by up to 35 at the sharpest edges."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_pixels < max(self.min_pixels, (self.patch * self.merge) ** 2):
            raise ValueError(f"max_pixels ({self.max_pixels}) is below min_pixels or below one merged patch")
        return self


class AudioSpec(_Part):
    """Log-mel features, as Whisper-like encoders take them."""

    sample_rate: Annotated[int, Field(ge=1000, le=limits.MAX_SAMPLE_RATE)] = 16_000
    mel_bins: Annotated[int, Field(ge=1, le=limits.MAX_MEL_BINS)] = 128
    hop_s: Annotated[float, Field(ge=limits.MIN_HOP_S)] = 0.01
    window_s: Annotated[float, Field(gt=0, le=limits.MAX_WINDOW_S)] = 0.025
    frames_per_token: Annotated[int, Field(ge=1)] = 8
    """Mel frames that become one LLM token (a convolution of stride 2 and a projector that joins 4)."""
    max_seconds: Annotated[float, Field(gt=0, le=limits.MAX_SECONDS)] = 600.0
    """Longer recordings are quarantined as too_long. For an encoder with a table of positions as many as that has: 30 for
    Whisper's, whose trainer refuses a job that allows more."""

    max_decode_mib: Annotated[int, Field(ge=1, le=limits.MAX_DECODE_MIB)] = 768
    """Recordings whose decoding would hold more are refused from their header (too_large); 600 s of 96 kHz fit."""

    @property
    def hop_samples(self) -> int:
        """Samples from one mel frame to the next."""
        return max(1, round(self.hop_s * self.sample_rate))

    @property
    def most_frames(self) -> int:
        """Mel frames of the longest recording that is taken."""
        return math.ceil(self.max_seconds * self.sample_rate) // self.hop_samples

    @model_validator(mode="after")
    def _fits_into_memory(self) -> Self:
        values = self.max_seconds * max(self.sample_rate, self.mel_bins / self.hop_s)
        if values > limits.MAX_SOUND_VALUES:
            raise ValueError(
                f"max_seconds ({self.max_seconds:g}) of sample_rate {self.sample_rate}, or of mel_bins {self.mel_bins} each "
                f"hop_s {self.hop_s:g}, are {values:.0f} values, and at most {limits.MAX_SOUND_VALUES} are taken: lower one"
            )
        return self


class TextSpec(_Part):
    """Tokenizer and prompt template."""

    tokenizer: Annotated[str, Field(max_length=limits.MAX_PATH)] = ""
    """Path or fsspec URL of a `tokenizer.json`. Empty: the bundled one."""
    template: Literal["chatml", "qwen2.5-vl", "llava", "llava-hf", "llama3", "llama3.2-vision"] = "chatml"
    """How the turns of a sample become one sequence; all but chatml as the model of that name wants it."""
    image_token: str = ""
    """The control token that stands for an image. Empty: the template's own."""
    audio_token: str = ""
    """Likewise for a recording; gives a place for recordings to a template that has none."""
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] = 32_768
    """Longer samples are quarantined as too_long."""


class TopologySpec(_Part):
    """Replicas, microbatches per replica, and pipeline stages per unit."""

    replicas: Annotated[int, Field(ge=1, le=limits.MAX_REPLICAS)] = 1
    microbatches: Annotated[int, Field(ge=1, le=limits.MAX_MICROBATCHES)] = 4
    stages: dict[str, Annotated[int, Field(ge=1, le=limits.MAX_STAGES, strict=True)]] = {"encoder": 1, LLM: 3}
    """Of `encoder` (vision and audio together) or of `vision`, `audio` or both, of `llm`, and of `generator` where the job's
    model has one."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Of the replicas, relative to each other, where they differ: then their shares of the work do, whatever the strategy."""

    @field_validator("stages")
    @classmethod
    def _known_units(cls, stages: dict[str, int]) -> dict[str, int]:
        encoders = set(stages) - {LLM, GENERATOR}
        if LLM not in stages or encoders not in ({"encoder"}, {"vision"}, {"audio"}, {"vision", "audio"}):
            raise ValueError(
                f"must name {LLM!r} and either 'encoder' or one or both of 'vision' and 'audio', and besides at most "
                f"{GENERATOR!r}, got {sorted(stages)}"
            )
        return {unit: stages[unit] for unit in ("encoder", "vision", "audio", LLM, GENERATOR) if unit in stages}

    @model_validator(mode="after")
    def _a_speed_each(self) -> Self:
        if self.speeds is not None and len(self.speeds) != self.replicas:
            raise ValueError(f"speeds must be one for each of {self.replicas} replicas, got {len(self.speeds)}")
        return self

    @model_validator(mode="after")
    def _can_be_planned(self) -> Self:
        stages = sum(self.stages.values())
        slots = self.replicas * self.microbatches * stages
        if slots > limits.MAX_SLOTS:
            raise ValueError(
                f"{self.replicas} replicas x {self.microbatches} microbatches x {stages} stages are {slots}, and at most "
                f"{limits.MAX_SLOTS} are planned: lower one of them"
            )
        return self

    def changed(
        self,
        *,
        replicas: int | None = None,
        microbatches: int | None = None,
        stages: Mapping[str, int] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> TopologySpec:
        """With what is not None in place of what is. Speeds go when the number of replicas changes. Raises SpecError."""
        fields = self.model_dump()
        if replicas not in (None, self.replicas):
            fields["speeds"] = None
        given = {"replicas": replicas, "microbatches": microbatches, "stages": stages, "speeds": speeds}
        return load_topology_json(json.dumps(fields | {name: value for name, value in given.items() if value is not None}))

    def topology(self) -> Topology:
        return Topology(replicas=self.replicas, microbatches=self.microbatches, stages=dict(self.stages))


class JobSpec(_Part):
    """A whole job. Two jobs with equal specs and data sets have equal global batches."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    sources: Annotated[tuple[SourceSpec, ...], Field(min_length=1, max_length=limits.MAX_SOURCES)]
    global_batch: Annotated[int, Field(ge=1, le=limits.MAX_GLOBAL_BATCH)] = 32
    epochs: Annotated[int, Field(ge=1, le=limits.MAX_EPOCHS)] | None = None
    """Stop after so many epochs. None: after one, or after `steps`."""
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)] | None = None
    """Stop after so many steps, in whichever epoch."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shuffle_shards: Annotated[int, Field(ge=1, le=limits.MAX_SHUFFLE_SHARDS)] = 16
    """Samples of so many shards (themselves in shuffled order) are shuffled together."""
    strategy: str = "auto"
    """Who plans the global batches. `auto`: for each one, of all strategies whose plan of it keeps every sample on one replica,
    the one whose plan takes the least time. Plans of those in `CROSSING` need units that share their replicas."""
    topology: TopologySpec = TopologySpec()
    pack_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    """Pack samples of a global batch into sequences of so many tokens, and plan these: samples of a pack stay in one
    microbatch, one behind the other (`PackedMicrobatch.pack_offsets` of the trainer), and each pack is taken to cost the LLM its
    full length, as where a trainer pads to it. Ours does not pad."""
    window: Annotated[int, Field(ge=1, le=limits.MAX_WINDOW)] = 4
    """Global batches that are planned ahead of the last committed one, at most."""
    window_bytes: Annotated[int, Field(ge=1)] | None = None
    """And so many bytes of them once they are decoded, as probing foresees it. None: what the preprocessors' stores hold
    together, less some room for what comes and goes. The one that trainers need now and the one behind it are planned however
    large they are. What the stores have no room for is decoded when it is asked for: a number is for jobs that share their
    preprocessors. A trainer that takes a third step before it commits the first counts on the room."""
    part_samples: Annotated[int, Field(ge=1, le=limits.MAX_PART_SAMPLES)] = 16
    """Most samples of one part, the unit of decoding and fetching."""
    image: ImageSpec = ImageSpec()
    audio: AudioSpec = AudioSpec()
    text: TextSpec = TextSpec()
    share: Annotated[float, Field(gt=0)] = 1.0
    """Of the preprocessors, beside other jobs': one with 2 gets twice as many samples decoded as one with 1, where both wait."""
    model: str = "tiny"
    """Named model shape: what the cost of a sample is computed from."""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, strategy: str) -> str:
        if strategy not in STRATEGIES:
            raise ValueError(f"no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
        return strategy

    @field_validator("model")
    @classmethod
    def _known_model(cls, model: str) -> str:
        if model not in MODEL_SHAPES:
            raise ValueError(f"no model {model!r}; there are {', '.join(MODEL_SHAPES)}")
        return model

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources need different names, got {names}")
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("either every source has a weight or none has")
        return self

    @model_validator(mode="after")
    def _window_fits_into_memory(self) -> Self:
        samples = self.window * self.global_batch
        if samples > limits.MAX_WINDOW_SAMPLES:
            raise ValueError(
                f"window ({self.window}) x global_batch ({self.global_batch}) are {samples} samples planned ahead, and at most "
                f"{limits.MAX_WINDOW_SAMPLES} are: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _packs_hold_every_sample(self) -> Self:
        if self.pack_tokens is not None and self.pack_tokens < self.text.max_tokens:
            raise ValueError(
                f"pack_tokens ({self.pack_tokens}) is below text.max_tokens ({self.text.max_tokens}): "
                "a sample must fit into a packed sequence; lower text.max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _model_has_the_units(self) -> Self:
        if GENERATOR in self.topology.stages and MODEL_SHAPES[self.model].generator is None:
            have = " or ".join(name for name, shape in MODEL_SHAPES.items() if shape.generator is not None)
            raise ValueError(
                f"topology.stages names {GENERATOR!r}, but model {self.model!r} has none: take it out, or take model {have}"
            )
        return self

    def with_topology(self, topology: TopologySpec) -> JobSpec:
        """The same job with another topology. Raises SpecError where model and topology do not fit each other."""
        return load_spec_json(self.model_copy(update={"topology": topology}).to_json())

    def to_json(self) -> str:
        return self.model_dump_json()

    def to_peer_json(self) -> str:
        """The same for another process, without what has its default: one of the release before knows no new field, and need not
        know it where nobody uses it. A default that changes raises `headrace.admission.PROTOCOL`."""
        return self.model_dump_json(exclude_defaults=True)


def parse_spec(document: Any) -> JobSpec:
    """A checked spec from plain data. Raises SpecError with one sentence that names the first wrong field."""
    return parse(JobSpec, document, "job spec")


def load_spec_json(text: str) -> JobSpec:
    """The spec behind `JobSpec.to_json`. Raises SpecError."""
    return parse_json(JobSpec, text, "job spec")


def load_topology_json(text: str) -> TopologySpec:
    """A topology from JSON text. Raises SpecError."""
    try:
        return parse_json(TopologySpec, text, "topology")
    except SpecError as err:
        raise SpecError(f"topology: {err}") from err


def load_spec_yaml(path: Path) -> JobSpec:
    """The spec in a YAML file. Raises SpecError."""
    return parse_spec(read_yaml(path, "job spec"))
