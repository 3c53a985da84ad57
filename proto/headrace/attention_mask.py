"""Which tokens of a multimodal sequence attend to which others, as one 64-bit field for each token.

A million tokens take 8 MB, where the matrix of all pairs takes 1 TB. After Cornstarch's bitfield attention mask (dissertation,
section 3.4.2; arXiv:2503.11367, section 4.3.1), which has a bit for each modality and one for causal attention. That cannot
tell two images or two packed samples apart, so a field also has the number of its segment and of its group, and a token's own
modality is a number, not its lowest bit. From the lowest bit on, a field has

    16 bits  modalities that the token sees
     4 bits  its own modality
    21 bits  its segment, from 1; 0: padding, which sees nothing and is seen by nothing
    20 bits  its group, from 1; 0: of no group, seen from all groups of its segment
     1 bit   whether it sees all of its own group, later tokens too, even if it is causal
     1 bit   whether it sees all groups, and not its own only
     1 bit   whether it is causal: sees no later token

Token i sees token j if they are of one segment, i sees the modality of j, i sees the group of j, and j is not later than i, or i
is not causal, or i sees all of its own group and j is of that. The tokens of a segment follow each other. What is computed here
never makes the matrix, but for `visible`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel

Fields = NDArray[np.int64]
Ints = NDArray[np.int64]

MOST_MODALITIES = 16
MOST_SEGMENTS, MOST_GROUPS = (1 << 21) - 1, (1 << 20) - 1
"""The highest numbers of a segment and of a group."""

OWN_BIT, SEGMENT_BIT, GROUP_BIT, WHOLE_GROUP_BIT, ALL_GROUPS_BIT, CAUSAL_BIT = 16, 20, 41, 61, 62, 63
"""The lowest bit of each part of a field but the first. The causal bit is the sign."""

NOTHING, PARTLY, WHOLLY = 0, 1, 2
"""What the queries of one block see of the keys of another, in a map of blocks."""


def field(
    *,
    sees: int,
    own: int,
    segment: int,
    group: int = 0,
    whole_group: bool = False,
    all_groups: bool = False,
    causal: bool = False,
) -> int:
    """Return the field of a token, as a signed 64-bit number. sees: a bit for each modality; the others as in the module's text.

    Raises ValueError for a number that has no room in its bits.
    """
    for name, number, most in (
        ("sees", sees, (1 << MOST_MODALITIES) - 1),
        ("own", own, MOST_MODALITIES - 1),
        ("segment", segment, MOST_SEGMENTS),
        ("group", group, MOST_GROUPS),
    ):
        if not 0 <= number <= most:
            raise ValueError(f"{name} of a token's attention field must be from 0 to {most}, got {number}")
    numbers = sees | own << OWN_BIT | segment << SEGMENT_BIT | group << GROUP_BIT
    flags = int(whole_group) << WHOLE_GROUP_BIT | int(all_groups) << ALL_GROUPS_BIT
    return (numbers | flags) - (1 << CAUSAL_BIT if causal else 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMask:
    """The fields of T tokens, in the order of the sequence.

    Raises ValueError unless they are a vector of int64 in which the tokens of each segment follow each other.
    """

    fields: Fields
    """(T,) int64."""

    def __post_init__(self) -> None:
        if self.fields.ndim != 1 or self.fields.dtype != np.int64:
            raise ValueError(
                f"an attention mask is a vector of int64 fields, got shape {self.fields.shape} of {self.fields.dtype}"
            )
        numbers = self.segments[_segment_starts(self.fields)[:-1]]
        real, times = np.unique(numbers[numbers > 0], return_counts=True)
        if (times > 1).any():
            raise ValueError(
                f"the tokens of segment {real[times > 1][0]} of an attention mask do not follow each other: number segments in "
                "the order of their tokens"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.fields.size)

    @property
    def segments(self) -> Ints:
        """(T,) segment of each token, 0 for padding."""
        return self.fields >> SEGMENT_BIT & MOST_SEGMENTS

    @property
    def own(self) -> Ints:
        """(T,) modality of each token."""
        return self.fields >> OWN_BIT & MOST_MODALITIES - 1

    @property
    def groups(self) -> Ints:
        """(T,) group of each token, 0 without one."""
        return self.fields >> GROUP_BIT & MOST_GROUPS

    def visible(self, queries: Ints, keys: Ints) -> NDArray[np.bool_]:
        """Return the (q, k) matrix of whether the tokens at the places `queries` see those at `keys`."""
        q, k = self.fields[queries, None], self.fields[None, keys]
        segment = q >> SEGMENT_BIT & MOST_SEGMENTS
        of_segment = (segment == k >> SEGMENT_BIT & MOST_SEGMENTS) & (segment > 0)
        of_modality = q >> (k >> OWN_BIT & MOST_MODALITIES - 1) & 1 > 0
        group = k >> GROUP_BIT & MOST_GROUPS
        own_group = group == q >> GROUP_BIT & MOST_GROUPS
        of_group = (q >> ALL_GROUPS_BIT & 1 > 0) | (group == 0) | own_group
        not_later = (q >= 0) | (np.asarray(keys)[None, :] <= np.asarray(queries)[:, None])
        not_later |= (q >> WHOLE_GROUP_BIT & 1 > 0) & own_group & (group > 0)
        return np.asarray(of_segment & of_modality & of_group & not_later)

    def row_counts(self) -> Ints:
        """Return the (T,) number of tokens that each token sees, in time that grows with T only."""
        return _row_counts(self.fields, _segment_starts(self.fields), *_sizes(self.fields))

    def touched_blocks(self, block: int) -> Ints:
        """Return for each block of `block` queries how many blocks of keys have one that some of them see.

        That is W of Cornstarch's Alg. 1 (dissertation, section 3.3.2.1): what a kernel computes that skips the other blocks.
        """
        return _touched(self.fields, _segment_starts(self.fields), _checked(block), *_sizes(self.fields))

    def block_map(self, block: int, queries: Ints | None = None) -> NDArray[np.uint8]:
        """Return (Q, K) NOTHING, PARTLY or WHOLLY: what each block of queries sees of each block of keys.

        queries: the numbers of the blocks of queries; None: all of them.
        """
        count = -(-self.num_tokens // _checked(block))
        chosen = np.arange(count) if queries is None else np.ascontiguousarray(queries, np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < count:
            raise ValueError(f"blocks of queries must be from 0 to {count - 1}, got {chosen.min()} to {chosen.max()}")
        return _block_map(self.fields, _segment_starts(self.fields), block, chosen)


def _checked(block: int) -> int:
    if block < 1:
        raise ValueError(f"a block has at least one token, got {block}")
    return block


@kernel
def _segment_starts(fields: Fields) -> Ints:
    """Return the first token of each run of tokens of one segment, and T."""
    starts = np.empty(fields.size + 1, np.int64)
    count = 0
    for i in range(fields.size):
        if i == 0 or (fields[i] ^ fields[i - 1]) >> SEGMENT_BIT & MOST_SEGMENTS:
            starts[count] = i
            count += 1
    starts[count] = fields.size
    return starts[: count + 1].copy()


@kernel
def _sizes(fields: Fields) -> tuple[int, int]:
    """Return one more than the highest modality and than the highest group of the tokens."""
    modality = group = 0
    for i in range(fields.size):
        modality = max(modality, fields[i] >> OWN_BIT & MOST_MODALITIES - 1)
        group = max(group, fields[i] >> GROUP_BIT & MOST_GROUPS)
    return modality + 1, group + 1


@kernel
def _row_counts(fields: Fields, starts: Ints, num_modalities: int, num_groups: int) -> Ints:
    """Do what `row_counts` says: causal tokens count what came before, the others what there is in their whole segment.

    Causal tokens that see all of their group count the others as they come, and their group in the end.
    """
    counts = np.zeros(fields.size, np.int64)
    of_all = np.zeros(num_modalities, np.int64)
    of_group = np.zeros((num_groups, num_modalities), np.int64)
    for s in range(starts.size - 1):
        first, end = starts[s], starts[s + 1]
        if not fields[first] >> SEGMENT_BIT & MOST_SEGMENTS:
            continue
        of_all[:] = 0
        for i in range(first, end):
            own, group = fields[i] >> OWN_BIT & MOST_MODALITIES - 1, fields[i] >> GROUP_BIT & MOST_GROUPS
            of_all[own] += 1
            of_group[group, own] += 1
            if fields[i] < 0:
                counts[i] = _count_seen(fields[i], of_all, of_group) - _count_group(fields[i], of_group)
        for i in range(first, end):
            if fields[i] >= 0:
                counts[i] = _count_seen(fields[i], of_all, of_group)
            else:
                counts[i] += _count_group(fields[i], of_group)
        for i in range(first, end):
            of_group[fields[i] >> GROUP_BIT & MOST_GROUPS, fields[i] >> OWN_BIT & MOST_MODALITIES - 1] = 0
    return counts


@kernel
def _count_seen(token: int, of_all: Ints, of_group: Ints) -> int:
    """Return how many of the counted tokens one sees: of all groups, or of its own and of none."""
    seen, group = 0, token >> GROUP_BIT & MOST_GROUPS
    for modality in range(of_all.size):
        if token >> modality & 1:
            if token >> ALL_GROUPS_BIT & 1:
                seen += of_all[modality]
            else:
                seen += of_group[0, modality] + (of_group[group, modality] if group else 0)
    return seen


@kernel
def _count_group(token: int, of_group: Ints) -> int:
    """Return how many of the counted tokens of its own group one sees if it sees all of that, and else 0."""
    seen, group = 0, token >> GROUP_BIT & MOST_GROUPS
    if group and token >> WHOLE_GROUP_BIT & 1:
        for modality in range(of_group.shape[1]):
            if token >> modality & 1:
                seen += of_group[group, modality]
    return seen


@kernel
def _touched(fields: Fields, starts: Ints, block: int, num_modalities: int, num_groups: int) -> Ints:
    """Do what `touched_blocks` says, segment by segment.

    Only the block of the queries itself can be touched by two segments: it is noted apart, and added once. `anywhere` and
    `common` have which blocks have tokens of a modality, of any group and of none; the blocks of a group are a linked list.
    """
    num_blocks = (fields.size + block - 1) // block
    touched, itself = np.zeros(num_blocks, np.int64), np.zeros(num_blocks, np.bool_)
    anywhere = np.zeros((num_modalities, num_blocks), np.uint8)
    common = np.zeros((num_modalities, num_blocks), np.uint8)
    heads = np.full((num_groups, num_modalities), -1, np.int64)
    at, following = np.empty(fields.size, np.int64), np.empty(fields.size, np.int64)
    union = np.zeros(num_blocks, np.uint8)
    part = np.full(num_groups, -1, np.int64)  # the last part of queries that had the group
    had = np.zeros((num_groups, 2), np.int64)  # what its tokens there saw of it, by whether all or what came before only
    present = np.zeros(num_groups, np.int64)  # modalities of its tokens there so far
    num_parts = 0
    for s in range(starts.size - 1):
        first, end = starts[s], starts[s + 1]
        if not fields[first] >> SEGMENT_BIT & MOST_SEGMENTS:
            continue
        low, high = first // block, (end - 1) // block + 1
        num_nodes = 0
        for i in range(first, end):
            own, group, b = fields[i] >> OWN_BIT & MOST_MODALITIES - 1, fields[i] >> GROUP_BIT & MOST_GROUPS, i // block
            anywhere[own, b] = 1
            if group == 0:
                common[own, b] = 1
            elif heads[group, own] < 0 or at[heads[group, own]] != b:
                at[num_nodes], following[num_nodes] = b, heads[group, own]
                heads[group, own] = num_nodes
                num_nodes += 1
        for b in range(low, high):
            sees = np.zeros((2, 2), np.int64)  # by whether causal, and whether of all groups
            here = here_common = 0
            for i in range(max(first, b * block), min(end, (b + 1) * block)):
                token = fields[i]
                causal, group, own = int(token < 0), token >> GROUP_BIT & MOST_GROUPS, token >> OWN_BIT & MOST_MODALITIES - 1
                wanted, all_groups = token & (1 << MOST_MODALITIES) - 1, token >> ALL_GROUPS_BIT & 1
                if part[group] != num_parts:
                    part[group], present[group] = num_parts, 0
                    had[group, 0] = had[group, 1] = 0
                here |= 1 << own
                here_common |= 0 if group else 1 << own
                present[group] |= 1 << own
                sees[causal, all_groups] |= wanted
                if causal and wanted & (here if all_groups else here_common | present[group]):
                    itself[b] = True
                whole = token >> WHOLE_GROUP_BIT & 1
                before = int(causal and not whole)
                if group and (whole or not all_groups) and wanted & ~had[group, before]:
                    for m in range(num_modalities):
                        node = heads[group, m] if (wanted & ~had[group, before]) >> m & 1 else -1
                        while node >= 0:
                            if not before or at[node] < b:
                                union[at[node]] = 1
                            node = following[node]
                    had[group, before] |= wanted
            for m in range(num_modalities):
                for causal in range(2):
                    last = b if causal else high
                    if sees[causal, 1] >> m & 1:
                        _join(union[low:last], anywhere[m, low:last])
                    if sees[causal, 0] >> m & 1:
                        _join(union[low:last], common[m, low:last])
            itself[b] |= union[b] > 0
            union[b] = 0
            touched[b] += _count_away(union[low:high])
            num_parts += 1
        anywhere[:, low:high] = 0
        common[:, low:high] = 0
        for i in range(first, end):
            heads[fields[i] >> GROUP_BIT & MOST_GROUPS, fields[i] >> OWN_BIT & MOST_MODALITIES - 1] = -1
    return touched + itself


@kernel
def _join(into: NDArray[np.uint8], other: NDArray[np.uint8]) -> None:
    """Set what is set in the other, too."""
    for i in range(into.size):
        into[i] |= other[i]


@kernel
def _count_away(flags: NDArray[np.uint8]) -> int:
    """Return how many flags are set, and clear them."""
    count = 0
    for i in range(flags.size):
        count += flags[i]
        flags[i] = 0
    return count


@kernel
def _block_map(fields: Fields, starts: Ints, block: int, queries: Ints) -> NDArray[np.uint8]:
    """Do what `block_map` says, by the runs of equal tokens of each block: one sees all of another, none, or is the same."""
    num_blocks = (fields.size + block - 1) // block
    found = np.zeros((queries.size, num_blocks), np.uint8)
    runs, of_block = np.empty(fields.size + 1, np.int64), np.empty(num_blocks + 1, np.int64)
    low, high = np.empty(fields.size, np.int64), np.empty(fields.size, np.int64)  # blocks of the segment, by run
    count = s = 0
    for i in range(fields.size):
        if i % block == 0:
            of_block[i // block] = count
        if i >= starts[s + 1]:
            s += 1
        if i % block == 0 or fields[i] != fields[i - 1]:
            runs[count], low[count], high[count] = i, starts[s] // block, (starts[s + 1] - 1) // block + 1
            count += 1
    runs[count], of_block[num_blocks] = fields.size, count
    pairs = np.zeros(num_blocks, np.int64)
    for row in range(queries.size):
        b = queries[row]
        first, end = num_blocks, 0
        for q in range(of_block[b], of_block[b + 1]):
            if not fields[runs[q]] >> SEGMENT_BIT & MOST_SEGMENTS:
                continue
            first, end = min(first, low[q]), max(end, high[q])
            query, size = fields[runs[q]], runs[q + 1] - runs[q]
            whole = query >> GROUP_BIT & MOST_GROUPS if query >> WHOLE_GROUP_BIT & 1 else 0
            for other in range(low[q], b + 1 if query < 0 and not whole else high[q]):
                for k in range(of_block[other], of_block[other + 1]):
                    key = fields[runs[k]]
                    if _sees(query, key):
                        if query >= 0 or k < q or (whole and whole == key >> GROUP_BIT & MOST_GROUPS):
                            pairs[other] += size * (runs[k + 1] - runs[k])
                        elif k == q:
                            pairs[other] += size * (size + 1) // 2
        size = min(fields.size, (b + 1) * block) - b * block
        for other in range(first, end):
            if pairs[other]:
                every = size * (min(fields.size, (other + 1) * block) - other * block)
                found[row, other] = WHOLLY if pairs[other] == every else PARTLY
                pairs[other] = 0
    return found


@kernel
def _sees(query: int, key: int) -> bool:
    """Return whether a token sees another of a known place: all of the rule but its causal part."""
    group = key >> GROUP_BIT & MOST_GROUPS
    return bool(
        not (query ^ key) >> SEGMENT_BIT & MOST_SEGMENTS
        and query >> SEGMENT_BIT & MOST_SEGMENTS
        and query >> (key >> OWN_BIT & MOST_MODALITIES - 1) & 1
        and (group == 0 or query >> ALL_GROUPS_BIT & 1 or group == query >> GROUP_BIT & MOST_GROUPS)
    )
