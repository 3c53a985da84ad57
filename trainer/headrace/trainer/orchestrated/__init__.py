"""OrchMLLM's execution (sections 5 to 7): every rank has all units, sharded by FSDP2, and each unit's work is balanced by itself.

`connect` makes the loader, and `OrchestratedModel` wraps encoders and an LLM: the user's own modules, or units of Headrace's.
"""

from headrace.trainer.orchestrated.orchestrated_loader import OrchestratedLoader, connect
from headrace.trainer.orchestrated.orchestrated_model import OrchestratedModel

__all__ = ["OrchestratedLoader", "OrchestratedModel", "connect"]
