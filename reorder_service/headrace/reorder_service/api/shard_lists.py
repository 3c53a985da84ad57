"""Lists of shards that preprocessors send in pages, and what all of them together may hold of this process's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import UnavailableError
from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.fleet.reports import check_listed
from headrace.v1 import fleet_pb2

MOST_HELD_BYTES = 1 << 30  # of all lists that have not come to their end: as many as one list may have


@dataclass(slots=True)
class _Listing:
    """The pages received so far of one list of shards, merged into one message, and their size in bytes."""

    pages: fleet_pb2.ShardsListed = field(default_factory=fleet_pb2.ShardsListed)
    num_bytes: int = 0


class ShardLists:
    """The lists that have not come to their end, of all preprocessors."""

    def __init__(self) -> None:
        self._listings: dict[tuple[Member, str], _Listing] = {}  # by lease
        self.num_bytes = 0
        """Bytes of all pages that are held."""

    def add(self, member: Member, page: fleet_pb2.ShardsListed) -> fleet_pb2.ShardsListed | None:
        """Take a page of a list; return the whole list if it is the last one.

        Raises UserError where the list is larger than one may be, and UnavailableError where all lists together are.
        """
        listing = self._listings.setdefault((member, page.lease), _Listing())
        num_bytes = page.ByteSize()
        check_listed(len(listing.pages.shards) + len(page.shards), listing.num_bytes + num_bytes)
        if self.num_bytes + num_bytes > MOST_HELD_BYTES:
            raise UnavailableError(
                f"the lists of shards that all preprocessors are sending have more than {MOST_HELD_BYTES} bytes together: "
                "this one is asked for again once others are complete"
            )
        listing.num_bytes += num_bytes
        self.num_bytes += num_bytes
        listing.pages.MergeFrom(page)
        if page.more:
            return None
        self.drop(lambda of, lease: of is member and lease == page.lease)
        return listing.pages

    def drop(self, is_over: Callable[[Member, str], bool]) -> None:
        """Drop the lists of which nobody wants the rest, by member and lease."""
        for key in [key for key in self._listings if is_over(*key)]:
            self.num_bytes -= self._listings.pop(key).num_bytes
