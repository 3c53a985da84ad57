"""What Headrace is compared with: loaders, and a trainer that outlasts the loss of processes.

    environment.py   one virtual environment each
    run.py           runs a loader in its environment: `python -m benchmarks.peers.run NAME ...`
    torch_webdataset.py  spdl_threads.py  energon.py  lit.py  mosaicml.py  ray_data.py      `batches(folder)` of each loader
    torchft_ddp.py   the trainer, a command of its own
    rank_tokens.py   the tokens that samplers and packers of other libraries give to ranks, a command of its own

All loaders decode with the same function, in two workers, in batches of the same size. A peer's module imports what is in its
own environment, so only what runs there may import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How a peer is called, installed and run."""

    title: str
    module: str
    """Of this package; also the name of its environment."""
    requirements: Sequence[str]
    with_dependencies: bool = True
    stubs: Mapping[str, str] = field(default_factory=dict)
    """Path in site-packages -> content: of modules that the peer imports and does not need here."""
    own_format: bool = False
    """Whether it reads shards of its own, which its module's `convert(photos, folder)` writes."""


DATALOADER = "DataLoader + webdataset"
RAY_DATA = Peer(title="Ray Data", module="ray_data", requirements=("ray[data]==2.60.*",))
"""Its environment has Ray, and behind it what Headrace has: Headrace's preprocessors on Ray run in it, too."""
# mosaicml-streaming requires torchvision and transformers, for data sets and tokenisers that are not used here, and clients of
# four clouds. The environment gets what is imported.
_STREAMING_STUBS = {
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "def to_tensor(image): ...\n",
    "transformers/__init__.py": "",
    "transformers/feature_extraction_utils.py": "class BatchFeature: ...\n",
    "transformers/tokenization_utils_base.py": "class BatchEncoding: ...\n",
    "transformers/models/__init__.py": "",
    "transformers/models/auto/__init__.py": "",
    "transformers/models/auto/tokenization_auto.py": "class AutoTokenizer: ...\n",
}
_STREAMING = ("mosaicml-streaming==0.13.*", "Brotli", "python-snappy", "cramjam", "xxhash", "zstd", "tqdm", "catalogue")
PEERS = (
    Peer(title=DATALOADER, module="torch_webdataset", requirements=("webdataset==1.0.*",)),
    Peer(title="SPDL", module="spdl_threads", requirements=("spdl==0.8.*",)),
    Peer(title="Megatron-Energon", module="energon", requirements=("megatron-energon==7.*",), own_format=True),
    Peer(title="LitData", module="lit", requirements=("litdata==0.2.*",), own_format=True),
    Peer(
        title="MosaicML Streaming",
        module="mosaicml",
        requirements=_STREAMING,
        with_dependencies=False,
        stubs=_STREAMING_STUBS,
        own_format=True,
    ),
    RAY_DATA,
)
"""The loaders."""
LOOPS = Peer(
    title="the training loops of other libraries",
    module="library_loops",
    requirements=("transformers==5.*", "accelerate==1.*", "lightning==2.*", "webdataset==1.0.*", "grain==0.2.*"),
)
"""Transformers' Trainer, Accelerate and Lightning, with the loader that they are fed by and the packer that torchtitan uses."""
TORCHFT = Peer(title="torchft", module="torchft_ddp", requirements=("torchft==0.2.*",))
