"""URLs of this machine and its link: refused by the address that a connection goes to, however it is written or found."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import DatasetError
from headrace.preprocessor import access, local_addresses
from headrace.preprocessor.access import Access, check_url, granting
from headrace.preprocessor.local_addresses import is_local_address
from headrace.preprocessor.sources.blob import read_url
from headrace.preprocessor.sources.range_requests import get_range
from tests.http_site import Site

ANY_WEB = ["http://", "https://", "sftp://", "s3://"]
REMEDY = "or start the preprocessor with --allow-local-urls"


@pytest.fixture
def name_hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(name=address) -> names that the system's resolver then knows."""
    resolve = socket.getaddrinfo

    def make(**addresses: str) -> None:
        known = {f"{name}.example": address for name, address in addresses.items()}

        def look_up(host: Any, *more: Any, **how: Any) -> Any:
            if host in known and how.get("flags", more[4] if len(more) > 4 else 0) & socket.AI_NUMERICHOST:
                raise socket.gaierror(socket.EAI_NONAME, "a name")
            return resolve(known.get(host, host), *more, **how)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return make


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("0.0.0.0", True),
        ("169.254.169.254", True),
        ("::1", True),
        ("::", True),
        ("fe80::1%eth0", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:169.254.169.254", True),
        ("64:ff9b::a9fe:a9fe", True),
        ("fd00:ec2::254", True),
        ("100.100.100.200", True),
        ("10.0.0.7", False),
        ("192.168.1.7", False),
        ("::ffff:10.0.0.7", False),
        ("2001:db8::7", False),
        ("fd12::7", False),
    ],
)
def test_an_address_is_of_this_machine_or_its_link_or_it_is_not(address: str, is_local: bool) -> None:
    assert is_local_address(address) is is_local


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/a.jsonl",
        "https://localhost/a.jsonl",
        "http://a.LOCALHOST./a.jsonl",
        "http://[0:0:0:0:0:0:0:1]:9/a.jsonl",
        "http://[0:0:0:0:0:ffff:7f00:1]/a.jsonl",
        "http://169.254.169.254/latest/meta-data/",
        "http://me@169.254.169.254/latest/",
        "http://127.1/a.jsonl",
        "http://2130706433/a.jsonl",
        "http://0x7f.0.0.1/a.jsonl",
        "http://0/a.jsonl",
        "sftp://127.0.0.1/a.jsonl",
    ],
)
def test_a_url_that_names_one_is_refused_in_a_sentence(url: str) -> None:
    with granting(Access.of([], ANY_WEB)), pytest.raises(DatasetError, match=REMEDY):
        check_url(url)
    with granting(Access.of([], ANY_WEB, local_urls=True)):
        check_url(url)


def test_other_urls_are_taken() -> None:
    with granting(Access.of([], ANY_WEB)):
        for url in ("https://host.example/a", "http://10.0.0.7:80/a", "s3://localhost/a", "s3://127.0.0.1/a"):
            check_url(url)
        with pytest.raises(DatasetError, match="is no URL"):
            check_url("http://[1/a")


def test_a_name_of_another_protocol_is_looked_up(name_hosts: Callable[..., None]) -> None:
    name_hosts(files="127.0.0.1", far="10.0.0.7")
    with granting(Access.of([], ANY_WEB)):
        check_url("sftp://far.example/a.jsonl")
        with pytest.raises(DatasetError, match=rf"names 127\.0\.0\.1, .*{REMEDY}"):
            check_url("sftp://files.example/a.jsonl")


def test_a_name_of_a_web_server_is_refused_by_the_address_that_is_connected_to(
    site: Site, name_hosts: Callable[..., None]
) -> None:
    site.files["a"] = b"secret"
    name_hosts(data="127.0.0.1")
    url = site.url.replace("127.0.0.1", "data.example") + "/a"
    with granting(Access.of([], ANY_WEB)):
        check_url(url)
        with pytest.raises(DatasetError, match=rf"is 127\.0\.0\.1, .*{REMEDY}"):
            read_url(url, 100)
        with pytest.raises(DatasetError, match=rf"is 127\.0\.0\.1, .*{REMEDY}"):
            get_range(url, 0, 6)
    assert site.gets == []
    with granting(Access.of([], ANY_WEB, local_urls=True)):
        assert read_url(url, 100) == get_range(url, 0, 6).data == b"secret"


@pytest.mark.parametrize("location", ["http://169.254.169.254/latest", "http://meta.example/latest"])
def test_a_redirection_leads_to_none_either(
    site: Site, name_hosts: Callable[..., None], monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    """The site stands for one on another host."""
    name_hosts(meta="169.254.169.254")
    for module in (access, local_addresses):
        monkeypatch.setattr(module, "is_local_address", lambda address: address == "169.254.169.254")
    site.failures = [(302, {"Location": location})]
    with granting(Access.of([], ANY_WEB)), pytest.raises(DatasetError, match=rf"169\.254\.169\.254, .*{REMEDY}"):
        read_url(f"{site.url}/a", 100)
    assert len(site.gets) == 1
