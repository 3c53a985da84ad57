"""The ports that a firewall or a network policy must know are fixed, and are those of docs/command-line.md."""

from __future__ import annotations

import re

import pytest
import yaml

from headrace.cli.main import _parse
from headrace.cli.run.preprocessor import flight_port
from headrace.cluster_token import is_loopback
from tests.kubernetes_documents import BASE, ROOT, containers, pod_specs
from tests.kustomization import kustomized

PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
LISTEN, FLIGHT = 7100, 7101


@pytest.mark.parametrize(
    ("listen", "port"),
    [
        ("0.0.0.0:7100", FLIGHT),
        ("[::]:9", 10),
        ("gpu-7.cluster:7100", FLIGHT),
        ("0.0.0.0:0", 0),
        ("0.0.0.0:65535", 0),
        ("127.0.0.1:7100", 0),
        ("localhost:7100", 0),
    ],
)
def test_flight_has_the_port_after_that_of_listen_where_a_network_is(listen: str, port: int) -> None:
    assert flight_port(listen) == port


def test_compose_names_both_ports_and_its_health_check_asks_the_first() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["preprocessor"]
    args = _parse(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["command"]).split())
    assert (args.listen, args.flight_port) == (f"0.0.0.0:{LISTEN}", FLIGHT)
    assert service["healthcheck"]["test"][-1].endswith(f":{LISTEN}")


def test_the_network_policies_of_kubernetes_let_trainers_through_to_both() -> None:
    documents = kustomized(BASE)
    (container,) = [
        container
        for document in documents
        for pod in pod_specs(document)
        for container in containers(pod)
        if container["image"].startswith("headrace-preprocessor") and container.get("args", [""])[0] == "preprocessor"
    ]
    args = _parse([re.sub(r"\$\((\w+)\)", "10.0.0.1", argument) for argument in container["args"]])
    assert (args.listen.rpartition(":")[2], args.flight_port) == (str(LISTEN), FLIGHT)
    assert {port["containerPort"] for port in container["ports"]} >= {LISTEN, FLIGHT}
    policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
    opened = {
        port["port"]
        for policy in policies
        if policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component") == "preprocessor"
        for rule in policy["spec"].get("ingress", [])
        for port in rule.get("ports", [])
    }
    assert {LISTEN, FLIGHT} <= opened


def test_no_network_policy_opens_the_web_page_which_listens_on_the_loopback_of_its_pod() -> None:
    documents = kustomized(BASE)
    (reorder,) = [one for one in documents if one["kind"] == "StatefulSet" and one["metadata"]["name"] == "headrace-reorder"]
    (pod,) = pod_specs(reorder)
    host, _, port = _parse(pod["containers"][0]["args"]).page.rpartition(":")
    assert is_loopback(f"{host}:{port}")
    policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", []) if "ports" in rule]
    assert not any(one["port"] <= int(port) <= one.get("endPort", one["port"]) for rule in rules for one in rule["ports"])


def test_the_page_lists_them() -> None:
    table = PAGE.partition("## Ports")[2].partition("\n## ")[0]
    for port in (7070, LISTEN, FLIGHT, 9090, 9100, 6379, 29500):
        assert re.search(rf"^\| [^|]*\b{port}\b", table, re.MULTILINE), port
