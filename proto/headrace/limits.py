"""Limits on the size of a job, checked before it is accepted so that it cannot exhaust a service.

Each limit is far above what anybody trains with, and below what would bring a service down: a refused job most likely has a digit
too many. The bytes and seconds named here were measured or calculated for one job at the limit.
"""

from __future__ import annotations

MAX_REPLICAS = 16_384
"""Most data-parallel replicas (pipelines) of a job; the largest published runs have some 1,000 to 2,000."""
MAX_MICROBATCHES = 4_096
"""Most microbatches of one replica in a step; published runs have up to a few hundred."""
MAX_STAGES = 256
"""Most pipeline stages of one unit; published pipelines have up to 64 stages, and models some 120 layers."""
MAX_SLICES = 1_024
"""Most tensor-parallel slices of a layer; published ones have up to 64."""
MAX_SLOTS = 1 << 21
"""Most replicas x microbatches x stages (of all units together), the slots that the simulation of a plan fills: at up to 0.8 KiB
each, 1.6 GiB. 16,384 replicas of 16 microbatches through 8 stages reach it."""
MAX_GLOBAL_BATCH = 1 << 20
"""Most samples of a global batch: 64 for each of 16,384 replicas."""
MAX_WINDOW = 1_024
"""Most steps that may be planned ahead."""
MAX_WINDOW_SAMPLES = 4 * MAX_GLOBAL_BATCH
"""Most samples in all steps planned ahead together: at about 1 KiB each, with their places and parts, 4 GiB."""
MAX_STEPS = 10**9
"""Most steps of a job: at 0.1 s each they take three years."""
MAX_EPOCHS = 10**6
"""Most epochs of a job: sample ids stay below 2^63 with up to 9 * 10^12 samples an epoch."""
MAX_SOURCES = 1_024
"""Most sources (data sets) of a mixture; published mixtures have a few hundred."""
MAX_SOURCE_NAME = 255
"""Most characters of a source's name, which begins the name of each of its samples in the ledger and in logs."""
MAX_PATH = 4_096
"""Most characters of a path or URL: the operating system's own limit."""
MAX_SHUFFLE_SHARDS = 65_536
"""Most shards that are shuffled together: the rows of all of them are counted before the first step."""
MAX_SHUFFLE_ROWS = 1 << 20
"""Most neighbouring rows that stay together when samples are shuffled: as many as pyarrow's largest row groups have."""
MAX_PART_SAMPLES = 4_096
"""Most samples of a part, the unit of decoding and fetching."""
MAX_TOKENS = 1 << 24
"""Most tokens of a sample or of a packed sequence."""
MAX_RANKS = 1 << 20
"""Most trainer ranks (processes) of a job: 64 for each of 16,384 replicas."""

MAX_PATCH = 256
"""Longest side of a patch in pixels; published encoders have 14, 16 or 32."""
MAX_MERGE = 64
"""Largest merge factor: `merge` x `merge` patches become one token."""
MAX_PIXELS = 1 << 26
"""Most pixels of an image after resizing: 67 megapixels take 200 MB and make 340,000 patches of side 14."""
MAX_IMAGE_SIDE = 4_096
"""Longest side in pixels of an image after resizing, where a job names one, and of a tile."""
MAX_TILES = 64
"""Most tiles of an image; published models have up to 12, or 40."""
MAX_TILES_PER_SIDE = 16
"""Most tiles along each side of an image of any resolution; published models have up to 6."""
MAX_SOURCE_PIXELS = 1 << 30
"""Most pixels of an image as it is stored, before resizing: 3 GiB once decoded."""
MAX_DECODE_MIB = 1 << 16
"""Most memory, in MiB, that decoding one image or recording may be allowed to hold."""

MAX_SAMPLE_RATE = 384_000
"""Highest sample rate in Hz, the highest at which anybody records."""
MAX_MEL_BINS = 1_024
"""Most mel bins of a frame; Whisper has 80 or 128."""
MIN_HOP_S = 0.001
"""Shortest hop between mel frames in seconds; published encoders have 0.01."""
MAX_WINDOW_S = 1.0
"""Longest window of a frame's Fourier transform in seconds; published encoders have 0.025."""
MAX_SECONDS = 86_400.0
"""Longest recording in seconds: a day."""
MAX_SOUND_VALUES = 1 << 28
"""Most values of a recording, as a waveform and as mel features: 1 GiB at 4 bytes each. 4.6 hours at 16 kHz, or 5.8 hours of 128
bins every 10 ms, reach it."""

MAX_NODES = 4_096
"""Most nodes of a recoverable job: a snapshot of that many is planned in half a minute."""
MAX_GPUS_PER_NODE = 64
"""Most processes of a node of a recoverable job; hosts have up to 16 GPUs."""
MAX_RECOVERABLE_MICROBATCHES = 1 << 16
"""Most microbatches in a global batch of a recoverable job, over all replicas."""
MAX_LAYERS = 4_096
"""Most layers of the model of a recoverable job."""
MAX_NODE_NAME = 255
"""Most characters of a node's name, and of its address."""
