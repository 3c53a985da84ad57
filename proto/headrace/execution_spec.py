"""How the trainers of a job run its plans: what the planner must know of them besides the shape of their pipelines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace import limits
from headrace.model_shape import ModelShape
from headrace.plan import GENERATOR, LLM
from headrace.schedule import SCHEDULES, ZERO_BUBBLE, build
from headrace.user_document import SpecSection, parse_json

NESTED: Final = "nested"
COLOCATED: Final = "colocated"
FSDP: Final = "fsdp"
SharingOrder = Literal["nested", "colocated"]
"""In which order a rank that several units share takes their actions. "nested": each unit's in the order of the schedule, which
bounds its activations; whatever can run first, the LLM's in front of others, so that encoders run where the LLM would wait.
"colocated": all forwards of encoders, then the LLM's actions, then the encoders' backwards, as trainers without a pipeline do."""


_OF_PIPELINES = ("schedule", "chunks", "in_flight", "sharing", "memory_gib", "bandwidth_gb_s", "latency_us")
_OF_FSDP = ("frozen", "frozen_layers", "frozen_projector", "checkpointing", "fp32_residual_connection", "cp")


class UnitExecution(SpecSection):
    """How many replicas and slices a unit has, what of it is trained, and how its layers keep their activations."""

    dp: Annotated[int, Field(ge=1, le=limits.MAX_REPLICAS)] | None = None
    """Number of data-parallel replicas. None: as many as the LLM, which has `topology.replicas`."""
    on: Literal["llm"] | None = None
    """Whose ranks the unit runs on: the LLM's, of which there must be as many as its dp x tp x pp. None: on ranks of its own."""
    pieces: Annotated[int, Field(ge=1, le=limits.MAX_LAYERS)] = 1
    """Into how many actions, each of some of its layers, a pass of the unit is cut where it runs on the LLM's ranks: shorter ones
    fit better where the LLM waits. More than 1 only with `on`, one stage and one chunk. Of plans only the predicted time and the
    choice of strategy `auto` know it."""
    tp: Annotated[int, Field(ge=1, le=limits.MAX_SLICES)] = 1
    """Number of tensor-parallel slices of every layer."""
    cp: Annotated[int, Field(ge=1, le=limits.MAX_SLICES)] | Literal["auto"] = 1
    """Number of neighbouring ranks that share each sequence of the LLM (context parallelism). In pipelines every stage of each of
    `topology.replicas` has so many. FSDP ranks are `topology.replicas` in all, of which fewer share a sequence that has fewer
    blocks of 128 tokens. "auto", there alone: a number for each sequence, the fewest ranks on which it takes no more than a
    rank's even share of the step, so that short ones are on one rank and long ones on several, up to all of them."""
    tp_overlap: Annotated[int, Field(ge=1, le=64)] = 1
    """In how many pieces the slices exchange a microbatch's rows in front of and behind their matrices, each while another is
    computed with. A piece is a smaller product, so few are best: 2 or 4 where a microbatch has thousands of rows. 1: only
    gradients of weights are computed meanwhile. Plans do not know it."""
    frozen: bool = False
    """Whether the unit's weights are frozen."""
    frozen_layers: Annotated[int, Field(ge=0, le=limits.MAX_LAYERS)] = 0
    """Number of the unit's first layers that are frozen, together with the modules in front of them; the others are trained.
    In front of them is the embedding, and with it an LLM's head if both are one matrix."""
    frozen_projector: bool = False
    """Whether the projector from the unit to the next one is frozen."""
    checkpointing: bool | Literal["auto"] = False
    """Whether the unit's layers use activation checkpointing: they keep only their inputs, and run their forward again in the
    backward. With 'zero-bubble' the recomputed activations are then kept from the backward until the weight gradients are
    computed. "auto": as many layers of a stage as the memory of its device asks for, found anew for each step; not with
    'zero-bubble'. It is planned with the memory of true and the time of false."""
    fp32_residual_connection: bool = True
    """Whether the residual stream between layers is float32 under `--precision bf16` too. Else it is bfloat16, as Megatron-LM has
    it unless told otherwise: a layer keeps 4 bytes a channel less, and the gradients of inputs are summed in bfloat16."""
    shard_weights: bool = False
    """Whether each of a stage's replicas keeps an equal share of its weights only, and they gather a layer's from each other for
    every forward and backward of it (ZeRO-3). All replicas then run all microbatches of a step in step with each other. Without
    it they share gradients' sums and the optimizer's state alone. Plans do not know it."""
    compile: bool = False
    """Whether torch.compile fuses what the unit's layers, and a whole head's loss, do between matrix products. It does so in the
    first step, for all lengths. On a GPU it needs triton, which comes with torch, and a C compiler. Plans do not know it."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Most GiB that a process of the unit may take of its device for weights, gradients, optimizer and activations. A step that
    is forecast to take more is refused before it begins; `checkpointing: auto` keeps to it. A process with a limit begins a step
    only when all of its data have come. None: `auto` keeps to what the GPU has, and nothing is refused."""
    exchange_s: tuple[Annotated[float, Field(ge=0, le=1e6)], Annotated[float, Field(ge=0, le=1e6)]] = (0.0, 0.0)
    """Seconds in which the unit's replicas exchange weights before its first microbatch, and gradients after its last one, while
    other units may compute. Trainers do not look at it."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Most rows (patches, audio frames, tokens) that a stage may keep at once for their backward. The limit is in rows because
    their number is known exactly, while the bytes of a row depend on precision, kernels and allocator. A process with a limit
    begins a step only when all of its data have come. Plans do not know it; they know `memory_gib`. None: no limit."""
    cuts: tuple[int, ...] | None = None
    """First layer of every part of the unit but the first; there are as many parts as stages times chunks. Plans take all stages
    of a unit to be equally long. None: the trainers find the cuts that make them most nearly so."""

    @property
    def num_slices(self) -> int:
        """How many ranks of a pipeline have a stage of a replica together: slices of its layers, or of its sequences."""
        return self.tp * (1 if self.cp == "auto" else self.cp)


