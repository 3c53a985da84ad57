"""A rank that only reads and commits."""

from __future__ import annotations

from headrace import trainer


def consume(loader: trainer.StepLoader, stop: int | None = None) -> list[int]:
    """Read and commit the steps from the loader's place on, up to `stop` or to the end; their numbers."""
    done = []
    for step in loader:
        list(step)
        loader.commit(step)
        done.append(step.index)
        if step.index + 1 == stop:
            break
    return done
