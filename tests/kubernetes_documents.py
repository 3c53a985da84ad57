"""What a Kubernetes document must keep to: the schema of its API, and for its pods the standard `restricted` of pod security."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.kubernetes_schemas import CORE, CRDS, KINDS, POD_SPEC
from tests.kustomization import Document

ROOT = Path(__file__).parents[1]
DEPLOYMENTS = ROOT / "deploy" / "kubernetes"
BASE = DEPLOYMENTS / "base"
OVERLAYS = sorted(path.parent for path in DEPLOYMENTS.glob("overlays/*/kustomization.yaml"))
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def named(document: Document) -> str:
    """Return kind and name, for messages."""
    return f"{document['kind']}/{document['metadata']['name']}"


def faults(document: Document) -> list[str]:
    """Return what the document's API would refuse, with its place; empty where there is nothing."""
    schema = _schema_of(document["kind"])
    found = _errors(schema, document)
    known = _identities()[document["kind"]]
    if document["apiVersion"] not in known:
        found.append(f"apiVersion {document['apiVersion']} is not {' or '.join(known)}")
    return found + [fault for pod in pod_specs(document) for fault in _errors(_core(POD_SPEC), pod)]


def _errors(schema: Document, value: Any) -> list[str]:
    from jsonschema import Draft202012Validator  # takes seconds, for all that collect these tests

    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)
    ]


@cache
def _schema_of(kind: str) -> Document:
    if name := KINDS.get(kind):
        return _core(name)
    return _strict(_crds()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


@cache
def _identities() -> dict[str, list[str]]:
    """Each kind's apiVersions."""
    core = json.loads(CORE.read_text())["$defs"]
    own = {kind: core[name]["properties"]["apiVersion"]["enum"] for kind, name in KINDS.items() if name}
    return own | {kind: [f"{crd['spec']['group']}/{crd['spec']['versions'][0]['name']}"] for kind, crd in _crds().items()}


@cache
def _core(name: str) -> Document:
    return {**json.loads(CORE.read_text()), "$ref": f"#/$defs/{name}"}


@cache
def _crds() -> dict[str, Document]:
    crds = [json.loads(path.read_text()) for path in sorted(CRDS.glob("*.json"))]
    return {crd["spec"]["names"]["kind"]: crd for crd in crds}


def _strict(schema: Any) -> Any:
    """Refuse properties that the schema does not name, as an API server does that is asked to validate strictly."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    parts = {
        key: {name: _strict(one) for name, one in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
    }
    return {**parts, "additionalProperties": False} if closed else parts


def pod_specs(document: Any) -> Iterator[Document]:
    """Yield the specs of all pods that the document has made, wherever they stand in it."""
    if isinstance(document, list):
        for one in document:
            yield from pod_specs(one)
    elif isinstance(document, dict):
        if isinstance(document.get("containers"), list):
            yield document
        for one in document.values():
            yield from pod_specs(one)


def containers(pod: Document) -> list[Document]:
    """Return the containers of a pod, those of its beginning first."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def unrestricted(pod: Document) -> list[str]:
    """Return what the pod security standard `restricted` forbids, and what this project forbids besides."""
    own, found = pod.get("securityContext", {}), []
    found += ["runs as root"] * (own.get("runAsNonRoot") is not True or own.get("runAsUser") in (None, 0))
    found += ["no seccomp profile"] * (own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"))
    found += ["host's namespaces"] * any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    found += ["a service account's token"] * (pod.get("automountServiceAccountToken") is not False)
    found += ["services' variables, as HEADRACE_..."] * (pod.get("enableServiceLinks") is not False)
    for volume in pod.get("volumes", []):
        found += [f"volume {volume['name']}"] * (not set(volume) - {"name"} <= _VOLUMES)
    for container in containers(pod):
        context, name = container.get("securityContext", {}), container["name"]
        found += [f"{name}: privileges"] * (
            context.get("allowPrivilegeEscalation") is not False or context.get("privileged", False)
        )
        found += [f"{name}: capabilities"] * (context.get("capabilities") != {"drop": ["ALL"]})
        found += [f"{name}: a writable root"] * (context.get("readOnlyRootFilesystem") is not True)
        found += [f"{name}: ports of the host"] * any("hostPort" in port for port in container.get("ports", []))
        resources = container.get("resources", {})
        found += [f"{name}: no bound of memory"] * ("memory" not in resources.get("limits", {}))
        found += [f"{name}: no request"] * (not {"cpu", "memory"} <= set(resources.get("requests", {})))
    return found
