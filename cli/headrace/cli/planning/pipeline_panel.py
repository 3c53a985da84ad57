"""Drawing of one simulated step: a row per stage or per rank that units share, a box per action, critical path and deferrals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.tracks import Tracks
from headrace.reorder_service.planning.simulation.simulator import Timeline
from headrace.schedule import Kind

INK, QUIET, IDLE, GAIN = "#22303c", "#66757f", "#e9edf0", "#2b7a43"
WIDTH_IN, LEFT, RIGHT = 13.0, 0.105, 0.985
MAX_ROWS = 16  # rows of one panel; if all replicas need more, only the slowest are drawn
_ROW_IN, _HEAD_IN, _GAP_IN = 0.27, 0.3, 0.45
ROW_FILL = 0.86  # height of a box, in rows; the rest separates them
_REPLICA_GAP = 0.55
_NARROW_IN = 0.08  # narrower boxes get thinner white edges, in which they would vanish otherwise
_DEFERRED = "#f2b134"
# colours of (forward, backward, weight) for the units in pipeline order: a strong colour, its tint, and a shade between them
_COLOURS = (
    ("#12807a", "#93d1cb", "#56a8a3"),
    ("#d1603d", "#f5bfa8", "#e39073"),
    ("#6a4c93", "#c8b6e2", "#9981bb"),
    ("#3a6ea5", "#b3cde8", "#779ec7"),
    ("#8a6d1d", "#e0cf9a", "#b59e5c"),
)
_NUMBER_SIZES = (8, 6)  # points: the largest that fits into a box
_CHUNK_FADE = 0.16  # how much whiter each further part of the model on a stage is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """The part of a picture that shows one plan: its actions over time, on the replicas that are drawn."""

    outcome: Outcome
    timeline: Timeline
    tracks: Tracks
    """The rows in which the actions of the timeline are drawn."""
    replicas: list[int]
    """Indices of the replicas that are drawn, from the top."""
    row_in: float = _ROW_IN
    """Height of a row in inches."""
    plain: bool = False
    """Whether the critical path and the replicas' names are left out."""

    @classmethod
    def of(cls, outcome: Outcome, max_rows: int = MAX_ROWS, *, row_in: float = _ROW_IN, plain: bool = False) -> Panel:
        """Make the panel of a plan from its slowest replicas: as many as fit into `max_rows` rows, at least one."""
        timeline = outcome.timeline()
        tracks = Tracks.of(outcome, timeline)
        most = max(1, max_rows // tracks.most_of_a_replica)
        replicas = tracks.slowest(timeline, most)
        return cls(outcome=outcome, timeline=timeline, tracks=tracks, replicas=replicas, row_in=row_in, plain=plain)

    @property
    def height_in(self) -> float:
        """Height of the panel in inches, with headline and time axis."""
        num_tracks = int(np.isin(self.tracks.replica, self.replicas).sum())
        return (num_tracks + len(self.replicas) * _REPLICA_GAP) * self.row_in + _HEAD_IN + _GAP_IN

    @property
    def axes_in(self) -> float:
        """Height of the axes in inches, without headline and time axis."""
        return self.height_in - _HEAD_IN - _GAP_IN

    def rows(self) -> NDArray[np.float64]:
        """Return the (t,) row in which each track is drawn, from the top; NaN for those of replicas that are left out.

        The row of a stage that a replica does not have stays empty.
        """
        rows = np.full(self.tracks.replica.size, np.nan)
        top = 0.0
        for replica in self.replicas:
            tracks = np.flatnonzero(self.tracks.replica == replica)
            rows[tracks] = top + np.arange(tracks.size)
            top += tracks.size + _REPLICA_GAP
        return rows

    @property
    def shares_ranks(self) -> bool:
        """Whether the rows are ranks that take turns between units; otherwise they are stages."""
        return self.outcome.shared is not None

    @property
    def reading(self) -> str:
        """How to read the panel, in words."""
        if not self.shares_ranks:
            return (
                "Each row is one pipeline stage over time, the numbers are microbatches; the step ends when the slowest replica "
                "is done."
            )
        pieces = " (.1: the second piece)" if self.outcome.cut_units else ""
        return f"Each row is one rank over time, which takes turns between its units; the numbers are microbatches{pieces}."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Boxes:
    """The b boxes that are drawn: one for each drawn track of each action that takes time."""

    action: NDArray[np.int64]
    row: NDArray[np.float64]
    start: NDArray[np.float64]
    width: NDArray[np.float64]

    @classmethod
    def of(cls, panel: Panel, scale: float, chosen: NDArray[np.bool_] | None = None) -> _Boxes:
        """Return those of the chosen (a,) actions, or of all."""
        actions = panel.timeline
        lasting = actions.end_s > actions.start_s
        action, track = panel.tracks.boxes(np.flatnonzero(lasting if chosen is None else lasting & chosen))
        row = panel.rows()[track]
        action, row = action[np.isfinite(row)], row[np.isfinite(row)]
        start = actions.start_s[action] * scale
        return cls(action=action, row=row, start=start, width=(actions.end_s - actions.start_s)[action] * scale)


def draw_panel(axes: Axes, panel: Panel, scale: float, end: float) -> None:
    """Draw a panel's tracks and actions into `axes`.

    scale: factor by which times are multiplied. end: where the time axis ends, in scaled time.
    """
    axes.set_xlim(0, end * 1.012)
    rows = panel.rows()
    shown = rows[np.isfinite(rows)]
    iteration = panel.outcome.predicted.iteration_s * scale
    add_boxes(axes, np.zeros_like(shown), np.full_like(shown, iteration), shown, facecolors=IDLE)
    boxes = _Boxes.of(panel, scale)
    edge = 0.6 if boxes.width.size and np.median(boxes.width) * _inches(axes) > _NARROW_IN else 0.2
    colours = _face_colours(panel, boxes.action)
    add_boxes(axes, boxes.start, boxes.width, boxes.row, facecolors=colours, edgecolors="white", linewidths=edge)
    _mark_deferred(axes, panel, scale)
    if not panel.plain:
        _mark_critical(axes, panel, rows, scale)
    _write_numbers(axes, panel, boxes)
    _set_axes(axes, panel, rows)


def write_headline(axes: Axes, panel: Panel, headline: str, figures: str) -> None:
    """Write above a panel what it shows, its figures, and which replicas are drawn if not all are."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(headline, (0, 1), (0, 5), fontsize=11.5, fontweight="bold", color=INK, **place)
    axes.annotate(figures, (0, 1), (225, 5), fontsize=11, color=INK, **place)
    drawn, replicas = len(panel.replicas), int(panel.tracks.replica.max()) + 1
    if drawn < replicas:
        note = f"the slowest {drawn} of {replicas} replicas" if drawn > 1 else f"the slowest of {replicas} replicas"
        axes.annotate(note, (1, 1), (0, 5), ha="right", fontsize=9, color=QUIET, **place)


def legend_handles(panel: Panel) -> list[Patch | Line2D]:
    """Return the legend entries for the colours and marks of a panel."""
    handles: list[Patch | Line2D] = [
        Patch(facecolor=unit_colour(u, kind), label=f"{unit} {kind.name.lower()}")
        for u, unit in enumerate(panel.outcome.batch.units)
        for kind in Kind
        if kind in panel.timeline.kind or kind != Kind.WEIGHT
    ]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if not panel.plain:
        handles.append(Line2D([], [], color=INK, linewidth=1.6, label="critical path"))
    if panel.outcome.num_deferred():
        marker = {"marker": (3, 0, -45), "markersize": 7, "markeredgewidth": 0}
        handles.append(Line2D([], [], color=_DEFERRED, linestyle="none", label="passes samples on late (deferred)", **marker))  # type: ignore[arg-type]
    return handles


def unit_colour(unit: int, kind: Kind) -> str:
    """Return the colour of a kind of action of the unit of that index."""
    return _COLOURS[unit % len(_COLOURS)][kind]


def add_boxes(axes: Axes, start: NDArray[np.float64], width: NDArray[np.float64], row: NDArray[np.float64], **style: Any) -> None:
    """Draw (b,) boxes into rows that are numbered from the top."""
    left, right, top, bottom = start, start + width, row - ROW_FILL / 2, row + ROW_FILL / 2
    corners = np.stack([np.stack([left, right, right, left]), np.stack([top, top, bottom, bottom])], axis=-1)
    axes.add_collection(PolyCollection(list(corners.transpose(1, 0, 2)), **style), autolim=False)


def _inches(axes: Axes) -> float:
    """Return how many inches of the time axis a unit of it takes."""
    return float(axes.bbox.width / axes.figure.dpi / axes.get_xlim()[1])


def _face_colours(panel: Panel, action: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the (b, 3) RGB colours of the boxes of actions, by unit, kind and chunk; pieces, which are numbered, are alike."""
    actions = panel.timeline
    palette = np.array([[to_rgb(colour) for colour in of_unit] for of_unit in _COLOURS])
    unit = np.array(panel.outcome.unit_of_stage)[actions.stage[action]]
    colour = palette[unit % len(_COLOURS), actions.kind[action]]
    in_chunks = np.array([name not in panel.outcome.cut_units for name in panel.outcome.batch.units])[unit]
    fade = 1 - (1 - _CHUNK_FADE) ** (actions.chunk[action] * in_chunks)
    faded: NDArray[np.float64] = colour + (1 - colour) * fade[:, None]
    return faded


def _mark_deferred(axes: Axes, panel: Panel, scale: float) -> None:
    """Mark, by a corner, every forward on a unit's last stage with samples that the next unit takes in a later microbatch."""
    actions, late = panel.timeline, panel.outcome.num_samples(panel.outcome.deferred())
    unit = np.array(panel.outcome.unit_of_stage)
    last_stage = np.append(np.diff(unit) > 0, True)[actions.stage]
    holds = late[unit[actions.stage], actions.replica, actions.microbatch] > 0
    marked = _Boxes.of(panel, scale, holds & last_stage & (actions.kind == Kind.FORWARD))
    if not marked.action.size:
        return
    size = 0.085 / _inches(axes)  # the corner's side, 0.085 inches
    right = marked.start + marked.width
    top = marked.row - ROW_FILL / 2
    side = np.minimum(size, marked.width)
    corners = np.stack([np.stack([right - side, right, right]), np.stack([top, top, top + 0.085 / panel.row_in])], axis=-1)
    axes.add_collection(PolyCollection(list(corners.transpose(1, 0, 2)), facecolors=_DEFERRED, linewidths=0), autolim=False)


def _mark_critical(axes: Axes, panel: Panel, rows: NDArray[np.float64], scale: float) -> None:
    """Draw the critical path: a line under each of its actions, and thinner lines from each to the next."""
    actions = panel.timeline
    path = np.flatnonzero(actions.critical & (actions.end_s > actions.start_s))
    path = path[np.lexsort((actions.end_s[path], actions.start_s[path]))]
    level = rows[panel.tracks.first[path]] + ROW_FILL / 2 - 0.04
    begin = np.stack([actions.start_s[path] * scale, level], axis=-1)
    end = np.stack([actions.end_s[path] * scale, level], axis=-1)
    seen = np.isfinite(level)
    under = np.stack([begin, end], axis=1)[seen]
    across = np.stack([end[:-1], begin[1:]], axis=1)[seen[:-1] & seen[1:]]
    axes.add_collection(LineCollection(list(under), colors=INK, linewidths=1.6), autolim=False)
    axes.add_collection(LineCollection(list(across), colors=INK, linewidths=0.7), autolim=False)


def _write_numbers(axes: Axes, panel: Panel, boxes: _Boxes) -> None:
    """Write the index of the microbatch, and of the piece where a unit is cut, into the boxes that are wide enough for it."""
    outcome, actions = panel.outcome, panel.timeline
    is_cut = [outcome.batch.units[unit] in outcome.cut_units for unit in outcome.unit_of_stage]
    width_in = boxes.width * _inches(axes)
    for action, left, length, at, inches in zip(
        *(column.tolist() for column in (boxes.action, boxes.start, boxes.width, boxes.row, width_in)), strict=True
    ):
        number = str(actions.microbatch[action])
        labels = [f"{number}.{actions.chunk[action]}", number] if is_cut[actions.stage[action]] else [number]
        fitting = ((label, size) for label in labels for size in _NUMBER_SIZES if inches > size * (0.0106 * len(label) + 0.0037))
        if found := next(fitting, None):
            label, size = found
            ink = INK if actions.kind[action] == Kind.BACKWARD else "white"
            axes.text(left + length / 2, at, label, ha="center", va="center_baseline", fontsize=size, color=ink)


def _set_axes(axes: Axes, panel: Panel, rows: NDArray[np.float64]) -> None:
    drawn = np.flatnonzero(np.isfinite(rows))
    axes.set_ylim(float(rows[drawn].max()) + 0.6, -0.6)
    axes.set_yticks(rows[drawn].tolist(), [panel.tracks.names[track] for track in drawn.tolist()], fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    for replica in () if panel.plain else panel.replicas:
        of_replica = rows[panel.tracks.replica == replica]
        if panel.shares_ranks and of_replica.size == 1:
            continue  # the rank says it, and there is no room
        axes.annotate(
            f"replica {replica}", (0, float(of_replica.mean())), (-66, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", rotation=90, ha="center", va="center", fontsize=9, color=QUIET,
        )  # fmt: skip