class ExecutionSpec(SpecSection):
    """The schedule of the pipelines, what they train, and the limits of their memory and links.

    With `trainer: pipeline`, this and the spec's `topology` are all that `headrace train` needs to take its place. A `--topology`
    file says the same of trainers that bring their own; with `--submit` a job that says nothing is planned for it, and trainers
    that run something else are refused before their first step.
    """

    trainer: Literal["pipeline", "colocated", "fsdp"] | None = None
    """"pipeline": units are stages of a pipeline, as under `--topology`, where a sample may change its replica between units.
    "colocated": every rank has all units, as with FSDP, DDP or Hugging Face; `topology.replicas` are then the ranks, and stages
    do not matter. "fsdp": so have the ranks of `headrace train --fsdp`, of which a sample may be on one in an encoder and on
    another in the LLM; `auto` plans as `orchmllm` does. None: planned as for pipelines, but strategy `auto` keeps every sample on
    one replica, as any trainer can."""
    meet: Literal["microbatch", "step"] = "microbatch"
    """How often colocated ranks wait for each other: at every microbatch (FSDP), or once a step (DDP that accumulates)."""
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    """Most tokens of a microbatch of a colocated rank. The limit is kept where microbatches have room to spare."""
    schedule: str = "1f1b"
    """Name of the pipeline schedule, one of `headrace.schedule.SCHEDULES`."""
    chunks: Annotated[int, Field(ge=1, le=limits.MAX_STAGES)] = 1
    """Number of parts of a unit on each of its stages; more than 1 only for 'interleaved'."""
    in_flight: Annotated[int, Field(ge=1, le=limits.MAX_MICROBATCHES)] | None = None
    """Most microbatches that a stage may hold under the 'eager' schedule. None: as many as a plan's activations leave within
    `memory_gib`, or no limit without it."""
    sharing: SharingOrder = NESTED
    """In which order a rank takes the actions of units that share it (`on: llm`): "nested" runs encoders where the LLM would
    wait, "colocated" in front of the LLM and behind it."""
    correct_costs: bool = True
    """Whether the costs are corrected by what the trainers measure while they train. Batches are the same either way; without it,
    so are the plans of two runs, to the last bit of a loss."""
    coefficients: dict[str, Any] | None = None
    """Measured costs of the model's layers, in the form of the file that `headrace profile` writes. None: the operations counted
    from the shape of the job's model at a nominal rate."""
    units: dict[str, UnitExecution] = Field(default_factory=dict)
    """The units with replicas of their own, or of which something is frozen or checkpointed, by name; all others have as many
    replicas as the LLM, learn and keep their activations."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Most GiB of activations that a stage can hold, estimated in bf16 from the model's shape. None: no limit."""
    bandwidth_gb_s: Annotated[float, Field(gt=0)] | None = None
    """Bandwidth of a link between two stages in GB/s. None: transfers take no time beyond `latency_us`."""
    latency_us: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Latency of one transfer between two stages in microseconds."""

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, schedule: str) -> str:
        if schedule not in SCHEDULES:
            raise ValueError(f"no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
        return schedule

    @model_validator(mode="after")
    def _of_one_kind_of_trainer(self) -> Self:
        if self.trainer != "colocated" and (self.meet != "microbatch" or self.max_tokens is not None):
            raise ValueError("meet and max_tokens are for `trainer: colocated`; pipelines have memory_gib")
        if self.trainer == "colocated" and (self.schedule != "1f1b" or self.memory_gib is not None):
            raise ValueError("schedule and memory_gib are for pipelines; colocated ranks have max_tokens")
        if self.trainer == "colocated" and self.of_units("dp"):
            raise ValueError("a dp of units is for pipelines; colocated ranks, topology.replicas of them, have all units")
        if self.trainer == "colocated" and (self.of_units("on") or self.sharing != NESTED):
            raise ValueError("on and sharing are for pipelines; colocated ranks have all units")
        if self.trainer == FSDP:
            self._check_fsdp()
        self._check_cp()
        return self

    def _check_cp(self) -> None:
        wrong = {unit: cp for unit, cp in self.of_units("cp").items() if unit != LLM or self.trainer not in (FSDP, "pipeline")}
        for unit, cp in wrong.items():
            if unit != LLM:
                raise ValueError(_not_of_the_llm(unit, cp))
            raise ValueError(
                f"unit {unit!r} has cp {cp}, which is for the llm in pipelines and on FSDP ranks: set `trainer: pipeline` or "
                "`trainer: fsdp`, or take it away"
            )

    def _check_fsdp(self) -> None:
        wrong = [name for name in _OF_PIPELINES if getattr(self, name) != type(self).model_fields[name].default]
        wrong += [option for option in UnitExecution.model_fields if option not in _OF_FSDP and self.of_units(option)]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} for pipelines, and with `trainer: fsdp` every rank has "
                f"all units, whole; of units it knows {', '.join(_OF_FSDP)}: take the others away"
            )
        if "auto" in self.of_units("checkpointing").values():
            raise ValueError(
                "checkpointing is auto, which forecasts a pipeline's memory: take true or false with `trainer: fsdp`"
            )

    @property
    def cp(self) -> int | Literal["auto"]:
        """How many ranks share a sequence of the LLM."""
        return self.units.get(LLM, UnitExecution()).cp

    @property
    def says_nothing(self) -> bool:
        """Whether nothing is said of the trainers, beside what the layers of their model cost."""
        return self == ExecutionSpec(coefficients=self.coefficients, correct_costs=self.correct_costs)

    def check(self, stages: Mapping[str, int], replicas: int, shape: ModelShape) -> None:
        """Raise ValueError where the execution does not fit the job's model, or pipelines with these stages.

        stages: by unit, in pipeline order. replicas: of the LLM.
        """
        unknown = sorted(set(self.units) - set(stages))
        if unknown:
            raise ValueError(f"execution.units names {unknown[0]!r}, but topology.stages has {', '.join(stages)}")
        if self.trainer == FSDP and (set(stages.values()) != {1} or {"encoder", GENERATOR} & set(stages)):
            raise ValueError(
                "`trainer: fsdp` has vision, audio or both, and the llm, of one stage each, but topology.stages is "
                f"{dict(stages)}: set it to {{vision: 1, audio: 1, llm: 1}}"
            )
        cp = self.cp
        if self.trainer == FSDP and cp != "auto" and replicas % cp:
            raise ValueError(
                f"execution: {LLM!r} has cp {cp}, which does not divide the {replicas} FSDP ranks (topology.replicas): take a "
                "divisor, or auto, which chooses a number for each sequence"
            )
        for unit, size in self.units.items():
            if unit == LLM and size.dp is not None:
                raise ValueError(f"execution: topology.replicas says how many {LLM!r} has: take away its dp {size.dp}")
            if unit in shape.units and size.frozen_layers >= (layers := shape.units[unit].layers):
                raise ValueError(
                    f"execution: {unit!r} of the job's model has {layers} layers, but frozen_layers is {size.frozen_layers}: "
                    "lower it, or set frozen"
                )
        try:
            if self.trainer == "pipeline":
                check_context(self.units, stages)
            check_units(self.units, stages, self.chunks, self.schedule)
            sizes = {unit: self.units.get(unit, UnitExecution()) for unit in stages}
            places = {unit: (size.dp or replicas) * size.num_slices * stages[unit] for unit, size in sizes.items()}
            check_sharing(sizes, self.sharing, places)
        except ValueError as err:
            raise ValueError(f"execution: {err}") from err
        build(self.schedule, dict(stages), (), chunks=self.chunks, in_flight=self.in_flight)

    def unit_replicas(self, replicas: int) -> dict[str, int]:
        """Return the number of replicas of each unit that has another number than the LLM. replicas: those of the LLM."""
        return {unit: dp for unit, dp in self.of_units("dp").items() if dp != replicas}

    def widths(self) -> dict[str, int]:
        """Return the number of slices of the layers of every part of a model; empty where nothing is said of the trainers."""
        parts = ("vision", "audio", LLM, GENERATOR)
        return {} if self.says_nothing else {part: self.units.get(part, UnitExecution()).tp for part in parts}

    def of_units(self, option: str) -> dict[str, Any]:
        """Return the values of `option`, one of UnitExecution's fields, by unit; units that have its default are left out."""
        values = {unit: getattr(execution, option) for unit, execution in self.units.items()}
        default = UnitExecution.model_fields[option].default
        return {unit: value for unit, value in values.items() if value != default}


