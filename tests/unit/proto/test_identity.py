"""Papers of a process: what their files must be, and that files which change are taken up."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from headrace.cli.run.authority import open_authority
from headrace.errors import UserError
from headrace.identity import CHAIN, CLIENT, KEY, PREPROCESSOR, REORDER, TLS, Identity, identity, load_papers, server_identity
from tests.papers import expire, make_cluster_papers


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    return make_cluster_papers(tmp_path / "papers")


def test_the_environment_names_the_folder_unless_the_caller_does(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TLS, raising=False)
    assert identity() is None
    monkeypatch.setenv(TLS, str(papers / "trainer"))
    found, named = identity(), identity(papers / "client")
    assert found is not None
    assert named is not None
    assert (found.folder, named.folder) == (papers / "trainer", papers / "client")
    assert identity("") is None
    assert identity() is found


def test_files_that_do_not_fit_are_told_in_a_sentence(papers: Path, tmp_path: Path) -> None:
    client = papers / "client"
    other_key = (papers / "trainer" / KEY).read_bytes()
    secret = serialization.load_pem_private_key(other_key, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    for number, (name, content, sentence) in enumerate(
        [
            ("ca.crt", None, "ca.crt cannot be read"),
            ("tls.crt", None, "tls.crt cannot be read"),
            ("tls.key", None, "tls.key cannot be read"),
            ("ca.crt", b"no certificate", "ca.crt has no certificate in PEM"),
            ("ca.crt", other_key, "ca.crt has no certificate in PEM"),
            ("ca.crt", b"\xff", "ca.crt has no certificate in PEM"),
            ("tls.key", other_key, "tls.key is not the key of .*tls.crt"),
            ("tls.key", secret, "are not a certificate and its unencrypted key in PEM"),
            ("tls.crt", b"no certificate", "are not a certificate and its unencrypted key in PEM"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in client.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=f"^(?=.*{sentence})[^\n]*$"):
            identity(folder)


def test_a_certificate_that_is_not_valid_now_is_told(papers: Path) -> None:
    authority, _ = open_authority(papers / "authority", datetime.now(UTC))
    expire(papers / "client", authority, CLIENT)
    with pytest.raises(UserError, match=r"tls.crt expired at .* UTC: renew it, for example with `headrace certs`$"):
        load_papers(papers / "client", datetime.now(UTC))
    chain, key = authority.certify(CLIENT, datetime.now(UTC) + timedelta(days=1), timedelta(days=2))
    (papers / "client" / KEY).write_bytes(key)
    (papers / "client" / CHAIN).write_bytes(chain)
    with pytest.raises(UserError, match=r"tls.crt is not valid before .* UTC: set this machine's clock$"):
        load_papers(papers / "client", datetime.now(UTC))


def test_a_server_is_not_started_with_the_papers_of_another(papers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, str(papers / "preprocessor"))
    assert server_identity(PREPROCESSOR) is identity()
    with pytest.raises(UserError, match=f"is the certificate of {PREPROCESSOR}, and clients of this service ask for {REORDER}"):
        server_identity(REORDER)
    monkeypatch.setenv(TLS, "")
    assert server_identity(REORDER) is None


def test_new_files_are_taken_up(papers: Path) -> None:
    own = Identity(papers / "client")
    first = own.present()
    assert own.present() is first
    make_cluster_papers(papers, renew=True)
    second = own.present()
    assert second.chain != first.chain
    assert second.chain == (papers / "client" / CHAIN).read_bytes()
    assert own.present() is second


def test_new_files_that_do_not_fit_are_told_once_and_taken_up_when_they_do(
    papers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Identity(papers / "client")
    first = own.present()
    key = (papers / "client" / KEY).read_bytes()
    (papers / "client" / KEY).write_bytes((papers / "trainer" / KEY).read_bytes())
    with caplog.at_level(logging.INFO):
        assert own.present() is own.present() is first
    assert [record.message.partition(" reason")[0] for record in caplog.records] == ["papers are not renewed"]
    assert "is not the key of" in caplog.text
    (papers / "client" / KEY).write_bytes(key)
    assert own.present() == first


def test_a_key_stays_out_of_logs(papers: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        logging.getLogger(__name__).info("%s", load_papers(papers / "client", datetime.now(UTC)))
    assert "BEGIN CERTIFICATE" in caplog.text
    assert "PRIVATE" not in caplog.text


def test_files_that_are_written_again_with_the_same_contents_are_no_new_papers(papers: Path) -> None:
    own = Identity(papers / "client")
    before = own.present()
    same = (papers / "client" / "ca.crt").read_bytes()
    (papers / "client" / "ca.crt").unlink()
    own.present()
    (papers / "client" / "ca.crt").write_bytes(same)
    assert own.present() is before


@pytest.mark.parametrize("error", [ValueError("no names"), x509.DuplicateExtension("twice", x509.SubjectAlternativeName.oid)])
def test_a_certificate_whose_names_cannot_be_read_is_told(
    papers: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(x509.Extensions, "get_extension_for_class", refuse, raising=True)
    with pytest.raises(UserError, match="are not a certificate and its unencrypted key in PEM"):
        load_papers(papers / "client", datetime.now(UTC))
