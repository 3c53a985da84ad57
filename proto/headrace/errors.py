"""Every error that Headrace raises on purpose, and its gRPC status.

HeadraceError
|-- BadSampleError (headrace.quarantine)   one sample is damaged: quarantined, never fatal
|-- UserError                 the user can fix it: one sentence with value, rule and remedy; exit code 2
|   |-- SpecError             a field of a job spec is wrong
|   |-- DatasetError          a data set is missing, empty or unreadable as a whole
|   |-- NotFoundError         no such job, session or part
|   |   `-- UnknownTicketError  a ticket of a job that is not known here
|   |-- ConflictError         the request does not fit the present state
|   |-- EndpointError         nothing usable answers at an endpoint
|   |-- UnauthenticatedError  the call carries no token, or one that the service does not know
|   |-- RoleError             the token of the call has not the role that its method takes
|   `-- LimitError            the service has as many jobs, or calls a second, as it takes
|-- PermissionDeniedError     a ticket does not bear its job's signature
|-- SupersededError           a newer session of the same rank took over
|-- JobFailedError            the job ended without all of its steps
|-- UnrecoverableError        too few nodes, or no copy of a layer, are left to go on
`-- UnavailableError          a peer is gone for now: try again or elsewhere
    `-- SupersededLeaderError another reorder service leads now
"""

from __future__ import annotations

import re

import grpc

_TOO_LARGE = re.compile(r"message larger than max \((?P<bytes>\d+) vs\. (?P<most>\d+)\)")  # gRPC's words, whichever end says them


class HeadraceError(Exception):
    """Base class of every error that Headrace raises on purpose."""


class UserError(HeadraceError):
    """An error that the user can fix. The message is one whole sentence that says how."""


class SpecError(UserError):
    """A field of a job spec, or of another document that users write, is wrong; the message names the field."""


class DatasetError(UserError):
    """A data set cannot be used as a whole: it is missing, empty or unreadable."""


class NotFoundError(UserError):
    """The job, session or part asked for does not exist."""


class UnknownTicketError(NotFoundError):
    """The ticket is that of a job that has ended, or of another reorder service."""


class ConflictError(UserError):
    """The request does not fit the present state of the job."""


class EndpointError(UserError):
    """Nothing usable answers at the endpoint, or the endpoint is malformed or taken."""


class UnauthenticatedError(UserError):
    """The call does not carry a token that the service knows."""


class RoleError(UserError):
    """The token of the call has not the role that its method takes (headrace.roles)."""


class LimitError(UserError):
    """A limit of the service is reached, such as that of its jobs: try again later."""


class PermissionDeniedError(HeadraceError):
    """The caller may not have what it asks for: a ticket does not bear its job's signature."""


class SupersededError(HeadraceError):
    """A newer session of the same rank has taken over from this one."""


class JobFailedError(HeadraceError):
    """The job ended before all of its steps were committed."""


class UnrecoverableError(HeadraceError):
    """Training cannot go on with the nodes that are left. The message says what is missing (nodes, or every copy of a layer), and
    what to do."""


class UnavailableError(HeadraceError):
    """A peer does not answer for now: try again or elsewhere."""


class SupersededLeaderError(UnavailableError):
    """Another reorder service leads now, and the store refuses this one's writes."""


STATUS_OF: dict[type[HeadraceError], grpc.StatusCode] = {
    SpecError: grpc.StatusCode.INVALID_ARGUMENT,
    DatasetError: grpc.StatusCode.INVALID_ARGUMENT,
    UserError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    RoleError: grpc.StatusCode.PERMISSION_DENIED,
    LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    SupersededError: grpc.StatusCode.ABORTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
}

ERROR_OF: dict[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UserError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: ConflictError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitError,
    grpc.StatusCode.ABORTED: SupersededError,
    grpc.StatusCode.UNIMPLEMENTED: EndpointError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def lost_commits(job: str, step: int, committed: int) -> str:
    """Return the error message for a trainer that runs at `step`, while its job has only `committed` steps committed."""
    return (
        f"this trainer has committed {step} steps of job {job!r}, whose store has lost all but {committed} of them: start it "
        "again from its newest checkpoint, and the steps up to that one are committed again without being trained"
    )


def status_of(error: HeadraceError) -> grpc.StatusCode:
    """Return the gRPC status of an error: that of its nearest base class in STATUS_OF, or INTERNAL."""
    for cls in type(error).__mro__:
        if issubclass(cls, HeadraceError) and cls in STATUS_OF:
            return STATUS_OF[cls]
    return grpc.StatusCode.INTERNAL


def from_rpc(error: grpc.RpcError, endpoint: str) -> HeadraceError:
    """Return the Headrace error that the gRPC error of a call to `endpoint` stands for."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    detail = (error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None) or str(error)
    cls = ERROR_OF.get(code, HeadraceError) if code is not None else HeadraceError
    if large := _TOO_LARGE.search(detail):
        return UserError(
            f"a message of {large['bytes']} bytes to or from {endpoint} is too large, as {large['most']} are carried at most: "
            "ask for less at once, or send less, such as a job with fewer paths"
        )
    if cls is UnavailableError:
        return UnavailableError(f"{endpoint} does not answer ({detail})")
    if cls is EndpointError:
        return EndpointError(f"{endpoint} answers, but is not the Headrace service asked for ({detail})")
    if cls is UnauthenticatedError:
        return UnauthenticatedError(f"{endpoint}: {detail}")
    if cls is PermissionDeniedError:  # tickets are refused by the transports, which have messages of their own for it
        return RoleError(f"{endpoint}: {detail}")
    return cls(detail)


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a possibly nested exception group that is not itself a group."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
