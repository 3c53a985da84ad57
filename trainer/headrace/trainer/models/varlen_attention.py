"""torch's attention of variable-length segments, as each release from 2.11 on takes grouped queries.

The import costs 1.5 s, as it takes in the compiler: only processes with a GPU need it.
"""

from __future__ import annotations

from functools import partial
from inspect import signature

from torch.nn.attention.varlen import varlen_attn

grouped_varlen_attn = partial(varlen_attn, enable_gqa=True) if "enable_gqa" in signature(varlen_attn).parameters else varlen_attn
"""`varlen_attn` where there may be fewer heads of keys than of queries. Releases before 2.13 take them without being told."""
