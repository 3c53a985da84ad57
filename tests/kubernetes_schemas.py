"""Cut the schemas of Kubernetes and of the controllers that deploy/ names down to what its documents use.

python -m tests.kubernetes_schemas JOBSET KEDA TRAINER: clones of the three controllers' repositories. The core schemas are those
of the package kubernetes-validate. tests/data/kubernetes/README.md says where each file is from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "data" / "kubernetes"
CORE = FOLDER / "core.json"
CRDS = FOLDER / "crds"
RELEASE = "v1.37.0"
KINDS = {  # kind -> its definition
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "HorizontalPodAutoscaler": "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
    "Job": "io.k8s.api.batch.v1.Job",
    "Kustomization": "",  # no API has it
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Pod": "io.k8s.api.core.v1.Pod",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "Secret": "io.k8s.api.core.v1.Secret",
    "Service": "io.k8s.api.core.v1.Service",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
}
POD_SPEC = "io.k8s.api.core.v1.PodSpec"
OF_CONTROLLERS = {
    "jobset": ["config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"],
    "keda": ["config/crd/bases/keda.sh_scaledobjects.yaml"],
    "trainer": [
        "manifests/base/crds/trainer.kubeflow.org_clustertrainingruntimes.yaml",
        "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml",
    ],
}
_REFERENCE = "/api/_definitions.json#/$defs/"
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], **_ANYTHING}
_DROPPED = {"description", "title", "example", "x-kubernetes-group-version-kind"}


def cut_core(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions of `KINDS` and all that they refer to, without their prose."""
    wanted, kept = sorted(filter(None, KINDS.values())), {}
    while wanted:
        name = wanted.pop()
        if name not in kept:
            text = json.dumps(_without_prose(definitions[name]))
            kept[name] = json.loads(text.replace(_REFERENCE, "#/$defs/"))
            wanted += [part.split('"')[0] for part in text.split("#/$defs/")[1:]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": dict(sorted(kept.items()))}


def cut_crd(crd: dict[str, Any]) -> dict[str, Any]:
    """Return the custom resource's definition with its stored version alone, without prose and what a pod or a claim may be."""
    spec = crd["spec"]
    (version,) = [one for one in spec["versions"] if one["storage"]]
    schema = _without_pods(_without_prose(version["schema"]["openAPIV3Schema"]))
    if "status" in schema["properties"]:
        schema["properties"]["status"] = _ANYTHING
    version = {**version, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": crd["apiVersion"],
        "kind": crd["kind"],
        "metadata": {"name": crd["metadata"]["name"], "annotations": _approvals(crd)},
        "spec": {"group": spec["group"], "names": spec["names"], "scope": spec["scope"], "versions": [version]},
    }


def _approvals(crd: dict[str, Any]) -> dict[str, str]:
    return {key: value for key, value in crd["metadata"].get("annotations", {}).items() if "approved" in key}


def _without_prose(schema: Any, *, of_properties: bool = False) -> Any:
    """Drop descriptions, but not properties that are called so."""
    if isinstance(schema, list):
        return [_without_prose(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_prose(value, of_properties=key == "properties" and not of_properties)
        for key, value in schema.items()
        if of_properties or key not in _DROPPED
    }


def _without_pods(schema: Any) -> Any:
    """Replace the schemas of pods, of their parts and of claims, which the core schemas have, by an object of any fields."""
    if isinstance(schema, list):
        return [_without_pods(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties", {})
    if {"containers", "restartPolicy"} <= set(properties):
        return _ANYTHING
    if {"name", "valueFrom"} <= set(properties):
        return _NAMED
    return {
        key: {name: _part(name, one) for name, one in value.items()} if key == "properties" else _without_pods(value)
        for key, value in schema.items()
    }


def _part(name: str, schema: dict[str, Any]) -> Any:
    if name in ("affinity", "volumeClaimPolicies", "securityContext", "resourcesPerNode", "tolerations"):
        return _ANYTHING if schema.get("type") == "object" else {**schema, "items": _ANYTHING}
    if name == "volumes" and schema.get("type") == "array":
        return {"type": "array", "items": _ANYTHING}
    return _without_pods(schema)


def main() -> None:
    """Write the files of tests/data/kubernetes."""
    import kubernetes_validate

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"{RELEASE}-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    for kind, name in KINDS.items():
        if name:  # the kinds' own files say which apiVersion is theirs
            group, _, version = name.removeprefix("io.k8s.api.").rsplit(".", 1)[0].rpartition(".")
            own = f"{kind.lower()}-{version if group == 'core' else f'{group}-{version}'}.json"
            definitions[name] = json.loads((folder / own).read_text())
            definitions[name].pop("$id")
            definitions[name].pop("$schema")
    _write(CORE, cut_core(definitions))
    for clone, files in zip(sys.argv[1:], OF_CONTROLLERS.values(), strict=True):
        for file in files:
            crd = yaml.safe_load((Path(clone) / file).read_text())
            _write(CRDS / f"{crd['spec']['names']['singular']}.json", cut_crd(crd))


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
