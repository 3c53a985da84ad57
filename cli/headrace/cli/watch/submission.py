"""Read the spec of a job to submit from its file."""

from __future__ import annotations

from pathlib import Path

from headrace.spec import JobSpec, load_spec_yaml


def read_spec(path: Path) -> JobSpec:
    """Read a spec, with every metadataset among its sources written out. Raises UserError and DatasetError.

    Only metadatasets need the code that reads data sets, which not every installation has.
    """
    spec = load_spec_yaml(path)
    if not any(suffix in source.path for source in spec.sources for suffix in (".yaml", ".yml")):
        return spec
    from headrace.preprocessor.sources.metadataset import expand

    return expand(spec)


def with_coefficients(spec: JobSpec, path: Path) -> JobSpec:
    """Return the spec with the measured costs of a coefficients file, at the widths (`tp`) of its units. Raises UserError."""
    from headrace.cli.costs.dataset_costs import read_coefficients
    from headrace.reorder_service.planning.cost_model.coefficients_document import document_of

    document = document_of(read_coefficients(path, spec.execution.widths()))
    return spec.with_execution(spec.execution.model_copy(update={"coefficients": document}))
