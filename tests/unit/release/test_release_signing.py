"""What is signed is verified with the tools that users have."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.errors import ReleaseError
from release.signing import NAMESPACE, sign, write_sums


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """SHA256SUMS beside what it is of."""
    files = [tmp_path / name for name in ("b.tar.gz", "a.whl")]
    for file in files:
        file.write_text(file.name)
    write_sums(files, tmp_path / "SHA256SUMS")
    return tmp_path / "SHA256SUMS"


@pytest.fixture
def ssh_key(tmp_path: Path) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not here")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    return key


@pytest.fixture
def gpg_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A key in a home of its own, whose path must be short for the socket of its agent."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not here")
    home = Path(os.path.realpath("/tmp")) / f"headrace-gpg-{os.getpid()}"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))
    try:
        make = [
            "gpg",
            "--batch",
            "--quiet",
            "--passphrase",
            "",
            "--quick-generate-key",
            "releaser@example.com",
            "ed25519",
            "sign",
        ]
        subprocess.run(make, check=True, capture_output=True)
        yield "releaser@example.com"
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], check=False, capture_output=True)
        shutil.rmtree(home)


def test_sums_are_checked_by_sha256sum(sums: Path) -> None:
    assert [line.split()[1] for line in sums.read_text().splitlines()] == ["a.whl", "b.tar.gz"]
    check = ["sha256sum", "--check", "--strict", sums.name]
    assert subprocess.run(check, cwd=sums.parent, capture_output=True, check=False).returncode == 0
    (sums.parent / "a.whl").write_text("other")
    assert subprocess.run(check, cwd=sums.parent, capture_output=True, check=False).returncode != 0


def test_an_ssh_key_signs_what_users_verify(sums: Path, ssh_key: Path) -> None:
    signature = sign(sums, str(ssh_key))
    assert sign(sums, str(ssh_key)) == signature, "a second time is no error"
    allowed = sums.with_name("allowed")
    allowed.write_text(f"releaser {ssh_key.with_suffix('.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", "releaser", "-n", NAMESPACE, "-s", str(signature)]
    assert subprocess.run(verify, input=sums.read_bytes(), capture_output=True, check=False).returncode == 0
    assert subprocess.run(verify, input=b"other", capture_output=True, check=False).returncode != 0


def test_a_file_that_is_no_key_is_named(sums: Path, ssh_key: Path) -> None:
    ssh_key.write_text("no key")
    with pytest.raises(ReleaseError, match=f"^RELEASE_KEY={ssh_key} does not sign, by ssh-keygen: "):
        sign(sums, str(ssh_key))


@pytest.mark.slow
def test_a_key_of_gnupg_signs_what_users_verify(sums: Path, gpg_key: str) -> None:
    signature = sign(sums, gpg_key)
    verify = ["gpg", "--verify", str(signature), str(sums)]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
    sums.write_text("other")
    assert subprocess.run(verify, capture_output=True, check=False).returncode != 0


@pytest.mark.slow
def test_a_key_that_gnupg_does_not_know_is_named(sums: Path, gpg_key: str) -> None:
    with pytest.raises(ReleaseError, match=r"^RELEASE_KEY=nobody@example.com does not sign, by gpg: "):
        sign(sums, "nobody@example.com")
