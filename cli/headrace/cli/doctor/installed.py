"""What of Headrace is installed: its release, the packages that it asks for, and its extras."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Sequence

from packaging.requirements import Requirement

from headrace.admission import PROTOCOL, release
from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, warning

EXTRAS = {
    "preprocessor": "reading and decoding samples: `headrace preprocessor`, `inspect`, `compare`",
    "trainer": "`headrace train`, and the loader for loops of your own",
    "av": "M4A, AAC and WebM recordings",
    "lance": "Lance data sets",
    "s3": "shards at s3://",
    "http": "shards at https://",
    "huggingface": "published models",
    "integrations": "the loops of Accelerate, Lightning and Megatron-Core",
    "ray": "preprocessors on a Ray cluster",
    "rdma": "payload by UCX, which is RDMA where there is a fabric",
    "trace": "OpenTelemetry traces",
}
"""Extra -> what it gives. Those for developers are left out."""

Lookup = Callable[[str], str | None]
"""Returns the version of an installed package; None if it is not installed."""


_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


def installed_version(package: str) -> str | None:
    """Return the version of a package in this interpreter; None if it is not installed."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    said = _VERSION.search(found.read_text("METADATA") or "")
    return said[1] if said else found.version  # which parses all of it: half a second for the packages of an installation


def requirements() -> list[Requirement] | None:
    """Return what the installed Headrace asks for, those of extras with their markers; None if it is not installed."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires("headrace") or ()]
    except importlib.metadata.PackageNotFoundError:
        return None


def interpreter() -> Iterator[Diagnosis]:
    """Tell of Python and the release. Where Headrace is not installed its release is unknown to itself and its peers."""
    yield ok("Python", f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})")
    if release() == "unknown":
        install = "install it, for example with `pip install headrace`"
        yield warning("release", f"Headrace is run from its sources, without a release; protocol {PROTOCOL}", install)
    else:
        yield ok("release", f"headrace {release()}, protocol {PROTOCOL}")


def packages(asked: Sequence[Requirement] | None, version_of: Lookup = installed_version) -> Iterator[Diagnosis]:
    """Tell whether the packages that every installation needs are there, in versions that Headrace works with.

    Those of extras are not among them: a reorder service runs without what `pip install headrace` brings for the demo.
    """
    if asked is None:
        yield warning("packages", "Headrace is not installed, so nothing says which it needs", "install it with pip")
        return
    of_extras = {one.name for one in asked if not _applies(one, "") and any(_applies(one, extra) for extra in EXTRAS)}
    needed = [one for one in asked if _applies(one, "") and one.name not in of_extras]
    wrong = [found for one in needed if (found := _shortcoming(one, version_of))]
    if wrong:
        install = " ".join(f"'{one.name}{one.specifier}'" for one in needed if _shortcoming(one, version_of))
        yield fault("packages", "; ".join(wrong), f"`pip install {install}`")
    else:
        yield ok("packages", f"all {len(needed)} that Headrace needs, in versions that it works with")


def extras(asked: Sequence[Requirement] | None, version_of: Lookup = installed_version) -> Iterator[Diagnosis]:
    """Tell which extras are whole, what each that is not installed would give, and what the others lack.

    An extra counts as wanted if more than half of its packages are installed: single ones come with other packages, too.
    """
    if asked is None:
        return
    whole, others = [], []
    for extra, gives in EXTRAS.items():
        own = [one for one in asked if _applies(one, extra) and not _applies(one, "")]
        wrong = [found for one in own if (found := _shortcoming(one, version_of))]
        num_installed = sum(version_of(one.name) is not None for one in own)
        install = f"`pip install 'headrace[{extra}]'`"
        if not wrong:
            whole.append(extra)
        elif 2 * num_installed > len(own):
            others.append(warning(f"extra {extra}", f"for {gives}; {'; '.join(wrong)}", install))
        else:
            others.append(ok(f"extra {extra}", f"not installed; it gives {gives}", install))
    yield ok("extras", f"whole: {', '.join(whole) or 'none'}")
    yield from others


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _shortcoming(requirement: Requirement, version_of: Lookup) -> str:
    """Return what is wrong with an installed package, as a clause; empty if nothing is."""
    version = version_of(requirement.name)
    if version is None:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, and Headrace works with {requirement.specifier}"
