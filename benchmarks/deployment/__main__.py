"""`python -m benchmarks.deployment`: what further hosts add, and what mutual TLS and tokens take."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from time import process_time

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from benchmarks.deployment.hosts import SHARE, hosts
from benchmarks.deployment.hosts_fleet import OTHERS_CORE, PLAIN, Fleet, Papers, fleet
from benchmarks.deployment.links import Quality, links, told
from benchmarks.preprocess.inputs import large_photos
from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.services import pin
from benchmarks.preprocess.workload import SampleDecoder, captions, write_photos
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_least
from benchmarks.timing import progress

COUNTS = (1, 2, 4)
PHOTOS, PHOTO_SHARDS = 1_600, 16
ROUNDS, SECONDS = 5, 16.0  # a step of one host takes 2.5 s, and a turn is measured in whole ones
QUALITY = Quality(delay_s=0.001, loss=0.001)
"""Of the way between the trainer and each host."""
LINEAR, ENCRYPTED = 0.95, 0.95
CIPHERED_BYTES, CIPHERED_TIMES = 1 << 20, 300
RAY_DATA = Rival(value=1.12 / 4, source="Ray Data, published: 1.12 x from 4 nodes")


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployment", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where deployment.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 6.0) if options.quick else (ROUNDS, SECONDS)
    number = sum(COUNTS) + 1
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as name,
        links(number, QUALITY) as between,
        hosts(number, linked=True) as every,
    ):
        pin(between.pid, OTHERS_CORE)
        folder = Path(name)
        progress(f"writing {PHOTOS:,} photographs")
        write_photos(folder / "photos", PHOTOS, PHOTO_SHARDS)
        closed = _papers(folder / "papers")
        with contextlib.ExitStack() as stack:
            fleets: dict[str, Fleet] = {}
            free = iter(every)
            ours = [(f"{count}", count, closed) for count in COUNTS]
            for label, count, papers in [ours[0], ("plain", 1, PLAIN), *ours[1:]]:  # what is compared follows one another
                progress(f"starting {count} hosts ({label})")
                on = [next(free) for _ in range(count)]
                running = fleet(folder / "photos", on, papers, folder / f"fleet-{label}", seconds=seconds)
                fleets[label] = stack.enter_context(running)
            readings = _readings(fleets, rounds)
        frames, lost = told(between)
    report = Report(
        benchmark="deployment",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[_scaling(readings, f"{lost:,} of {frames:,} frames were lost"), _encryption(readings)],
    )
    report.write(options.results / "deployment.json")
    report.show()


def _readings(fleets: Mapping[str, Fleet], rounds: int) -> dict[str, list[Reading]]:
    """What each fleet delivers in turns; a first turn of each is not counted."""
    readings: dict[str, list[Reading]] = {label: [] for label in fleets}
    for number in range(rounds + 1):
        progress(f"turn {number} of {rounds}")
        for label, running in fleets.items():
            reading = running.turn()
            if number:
                readings[label].append(reading)
    return readings


def _scaling(readings: Mapping[str, list[Reading]], ways: str) -> Section:
    rates = {label: [_rate(reading) for reading in of] for label, of in readings.items()}
    rows = [Row(name="one host", value=median(rates["1"]), unit="samples/s", detail=ways)]
    for count in COUNTS[1:]:
        shares = [many / (count * one) for one, many in zip(rates["1"], rates[str(count)], strict=True)]
        rows.append(
            Row(
                name=f"{count} hosts: share of linear",
                value=median(shares),
                rival=RAY_DATA if count == COUNTS[-1] else None,
                goal=at_least(LINEAR),
                detail=f"turns: {', '.join(f'{share:.2f}' for share in shares)}",
            )
        )
    title = (
        f"Preprocessors on hosts of {SHARE:g} of a core each (network namespaces with addresses of their own, {QUALITY.words}); "
        "by Arrow Flight, with mutual TLS and tokens"
    )
    return Section(title=title, rows=rows)


def _encryption(readings: Mapping[str, list[Reading]]) -> Section:
    turns = list(zip(readings["1"], readings["plain"], strict=True))
    shares = [_rate(closed) / _rate(plain) for closed, plain in turns]
    closed_ms, plain_ms = (median(_cpu_ms(turn[k]) for turn in turns) for k in (0, 1))
    of_cpu = [_cpu_ms(plain) / _cpu_ms(closed) for closed, plain in turns]
    num_bytes = _sample_bytes()
    cipher_ms = 1e3 * num_bytes / _cipher_rate()
    rows = [
        Row(
            name="samples with mutual TLS and tokens, of those without",
            value=median(shares),
            goal=at_least(ENCRYPTED),
            detail=f"turns: {', '.join(f'{share:.2f}' for share in shares)}",
        ),
        Row(
            name="by the preprocessor's processor time, which other programs lengthen less than they lower rates",
            value=median(of_cpu),
            detail=f"a sample takes {closed_ms:.2f} ms with, {plain_ms:.2f} ms without",
        ),
        Row(
            name="if nothing but the cipher itself were added",
            value=plain_ms / (plain_ms + cipher_ms),
            detail=f"AES-256-GCM of the {num_bytes / 1e6:.2f} MB of a sample takes {cipher_ms:.2f} ms",
        ),
    ]
    return Section(title="What closed doors leave of a host that is held to a share of a core", rows=rows)


def _rate(reading: Reading) -> float:
    """Samples per second."""
    return reading.samples / reading.seconds


def _cpu_ms(reading: Reading) -> float:
    """Milliseconds of processor time that all preprocessors took for each sample that the trainer had."""
    return 1e3 * sum(reading.watched_cpu_s) / reading.samples


def _sample_bytes() -> float:
    """The mean size of a decoded sample."""
    decode, texts = SampleDecoder(), captions()
    rows = [decode(jpeg, texts[k % len(texts)].decode()) for k, jpeg in enumerate(large_photos())]
    return mean(row.patches.nbytes + row.input_ids.nbytes + row.labels.nbytes for row in rows)


def _cipher_rate() -> float:
    """Bytes that AES-256-GCM, which TLS between two Flight ends agrees on, encrypts in a second of processor time: the best."""
    data, rates = bytes(CIPHERED_BYTES), []
    out = bytearray(len(data) + 16)
    for _ in range(CIPHERED_TIMES):
        encryptor = Cipher(algorithms.AES256(bytes(32)), modes.GCM(bytes(12))).encryptor()
        began_s = process_time()
        encryptor.update_into(data, out)
        rates.append(len(data) / (process_time() - began_s))
    return max(rates)


def _papers(folder: Path) -> Papers:
    """Make certificates and tokens as a user does, and say who gets what."""
    for command in (["certs", str(folder)], ["tokens", str(folder / "tokens")]):
        subprocess.run([sys.executable, "-m", "headrace.cli", *command], check=True, capture_output=True)
    tokens = folder / "tokens"
    with (tokens / "submit").open("a", encoding="utf-8") as submit:  # the trainer's process submits the job, too
        submit.write((tokens / "train").read_text(encoding="utf-8"))

    def of(part: str, role: str) -> dict[str, str]:
        return {"HEADRACE_TLS": str(folder / part), "HEADRACE_CLUSTER_TOKEN_FILE": str(tokens / role)}

    return Papers(
        reorder={"HEADRACE_TLS": str(folder / "reorder"), "HEADRACE_TOKENS": str(tokens)},
        preprocessor=of("preprocessor", "preprocess") | {"HEADRACE_TOKENS": str(tokens)},
        trainer=of("trainer", "train"),
    )


if __name__ == "__main__":
    main()
