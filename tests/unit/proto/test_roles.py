"""Tokens with roles: which method takes which, what a folder of tokens may hold, and how it changes while a service runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cluster_token import TOKEN, TOKEN_FILE, cluster_token
from headrace.errors import UserError
from headrace.known_tokens import KnownTokens
from headrace.roles import FILE_ROLES, METHODS, Role, may_call, role_of
from headrace.token_folder import LOOK_S, TokenFolder, make_tokens
from headrace.v1 import common_pb2, fleet_pb2, jobs_pb2, membership_pb2, payload_pb2, sessions_pb2

PROTOS = (common_pb2, fleet_pb2, jobs_pb2, membership_pb2, payload_pb2, sessions_pb2)
OLD, NEW = "an-old-token-of-a-kind", "a-new-token-of-the-kind"


class Watch:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self) -> float:
        return self.at_s


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def described_methods() -> Iterator[str]:
    for proto in PROTOS:
        for service in proto.DESCRIPTOR.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def test_every_method_has_a_role() -> None:
    assert sorted(METHODS) == sorted(described_methods())
    names = {path.stem for path in Path(common_pb2.__file__).parent.glob("*.proto")}
    assert {proto.DESCRIPTOR.name.rpartition("/")[2].removesuffix(".proto") for proto in PROTOS} == names


def test_a_role_may_do_what_it_is_for_and_no_more() -> None:
    for method, takes in METHODS.items():
        able = {role for role in Role if may_call({role}, method)}
        assert able == {takes, Role.CLUSTER} | ({Role.SUBMIT, Role.TRAIN} if takes is Role.WATCH else set())
        assert not may_call(set(), method)
    assert may_call({Role.SUBMIT, Role.TRAIN}, "/headrace.v1.Sessions/Open")
    assert role_of("/headrace.v1.Jobs/Unheard") is Role.CLUSTER, "what is in no table"
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert may_call({Role.WATCH}, reflection)
    assert not may_call(set(), reflection)


def test_a_token_in_several_files_has_all_of_their_roles(tmp_path: Path) -> None:
    tokens = TokenFolder(folder_of(tmp_path, train=f"# both\n\n {OLD} \n{NEW}\n", submit=OLD)).tokens
    assert tokens.roles_of(OLD) == {Role.TRAIN, Role.SUBMIT}
    assert tokens.roles_of(NEW) == {Role.TRAIN}
    assert tokens.roles_of("") == tokens.roles_of(OLD[:-1]) == set()
    assert OLD not in repr(tokens)
    assert not KnownTokens.of([])


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, r"holds no file named submit, train, preprocess, watch: make them with `headrace tokens"),
        ({"trainer": OLD}, r"trainer is named like no role.*move it away"),
        ({"train": OLD, "cluster": NEW}, r"cluster is named like no role"),
        ({"train": "# none\n"}, r"train holds no token: write one into it, or remove the file"),
        ({"train": f"{OLD}\nshort\n"}, r"train, line 2: .*at least 16 ASCII characters"),
    ],
)
def test_what_is_no_folder_of_tokens_is_told(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        TokenFolder(folder_of(tmp_path, **files))
    assert not any(secret in str(caught.value) for secret in (OLD, NEW, "short"))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--tokens .*none cannot be read .*headrace tokens"):
        TokenFolder(tmp_path / "none")
    (tmp_path / "train").write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match=r"cannot read the tokens of .*train"):
        TokenFolder(tmp_path)
    (tmp_path / "train").unlink()
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"cannot read the tokens of .*train"):
        TokenFolder(tmp_path)


def test_a_folder_is_read_anew_when_it_changes_and_looked_at_once_a_second(tmp_path: Path) -> None:
    watch = Watch()
    folder = TokenFolder(folder_of(tmp_path, train=f"{OLD}\n"), watch)
    folder_of(tmp_path, train=f"{OLD}\n{NEW}\n")
    watch.at_s = 0.9 * LOOK_S
    assert not folder.tokens.roles_of(NEW), "not looked at yet"
    watch.at_s = LOOK_S
    assert folder.tokens.roles_of(NEW) == folder.tokens.roles_of(OLD) == {Role.TRAIN}
    folder_of(tmp_path, train=f"{NEW}\n", watch=OLD)
    watch.at_s = 2 * LOOK_S
    assert (folder.tokens.roles_of(NEW), folder.tokens.roles_of(OLD)) == ({Role.TRAIN}, {Role.WATCH})
    (tmp_path / "watch").unlink()
    watch.at_s = 3 * LOOK_S
    assert not folder.tokens.roles_of(OLD), "with its file a role is gone"


def test_the_last_good_tokens_stay_and_what_is_wrong_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    folder = TokenFolder(folder_of(tmp_path, train=OLD), watch)
    for number, broken in enumerate(("", "short", f"{NEW} {NEW}"), 1):
        (tmp_path / "train").write_text(broken)
        for _ in range(3):
            watch.at_s += LOOK_S
            assert folder.tokens.roles_of(OLD) == {Role.TRAIN}
        assert len([line for line in caplog.messages if "the former ones stay" in line]) == number
    assert NEW not in caplog.text
    (tmp_path / "train").write_text(NEW)
    watch.at_s += LOOK_S
    with caplog.at_level(logging.INFO):
        assert (folder.tokens.roles_of(OLD), folder.tokens.roles_of(NEW)) == (set(), {Role.TRAIN})


def test_a_mounted_secret_changes_by_its_links(tmp_path: Path) -> None:
    """As Kubernetes changes it: hidden folders, a link to the present one, and links through that."""
    watch = Watch()
    folder_of(tmp_path / "..1", train=OLD)
    folder_of(tmp_path / "..2", train=NEW)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "train").symlink_to("..data/train")
    folder = TokenFolder(tmp_path, watch)
    assert folder.tokens.roles_of(OLD) == {Role.TRAIN}
    (tmp_path / "..next").symlink_to("..2")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    watch.at_s = LOOK_S
    assert (folder.tokens.roles_of(OLD), folder.tokens.roles_of(NEW)) == (set(), {Role.TRAIN})


def test_a_process_takes_the_first_token_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setenv(TOKEN_FILE, str(folder_of(tmp_path, train=f"# new\n\n{NEW}\n{OLD}\n") / "train"))
    assert cluster_token() == NEW


def test_a_folder_is_made_for_its_owner_and_what_is_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    paths = make_tokens(folder)
    assert [path.name for path in paths] == list(FILE_ROLES)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    made = {path.name: path.read_text() for path in paths}
    assert len(set(made.values())) == len(FILE_ROLES)
    (folder / "watch").unlink()
    make_tokens(folder)
    again = {path.name: path.read_text() for path in folder.iterdir()}
    assert {name for name in made if made[name] != again[name]} == {"watch"}
    assert sorted(again) == sorted(FILE_ROLES)
