"""Compares requirements.lock with the published vulnerabilities of its versions, by pip-audit in a venv of its own.

    python tools/audit.py requirements.lock

Ends with 1 if there are any, and with 0, saying so, where there is no network: then nothing is known.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(".venv-audit")


def run(lock: str, folder: Path = FOLDER) -> int:
    """Makes the venv if it is not there, audits, and prints what was found.

    Args:
        lock: file with pinned versions.
        folder: of the venv.

    Returns:
        The exit code.
    """
    tool = folder / "bin" / "pip-audit"
    if not tool.exists():
        venv.create(folder, with_pip=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "pip-audit"]
        installed = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True)
        if installed.returncode:
            return _nothing_known(installed.stderr)
    command = [str(tool), "--requirement", lock, "--no-deps", "--disable-pip", "--format", "json"]
    audited = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        packages = json.loads(audited.stdout)["dependencies"]
    except (ValueError, KeyError):
        return _nothing_known(audited.stderr)
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        return _nothing_known("no package was found where vulnerabilities are published")
    faults = [(package, fault) for package in packages for fault in package.get("vulns", [])]
    for package, fault in faults:
        fixed = ", ".join(fault["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {fault['id']}, mended in {fixed}")
    print(f"{len(packages) - len(skipped)} packages of {lock} audited, {len(faults)} vulnerabilities known")
    if skipped:
        print(f"not audited: {', '.join(skipped)}")
    return int(bool(faults))


def _nothing_known(reason: str) -> int:
    last = reason.strip().splitlines()[-1] if reason.strip() else "no reason given"
    print(f"nothing was audited: {last} (is there a network?)")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
