"""Import what the commands of an image import, which writes its bytecode: `python import_commands.py`.

A container cannot write it, and would compile at each start what is not there.
"""

from importlib import import_module

import numba

from headrace.cli.main import COMMANDS

SERVICES = (
    "headrace.observability.otlp",
    "headrace.preprocessor.audio.features",
    "headrace.preprocessor.server",
    "headrace.reorder_service.page.page_server",
    "headrace.reorder_service.server",
    "headrace.trainer.loading.relay",
    "headrace.trainer.pipeline.pipeline_training",
    "headrace.trainer.recovery.node",
    "headrace.trainer.train",
    "matplotlib.pyplot",
    "torch.optim",
)
"""What they import when they come to it."""

for name in (*(f"headrace.cli.{module}" for module, _ in COMMANDS.values()), *SERVICES):
    try:
        import_module(name)
    except ModuleNotFoundError as err:
        print(f"not for this image: {name} ({err.name})")

numba.njit(lambda number: number)(1)  # it imports much when it compiles
