"""Sources on S3, from a real server on this machine: every format, and what happens when the service does not serve."""

from __future__ import annotations

import gc
import http.client
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from headrace.errors import DatasetError
from headrace.manifest import ShardInfo
from headrace.preprocessor.records.record_to_sample import Text, to_sample
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.download import Retry
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec

pytestmark = [
    pytest.mark.integration,
    # botocore's own; it calls datetime.utcnow.
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

DATA = Path(__file__).parents[1] / "data"
SLOW_DOWN = b"<Error><Code>ServiceUnavailable</Code><Message>Please reduce your rate</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass
class Gateway:
    """A server in front of the S3 server that refuses or breaks off what it is told to."""

    port: int
    """Of the S3 server."""
    refusals: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    """Answers to the next requests for objects."""
    cuts: list[int] = field(default_factory=list)
    """The next objects break off after so many bytes."""
    gone: bool = False
    """Connections are closed without an answer."""
    gets: list[str] = field(default_factory=list)
    """Paths of the objects that were asked for."""


class _Handler(BaseHTTPRequestHandler):
    """Hands requests on."""

    protocol_version = "HTTP/1.1"
    gateway: Gateway

    def do_GET(self) -> None:
        self._hand_on()

    def do_HEAD(self) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        gateway = self.gateway
        if gateway.gone:
            self.close_connection = True
            return
        of_object = self.command == "GET" and "?" not in self.path
        if of_object:
            gateway.gets.append(self.path)
        status, headers, body = gateway.refusals.pop(0) if of_object and gateway.refusals else self._ask()
        length = headers.pop("Content-Length", str(len(body)))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        if of_object and gateway.cuts:
            body = body[: gateway.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)

    def _ask(self) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        }
        result = answer.status, kept, answer.read()
        connection.close()
        return result

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    """The port of an S3 server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(scope="module")
def running(moto: int) -> Iterator[Gateway]:
    """The gateway, and S3 as the environment describes it."""
    gateway = Gateway(port=moto)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"gateway": gateway}))
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_MAX_ATTEMPTS": "1",  # the driver's own patience is not what is tested
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        driver = fsspec.get_filesystem_class("s3")
        patch.setattr(driver, "retries", 1)
        driver.clear_instance_cache()
        _fill(fsspec.filesystem("s3", endpoint_url=f"http://127.0.0.1:{moto}"))
        yield gateway
    driver.clear_instance_cache()
    gc.collect()  # closes their connections here, and not in the event loop of a later test
    server.shutdown()
    thread.join()
    server.server_close()


def _fill(fs: fsspec.AbstractFileSystem) -> None:
    """The data sets of the unit tests, a Parquet file, and a JSONL file beside a picture."""
    fs.mkdir("headrace")
    fs.put(str(DATA / "mds"), "headrace/mds", recursive=True)
    fs.put(str(DATA / "energon"), "headrace/energon", recursive=True)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"caption": [f"row {row}" for row in range(8)]}), sink, row_group_size=3)
    fs.pipe_file("headrace/parquet/s.parquet", sink.getvalue().to_pybytes())
    lines = [b'{"image": "m/0.jpg", "caption": "c"}', b'{"image": "m/none.jpg", "caption": "c"}']
    fs.pipe_file("headrace/jsonl/s.jsonl", b"\n".join(lines))
    fs.pipe_file("headrace/jsonl/m/0.jpg", b"a picture")


@pytest.fixture
def gateway(running: Gateway) -> Gateway:
    """The gateway, which serves again."""
    running.refusals, running.cuts, running.gets, running.gone = [], [], [], False
    fsspec.filesystem("s3").invalidate_cache()
    return running


@pytest.fixture
def bucket(gateway: Gateway) -> str:
    return "s3://headrace"


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def cache(tmp_path: Path, pauses: list[float]) -> ShardCache:
    return ShardCache(tmp_path / "cache", retry=Retry(attempts=4, sleep=pauses.append))


def listed(path: str) -> tuple[SourceSpec, list[ShardInfo]]:
    spec = parse_spec({"name": "test", "sources": [{"path": path, "name": "s"}]})
    return spec.sources[0], list_shards(spec, Retry(attempts=2, sleep=lambda pause_s: None))


def test_an_energon_data_set(bucket: str, cache: ShardCache) -> None:
    source, shards = listed(f"{bucket}/energon/captions")
    assert [shard.name for shard in shards] == ["s/parts/shard_0.tar", "s/parts/shard_1.tar"]
    with open_shard(shards[1].url, source, cache) as shard:
        segments = list(to_sample(shard.read(1), source.mapping).segments)
    assert segments[1] == Text(text="Ellipse 3")


def test_mds_shards(bucket: str, cache: ShardCache) -> None:
    source, shards = listed(f"{bucket}/mds/captions")
    captions = []
    for info in shards:
        with open_shard(info.url, source, cache) as shard:
            assert shard.rejected == ()
            captions += [shard.read(row).fields["caption"] for row in range(shard.num_rows)]
    assert len(captions) == 5
    assert captions[-1] == "An ellipse, number 4: größer"


def test_parquet_files_by_glob(bucket: str, gateway: Gateway, cache: ShardCache) -> None:
    source, shards = listed(f"{bucket}/parquet/*.parquet")
    for _ in range(2):
        with open_shard(shards[0].url, source, cache) as shard:
            assert [shard.read(row).fields["caption"] for row in (7, 0, 4)] == ["row 7", "row 0", "row 4"]
    assert gateway.gets == ["/headrace/parquet/s.parquet"]


def test_a_parquet_file_by_ranges_where_the_cache_has_no_room(bucket: str, gateway: Gateway, tmp_path: Path) -> None:
    source, shards = listed(f"{bucket}/parquet")
    small = ShardCache(tmp_path / "small", max_bytes=100)
    with open_shard(shards[0].url, source, small) as shard:
        assert shard.read(7).fields["caption"] == "row 7"
    assert small.stats.uncached == 1


def test_media_beside_a_jsonl_file(bucket: str, cache: ShardCache) -> None:
    source, shards = listed(f"{bucket}/jsonl")
    with open_shard(shards[0].url, source, cache) as shard:
        record = shard.read(0)
        assert record.load(record.fields["image"]) == b"a picture"
        with pytest.raises(Exception, match=r"missing_media: no file 'm/none\.jpg' in headrace"):
            shard.read(1).load("m/none.jpg")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://no-such-bucket/x", r"s3://no-such-bucket/x does not exist; give a folder"),
        ("s3://headrace/no-such-folder", r"s3://headrace/no-such-folder does not exist"),
        ("s3://headrace/mds/*.tar", r"no file matches s3://headrace/mds/\*\.tar"),
    ],
)
def test_what_is_not_there_is_told_in_a_sentence(bucket: str, path: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        listed(path)


def test_a_shard_that_was_deleted_is_named(bucket: str, cache: ShardCache) -> None:
    source, _ = listed(f"{bucket}/mds/captions")
    with pytest.raises(DatasetError, match=r"cannot read the shard s3://headrace/mds/captions/none\.mds: .*; check that"):
        open_shard("s3://headrace/mds/captions/none.mds", source, cache)


def test_a_denied_key_is_told_at_once(bucket: str, gateway: Gateway, cache: ShardCache, pauses: list[float]) -> None:
    source, shards = listed(f"{bucket}/parquet")
    gateway.refusals = [(403, {}, DENIED)]
    with pytest.raises(DatasetError, match=r"cannot read the shard s3://headrace/parquet/s\.parquet: Access Denied"):
        open_shard(shards[0].url, source, cache)
    assert pauses == []


def test_throttling_waits_as_long_as_the_service_asks(
    bucket: str, gateway: Gateway, cache: ShardCache, pauses: list[float]
) -> None:
    source, shards = listed(f"{bucket}/parquet")
    gateway.refusals = [(503, {"Retry-After": "3"}, SLOW_DOWN), (503, {}, SLOW_DOWN)]
    with open_shard(shards[0].url, source, cache) as shard:
        assert shard.num_rows == 8
    assert pauses == [3.0, 1.0]


def test_a_transfer_that_breaks_off_is_taken_up_again(
    bucket: str, gateway: Gateway, cache: ShardCache, pauses: list[float]
) -> None:
    source, shards = listed(f"{bucket}/parquet")
    gateway.cuts = [100, 200]
    with open_shard(shards[0].url, source, cache) as shard:
        assert shard.num_rows == 8
    assert pauses == [0.5, 1.0]


@pytest.mark.slow
def test_a_service_that_goes_away(bucket: str, gateway: Gateway, cache: ShardCache, pauses: list[float]) -> None:
    """What is here already is read on; what is not is named; and it comes back by itself."""
    source, shards = listed(f"{bucket}/energon/captions")
    with open_shard(shards[0].url, source, cache) as shard:
        gateway.gone = True
        assert shard.read(0).fields["caption"] == "Ellipse 0"
        assert shard.read(1).load("jpg")[:2] == b"\xff\xd8"
        with pytest.raises(DatasetError, match="cannot read the shard s3://headrace/energon/captions/parts/shard_1"):
            open_shard(shards[1].url, source, cache)
        with pytest.raises(DatasetError, match="cannot read the shard s3://headrace/mds/captions/shard"):
            open_shard("s3://headrace/mds/captions/shard.00000.mds", source, cache)
        with pytest.raises(DatasetError, match="source 's': cannot list s3://headrace/parquet"):
            listed(f"{bucket}/parquet")
        assert pauses == [0.5, 1.0, 2.0] * 2
        gateway.gone = False
    with open_shard(shards[1].url, source, cache) as shard:
        assert shard.read(0).fields["caption"] == "Ellipse 2"
