"""Cost tables: what every sample costs in every unit, in a Parquet or JSONL file (design section 6).

    sample_id       int64, all different
    cost_<unit>     forward time of the whole unit, in any one unit of time; finite, not negative
    memory_<unit>   optional, for all units or none: memory of the activations that the whole unit keeps for the sample
    bytes_<unit>    optional, for all units or none: bytes that a stage of the unit sends to the next for the sample
    tokens          optional: length of the sample's LLM sequence

Rows are samples in arrival order. Other columns are ignored. The units of time and memory are known where the metadata of the
Parquet schema name them, as in the tables that this module writes.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.backward_factors import BackwardTimes
from headrace.errors import UserError
from headrace.plan import GENERATOR, LLM

if TYPE_CHECKING:
    from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Columns = Mapping[str, Floats]

ID, TOKENS = "sample_id", "tokens"
COST, MEMORY, BYTES = "cost_", "memory_", "bytes_"
STDIN = "-"
_EMPTY = "{} has no row; a global batch needs at least one sample"
_PARQUET, _JSONL = (".parquet", ".pq"), (".jsonl", ".ndjson")
_TIME_UNIT, _MEMORY_UNIT = b"headrace.time_unit", b"headrace.memory_unit"
_LARGEST_SUM = 1e300  # as in the planner: numbers computed from a sum of costs must be finite too
SECONDS, MEMORY_BYTES = "s", "bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """What each of n >= 1 samples, in arrival order, costs in every unit; columns by unit, units in pipeline order."""

    sample_ids: Ints
    """Sample ids, (n,), all different."""
    costs: Columns
    """Forward time of each sample in each whole unit, (n,) each, in `time_unit`; as in all columns finite and not negative."""
    memory: Columns | None = None
    """Activation memory that each whole unit keeps for each sample, (n,) each, in `memory_unit`."""
    transfer_bytes: Columns | None = None
    """Bytes that a stage of each unit sends to the next for each sample, (n,) each."""
    tokens: Ints | None = None
    """Length of each sample's LLM sequence, (n,)."""
    name: str = "the cost table"
    """Where the table comes from, for errors."""
    time_unit: str = ""
    """Unit of `costs`; empty if unknown."""
    memory_unit: str = ""
    """Unit of `memory`; empty if unknown."""
    measured: MeasuredCosts | None = None
    """Measured costs of the model that the table is of, for its backward and what microbatches take besides their samples."""

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units in pipeline order, at least one."""
        return tuple(self.costs)

    @property
    def backward(self) -> Mapping[str, BackwardTimes]:
        """Measured times of the backward over those of the forward, of the units for which they are known."""
        from headrace.reorder_service.planning.cost_model.cost import PARTS_OF

        return {} if self.measured is None else self.measured.backward_times([unit for unit in self.units if unit in PARTS_OF])

    def microbatch_s(self, backward_factors: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Return by unit the seconds of a microbatch besides those of its samples (`MeasuredCosts.microbatch_s`).

        Nothing where costs are not in seconds, or none were measured.
        """
        if self.measured is None or self.time_unit != SECONDS:
            return {}
        return self.measured.microbatch_s([unit for unit in self.backward if unit in backward_factors], backward_factors)

    def totals(self) -> dict[str, float]:
        """Return the cost of all samples together, by unit."""
        return {unit: float(column.sum()) for unit, column in self.costs.items()}

    def take(self, rows: Ints | slice) -> CostTable:
        """Return a table with the given rows only, in the given order."""

        def pick(columns: Columns | None) -> Columns | None:
            return None if columns is None else {unit: column[rows] for unit, column in columns.items()}

        return dataclasses.replace(
            self,
            sample_ids=self.sample_ids[rows],
            costs={unit: column[rows] for unit, column in self.costs.items()},
            memory=pick(self.memory),
            transfer_bytes=pick(self.transfer_bytes),
            tokens=None if self.tokens is None else self.tokens[rows],
        )


def read_cost_table(path: str) -> CostTable:
    """Read a cost table from a Parquet or JSONL file; `-` is JSONL on standard input.

    Raises UserError, which names the row and the rule that it breaks.
    """
    name = "standard input" if path == STDIN else path
    try:
        if path == STDIN:
            columns = _jsonl_columns(sys.stdin.buffer, name)
        elif Path(path).is_dir():
            raise UserError(
                f"{path} is a folder; `headrace inspect {path} --costs costs.parquet` makes a cost table of a data set"
            )
        elif path.endswith(_JSONL):
            with Path(path).open("rb") as file:
                columns = _jsonl_columns(file, name)
        elif path.endswith(_PARQUET):
            with Path(path).open("rb") as file:
                return _parquet_table(file, name)
        else:
            raise UserError(f"{path} is no cost table: give a .parquet or a .jsonl file, or - for JSONL on standard input")
    except OSError as err:
        raise UserError(f"cannot read {name}: {err.strerror or err}") from err
    return _checked(name, columns)


