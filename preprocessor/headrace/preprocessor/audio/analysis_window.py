"""Lengths in samples that follow from a job's audio section."""

from __future__ import annotations

import math

from headrace.spec import AudioSpec


def window_samples(spec: AudioSpec) -> int:
    """Return the samples of an analysis window."""
    return max(2, round(spec.window_s * spec.sample_rate))


def silence_behind(num_samples: int, spec: AudioSpec) -> int:
    """Return how many zeros go behind a recording for its last mel frame, up to the longest recording that there may be."""
    room = math.ceil(spec.most_samples(spec.sample_rate)) - num_samples
    return max(0, min(window_samples(spec), room)) if spec.last_frame == "pad" else 0
