"""Jobs whose preprocessors run on a Ray cluster.

with headrace.ray.submit("job.yaml", endpoint="10.0.0.1:7070", min=2, max=16) as run:
    with headrace.trainer.connect("10.0.0.1:7070", job=run.job) as loader:
        ...
"""

from headrace.ray.submitting import RayRun, submit

__all__ = ["RayRun", "submit"]
