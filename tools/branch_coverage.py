"""Ends with 1 if the tests took fewer of the package's branches than are promised; says nothing if they took enough.

    python tools/branch_coverage.py .coverage

coverage's own `fail_under` is of lines and branches together, and lines hide branches.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout

import coverage

AT_LEAST_PERCENT = 95.0  # it only rises


def main(data_file: str) -> None:
    """Compares the share of branches in what `pytest --cov` has left; without branches there is none."""
    measured = coverage.Coverage(data_file=data_file)
    measured.load()
    with redirect_stdout(io.StringIO()) as out:
        measured.json_report(outfile="-")
    totals = json.loads(out.getvalue())["totals"]
    taken, total = totals.get("covered_branches", 0), totals.get("num_branches", 0)
    percent = 100 * taken / total if total else 0.0
    if percent < AT_LEAST_PERCENT:
        sys.exit(f"{taken:,} of {total:,} branches are tested, {percent:.2f} %; it must be {AT_LEAST_PERCENT:g} %.")


if __name__ == "__main__":
    main(sys.argv[1])
