"""Software bill of materials: what requirements.lock installs, as CycloneDX 1.6 JSON.

    python tools/sbom.py requirements.lock > sbom.json

Licences are those that the installed packages state, where they are installed; nothing is looked up in a network.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")


def read_lock(text: str) -> dict[str, str]:
    """Versions by normalised name.

    Raises:
        ValueError: If a line pins nothing.

    Example:
        >>> read_lock("Py_Arrow==26.0.1")
        {'py-arrow': '26.0.1'}
    """
    found = {}
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.startswith(("#", "--")):
            continue
        match = _PINNED.match(line)
        if match is None:
            raise ValueError(f"the line {line!r} pins no version; write name==version.")
        found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def component(name: str, version: str) -> dict[str, Any]:
    """A package as CycloneDX describes it."""
    purl = f"pkg:pypi/{name}@{version}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    try:
        installed = metadata(name)
    except PackageNotFoundError:
        return found
    if installed["Version"] == version and installed["License-Expression"]:
        found["licenses"] = [{"expression": installed["License-Expression"]}]
    return found


def bill(lock: dict[str, str], project: dict[str, str]) -> dict[str, Any]:
    """The whole bill. It has no time and no serial number, so that the same lock gives the same bytes."""
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": project["name"], "version": project["version"]}},
        "components": [component(name, version) for name, version in sorted(lock.items())],
    }


def main() -> None:
    """Prints the bill of the lock that is named."""
    path = Path(sys.argv[1])
    project = tomllib.loads((path.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(json.dumps(bill(read_lock(path.read_text(encoding="utf-8")), project), indent=2))


if __name__ == "__main__":
    main()
