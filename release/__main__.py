"""`python -m release`: make of the commit that is checked out what is published of it, in build/dist."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from release.building import build_twice, members
from release.contents import check_contents
from release.errors import ReleaseError
from release.notes import notes
from release.signing import sign, write_sums
from release.tree import check_history, check_tags, check_version, checked_out, export
from release.trial import STEPS, try_out

ROOT = Path(__file__).parents[1]
SUMS = "SHA256SUMS"
NOTES = "RELEASE_NOTES.md"


def main(arguments: list[str] | None = None) -> int:
    """0: build/dist has a release; 2: something is to be done first, and build/dist is as it was."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the clone (default: this one)")
    parser.add_argument("--key", default="", metavar="KEY", help="file of a private SSH key, or what GnuPG knows a key by")
    parser.add_argument("--unsigned", action="store_true", help="sign nothing")
    args = parser.parse_args(arguments)
    try:
        release(args.root.resolve(), args.key, unsigned=args.unsigned)
    except ReleaseError as err:
        print(f"release: {err}", file=sys.stderr)
        return 2
    return 0


def release(root: Path, key: str, *, unsigned: bool) -> None:
    """Build, check, try, sum and sign. Raises ReleaseError with the first thing that is wrong."""
    if not key and not unsigned:
        raise ReleaseError("nothing would be signed: name a key by RELEASE_KEY=KEY, or say UNSIGNED=1 to try it without")
    commit = checked_out(root)
    check_version(commit.version)
    told = notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), commit.version)
    check_tags(root, commit)
    check_history(root, commit.version)
    day = time.strftime("%Y-%m-%d", time.gmtime(commit.epoch_s))
    print(f"headrace {commit.version}, of commit {commit.name[:12]} of {day}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-release-") as temporary:
        folder = Path(temporary)
        archives = build_twice(lambda place: export(root, commit, place), folder, commit.epoch_s)
        check_contents(archives, folder / "sources", commit.version)
        print("built twice, with the same bytes; each file of the package is in it, and no other:")
        for archive in (archives.wheel, archives.sdist):
            print(f"  {archive.name}: {archive.stat().st_size / 1e6:.1f} MB, {len(members(archive))} files")
        _check_description([archives.wheel, archives.sdist])
        print("twine finds no fault; trying it in an empty environment (some minutes)", flush=True)
        said = try_out(archives.wheel, commit.version, folder / "trial")
        print(f"  {said}; the demo has trained {STEPS} steps")
        ready = folder / "dist"
        ready.mkdir()
        for archive in (archives.wheel, archives.sdist):
            shutil.copyfile(archive, ready / archive.name)
        (ready / NOTES).write_text(told, encoding="utf-8")
        write_sums(ready.iterdir(), ready / SUMS)
        print(f"signed: {sign(ready / SUMS, key).name}" if key else "NOT SIGNED: not to be published")
        out = root / "build" / "dist"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(ready, out)
    print(f"build/dist has {', '.join(sorted(file.name for file in out.iterdir()))}")


def _check_description(files: list[Path]) -> None:
    """Raise ReleaseError where an index would not show what the archives say of themselves."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["it says nothing"]
        raise ReleaseError(f"twine check --strict finds fault: {last[0]}")


if __name__ == "__main__":
    sys.exit(main())