def load_execution_json(text: str) -> ExecutionSpec:
    """Return the validated execution in JSON text. Raises SpecError if it is not valid."""
    return parse_json(ExecutionSpec, text, "execution")


def check_units(units: Mapping[str, UnitExecution], stages: Mapping[str, int], chunks: int, schedule: str) -> None:
    """Raise ValueError where a unit's settings contradict each other, its stages or its place.

    stages: number of stages by unit, in pipeline order; chunks: parts of a unit on each of them.
    """
    for unit, size in units.items():
        if size.checkpointing == "auto" and schedule == ZERO_BUBBLE:
            raise ValueError(
                f"unit {unit!r} has checkpointing 'auto', but under {schedule!r} what a backward computes again is kept until "
                "the weight gradients, so that no choice of layers keeps to a limit: take another schedule, or true or false"
            )
        if size.compile and (size.tp > 1 or schedule == ZERO_BUBBLE):
            raise ValueError(
                f"unit {unit!r} has compile true, tp {size.tp} and schedule {schedule!r}, but layers in slices, and those under "
                f"{ZERO_BUBBLE!r}, are not compiled: take compile false, or tp 1 and another schedule"
            )
        if size.tp_overlap > 1 and (size.tp == 1 or schedule == ZERO_BUBBLE):
            raise ValueError(
                f"unit {unit!r} has tp_overlap {size.tp_overlap}, tp {size.tp} and schedule {schedule!r}, but only slices "
                f"exchange rows, and under {ZERO_BUBBLE!r} all at once: take tp_overlap 1, or tp 2 or more and another schedule"
            )
        if size.frozen and size.frozen_layers:
            raise ValueError(
                f"unit {unit!r} is frozen as a whole, and so are more than its first {size.frozen_layers} layers: "
                "take away its frozen or its frozen_layers"
            )
        if size.pieces > 1 and (size.on is None or stages[unit] * chunks > 1):
            raise ValueError(
                f"unit {unit!r} has {size.pieces} pieces, pp {stages[unit]} and chunks {chunks}, but only a unit on the ranks of "
                f"the {LLM} is cut into pieces, and not into stages or chunks too: set on: {LLM}, pp 1 and chunks 1"
            )
        if size.cuts is None:
            continue
        parts = stages[unit] * chunks * size.pieces
        if len(size.cuts) != parts - 1:
            raise ValueError(
                f"unit {unit!r} has {len(size.cuts)} cuts, but pp {stages[unit]} x chunks {chunks} parts need {parts - 1}: "
                "change its cuts or its pp"
            )
        if any(cut <= before for before, cut in zip((0, *size.cuts), size.cuts, strict=False)):
            raise ValueError(
                f"the cuts of unit {unit!r} must rise and begin at 1 or later, got {list(size.cuts)}: "
                "give each part at least one layer"
            )
    if (last := list(stages)[-1]) in units and units[last].frozen_projector:
        raise ValueError(f"{last!r} is the last unit and has no projector behind it: take away its frozen_projector")


