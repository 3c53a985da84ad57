"""A real API server of Kubernetes with its etcd, from the binaries in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.kustomization import Document
from tests.wire import free_ports

START_S = 240.0
_TOKEN = "of-the-tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """Where it listens, and whom it trusts."""

    url: str
    context: ssl.SSLContext

    def make_namespace(self, name: str) -> None:
        """Make a namespace that takes restricted pods only."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.ask("/api/v1/namespaces", method="POST", body=json.dumps(space))

    def apply(self, document: Document, namespace: str = "default", *, dry_run: bool = False) -> str:
        """Apply a document on the server's side, strictly. Returns what the server says against it, or nothing."""
        resource, namespaced = self._resource(document["apiVersion"], document["kind"])
        group = "/api/v1" if document["apiVersion"] == "v1" else f"/apis/{document['apiVersion']}"
        place = f"{group}/namespaces/{namespace}/{resource}" if namespaced else f"{group}/{resource}"
        options = {
            "fieldManager": "tests",
            "force": "true",
            "fieldValidation": "Strict",
            **({"dryRun": "All"} if dry_run else {}),
        }
        path = f"{place}/{document['metadata']['name']}?{urllib.parse.urlencode(options)}"
        try:
            self.ask(path, method="PATCH", body=json.dumps(document), content="application/apply-patch+yaml")
        except urllib.error.HTTPError as err:
            return str(json.loads(err.read())["message"])
        return ""

    def ask(self, path: str, *, method: str = "GET", body: str = "", content: str = "application/json") -> Any:
        """Return the server's answer. Raises HTTPError where it refuses, and OSError where it does not answer."""
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": content}
        request = urllib.request.Request(self.url + path, method=method, data=body.encode() or None, headers=headers)
        with urllib.request.urlopen(request, context=self.context, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def _resource(self, api_version: str, kind: str) -> tuple[str, bool]:
        group = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:  # a new kind takes a moment
            with contextlib.suppress(urllib.error.HTTPError):
                for one in self.ask(group)["resources"]:
                    if one["kind"] == kind and "/" not in one["name"]:
                        return one["name"], one["namespaced"]
            time.sleep(0.5)
        raise TimeoutError(f"the server has no {kind} of {api_version}")


@contextlib.contextmanager
def running_api_server(binaries: Path, folder: Path) -> Iterator[ApiServer]:
    """Start etcd and the API server, and end both. Raises TimeoutError with their logs' ends."""
    etcd_port, peer_port, port = free_ports(3)
    key, tokens, certificates = folder / "accounts.key", folder / "tokens.csv", folder / "certificates"
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tokens.write_text(f'{_TOKEN},tests,tests,"system:masters"\n')
    etcd_url, peer_url = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    etcd = [str(binaries / "etcd"), f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"]
    etcd += [f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}", f"--listen-peer-urls={peer_url}"]
    server = [str(binaries / "kube-apiserver"), f"--etcd-servers={etcd_url}", f"--cert-dir={certificates}"]
    server += ["--bind-address=127.0.0.1", f"--secure-port={port}", "--service-cluster-ip-range=10.0.0.0/24"]
    server += [f"--token-auth-file={tokens}", "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"]
    server += ["--service-account-issuer=https://tests", f"--service-account-key-file={key}"]
    server += [f"--service-account-signing-key-file={key}"]
    logs = [folder / "etcd.log", folder / "kube-apiserver.log"]
    with contextlib.ExitStack() as stack:
        for command, log in zip((etcd, server), logs, strict=True):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stack.enter_context(log.open("wb")))
            stack.callback(_end, process)
        yield _awaited(f"https://127.0.0.1:{port}", certificates / "apiserver.crt", logs)


def _awaited(url: str, certificate: Path, logs: list[Path]) -> ApiServer:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            context = ssl.create_default_context(cafile=certificate)
            context.check_hostname = False
            server = ApiServer(url=url, context=context)
            if server.ask("/readyz") == "ok":
                return server
        time.sleep(0.5)
    raise TimeoutError("\n".join(log.read_text()[-3000:] for log in logs))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def binaries() -> Path | None:
    """Return the folder with kube-apiserver and etcd that KUBEBUILDER_ASSETS names, if it does."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS") or os.devnull)
    return folder if (folder / "kube-apiserver").exists() and (folder / "etcd").exists() else None
