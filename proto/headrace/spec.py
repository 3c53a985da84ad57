"""The job spec: everything that decides what a job's global batches contain and how they are planned.

Users write it as YAML; it is checked here once, and the services exchange it as canonical JSON.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace import limits
from headrace.entrain_settings import EntrainSettings
from headrace.errors import SpecError
from headrace.execution_spec import FSDP, ExecutionSpec
from headrace.image_spec import ImageSpec as ImageSpec
from headrace.model_shape import MODEL_SHAPES
from headrace.orchmllm_settings import OrchMLLMSettings
from headrace.plan import BASELINE_STRATEGIES, CROSS_REPLICA_STRATEGIES, FSDP_STRATEGIES, GENERATOR, LLM
from headrace.source_spec import SourceSpec
from headrace.text_spec import TextSpec
from headrace.topology_spec import TopologySpec
from headrace.user_document import SpecSection, naming, parse_json
from headrace.user_document import parse as parse
from headrace.user_document import read_yaml as read_yaml
from headrace.validation_spec import SetName, ValidationSpec, check_names

STRATEGIES = ("random", "disttrain", "entrain", "orchmllm", "joint", "taper", "auto")


class AudioSpec(SpecSection):
    """How recordings become log-mel features for Whisper-like encoders."""

    sample_rate: Annotated[int, Field(ge=1000, le=limits.MAX_SAMPLE_RATE)] = 16_000
    """Hz to which recordings are resampled before their features are computed."""
    mel_bins: Annotated[int, Field(ge=1, le=limits.MAX_MEL_BINS)] = 128
    """Channels of a mel frame."""
    hop_s: Annotated[float, Field(ge=limits.MIN_HOP_S)] = 0.01
    """Seconds from one mel frame to the next."""
    window_s: Annotated[float, Field(gt=0, le=limits.MAX_WINDOW_S)] = 0.025
    """Seconds of waveform that a mel frame is computed from."""
    frames_per_token: Annotated[int, Field(ge=1)] = 8
    """Mel frames per LLM token: 8 for a convolution of stride 2 and a projector that joins 4."""
    last_frame: Literal["drop", "pad"] = "drop"
    """What becomes of the last mel frame if the recording ends in it: with `pad` it is there, and silence behind the recording,
    as in the Whisper feature extractor of `transformers`."""
    last_token: Literal["pad", "drop"] = "pad"
    """What becomes of the last outputs of an encoder of stride 2 if they are fewer than a token takes: with `drop` they are left
    out, as by the pooling of Qwen2-Audio and Qwen2.5-Omni."""
    max_seconds: Annotated[float, Field(gt=0, le=limits.MAX_SECONDS)] = 600.0
    """Recordings longer than this are quarantined as too_long, or split, as `too_long` has it. An encoder with a position table
    needs the length of its table: 30 for Whisper's, with which the trainer refuses jobs that allow more."""
    too_long: Literal["refuse", "split"] = "refuse"
    """What becomes of recordings longer than `max_seconds`: they are refused, or split into pieces of that length, each of which
    has features and tokens of its own, as a recording has. A last piece that is shorter than `window_s` is left out."""
    min_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Recordings shorter than this are quarantined as too_short."""
    max_decode_mib: Annotated[int, Field(ge=1, le=limits.MAX_DECODE_MIB)] = 768
    """Recordings whose decoding would hold more MiB than this are refused as too_large from their header; 600 s of 96 kHz fit."""

    @property
    def hop_samples(self) -> int:
        """Waveform samples from one mel frame to the next."""
        return max(1, round(self.hop_s * self.sample_rate))

    @property
    def most_frames(self) -> int:
        """Mel frames of the longest recording, or piece of one, that is not refused: one of `max_seconds`."""
        return self.num_frames(math.ceil(self.most_samples(self.sample_rate)))

    def most_samples(self, rate: int) -> float:
        """Return the waveform samples at a rate that `max_seconds` are: a whole number where floats miss one by rounding,
        as in 2.01 times 16,000."""
        return round(self.max_seconds * rate, 6)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of mel frames of a recording of so many samples at `sample_rate`."""
        padded = num_samples + (self.hop_samples - 1 if self.last_frame == "pad" else 0)
        return padded // self.hop_samples

    def num_tokens(self, mel_frames: int) -> int:
        """Return the number of LLM tokens that a recording of so many mel frames becomes."""
        if self.last_token == "pad":
            return -(-mel_frames // self.frames_per_token)
        return (mel_frames + 1) // 2 // (self.frames_per_token // 2)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_seconds > self.max_seconds:
            raise ValueError(
                f"min_seconds ({self.min_seconds:g}) is above max_seconds ({self.max_seconds:g}): lower one, or raise one"
            )
        if self.too_long == "split" and self.most_frames * self.hop_samples < self.window_s * self.sample_rate + 1:
            raise ValueError(
                f"max_seconds ({self.max_seconds:g}) is the length of the pieces of split recordings, and each must be longer "
                f"than window_s ({self.window_s:g}) and hop_s ({self.hop_s:g}): raise it"
            )
        if self.too_long == "split" and self.num_tokens(self.most_frames) == 0:
            raise ValueError(
                f"max_seconds ({self.max_seconds:g}) is the length of the pieces of split recordings, and each must have a "
                f"token, which takes {self.frames_per_token} frames: raise it"
            )
        if self.too_long == "split" and self.last_frame == "pad" and self.most_samples(self.sample_rate) % self.hop_samples:
            raise ValueError(
                f"max_seconds ({self.max_seconds:g}) is no multiple of hop_s ({self.hop_s:g}), which it must be where split "
                "recordings have last_frame pad: change it"
            )
        if self.last_token == "drop" and self.frames_per_token % 2:
            raise ValueError(f"frames_per_token ({self.frames_per_token}) is odd, and last_token drop is for a stride of 2")
        return self

    @model_validator(mode="after")
    def _fits_into_memory(self) -> Self:
        values = self.max_seconds * max(self.sample_rate, self.mel_bins / self.hop_s)
        if values > limits.MAX_SOUND_VALUES:
            raise ValueError(
                f"max_seconds ({self.max_seconds:g}) of sample_rate {self.sample_rate}, or of mel_bins {self.mel_bins} each "
                f"hop_s {self.hop_s:g}, are {values:.0f} values, and at most {limits.MAX_SOUND_VALUES} are taken: lower one"
            )
        return self


class JobSpec(SpecSection):
    """The spec of a whole job. Two jobs with equal specs and data sets have equal global batches."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """The job's name, by which trainers and commands call it; one service has it once."""
    sources: Annotated[tuple[SourceSpec, ...], Field(min_length=1, max_length=limits.MAX_SOURCES)]
    """The data sets of the mixture, with different names. Either all of them have a weight or none has."""
    validation: Annotated[dict[SetName, ValidationSpec], Field(default_factory=dict)]
    """Validation sets by name, which are evaluated between steps (`StepLoader.evaluate`) and never trained on."""
    global_batch: Annotated[int, Field(ge=1, le=limits.MAX_GLOBAL_BATCH)] = 32
    """Number of samples of a step, over all replicas and microbatches."""
    epochs: Annotated[int, Field(ge=1, le=limits.MAX_EPOCHS)] | None = None
    """Stop after this many epochs. None: after `steps`, or after one epoch if that is None too."""
    steps: Annotated[int, Field(ge=1, le=limits.MAX_STEPS)] | None = None
    """Stop after this many steps, in whichever epoch. None: `epochs` alone decides."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the order of shards and samples, and of the mixture: together with the data sets it decides what each batch holds."""
    shuffle_shards: Annotated[int, Field(ge=1, le=limits.MAX_SHUFFLE_SHARDS)] = 16
    """Number of shards, themselves in shuffled order, whose samples are shuffled together."""
    shuffle_rows: Annotated[int, Field(ge=1, le=limits.MAX_SHUFFLE_ROWS)] = 1
    """Number of neighbouring rows of a shard that stay together, in their order, where samples are shuffled: rows 0 to n - 1, n
    to 2 n - 1, and so on. With the rows of a Parquet row group, each group of a remote shard is read once for all of them."""
    shuffle: bool = True
    """False: each source gives its shards by name and their samples as they stand in them, in every epoch, as to evaluate."""
    strategy: str = "auto"
    """The strategy that plans the global batches. `auto` takes, for each batch, the fastest of all strategies' plans; those in
    which a sample changes its replica between units only if `execution.trainer` is "pipeline" or "fsdp"."""
    topology: TopologySpec = TopologySpec()
    """The replicas, microbatches and pipeline stages for which batches are planned."""
    execution: ExecutionSpec = ExecutionSpec()
    """How the trainers run the plans, so that they are planned for what will run. The default assumes an ideal 1F1B pipeline in
    which everything learns, and refuses no trainer."""
    orchmllm: OrchMLLMSettings = OrchMLLMSettings()
    """How strategy `orchmllm`, asked for or tried by `auto`, balances each unit."""
    entrain: EntrainSettings = EntrainSettings()
    """How strategy `entrain`, asked for or tried by `auto`, assigns samples to microbatches."""
    pack_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    """Pack the samples of a global batch into sequences of at most this many tokens, and plan these packs. The samples of a pack
    stay in one microbatch, one after the other (`PackedMicrobatch.pack_offsets` of the trainer). None: samples are planned
    singly."""
    pad_to_max_length: bool = False
    """Pad each pack at its end to exactly `pack_tokens`, so that sequences have one shape. Padding changes neither loss nor
    gradients, and costs the LLM the memory and the time of full packs, with which packs are planned then. The option is called so
    in NeMo and Megatron-Bridge."""
    mrope: bool = False
    """Give trainers position ids in time, height and width too (`PackedMicrobatch.mrope_position_ids`), as Qwen2-VL, 2.5-VL and
    3-VL take them."""
    window: Annotated[int, Field(ge=1, le=limits.MAX_WINDOW)] = 4
    """Most global batches that are planned ahead of the last committed one."""
    window_bytes: Annotated[int, Field(ge=1)] | None = None
    """Most bytes that the global batches planned ahead may take once decoded, as predicted from probing. None: what the
    preprocessors' payload stores hold together, less some headroom; set a number for jobs that share their preprocessors. The
    batch that trainers need now and the next one are planned however large they are, and what the stores have no room for is
    decoded when a trainer asks for it. A trainer that takes a third step before it commits the first relies on this room."""
    part_samples: Annotated[int, Field(ge=1, le=limits.MAX_PART_SAMPLES)] = 16
    """Most samples of one part, the unit of decoding and fetching."""
    image: ImageSpec = ImageSpec()
    """How images become patches."""
    audio: AudioSpec = AudioSpec()
    """How recordings become mel features."""
    text: TextSpec = TextSpec()
    """How text becomes tokens."""
    share: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the job in sharing the preprocessors with other jobs: while both wait, a job with 2 gets twice as many samples
    decoded as one with 1."""
    model: str = "tiny"
    """Name of the model shape (`headrace.model_shape.MODEL_SHAPES`) from which the cost of a sample is computed."""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, strategy: str) -> str:
        known = (*STRATEGIES, *BASELINE_STRATEGIES)
        if strategy not in known:
            raise ValueError(f"no strategy {strategy!r}; there are {', '.join(known)}")
        return strategy

    @field_validator("model")
    @classmethod
    def _known_model(cls, model: str) -> str:
        if model not in MODEL_SHAPES:
            raise ValueError(f"no model {model!r}; there are {', '.join(MODEL_SHAPES)}")
        return model

    @model_validator(mode="after")
    def _execution_fits_the_topology(self) -> Self:
        self.execution.check(self.topology.stages, self.topology.replicas, MODEL_SHAPES[self.model])
        self.topology.check_size(max(self.execution.of_units("dp").values(), default=1))
        return self

    @model_validator(mode="after")
    def _strategy_fits_the_trainers(self) -> Self:
        if self.execution.trainer == FSDP and self.strategy not in FSDP_STRATEGIES:
            raise ValueError(f"`trainer: fsdp` takes strategy {' or '.join(FSDP_STRATEGIES)}, got {self.strategy!r}: change it")
        if self.execution.trainer == "colocated" and self.strategy in CROSS_REPLICA_STRATEGIES:
            raise ValueError(
                f"strategy {self.strategy!r} has samples change their replica between the units, and colocated ranks have all "
                "units of a sample on one: set strategy to 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _shared_sequences_can_be_planned(self) -> Self:
        if self.execution.cp == 1 or self.execution.trainer != FSDP:
            return self
        why = ""
        if self.strategy not in ("auto", *CROSS_REPLICA_STRATEGIES):
            why = f"strategy {self.strategy!r} puts a sequence on one rank: take auto or orchmllm"
        elif self.pack_tokens is not None:
            why = f"pack_tokens ({self.pack_tokens}) plans packs, and sequences are shared singly: take it away"
        elif (form := self.orchmllm.forms.get(LLM, "no_padding")) not in ("no_padding", "third"):
            why = f"orchmllm.forms has {form!r} of the llm, which pads whole sequences: take no_padding or third"
        elif self.topology.speeds is not None:
            why = "topology.speeds gives ranks unequal work, and those that share a sequence have equal parts: take it away"
        if why:
            raise ValueError(f"execution has cp {self.execution.cp} of the llm, but {why}, or leave out cp")
        return self

    @model_validator(mode="after")
    def _settings_fit_the_strategy(self) -> Self:
        self.orchmllm.check(self.topology.stages, self.strategy)
        self.entrain.check(self.strategy)
        return self

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources need different names, got {names}: give each a `name` of its own")
        if 0 < (missing := [source.weight for source in self.sources].count(None)) < len(self.sources):
            raise ValueError(
                f"either every source has a weight or none has, but {missing} of {len(names)} have none: give them one"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_names(self) -> Self:
        check_names(self.name, self.validation)
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
        if self.pad_to_max_length and self.pack_tokens is None:
            raise ValueError("pad_to_max_length is set without pack_tokens, the length to pad to: set it too")
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

    @model_validator(mode="after")
    def _units_take_the_images(self) -> Self:
        if self.image.fit == "anyres" and (self.mrope or GENERATOR in self.topology.stages):
            raise ValueError("image.fit is anyres, but mrope and a generator take a token for each patch: set another image.fit")
        return self

    def check_longest(self) -> None:
        """Raise SpecError where the longest sample or pack that the job admits fits into no microbatch.

        This is checked when a job is submitted and not whenever a spec is loaded: jobs that were taken up before go on.
        """
        limit = self.execution.max_tokens
        name, longest = ("pack_tokens", self.pack_tokens) if self.pack_tokens else ("text.max_tokens", self.text.max_tokens)
        if limit is not None and longest > limit:
            raise SpecError(
                f"{name} ({longest}) is above execution.max_tokens ({limit}): the longest sample or pack must fit into a "
                f"microbatch; lower {name}, so that longer samples are refused as too_long, or raise execution.max_tokens"
            )

    def planned_for(self, topology: TopologySpec, execution: ExecutionSpec) -> JobSpec:
        """Return the spec of the same job for other trainers. Raises SpecError if these and the job's model do not fit."""
        return load_spec_json(self.model_copy(update={"topology": topology, "execution": execution}).to_json())

    def with_topology(self, topology: TopologySpec) -> JobSpec:
        """Return the spec of the same job with another topology. Raises SpecError if the model does not fit the topology."""
        return self.planned_for(topology, self.execution)

    def with_execution(self, execution: ExecutionSpec) -> JobSpec:
        """Return the spec of the same job for other trainers. Raises SpecError if they do not fit the topology."""
        return self.planned_for(self.topology, execution)

    def is_same_job(self, submitted: JobSpec) -> bool:
        """Return whether submitting that spec means this job: it is equal, or only adds an `execution` or its kind of trainer.

        So a job of a former release, which had no such section, goes on when it is submitted with a topology, whose stages come
        with its execution.
        """
        if self.execution == submitted.execution.model_copy(update={"trainer": None}):
            submitted = submitted.model_copy(update={"execution": self.execution})
        if self.execution == ExecutionSpec() != submitted.execution:
            topology = submitted.topology.model_copy(update={"stages": self.topology.stages})
            submitted = submitted.model_copy(update={"execution": self.execution, "topology": topology})
        return self == submitted

    def to_json(self) -> str:
        """Return the canonical JSON form, with every field."""
        return self.model_dump_json()

    def to_peer_json(self) -> str:
        """Return the JSON form for another process, without fields that have their default: what a peer of an older release does
        not know, it finds only in jobs that use it (`headrace.peer_spec`). Changing a default requires raising
        `headrace.admission.PROTOCOL`."""
        return self.model_dump_json(exclude_defaults=True)


def parse_spec(document: Any) -> JobSpec:
    """Return the validated job spec in plain data. Raises SpecError with one sentence that names the first wrong field."""
    return parse(JobSpec, document, "job spec")


def load_spec_json(text: str) -> JobSpec:
    """Return the job spec in the JSON text of `JobSpec.to_json`. Raises SpecError if it is not valid."""
    return parse_json(JobSpec, text, "job spec")


def load_spec_yaml(path: Path) -> JobSpec:
    """Return the job spec in a YAML file. Raises SpecError if the file cannot be read or is not valid."""
    document = read_yaml(path, "job spec")
    with naming(path):
        return parse_spec(document)
