"""`headrace certs`: an authority, papers for each kind of process, and their renewal."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from headrace.cli.main import main
from headrace.cli.run.authority import FOLDERS, STORE, STORE_FOLDER, make_papers
from headrace.errors import UserError
from headrace.identity import AUTHORITIES, CHAIN, KEY, load_papers
from tests.papers import serial_number

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def serials(folder: Path) -> dict[str, int]:
    return {name: serial_number(folder / name) for name in FOLDERS}


def test_it_makes_papers_that_each_kind_of_process_can_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path), "--days", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"made {tmp_path / name}" for name in ("authority", *FOLDERS)]
    authority = (tmp_path / "authority" / "ca.crt").read_bytes()
    for line, (folder, name) in zip(lines[1:], FOLDERS.items(), strict=True):
        papers = load_papers(tmp_path / folder, datetime.now(UTC))
        assert papers.names == (name,)
        assert papers.authorities == authority
        assert line.endswith(f"valid until {papers.until:%Y-%m-%d %H:%M} UTC")
        assert timedelta(days=2, hours=23) < papers.until - datetime.now(UTC) <= timedelta(days=3)
    for key in (tmp_path / "authority" / "ca.key", *(tmp_path / folder / KEY for folder in FOLDERS)):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not list(tmp_path.glob("**/.*"))


def test_only_servers_have_papers_of_servers(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 3))
    for folder, is_server in {"reorder": True, "preprocessor": True, "trainer": False, "client": False}.items():
        certificate = x509.load_pem_x509_certificate((tmp_path / folder / CHAIN).read_bytes())
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert ExtendedKeyUsageOID.CLIENT_AUTH in uses
        assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) is is_server


def test_a_redis_server_has_papers_for_its_hosts_where_they_are_named(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    assert not (tmp_path / STORE_FOLDER).exists()
    assert main(["certs", str(tmp_path), "--store-host", "redis", "--store-host", "10.0.0.7"]) == 0
    certificate = x509.load_pem_x509_certificate((tmp_path / STORE_FOLDER / CHAIN).read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [STORE, "redis"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    assert ExtendedKeyUsageOID.SERVER_AUTH in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value


def test_hosts_of_a_redis_server_need_to_be_named_once(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 30, now=NOW, store_hosts=["redis"]))
    first = serial_number(tmp_path / STORE_FOLDER)
    assert not any(made.is_new for made in make_papers(tmp_path, 30, now=NOW + timedelta(days=1)))
    *_, renewed = make_papers(tmp_path, 30, now=NOW + timedelta(days=21))
    assert (renewed.folder.name, renewed.is_new) == (STORE_FOLDER, True)
    assert serial_number(tmp_path / STORE_FOLDER) != first
    assert load_papers(tmp_path / STORE_FOLDER, NOW + timedelta(days=21)).names == (STORE, "redis")


def test_another_host_of_a_redis_server_takes_new_papers(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 30, store_hosts=["redis"]))
    both = make_papers(tmp_path, 30, store_hosts=["redis", "store"])
    assert [made.folder.name for made in both if made.is_new] == [STORE_FOLDER]
    assert not any(made.is_new for made in make_papers(tmp_path, 30, store_hosts=["store"])), "which has that name, too"


def test_what_has_used_two_thirds_of_its_time_is_renewed_by_the_same_authority(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 30, now=NOW))
    authority = {path.name: path.read_bytes() for path in (tmp_path / "authority").iterdir()}
    first = serials(tmp_path)
    kept = list(make_papers(tmp_path, 30, now=NOW + timedelta(days=19)))
    assert not any(made.is_new for made in kept)
    assert serials(tmp_path) == first
    renewed = list(make_papers(tmp_path, 30, now=NOW + timedelta(days=21)))
    assert [made.is_new for made in renewed] == [False, *(True for _ in FOLDERS)]
    assert all(made.until == NOW + timedelta(days=51) for made in renewed[1:])
    assert not set(serials(tmp_path).values()) & set(first.values())
    assert {path.name: path.read_bytes() for path in (tmp_path / "authority").iterdir()} == authority


def test_renew_renews_all(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    first = serials(tmp_path)
    assert main(["certs", str(tmp_path), "--renew"]) == 0
    assert not set(serials(tmp_path).values()) & set(first.values())


def test_papers_that_lack_something_are_made_anew_and_the_others_kept(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 30))
    first = serials(tmp_path)
    (tmp_path / "reorder" / KEY).unlink()
    (tmp_path / "trainer" / CHAIN).write_text("no certificate")
    (tmp_path / "client" / KEY).write_bytes((tmp_path / "preprocessor" / KEY).read_bytes())
    assert [made.folder.name for made in make_papers(tmp_path, 30) if made.is_new] == ["reorder", "trainer", "client"]
    assert serials(tmp_path)["preprocessor"] == first["preprocessor"]
    for folder in FOLDERS:
        load_papers(tmp_path / folder, datetime.now(UTC))


def test_after_another_authority_all_papers_are_made_anew(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 30))
    (tmp_path / "authority").rename(tmp_path / "former")
    assert all(made.is_new for made in make_papers(tmp_path, 30))
    assert (tmp_path / "client" / AUTHORITIES).read_bytes() == (tmp_path / "authority" / "ca.crt").read_bytes()


def test_papers_end_with_their_authority(tmp_path: Path) -> None:
    authority, *papers = make_papers(tmp_path, 3650, now=NOW - timedelta(days=3000))
    assert all(made.until == authority.until for made in papers)
    *_, last = make_papers(tmp_path, 3650, now=NOW, renew=True)
    assert last.until == authority.until


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "ca.crt").unlink(), "has no whole authority"),
        (lambda folder: (folder / "ca.key").write_text("no key"), "has no whole authority"),
        (lambda folder: (folder / "ca.key").write_bytes((folder.parent / "client" / KEY).read_bytes()), "is not the .* key of"),
    ],
)
def test_a_broken_authority_is_told_and_left_as_it_is(tmp_path: Path, spoil: object, sentence: str) -> None:
    list(make_papers(tmp_path, 30))
    spoil(tmp_path / "authority")  # type: ignore[operator]
    left = {path.name: path.read_bytes() for path in (tmp_path / "authority").iterdir()}
    with pytest.raises(UserError, match=f"^(?=.*{sentence})[^\n]*$"):
        list(make_papers(tmp_path, 30))
    assert {path.name: path.read_bytes() for path in (tmp_path / "authority").iterdir()} == left


def test_an_authority_that_expired_is_told(tmp_path: Path) -> None:
    list(make_papers(tmp_path, 30, now=NOW))
    with pytest.raises(UserError, match=r"the authority in .* expired at 2035-12-30: move the folder away"):
        list(make_papers(tmp_path, 30, now=NOW + timedelta(days=3650)))


def test_what_cannot_be_done_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for arguments, sentence in [
        ([str(tmp_path), "--days", "0"], "--days must be from 1 to 3650, got 0"),
        ([str(tmp_path / "file")], f"cannot write {tmp_path / 'file'}"),
        ([str(tmp_path), "--store-host", "redis:6379"], "--store-host must be a host's name or address without a port"),
    ]:
        assert main(["certs", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"headrace certs: {sentence}")
        assert err.count("\n") == 1
