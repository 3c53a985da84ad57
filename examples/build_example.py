"""Make the bundled example: pick freely licensed samples from a folder of data sets, add composed ones, train the tokenizer.

FOLDER holds `ATTRIBUTION.csv` and the WebDatasets chartqa-like, synthchart-like, cocoqa-like and omni. A sample is taken only if
every origin of every one of its members is CC0, public domain or CC-BY. Needs espeak-ng. Run it from the root of the repository:

    python -m examples.build_example FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.building.composed import picture_pages, spoken_questions, texts, tones, transcripts
from examples.building.samples import Sample, read_samples, write_shards
from examples.building.tokenizer import sample_texts, train_tokenizer

ROOT = Path(__file__).parent.parent


def main(argv: Sequence[str] | None = None) -> None:
    """Write the shards, ATTRIBUTION.csv and tokenizer.json."""
    options = _parser().parse_args(argv)

    def picked(data_set: str) -> list[Sample]:
        samples = read_samples(options.folder, data_set)
        return [sample for sample in samples if sample.admitted and sample.num_bytes <= options.max_sample_bytes]

    charts, tables, photos = picked("chartqa-like"), picked("synthchart-like"), picked("cocoqa-like")
    shards = {
        "charts-00000": charts[0::2],
        "charts-00001": charts[1::2],
        "tables-00000": tables[0::2],
        "tables-00001": tables[1::2],
        "pictures-00000": [*photos, *picked("omni"), *picture_pages(photos, 12)],
        "speech-00000": [*spoken_questions(charts, 16), *transcripts()],
        "sound-00000": list(tones()),
        "text-00000": list(texts(tables, 20)),
    }
    write_shards(options.out, shards)
    everything = [sample for samples in shards.values() for sample in samples]
    tokenizer = train_tokenizer(sample_texts(everything), options.vocab_size)
    tokenizer.save(str(options.tokenizer))
    print(f"{len(everything)} samples in {options.out}, {tokenizer.get_vocab_size()} tokens in {options.tokenizer}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build_example", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=ROOT / "examples/data", help="folder of the shards")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=ROOT / "preprocessor/headrace/preprocessor/text/tokenizer.json",
        help="tokenizer to write",
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="most tokens of the tokenizer (default %(default)s)")
    parser.add_argument("--max-sample-bytes", type=int, default=45_000, help="larger samples stay out (default %(default)s)")
    return parser


if __name__ == "__main__":
    main()
