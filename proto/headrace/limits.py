"""How large a job may be: what a spec makes the services do is known to fit before it is taken.

Each limit is far beyond what anybody trains with, and below what ends a service: a job that is refused has a number too many in
it. Bytes and seconds beside them were measured or counted for one job at the limit.
"""

from __future__ import annotations

MAX_REPLICAS = 16_384
"""Data-parallel pipelines; the largest runs that are published have some 1,000 to 2,000."""
MAX_MICROBATCHES = 4_096
"""Of a replica in a step; published ones have up to a few hundred."""
MAX_STAGES = 256
"""Of a unit; published pipelines have up to 64, and models some 120 layers."""
MAX_SLOTS = 1 << 21
"""Replicas times microbatches times stages of all units: what the simulation of a plan fills, up to 0.8 KiB each, 1.6 GiB. 16,384
replicas of 16 microbatches through 8 stages have so many."""
MAX_GLOBAL_BATCH = 1 << 20
"""Samples of a step: 64 for each of 16,384 replicas."""
MAX_WINDOW = 1_024
"""Steps that are planned ahead."""
MAX_WINDOW_SAMPLES = 4 * MAX_GLOBAL_BATCH
"""Samples of the steps that are planned ahead, about 1 KiB each with their places and parts: 4 GiB."""
MAX_STEPS = 10**9
"""A step of 0.1 s each would take three years."""
MAX_EPOCHS = 10**6
"""Epochs times samples stay below 2^63 for 9 * 10^12 samples."""
MAX_SOURCES = 1_024
"""Data sets of a mixture; published ones have a few hundred."""
MAX_SOURCE_NAME = 255
"""Characters; it begins every sample's name, in the ledger and in logs."""
MAX_PATH = 4_096
"""Characters of a path or URL: the system's own limit."""
MAX_SHUFFLE_SHARDS = 65_536
"""Shards that are shuffled together: all of them are counted before the first step."""
MAX_PART_SAMPLES = 4_096
"""Samples that are decoded and fetched as one."""
MAX_TOKENS = 1 << 24
"""Of a sample, or of a packed sequence."""
MAX_RANKS = 1 << 20
"""Processes that take a job's replicas: 64 for each of 16,384."""

MAX_PATCH = 256
"""Pixels of a patch's side; encoders have 14, 16 or 32."""
MAX_MERGE = 64
"""Patches of a side that become one token."""
MAX_PIXELS = 1 << 26
"""Of an image after resizing, 67 megapixels: 200 MB, and 340,000 patches of 14."""
MAX_SOURCE_PIXELS = 1 << 30
"""Of an image as it is stored: 3 GiB, once it is decoded."""
MAX_DECODE_MIB = 1 << 16
"""That decoding one image or recording may hold."""

MAX_SAMPLE_RATE = 384_000
"""Hertz: the highest at which anybody records."""
MAX_MEL_BINS = 1_024
"""Whisper has 80 and 128."""
MIN_HOP_S = 0.001
"""Between frames; encoders have 0.01."""
MAX_WINDOW_S = 1.0
"""Of a frame's transform; encoders have 0.025."""
MAX_SECONDS = 86_400.0
"""Of a recording: a day."""
MAX_SOUND_VALUES = 1 << 28
"""Of a recording, before its transform and after, 4 bytes each: 1 GiB. 4.6 hours at 16 kHz, or 5.8 of 128 bins each 10 ms."""

MAX_NODES = 4_096
"""Of a recoverable job: a snapshot of so many is planned in half a minute."""
MAX_NODES_MICROBATCHES = 1 << 16
"""Of a global batch of such a job, over all replicas."""
MAX_LAYERS = 4_096
"""Of its model."""
MAX_NODE_NAME = 255
"""Characters of a node's name, and of its address."""