def check_context(units: Mapping[str, UnitExecution], stages: Collection[str]) -> None:
    """Raise ValueError where a pipeline cannot share sequences as its units say. stages: the names of all units."""
    for unit, size in units.items():
        if size.cp == 1:
            continue
        if unit != LLM:
            raise ValueError(_not_of_the_llm(unit, size.cp))
        if size.cp == "auto":
            raise ValueError(
                f"unit {unit!r} has cp auto, which chooses a number of FSDP ranks for each sequence, but in a pipeline all share "
                "one: give a number, or take FSDP ranks"
            )
        others = {"compile true": size.compile, f"a {GENERATOR} behind it": GENERATOR in stages}
        if wrong := [other for other, is_there in others.items() if is_there]:
            raise ValueError(
                f"unit {unit!r} has cp {size.cp} and {' and '.join(wrong)}, but layers that share sequences are not compiled, "
                f"and a {GENERATOR} takes no part of one: leave out one or the other"
            )


def _not_of_the_llm(unit: str, cp: int | str) -> str:
    rule = f"shares sequences of the {LLM}, and media are not cut"
    return f"unit {unit!r} has cp {cp}, which {rule}: take it away, or set it of {LLM!r}"


def check_sharing(units: Mapping[str, UnitExecution], sharing: SharingOrder, places: Mapping[str, int]) -> None:
    """Raise ValueError where units cannot share ranks as they say.

    units: all of them. places: dp x tp x cp x pp of each.
    """
    sharers = [unit for unit, size in units.items() if size.on is not None]
    for unit in sharers:
        if unit == LLM:
            raise ValueError(f"unit {LLM!r} is on itself: take its on away, and set it where other units are to share its ranks")
        if places[unit] != places[LLM]:
            factors, sizes = "dp x tp x pp", "its dp, tp or pp"
            if units[LLM].cp != 1:
                factors, sizes = "dp x tp x cp x pp", f"its dp, tp or pp, or the cp of {LLM!r},"
            raise ValueError(
                f"unit {unit!r} is on the ranks of the {LLM}, whose {factors} is {places[LLM]}, but its own is "
                f"{places[unit]}: set {sizes} so that every rank has a part of it"
            )
        if unit == GENERATOR and sharing == COLOCATED:
            raise ValueError(
                f"unit {GENERATOR!r} is on the ranks of the {LLM}, whose backwards wait for it, so that it cannot run behind "
                "all of them: take sharing nested"
            )
    sharded = [unit for unit, size in units.items() if size.shard_weights]
    if sharers and sharded:
        raise ValueError(
            f"unit {sharers[0]!r} shares ranks, and {sharded[0]!r} has shard_weights, whose replicas would have to take all "
            "actions of their ranks in step: take away either"
        )
