"""The sums of what is published, and a signature of them, by a key of SSH or of GnuPG."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from release.building import digest
from release.errors import ReleaseError

NAMESPACE = "headrace-release"
"""What an SSH key signs is for this use only; whoever verifies names it."""


def write_sums(files: Iterable[Path], out: Path) -> None:
    """Write SHA-256 sums in the form that `sha256sum --check` reads."""
    out.write_text("".join(f"{digest(file)}  {file.name}\n" for file in sorted(files)), encoding="utf-8")


def sign(file: Path, key: str) -> Path:
    """Sign a file, and return the signature, which is beside it: .sig of an SSH key, .asc of one of GnuPG.

    `key`: a file with a private SSH key, or what GnuPG knows a key by. Raises ReleaseError where it does not sign, or what it
    signs cannot be verified.
    """
    if Path(key).is_file():
        signature = file.with_name(f"{file.name}.sig")
        signature.unlink(missing_ok=True)
        _run(["ssh-keygen", "-Y", "sign", "-q", "-f", key, "-n", NAMESPACE, str(file)], key)
        _run(["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)], key, file.read_bytes())
    else:
        signature = file.with_name(f"{file.name}.asc")
        _run(
            ["gpg", "--batch", "--yes", "--local-user", key, "--armor", "--output", str(signature), "--detach-sign", str(file)],
            key,
        )
        _run(["gpg", "--batch", "--verify", str(signature), str(file)], key)
    return signature


def _run(command: list[str], key: str, stdin: bytes | None = None) -> None:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    except FileNotFoundError:
        raise ReleaseError(f"{command[0]} is not here, which signs with {key}: install it") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[:1] or ["it says nothing"]
        raise ReleaseError(f"RELEASE_KEY={key} does not sign, by {command[0]}: {said[0]}")
