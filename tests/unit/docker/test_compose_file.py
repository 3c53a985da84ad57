"""compose.yaml and what it mounts: confined, encrypted, and about metrics that exist."""

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from headrace.observability import metrics

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OBSERVABILITY = ROOT / "docker" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "dashboards" / "headrace.json").read_text(encoding="utf-8"))
OURS = [name for name in SERVICES if SERVICES[name]["image"].startswith("headrace-")]


@pytest.mark.parametrize("service", SERVICES)
def test_every_container_is_confined(service: str) -> None:
    container = SERVICES[service]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "pids_limit"} <= set(container)


@pytest.mark.parametrize("service", [name for name in OURS if name != "papers"])
def test_every_process_has_papers_of_its_own_part_and_may_not_change_them(service: str) -> None:
    container = SERVICES[service]
    assert container["environment"]["HEADRACE_TLS"] == "/run/headrace"
    assert container["environment"]["HEADRACE_LOG_CONNECTIONS"] == "${HEADRACE_LOG_CONNECTIONS-1}", "0 turns it off"
    part = "reorder" if service == "standby" else service.removesuffix("-gpu")
    assert [volume for volume in container["volumes"] if "papers" in volume] == [f"{part}-papers:/run/headrace:ro"]
    words = " ".join([*container.get("command", []), *container.get("entrypoint", [])])
    assert "--allow-" not in words, "no door is left open by name"


def test_only_those_who_need_it_see_the_authority_and_the_store() -> None:
    assert [name for name, one in SERVICES.items() if "authority" in str(one.get("volumes"))] == ["papers"]
    assert {name for name, one in SERVICES.items() if "store" in one.get("networks", [])} == {"redis", "reorder", "standby"}
    assert COMPOSE["networks"]["store"] == {"internal": True}


def test_the_store_speaks_tls_only_to_those_with_papers() -> None:
    redis, reorder = str(SERVICES["redis"]["command"]), str(SERVICES["reorder"]["command"])
    for words in ("--port 0 --tls-port 6379", "--tls-auth-clients yes", "--aclfile /run/headrace/users.acl"):
        assert words in redis
    assert "@redis:6379" in reorder
    assert "redis://" not in reorder
    assert "--store-host redis\n" in (ROOT / "docker" / "make_papers.sh").read_text(encoding="utf-8")
    for option, file in (("ssl_ca_certs", "ca.crt"), ("ssl_certfile", "tls.crt"), ("ssl_keyfile", "tls.key")):
        assert f"{option}=/run/headrace/{file}" in reorder
    assert "store-papers:/run/headrace:ro" in SERVICES["redis"]["volumes"]


def test_what_is_published_is_published_on_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all("127.0.0.1:" in port for port in ports)


def test_the_web_page_is_where_its_description_says() -> None:
    page = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    assert "https://127.0.0.1:7080/" in page
    assert "${HEADRACE_PUBLISH_PAGE:-127.0.0.1:7080}:7080" in SERVICES["reorder"]["ports"]
    assert "HEADRACE_PUBLISH_PAGE" in page
    assert "--page 0.0.0.0:7080" in str(SERVICES["reorder"]["command"])


def test_nobody_may_change_what_grafana_shows() -> None:
    settings = SERVICES["grafana"]["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"  # an empty password would leave it at "admin"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_whatever_is_mounted_from_the_repository_is_there() -> None:
    mounted = {volume.split(":")[0] for one in SERVICES.values() for volume in one.get("volumes", []) if volume.startswith("./")}
    assert mounted
    for path in mounted:
        assert (ROOT / path).exists(), path


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    declared = {sample for registry in (metrics.PREPROCESSOR, metrics.REORDER, metrics.TRAINER) for sample in names_of(registry)}
    asked = {name for query in queries for name in re.findall(r"headrace_\w+", query)}
    assert len(asked) > 10
    assert asked <= declared


def test_no_panel_of_the_dashboard_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        fields = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not fields & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= fields
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_and_its_data_source_name_each_other() -> None:
    (source,) = yaml.safe_load((OBSERVABILITY / "grafana" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))[
        "datasources"
    ]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel} == {source["uid"]}
    (job,) = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert set(discovery["names"]) == {name for name in OURS if name != "papers"}
    for name in discovery["names"]:
        assert f"--metrics 0.0.0.0:{discovery['port']}" in str(SERVICES[name]["command"])


@pytest.fixture(scope="module")
def requirements() -> Callable[..., list[str]]:
    """(pyproject, extras, unused) -> lines, of docker/requirements.py."""
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "docker" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Callable[..., list[str]], module.requirements)


def test_an_image_leaves_out_what_it_has_no_use_for(requirements: Callable[..., list[str]]) -> None:
    lines = requirements(ROOT / "pyproject.toml", ["trace"], ["matplotlib"])
    assert not [line for line in lines if line.startswith(("matplotlib", "torch", "pillow", "fsspec"))]
    assert [line for line in lines if line.startswith("aiohttp")], "which serves the web page"
    assert [line for line in lines if line.startswith("opentelemetry-sdk")]
    with pytest.raises(ValueError, match="no dependency nonsense"):
        requirements(ROOT / "pyproject.toml", [], ["nonsense"])


def test_an_image_of_a_preprocessor_has_what_one_needs(requirements: Callable[..., list[str]]) -> None:
    """Of a newer fsspec than `pip install headrace` asks for beside libraries of trainers."""
    lines = requirements(ROOT / "pyproject.toml", ["preprocessor"], [])
    assert [line for line in lines if line.startswith("fsspec")] == ["fsspec>=2026.6"]
    assert not [line for line in lines if line.startswith("xxhash")]


def test_what_is_installed_without_extras_is_enough_for_the_demo() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {*extras["preprocessor"], *extras["trainer"]} - {"fsspec>=2026.6"} | {"fsspec"}
    assert needed <= set(project["dependencies"])


def names_of(registry: Any) -> set[str]:
    """Every name under which a sample of the registry's metrics may appear."""
    names = set()
    for metric in list(registry._collector_to_names):
        names |= set(registry._collector_to_names[metric])
    return names


def test_what_ends_by_itself_does_not_end_the_demo() -> None:
    """`up --exit-code-from trainer` ends with the first container that ends, of those that it is attached to."""
    ending = {name for name, one in SERVICES.items() if one.get("restart") == "no" and not name.startswith("trainer")}
    assert ending == {name for name, one in SERVICES.items() if one.get("attach") is False} == {"papers"}
