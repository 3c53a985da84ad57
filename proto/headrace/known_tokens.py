"""The tokens that a server knows, and the roles of each."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from headrace.roles import Role


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens with their roles. Only their digests are kept: what a process writes about itself holds no token."""

    _roles: dict[bytes, frozenset[Role]] = field(default_factory=dict, repr=False)
    """SHA-256 of each token -> its roles."""

    @classmethod
    def of(cls, tokens: Iterable[tuple[str, Role]]) -> KnownTokens:
        """Build it from pairs of a token and a role; a token that stands there several times has all of these roles."""
        roles: dict[bytes, frozenset[Role]] = {}
        for token, role in tokens:
            digest = _digest(token)
            roles[digest] = roles.get(digest, frozenset()) | {role}
        return cls(roles)

    def __bool__(self) -> bool:
        return bool(self._roles)

    def roles_of(self, token: str) -> Set[Role]:
        """Return the roles of a token, none of one that is not known.

        It is compared with all of them, by digests and in constant time: how long that takes says nothing of any token.
        """
        presented, found = _digest(token), frozenset[Role]()
        for digest, roles in self._roles.items():
            if hmac.compare_digest(presented, digest):
                found = roles
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
