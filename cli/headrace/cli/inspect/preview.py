"""`headrace inspect --preview`: shows samples as the model will see them, taken through the real pipeline.

This module makes the cards of the contact sheet from the arrays that a trainer would get; inspect.contact_sheet draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image

from headrace.cli.inspect.contact_sheet import CaptionedPicture, Card, Token, draw_sheet
from headrace.errors import UserError
from headrace.preprocessor.decoding import Row
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.text.sequence import PromptTemplate
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import Rejected
from headrace.sample import LABEL_IGNORED, SampleRef
from headrace.spec import AudioSpec, ImageSpec

_SPECTRUM_SPAN = 2.0  # largest distance of a log-mel value from the maximum: 8 / 4, see headrace.preprocessor.audio


class PreviewJob(JobWork):
    """A job that decodes samples one by one."""

    def row(self, ref: SampleRef) -> Row | Rejected:
        """Return the decoded sample, or why it is refused.

        Raises DatasetError, OSError or MemoryError where it cannot be read on this machine.
        """
        return self._attempt(ref, self.processor.decode)


def write_preview(out: Path, job: PreviewJob, refs: Sequence[SampleRef], *, title: str, subtitle: str) -> Path:
    """Decode at least one sample of a job and write the contact sheet of all as a PNG; close the job and return `out`.

    Raises SpecError where the job's spec does not fit, UserError where `out` cannot be written.
    """
    text = job.spec.text
    template = load_template(text)
    try:
        with ThreadPoolExecutor() as pool:
            cards = list(pool.map(lambda ref: _card(job, ref, template), refs))
    finally:
        job.close()
    sheet = draw_sheet(cards, title=title, subtitle=f"{subtitle}; template {text.template}")
    try:
        sheet.save(out)
    except OSError as err:
        raise UserError(f"cannot write {out}: {err.strerror}; name another folder with --out") from err
    return out


def _card(job: PreviewJob, ref: SampleRef, template: PromptTemplate) -> Card:
    row = job.row(ref)
    name = job.sample_name(ref)
    if isinstance(row, Rejected):
        return Card(name=name, reason=str(row.reason), detail=row.detail)
    learnt = int(np.count_nonzero(row.labels != LABEL_IGNORED))
    return Card(
        name=name,
        detail=f"{len(row.input_ids):,} tokens, {learnt:,} with loss",
        images=tuple(_images(row, job.spec.image)),
        spectra=tuple(_spectra(row, job.spec.audio)),
        tokens=tuple(tokens_of(row.input_ids, row.labels, template)),
    )


def tokens_of(input_ids: NDArray[np.int32], labels: NDArray[np.int32], template: PromptTemplate) -> Iterator[Token]:
    """Yield the tokens of a sequence as they are shown, a run of equal media placeholders as one; both arrays are (T,)."""
    media = {template.vocabulary.image_token: "image", template.vocabulary.audio_token: "audio"}
    control = set(template.encoder.control.values())
    start = 0
    for medium, group in groupby(input_ids.tolist(), key=media.get):
        ids = list(group)
        if medium is not None:
            yield Token(text=f"<{medium} x {len(ids):,}>", kind=medium, learnt=False, count=len(ids))
            start += len(ids)
            continue
        for text, count in template.encoder.pieces(ids):
            kind = "control" if count == 1 and int(input_ids[start]) in control else "text"
            learnt = bool((labels[start : start + count] != LABEL_IGNORED).any())
            yield Token(text=text, kind=kind, learnt=learnt, count=count)
            start += count


def reassemble(patches: NDArray[np.uint8], height: int, width: int, spec: ImageSpec) -> NDArray[np.uint8]:
    """Return the pixels of one image, (height * patch, width * patch, 3), from patches (height * width, 3 * patch * patch).

    The inverse of headrace.preprocessor.image.to_patches.
    """
    patch, merge = spec.patch, spec.merge
    # axes: group row, group column, row in group, column in group, channel, y, x
    cells = patches.reshape(height // merge, width // merge, merge, merge, 3, patch, patch)
    return np.ascontiguousarray(cells.transpose(0, 2, 5, 1, 3, 6, 4)).reshape(height * patch, width * patch, 3)


def _images(row: Row, spec: ImageSpec) -> Iterator[CaptionedPicture]:
    start = 0
    for _, height, width in row.image_grids.tolist():
        pixels = reassemble(row.patches[start : start + height * width], height, width, spec)
        start += height * width
        caption = f"{width * spec.patch} x {height * spec.patch} px, {width} x {height} patches"
        if spec.fit != "anyres":  # whose tiles have no tokens of their own
            caption += f" = {_tokens(height * width // spec.merge**2)}"
        yield CaptionedPicture(picture=Image.fromarray(pixels), caption=caption, cell_px=spec.patch * spec.merge)


def _spectra(row: Row, spec: AudioSpec) -> Iterator[CaptionedPicture]:
    start = 0
    for frames in row.mel_frames.tolist():
        mel = row.mel[start : start + frames].astype(np.float32)
        start += frames
        bright = 1 + (mel - mel.max(initial=-np.inf)) / _SPECTRUM_SPAN
        pixels = (colormaps["magma"](bright.T[::-1])[..., :3] * 255).round().astype(np.uint8)
        caption = f"{frames * spec.hop_s:.1f} s, {frames:,} frames x {spec.mel_bins} bins = {_tokens(spec.num_tokens(frames))}"
        yield CaptionedPicture(picture=Image.fromarray(pixels), caption=caption)


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"
