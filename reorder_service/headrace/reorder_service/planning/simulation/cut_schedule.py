"""Schedule tables in which the passes of some units are cut into pieces, as trainers run them on ranks that units share."""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Ints
from headrace.reorder_service.planning.simulation.timed_schedule import BEFORE, CHUNK, EXIT, KIND, UNIT, WAITS
from headrace.schedule import Kind


def in_pieces(table: Ints, pieces: Ints) -> Ints:
    """Return a table of `timed_schedule` with as many rows in the place of each as its unit has pieces.

    pieces: (U,) of each unit, more than 1 only for units in one stage and one chunk. A forward goes from the first piece to the
    last, everything else back; CHUNK has the number of the piece. The first of them waits for what the whole pass waits for, and
    only the last one has its result.
    """
    counts = pieces[table[:, UNIT]]
    ends = np.cumsum(counts)
    row = np.repeat(np.arange(len(table)), counts)
    place = np.arange(row.size) - (ends - counts)[row]
    is_first, is_last = place == 0, place == counts[row] - 1
    number = np.where(table[row, KIND] == Kind.FORWARD, place, counts[row] - 1 - place)
    cut: Ints = table[row]
    cut[:, CHUNK] = np.where(counts[row] > 1, number, cut[:, CHUNK])
    cut[:, EXIT] *= is_last
    last_of = np.append(ends - 1, -1)
    cut[:, BEFORE] = np.where(is_first, last_of[cut[:, BEFORE]], np.arange(row.size) - 1)
    cut[:, WAITS:] = np.where(is_first[:, None], last_of[cut[:, WAITS:]], -1)
    return cut
