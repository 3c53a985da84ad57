"""Documents of deploy/kubernetes are what the APIs take, and fit each other."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.identity import AUTHORITIES, CHAIN, KEY
from headrace.spec import JobSpec
from tests.kubernetes_documents import BASE, DEPLOYMENTS, OVERLAYS, containers, faults, named, pod_specs, unrestricted
from tests.kustomization import Document, kustomized

FOLDERS = [BASE, *OVERLAYS]
MADE_BY_HAND = {  # what the page has its reader make, and nobody else does
    "headrace-tls-reorder",
    "headrace-tls-preprocessor",
    "headrace-tls-trainer",
    "headrace-tls-client",
    "headrace-tls-store",
    "headrace-tokens",
    "headrace-redis",
    "headrace-data",
    "headrace-checkpoints",
}
read = cache(kustomized)
folders = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@folders
def test_every_document_is_what_its_api_takes(folder: Path) -> None:
    assert {named(document): found for document in read(folder) if (found := faults(document))} == {}


@folders
def test_every_pod_is_restricted(folder: Path) -> None:
    found = {named(document): [unrestricted(pod) for pod in pod_specs(document)] for document in read(folder)}
    assert {name: lists for name, lists in found.items() if any(lists)} == {}
    assert any(found.values())


def test_a_misspelt_key_and_a_bold_pod_are_found() -> None:
    (deployment,) = [document for document in read(BASE) if document["kind"] == "Deployment"]
    misspelt = copy.deepcopy(deployment)
    misspelt["spec"]["template"]["spec"]["container"] = []
    assert any("'container' was unexpected" in fault for fault in faults(misspelt))
    (pod,) = pod_specs(deployment)
    bold = copy.deepcopy(pod)
    bold["containers"][0]["securityContext"]["capabilities"] = {"add": ["NET_ADMIN"]}
    bold["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    assert unrestricted(bold) == ["volume host", "preprocessor: capabilities"]


@pytest.mark.parametrize("kind", ["JobSet", "ScaledObject", "TrainJob"])
def test_misspelt_keys_of_controllers_are_found(kind: str) -> None:
    (document, *_) = [one for folder in OVERLAYS for one in read(folder) if one["kind"] == kind]
    assert faults({**document, "spec": {**document["spec"], "retries": 3}}) != []


@folders
def test_what_pods_mount_and_read_is_there_or_made_by_hand(folder: Path) -> None:
    documents = read(folder)
    made = {document["metadata"]["name"] for document in documents if document["kind"] == "ConfigMap"}
    for pod in (pod for document in documents for pod in pod_specs(document)):
        claimed = {"data"} if pod["containers"][0]["name"] == "redis" else set()  # a template's
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | claimed
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == volumes
        assert _references(pod) <= made | MADE_BY_HAND


def _references(node: Any) -> set[str]:
    """Names of secrets, config maps and claims in a pod."""
    if isinstance(node, list):
        return set().union(*map(_references, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    own = {str(node[key]) for key in ("secretName", "claimName") if key in node}
    own |= {node[key]["name"] for key in ("configMap", "secretKeyRef", "configMapKeyRef") if key in node}
    return own | set().union(*map(_references, node.values()))


@folders
def test_selectors_choose_pods_that_are_there(folder: Path) -> None:
    documents = read(folder)
    if not any(document["kind"] == "Deployment" for document in documents):
        pytest.skip("trainers alone, beside the base")
    labels = [
        document["spec"]["template"]["metadata"]["labels"] for document in documents if "template" in document.get("spec", {})
    ]
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            wanted = spec["selector"]
        elif document["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            wanted = spec["selector"]["matchLabels"]
        else:
            continue
        assert any(wanted.items() <= own.items() for own in labels), named(document)


def test_services_and_policies_name_the_ports_of_the_containers() -> None:
    documents = read(BASE)
    ports = {
        (document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"], port["containerPort"]): port["name"]
        for document in documents
        for pod in pod_specs(document)
        for port in pod["containers"][0]["ports"]
    }
    for document in documents:
        if document["kind"] == "Service":
            component = document["spec"]["selector"]["app.kubernetes.io/component"]
            for port in document["spec"]["ports"]:
                assert ports[component, port["port"]] == port["targetPort"]
        if document["kind"] == "NetworkPolicy":
            component = document["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
            for rule in document["spec"].get("ingress", []) if component in ("reorder", "redis", "preprocessor") else []:
                assert {(component, port["port"]) for port in rule["ports"]} <= set(ports)


def test_redis_is_reached_by_the_reorder_service_alone() -> None:
    policies = {document["metadata"]["name"]: document["spec"] for document in read(BASE) if document["kind"] == "NetworkPolicy"}
    assert policies["headrace-deny"]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "headrace"}}
    assert "ingress" not in policies["headrace-deny"]
    (rule,) = policies["headrace-redis"]["ingress"]
    assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]] == ["reorder"]
    assert not any(_without_peers(rule) for rule in policies["headrace-reorder"]["ingress"])


def test_redis_speaks_tls_only_to_those_with_papers() -> None:
    (redis,) = [document for document in read(BASE) if named(document) == "StatefulSet/headrace-redis"]
    (pod,) = pod_specs(redis)
    (container,) = pod["containers"]
    words = container["args"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (options["--port"], options["--tls-auth-clients"]) == ("0", "yes")
    assert int(options["--tls-port"]) == container["ports"][0]["containerPort"]
    files = {options[f"--tls-{name}-file"] for name in ("cert", "key", "ca-cert")}
    assert files == {f"/run/redis-tls/{name}" for name in (CHAIN, KEY, AUTHORITIES)}
    (url,) = re.findall(r"rediss?://headrace:[^\"]*", (DEPLOYMENTS.parents[1] / "docs" / "kubernetes.md").read_text())
    name = redis["spec"]["serviceName"]
    asked = "&".join(
        f"{option}=/run/headrace/tls/{file}"
        for option, file in (("ssl_ca_certs", AUTHORITIES), ("ssl_certfile", CHAIN), ("ssl_keyfile", KEY))
    )
    assert url == f"rediss://headrace:$password@{name}:6379/0?{asked}"


def _without_peers(rule: Document) -> bool:
    return not rule.get("from")


def test_a_trainer_has_its_own_token_and_papers_only() -> None:
    for folder in OVERLAYS:
        for pod in (pod for document in read(folder) for pod in pod_specs(document)):
            volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
            for container in containers(pod):
                secrets = [secret for mount in container["volumeMounts"] if (secret := volumes.get(mount["name"]))]
                tokens = [item["key"] for secret in secrets for item in secret.get("items", []) if item["key"] != "users.acl"]
                papers = [secret["secretName"] for secret in secrets if secret["secretName"].startswith("headrace-tls-")]
                if container["name"] in ("trainer", "node"):
                    assert (tokens, papers) == (["train"], ["headrace-tls-trainer"])
                if container["name"] == "submit":
                    assert (tokens, papers) == (["submit"], ["headrace-tls-client"])


@pytest.mark.parametrize("spec", sorted(DEPLOYMENTS.glob("**/job.yaml")), ids=lambda path: path.parent.name)
def test_jobs_are_specs(spec: Path) -> None:
    JobSpec.model_validate(yaml.safe_load(spec.read_text()))


def test_ranks_are_as_many_as_the_job_s_pipeline_takes() -> None:
    from headrace.trainer.pipeline.topology import PipelineTopology

    documents = read(DEPLOYMENTS / "overlays" / "jobset")
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    (config,) = [document for document in documents if document["kind"] == "ConfigMap"]
    spec = JobSpec.model_validate(yaml.safe_load(config["data"]["job.yaml"]))
    workers = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]
    (container,) = workers["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert int(env["NUM_NODES"]) == workers["parallelism"] == workers["completions"]
    assert int(env["NUM_GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    PipelineTopology.of_job(spec).check_world(int(env["NUM_NODES"]) * int(env["NUM_GPUS"]))
    assert re.search(r"--job (\S+)", container["args"][0])[1] == spec.name


def test_the_runtime_of_kubeflow_ends_and_restarts_what_the_jobset_does() -> None:
    """Line for line: what it leaves out is the controller's to fill in, and a coordinator, for which that has variables."""
    (jobset,) = [one for one in read(DEPLOYMENTS / "overlays" / "jobset") if one["kind"] == "JobSet"]
    (runtime,) = [one for one in read(DEPLOYMENTS / "overlays" / "kubeflow") if one["kind"] == "ClusterTrainingRuntime"]
    renamed = json.loads(json.dumps(jobset["spec"]).replace('"workers"', '"node"'))
    theirs = runtime["spec"]["template"]["spec"]
    assert {key for key in renamed if renamed[key] != theirs.get(key)} == {"coordinator", "replicatedJobs"}
    for one, other in zip(renamed["replicatedJobs"], theirs["replicatedJobs"], strict=True):
        assert (one["name"], one.get("dependsOn")) == (other["name"], other.get("dependsOn"))
        own, same = one["template"]["spec"], other["template"]["spec"]
        left_out = set() if one["name"] == "submit" else {"parallelism", "completions"}
        assert {key for key in own if key != "template" and own[key] != same.get(key)} == left_out
        assert same["template"]["spec"]["restartPolicy"] == "Never", "which a podFailurePolicy takes"


def test_a_misspelt_rule_of_the_runtime_is_found() -> None:
    (runtime,) = [one for one in read(DEPLOYMENTS / "overlays" / "kubeflow") if one["kind"] == "ClusterTrainingRuntime"]
    misspelt = copy.deepcopy(runtime)
    misspelt["spec"]["template"]["spec"]["failurePolicy"]["rules"][0]["action"] = "FailJob"
    misspelt["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"]["podFailurePolicies"] = {}
    assert sorted(re.sub(r":.*", "", fault) for fault in faults(misspelt)) == [
        "spec/template/spec/failurePolicy/rules/0/action",
        "spec/template/spec/replicatedJobs/1/template/spec",
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@folders
def test_kustomize_reads_the_folders_alike(folder: Path) -> None:
    text = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=60).stdout
    theirs = {named(document): document for document in yaml.safe_load_all(text)}
    assert {named(document): document for document in read(folder)} == theirs
