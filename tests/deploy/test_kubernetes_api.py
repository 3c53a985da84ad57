"""A real API server takes every document of deploy/kubernetes, and their pods where only restricted ones may be."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.api_server import ApiServer, binaries, running_api_server
from tests.kubernetes_documents import BASE, OVERLAYS, named, pod_specs
from tests.kubernetes_schemas import CRDS
from tests.kustomization import Document, kustomized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(binaries() is None, reason="KUBEBUILDER_ASSETS names no folder with kube-apiserver and etcd"),
]
FOLDERS = [BASE, *OVERLAYS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder = binaries()
    assert folder is not None
    with running_api_server(folder, tmp_path_factory.mktemp("kubernetes")) as running:
        for path in sorted(CRDS.glob("*.json")):
            crd = json.loads(path.read_text())
            crd["metadata"]["annotations"]["api-approved.kubernetes.io"] = "unapproved, of a test"
            assert running.apply(crd) == ""
        yield running


def _pod(spec: Document) -> Document:
    lasting = {key: value for key, value in spec.items() if key != "restartPolicy"}
    claimed = [{"name": "data", "emptyDir": {}}] if spec["containers"][0]["name"] == "redis" else []
    volumes = [*spec.get("volumes", []), *claimed]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {**lasting, "volumes": volumes}}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_server_takes_every_document_and_its_pods(server: ApiServer, folder: Path) -> None:
    documents = kustomized(folder)
    server.make_namespace(folder.name)
    said = {named(document): server.apply(document, folder.name) for document in documents}
    pods = [(f"pod of {named(document)}", spec) for document in documents for spec in pod_specs(document)]
    said |= {name: server.apply(_pod(spec), folder.name, dry_run=True) for name, spec in pods}
    assert pods
    assert {name: words for name, words in said.items() if words} == {}


def test_the_server_refuses_a_bold_pod_and_a_misspelt_key(server: ApiServer) -> None:
    (deployment,) = [document for document in kustomized(BASE) if document["kind"] == "Deployment"]
    (spec,) = pod_specs(deployment)
    server.make_namespace("bold")
    bold = copy.deepcopy(spec)
    bold["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert 'violates PodSecurity "restricted:' in server.apply(_pod(bold), "bold", dry_run=True)
    misspelt = copy.deepcopy(deployment)
    misspelt["spec"]["replica"] = 2
    assert "replica" in server.apply(misspelt, "bold")