def is_cost_table(path: str) -> bool:
    """Whether a local Parquet or JSONL file has a column of costs. False for files that cannot be read."""
    try:
        if path.endswith(_JSONL):
            with Path(path).open("rb") as file:
                names = json.loads(file.readline())
        elif path.endswith(_PARQUET):
            with Path(path).open("rb") as file:
                names = pq.read_schema(file).names
        else:
            return False
    except (OSError, ValueError):  # pyarrow's error for a file that is no Parquet is a ValueError too
        return False
    return isinstance(names, dict | list) and any(str(name).startswith(COST) for name in names)


def in_pipeline_order(units: Iterable[str]) -> list[str]:
    """Sort units into pipeline order: encoders in the given order, then `llm`, then `generator`."""
    return sorted(units, key=lambda unit: (unit == LLM) + 2 * (unit == GENERATOR))


class CostTableWriter:
    """Writes a Parquet cost table piece by piece; the file gets its name once it is complete."""

    def __init__(self, path: Path) -> None:
        """Create the unfinished file. Raises UserError where `path` is not a Parquet file or cannot be written."""
        if path.suffix not in _PARQUET:
            raise UserError(f"a cost table is written as Parquet, so its name must end in .parquet, got {path}")
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._part.touch()
        except OSError as err:
            raise UserError(f"cannot write to {path}: {err.strerror}; name another file") from err

    def __enter__(self) -> CostTableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if kind is None and self._writer is not None:
            self._part.replace(self._path)
        else:
            self._part.unlink()

    def add(self, names: Sequence[str], tokens: Ints, costs: Columns, memory: Columns, transfer_bytes: Columns) -> None:
        """Append m samples: their names, and columns by unit of shape (m,), in seconds and bytes. Sample ids number the rows."""
        columns: dict[str, Any] = {
            ID: np.arange(self._rows, self._rows + len(names)),
            "name": pa.array(names, pa.string()),
            TOKENS: tokens,
        }
        for prefix, of_unit in ((COST, costs), (MEMORY, memory), (BYTES, transfer_bytes)):
            columns |= {prefix + unit: column for unit, column in of_unit.items()}
        units = {_TIME_UNIT: SECONDS.encode(), _MEMORY_UNIT: MEMORY_BYTES.encode()}
        table = pa.table(columns).replace_schema_metadata(units)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._part, table.schema)
        self._writer.write_table(table)
        self._rows += len(names)


def _parquet_table(file: IO[bytes], name: str) -> CostTable:
    """Read a Parquet cost table. Raises UserError.

    It reads without threads: a pool that still runs when the interpreter ends early, after an error, can abort the process.
    """
    try:
        parquet = pq.ParquetFile(file, pre_buffer=False)
        names, metadata = parquet.schema_arrow.names, parquet.schema_arrow.metadata or {}
        wanted = [column for column in names if _is_ours(column)]
        if twice := sorted({column for column in wanted if wanted.count(column) > 1}):
            raise UserError(f"{name} has more than one column {twice[0]!r}; column names must differ")
        table = parquet.read(columns=wanted, use_threads=False)
    except pa.ArrowException as err:
        raise UserError(f"{name} is no Parquet file that can be read ({' '.join(str(err).split())[:120]})") from err
    time_unit, memory_unit = (metadata.get(key, b"").decode(errors="replace") for key in (_TIME_UNIT, _MEMORY_UNIT))
    columns = {column: table[column].combine_chunks() for column in wanted}
    return dataclasses.replace(_checked(name, columns), time_unit=time_unit, memory_unit=memory_unit)


def _jsonl_columns(file: IO[bytes], name: str) -> dict[str, pa.Array]:
    """Read the columns of a JSONL cost table; every line must be an object with the columns of the first. Raises UserError."""
    columns: dict[str, list[Any]] | None = None
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as err:
            raise UserError(f"{name}, line {number}: not JSON ({err}); every line must be one object") from err
        if not isinstance(row, dict):
            raise UserError(f"{name}, line {number}: every line must be one JSON object, not {type(row).__name__}")
        row = {key: value for key, value in row.items() if _is_ours(key)}
        if columns is None:
            columns = {key: [] for key in row}
        if row.keys() != columns.keys():
            odd = min(row.keys() ^ columns.keys())
            raise UserError(f"{name}, line {number}: {odd!r} must be in every line or in none")
        for key, value in row.items():
            columns[key].append(_json_number(value, key, f"{name}, line {number}"))
    if columns is None:
        raise UserError(_EMPTY.format(name))
    return {key: _json_column(values, key, name) for key, values in columns.items()}


