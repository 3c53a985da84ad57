"""Read a kustomization as `kubectl kustomize` does, for what deploy/ uses of it, which needs no kubectl.

Resources, config maps of files, images' tags, and patches: JSON patches (RFC 6902) of named targets, and deletions.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in compiled code, where PyYAML has it: ten times as fast
_READ = {"apiVersion", "kind", "resources", "configMapGenerator", "generatorOptions", "images", "patches"}


def documents_of(path: Path) -> list[Document]:
    """Return the documents of one YAML file."""
    return [document for document in yaml.load_all(path.read_text(encoding="utf-8"), _Loader) if document]


def kustomized(folder: Path) -> list[Document]:
    """Return all documents of a folder with a kustomization. Raises ValueError for what is not read here."""
    [kustomization] = documents_of(folder / "kustomization.yaml")
    if unread := set(kustomization) - _READ:
        raise ValueError(f"{folder}: {', '.join(sorted(unread))} is not read by the tests")
    documents: list[Document] = []
    for resource in kustomization.get("resources", []):
        path = folder / resource
        documents += kustomized(path) if path.is_dir() else documents_of(path)
    for generator in kustomization.get("configMapGenerator", []):
        if not kustomization["generatorOptions"]["disableNameSuffixHash"]:
            raise ValueError(f"{folder}: names of config maps with a hash are not read by the tests")
        named = [file.rpartition("=") for file in generator["files"]]  # KEY=FILE, or a file that is its own key
        data = {key or file: (folder / file).read_text(encoding="utf-8") for key, _, file in named}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data})
    for patch in kustomization.get("patches", []):
        documents = _patched(documents, patch)
    tags = {image["name"]: image["newTag"] for image in kustomization.get("images", [])}
    return [_tagged(document, tags) for document in documents]


def _patched(documents: list[Document], patch: Document) -> list[Document]:
    content = yaml.safe_load(patch["patch"])
    target = patch.get("target") or {"kind": content["kind"], "name": content["metadata"]["name"]}
    chosen = [document for document in documents if _is(document, target)]
    if len(chosen) != 1:
        raise ValueError(f"a patch of {target} has {len(chosen)} documents")
    others = [document for document in documents if document is not chosen[0]]
    if isinstance(content, list):
        place = documents.index(chosen[0])
        return [*documents[:place], _changed(chosen[0], content), *documents[place + 1 :]]
    if content.get("$patch") != "delete":
        raise ValueError(f"a patch of {target} is neither a list of operations nor a deletion")
    return others


def _is(document: Document, target: Document) -> bool:
    return bool(document["kind"] == target["kind"] and document["metadata"]["name"] == target["name"])


def _changed(document: Document, operations: list[Document]) -> Document:
    """Return the document after the operations `add` (of a key), `replace` and `remove`, whose paths have to be there."""
    document = copy.deepcopy(document)
    for operation in operations:
        *way, last = [step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]]
        place: Any = document
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        key = int(last) if isinstance(place, list) else last
        if operation["op"] == "remove":
            del place[key]
        elif (operation["op"] == "add" and key not in place) or (operation["op"] == "replace" and place[key] is not None):
            place[key] = operation["value"]
        else:
            raise ValueError(f"{operation['op']} {operation['path']} cannot be carried out")
    return document


def _tagged(node: Any, tags: dict[str, str]) -> Any:
    if isinstance(node, list):
        return [_tagged(one, tags) for one in node]
    if not isinstance(node, dict):
        return node
    image = node.get("image")
    name = image.partition(":")[0] if isinstance(image, str) else ""
    return {key: f"{name}:{tags[name]}" if key == "image" and name in tags else _tagged(one, tags) for key, one in node.items()}
