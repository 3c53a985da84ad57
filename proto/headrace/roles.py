"""Roles: which token may call which method.

A token has the role of the file that it stands in (headrace.token_folder), or those of several; the cluster's token has
`CLUSTER`, which may call everything. What is in no table here takes the cluster's token.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import StrEnum


class Role(StrEnum):
    """What a process is to the others of its cluster."""

    SUBMIT = "submit"
    """People and tools that submit, change, cancel and delete jobs."""
    TRAIN = "train"
    """Trainers: sessions, memberships, and where preprocessors offer payload."""
    PREPROCESS = "preprocess"
    """Preprocessors: the fleet's work."""
    WATCH = "watch"
    """Who only looks: jobs, ledgers, plans."""
    CLUSTER = "cluster"
    """Who has the one token of the cluster."""


FILE_ROLES = (Role.SUBMIT, Role.TRAIN, Role.PREPROCESS, Role.WATCH)
"""The roles that tokens of a folder can have, each by the file of its name."""

METHODS = {
    "/headrace.v1.Jobs/Submit": Role.SUBMIT,
    "/headrace.v1.Jobs/Show": Role.WATCH,
    "/headrace.v1.Jobs/List": Role.WATCH,
    "/headrace.v1.Jobs/Cancel": Role.SUBMIT,
    "/headrace.v1.Jobs/Delete": Role.SUBMIT,
    "/headrace.v1.Jobs/Manifest": Role.WATCH,
    "/headrace.v1.Jobs/Pause": Role.SUBMIT,
    "/headrace.v1.Jobs/Reset": Role.SUBMIT,
    "/headrace.v1.Jobs/SetWeights": Role.SUBMIT,
    "/headrace.v1.Jobs/SetTopology": Role.SUBMIT,
    "/headrace.v1.Jobs/Ledger": Role.WATCH,
    "/headrace.v1.Jobs/Quarantine": Role.WATCH,
    "/headrace.v1.Jobs/ShowPlan": Role.WATCH,
    "/headrace.v1.Jobs/About": Role.WATCH,
    "/headrace.v1.Sessions/Open": Role.TRAIN,
    "/headrace.v1.Sessions/Plans": Role.TRAIN,
    "/headrace.v1.Sessions/ReportLost": Role.TRAIN,
    "/headrace.v1.Sessions/Commit": Role.TRAIN,
    "/headrace.v1.Sessions/Close": Role.TRAIN,
    "/headrace.v1.Sessions/Relay": Role.TRAIN,
    "/headrace.v1.Membership/Join": Role.TRAIN,
    "/headrace.v1.Fleet/Work": Role.PREPROCESS,
    "/headrace.v1.Payload/Offer": Role.TRAIN,
}
"""The role that each method takes."""

_FOR_ANY_ROLE = "/grpc.reflection."  # it tells what the .proto files tell
_INCLUDING = {
    Role.WATCH: frozenset((Role.WATCH, Role.SUBMIT, Role.TRAIN)),
}


def role_of(method: str) -> Role:
    """Return the role that a method takes, by its full name such as /headrace.v1.Jobs/Show."""
    return METHODS.get(method, Role.CLUSTER)


def may_call(roles: Set[Role], method: str) -> bool:
    """Whether a token with these roles may call a method, by its full name."""
    if Role.CLUSTER in roles or method.startswith(_FOR_ANY_ROLE):
        return bool(roles)
    role = role_of(method)
    return not roles.isdisjoint(_INCLUDING.get(role, (role,)))


def role_names(roles: Iterable[Role]) -> str:
    """Return the names of roles for a sentence."""
    return " and ".join(sorted(roles))