def _json_number(value: Any, key: str, place: str) -> int | float:
    kinds = (int,) if key in (ID, TOKENS) else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise UserError(f"{place}: {key} must be {'a whole number' if len(kinds) == 1 else 'a number'}, got {json.dumps(value)}")
    return value


def _json_column(values: list[int | float], key: str, name: str) -> pa.Array:
    whole = key in (ID, TOKENS)
    try:
        return pa.array(values if whole else [float(value) for value in values], pa.int64() if whole else pa.float64())
    except (OverflowError, pa.ArrowInvalid) as err:
        raise UserError(f"{name}: a {key} does not fit into 64 bits") from err


def _is_ours(column: str) -> bool:
    return column in (ID, TOKENS) or column.startswith((COST, MEMORY, BYTES))


def _checked(name: str, columns: Mapping[str, pa.Array]) -> CostTable:
    """Make a cost table of raw columns. Raises UserError where they break a rule."""
    units = in_pipeline_order(column.removeprefix(COST) for column in columns if column.startswith(COST))
    if ID not in columns:
        raise UserError(f"{name} has no column {ID!r}; number the samples with whole numbers that differ")
    if not units:
        raise UserError(f"{name} has no column of costs; name one cost_<unit> per unit, like cost_encoder and cost_llm")
    if "" in units:
        raise UserError(f"{name}: the column {COST!r} names no unit; call it cost_<unit>, like cost_llm")
    if not len(columns[ID]):
        raise UserError(_EMPTY.format(name))
    ids = _whole(name, ID, columns[ID])
    _check_different(name, ids)

    def family(prefix: str) -> Columns | None:
        there = [column for column in columns if column.startswith(prefix)]
        if there and set(there) != {prefix + unit for unit in units}:
            raise UserError(f"{name} has {', '.join(there)} for the units {', '.join(units)}; give one for each of them or none")
        return {unit: _measure(name, prefix + unit, columns[prefix + unit], ids) for unit in units} if there else None

    costs = family(COST)
    assert costs is not None
    return CostTable(
        name=name,
        sample_ids=ids,
        costs=costs,
        memory=family(MEMORY),
        transfer_bytes=family(BYTES),
        tokens=_whole(name, TOKENS, columns[TOKENS]) if TOKENS in columns else None,
    )


def _whole(name: str, column: str, values: pa.Array) -> Ints:
    if not pa.types.is_integer(values.type):
        raise UserError(f"{name}: {column} must be whole numbers (int64), not {values.type}")
    _check_no_null(name, column, values)
    try:
        numbers: Ints = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as err:
        raise UserError(f"{name}: a {column} does not fit into 64 bits") from err
    if column == TOKENS and (wrong := np.flatnonzero(numbers < 0)).size:
        raise UserError(f"{name}, row {wrong[0]}: tokens must not be negative, got {numbers[wrong[0]]}")
    return numbers


def _measure(name: str, column: str, values: pa.Array, ids: Ints) -> Floats:
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise UserError(f"{name}: {column} must be numbers (float64), not {values.type}")
    _check_no_null(name, column, values)
    numbers: Floats = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if wrong.size:
        row = int(wrong[0])
        raise UserError(f"{name}, row {row} (sample {ids[row]}): {column} must be finite and not negative, got {numbers[row]}")
    if numbers.max() > _LARGEST_SUM / numbers.size:
        row = int(numbers.argmax())
        raise UserError(f"{name}, row {row} (sample {ids[row]}): {column} is too large to add up, got {numbers[row]}")
    return numbers


def _check_no_null(name: str, column: str, values: pa.Array) -> None:
    if values.null_count:
        row = values.is_null().index(True).as_py()
        raise UserError(f"{name}, row {row}: {column} must not be empty; a sample that a unit does not see costs 0 there")


def _check_different(name: str, ids: Ints) -> None:
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if twice.size:
        first, second = int(order[twice[0]]), int(order[twice[0] + 1])
        raise UserError(f"{name}: sample ids must differ, but rows {first} and {second} both have {ids[first]}")
