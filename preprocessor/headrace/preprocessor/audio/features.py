"""Log-mel features of decoded recordings, by torch; see `headrace.preprocessor.audio` for their definition."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from headrace.preprocessor.audio.analysis_window import silence_behind, window_samples
from headrace.preprocessor.audio.resampler import resampler
from headrace.spec import AudioSpec
from headrace.torchaudio_import import torchaudio

# Sample rates without a large common divisor would need a filter for every phase: 44,101 to 16,000 Hz takes 2.8 GB. A
# ratio with a small denominator is exact for all usual rates and less than 0.1 % off for the others.
_MAX_DENOMINATOR = 1000


def log_mel(
    mono: NDArray[np.float32], rate: int, num_samples: int, is_split: bool, lengths: Sequence[int], spec: AudioSpec
) -> tuple[NDArray[np.float16], bool]:
    """Return the features of a recording, and whether all of them were finite before the conversion to float16.

    mono: (frames,) at `rate`, which are `num_samples` at the job's. lengths: the mel frames of each piece that it is split into,
    of one where it is not split. The features of all pieces, (sum of the lengths, mel_bins), are one behind the other.
    """
    with torch.inference_mode():
        samples = _resample(torch.from_numpy(mono), rate, num_samples, spec)
        mel, finite, begin = np.empty((sum(lengths), spec.mel_bins), np.float16), True, 0
        pieces = torch.split(samples, spec.most_frames * spec.hop_samples) if is_split else (samples,)
        for piece, frames in zip(pieces, lengths, strict=False):  # the last piece may be left out
            silence = silence_behind(len(piece), spec)
            features = _log_mel(pad(piece, (0, silence)) if silence else piece, spec)[:frames]
            mel[begin : begin + frames] = features.to(torch.float16).numpy()
            finite, begin = finite and bool(features.isfinite().all()), begin + frames
        return mel, finite


def _resample(mono: Tensor, rate: int, num_samples: int, spec: AudioSpec) -> Tensor:
    """Resample (frames,) at a rate to (num_samples,) at the job's."""
    if rate == spec.sample_rate:
        return mono
    ratio = Fraction(spec.sample_rate, rate).limit_denominator(_MAX_DENOMINATOR)
    resampled = mono if ratio == 1 else resampler(ratio)(mono)
    missing = num_samples - len(resampled)  # rounding of the ratio
    return pad(resampled, (0, missing)) if missing > 0 else resampled[: len(resampled) + missing]


def _log_mel(samples: Tensor, spec: AudioSpec) -> Tensor:
    """Return the log-mel features of (samples,): (1 + samples // hop or one more, mel_bins)."""
    transform = _mel_transform(spec)
    window = transform.spectrogram.window
    spectrum = torch.view_as_real(
        torch.stft(samples, transform.n_fft, transform.hop_length, len(window), window, pad_mode="reflect", return_complex=True)
    )
    real, imaginary = spectrum[..., 0], spectrum[..., 1]
    power = real.square().addcmul_(imaginary, imaginary)  # without torchaudio, which takes a root and squares it again
    log: Tensor = (power.T @ transform.mel_scale.fb).clamp_(min=1e-10).log10_()
    return log.clamp_(min=log.max() - 8.0).add_(4.0).div_(4.0)


@lru_cache(maxsize=8)
def _mel_transform(spec: AudioSpec) -> Any:
    """Return torchaudio's cached mel transform, of which the window, the sizes and the mel filters are used."""
    window = window_samples(spec)
    return torchaudio.transforms.MelSpectrogram(
        sample_rate=spec.sample_rate,
        n_fft=window + window % 2,
        win_length=window,
        hop_length=spec.hop_samples,
        n_mels=spec.mel_bins,
        power=2.0,
        norm="slaney",
        mel_scale="slaney",
    )
