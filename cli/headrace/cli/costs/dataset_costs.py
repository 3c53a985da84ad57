"""The cost table of a real data set, estimated from the headers and texts of its samples and the size of a model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.cli.costs.cost_table import CostTable, CostTableWriter
    from headrace.reorder_service.planning.cost_model.cost import SampleCosts
    from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts
    from headrace.sample import Probe
    from headrace.spec import JobSpec

DEFAULT_MODEL = "7b"
DEFAULT_UNITS = "encoder,llm"
ROWS_AT_ONCE = 16_384  # samples per row group


class Estimator:
    """Estimates from probes what samples cost in every unit of one model, under one job spec."""

    def __init__(
        self,
        spec: JobSpec,
        vocab: int,
        *,
        model: str = DEFAULT_MODEL,
        units: str = DEFAULT_UNITS,
        coefficients: Path | None = None,
    ) -> None:
        """Choose the model and its units. Raises UserError for a model, units or coefficients that cannot be used.

        spec: the job whose samples are estimated. vocab: size of the tokenizer's vocabulary. model: a key of MODEL_SHAPES.
        units: the units to estimate, separated by commas. coefficients: JSON file with measured layer times, used instead of
        counted operations.
        """
        from headrace.cli.costs.cost_table import in_pipeline_order

        if model not in MODEL_SHAPES:
            raise UserError(f"no model {model!r}; there are {', '.join(MODEL_SHAPES)}")
        self._shape = MODEL_SHAPES[model]
        self._spec = spec
        self._vocab = vocab
        self._measured = None if coefficients is None else read_coefficients(coefficients)
        if self._measured is not None:
            try:
                self._measured.check_model(model, self._shape)
            except ValueError as err:
                raise UserError(f"{coefficients}: {err}") from err
        self._units = in_pipeline_order(unit.strip() for unit in units.split(","))
        self.estimate([])

    def layers(self) -> dict[str, int]:
        """Return the number of layers of each unit, which bounds its stages; `encoder` has those of vision and audio."""
        from headrace.reorder_service.planning.cost_model.cost import PARTS_OF

        layers = {part: stack.layers for part, stack in self._shape.units.items()}
        if self._measured is not None:
            layers |= {part: len(self._measured.parts[part].layers) for part in self._measured.huggingface}
        return {unit: sum(layers[part] for part in PARTS_OF[unit]) for unit in self._units}

    def estimate(
        self, probes: Sequence[Probe], *, checkpointing: Collection[str] = (), backward_factors: Mapping[str, float] | None = None
    ) -> SampleCosts:
        """Estimate the cost, memory and transfer columns of the samples, with units in pipeline order. Raises UserError.

        Memory also depends on `checkpointing`, the units with activation checkpointing, and on `backward_factors`, the ratio of
        backward to forward time by unit.
        """
        from headrace.reorder_service.planning.cost_model.cost import estimate

        try:
            return estimate(
                probes, self._shape, image=self._spec.image, audio=self._spec.audio, vocab=self._vocab, units=self._units,
                measured=None if self._measured is None else self._measured.coefficients,
                checkpointing=checkpointing, backward_factors=backward_factors,
            )  # fmt: skip
        except ValueError as err:
            raise UserError(str(err)) from err

    def table(
        self, probes: Sequence[Probe], *, checkpointing: Collection[str] = (), backward_factors: Mapping[str, float] | None = None
    ) -> CostTable:
        """Estimate the cost table of at least one sample, with arguments as for `estimate`; sample ids are 0, 1, ..."""
        import numpy as np

        from headrace.cli.costs.cost_table import MEMORY_BYTES, SECONDS, CostTable

        costs = self.estimate(probes, checkpointing=checkpointing, backward_factors=backward_factors)
        return CostTable(
            sample_ids=np.arange(len(probes)),
            costs=costs.seconds,
            memory=costs.memory_bytes,
            transfer_bytes=costs.transfer_bytes,
            tokens=num_tokens(probes),
            name="the data set",
            time_unit=SECONDS,
            memory_unit=MEMORY_BYTES,
            measured=self._measured,
        )


class CostRecorder:
    """Estimates the costs of samples that are added one by one, and writes their cost table a row group at a time."""

    def __init__(self, writer: CostTableWriter, estimator: Estimator) -> None:
        self._writer = writer
        self._estimator = estimator
        self._probes: list[Probe] = []

    def __enter__(self) -> CostRecorder:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._writer.__exit__(kind, error, trace)

    def add(self, probe: Probe) -> None:
        """Add a sample as the next row of the table."""
        self._probes.append(probe)
        if len(self._probes) == ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._probes:
            costs = self._estimator.estimate(self._probes)
            names = [probe.name for probe in self._probes]
            self._writer.add(names, num_tokens(self._probes), costs.seconds, costs.memory_bytes, costs.transfer_bytes)
            self._probes.clear()


def num_tokens(probes: Sequence[Probe]) -> NDArray[np.int64]:
    """Return the length of each sample's LLM sequence, (n,)."""
    import numpy as np

    return np.array([probe.num_tokens for probe in probes], np.int64)


def read_coefficients(path: Path, tp: Mapping[str, int] | None = None) -> MeasuredCosts:
    """Read a coefficients file; `tp` as for `parse_coefficients`. Raises UserError."""
    from headrace.reorder_service.planning.cost_model.coefficients_document import parse_coefficients

    try:
        return parse_coefficients(json.loads(path.read_text(encoding="utf-8")), tp)
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}") from err
    except ValueError as err:
        raise UserError(f"{path}: {err}") from err
