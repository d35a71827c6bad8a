"""Everyone side by side on one block: f, seconds, memory, and how soon greedy's f is reached.

python benchmarks/suite.py FILE.parquet [FILE.parquet ...] [--write docs]

Every competitor runs in a process of its own, on the same data with the same number of threads, after a small problem
that warms it up. Seconds start from unit float32 features in memory, include similarities or neighbour lists, and are
medians of --repeats runs, of one where a run takes over a minute; "after similarities" they are left out. f is raw,
and found by code that shares nothing with the package; finding it is not timed. "Ours by then" is how far the best mask
that ours had after as many seconds is above that of a competitor at its end. Memory is the peak of the process beyond
that of one that only loads the data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch
from common import Kind, evaluate, load_dictionary
from competitors import FACILITY, PAPER, TABLES, competitors, compiled
from ours import Point, Problem

from datamask_pl.evidence.baselines.greedy import random_mask, top_quality_mask
from datamask_pl.functional.budget import num_to_keep

CASES = ["facility_location:0", "facility_location:0.3", "pairwise:0.05", "disf:0", "disf:0.02"]
LIBRARIES = ["torch", "numpy", "numba", "scipy", "apricot-select", "submodlib-py"]
# Runs that take longer are not repeated.
LONG_S = 60.0
# f counts as reached within the rounding of float32 similarities.
TOLERANCE = 1e-6
NUM_WARM_UP = 600

Result = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="parquet files with feature_arr and quality_score; random if left out")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="TERM:QUALITY_WEIGHT", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", help="competitors whose name begins with one of these; greedy always runs")
    parser.add_argument("--select-ratio", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--paper-seconds", type=float, default=60.0, help="time given to the paper's estimator")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run is stopped")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write suite.md, suite.svg and suite.json there")
    parser.add_argument("--work", nargs=3, metavar=("TERM:WEIGHT", "COMPETITOR", "OUTPUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for case in args.cases:
        kind, _, weight = case.partition(":")
        if kind not in get_args(Kind) or not 0.0 <= _number(weight) <= 1.0:
            parser.error(f"--cases takes TERM:QUALITY_WEIGHT such as {CASES[1]}, got {case!r}")
    return args


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def load(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    if args.paths:
        return load_dictionary(args.paths)
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(200, 128, generator=generator)
    features = center[torch.randint(200, (20_000,), generator=generator)]
    features += 0.7 * torch.randn(20_000, 128, generator=generator)
    return torch.nn.functional.normalize(features), torch.rand(20_000, generator=generator)


def problem_of(case: str, features: torch.Tensor, quality: torch.Tensor, select_ratio: float) -> Problem:
    kind, _, weight = case.partition(":")
    return Problem(features, quality, num_to_keep(select_ratio, len(features)), kind, float(weight))  # type: ignore[arg-type]


# ---- in a competitor's own process


def work(args: argparse.Namespace) -> Result:
    """Runs one competitor, and returns its points; with an empty name only loads the data.

    A run that takes longer than the limit ends the process, whatever library it is in.
    """
    case, name, _ = args.work
    torch.set_num_threads(args.threads)
    problem = problem_of(case, *load(args), args.select_ratio)
    if not name:
        return {"memory_bytes": peak_bytes()}
    run = competitors(problem.kind, problem.quality_weight, args.paper_seconds)[name]
    num_repeats = 1 if name == PAPER else args.repeats
    limit_s = math.ceil(args.limit + (args.paper_seconds if name == PAPER else 0.0))
    signal.alarm(limit_s)
    try:
        small = problem_of(case, problem.features_ND[:NUM_WARM_UP], problem.quality_N[:NUM_WARM_UP], args.select_ratio)
        competitors(problem.kind, problem.quality_weight, paper_seconds=0.1)[name](small)
        runs: list[list[Point]] = []
        while not runs or (len(runs) < num_repeats and runs[0][-1].seconds < min(LONG_S, args.limit / 2)):
            signal.alarm(limit_s)
            runs.append(run(problem))
    except ImportError as error:
        return {"failure": f"not installed ({error})"}
    signal.alarm(0)
    memory_bytes = peak_bytes()
    points = []
    for same in zip(*runs, strict=True):
        middle = sorted(same, key=lambda point: point.seconds)[(len(same) - 1) // 2]
        found = evaluate(problem.features_ND, problem.quality_N, middle.mask_N, problem.kind, problem.quality_weight)
        assert int(middle.mask_N.sum()) == problem.num_selected
        seconds = statistics.median(point.seconds for point in same)
        prepared_s = statistics.median(point.prepared_s for point in same)
        points.append({"label": middle.label, "seconds": seconds, "prepared_s": prepared_s, **found._asdict()})
    return {"points": points, "memory_bytes": memory_bytes, "runs": len(runs)}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- in the process that was started


def run_apart(args: argparse.Namespace, case: str, name: str) -> Result:
    """The result of a competitor in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        options = {"select-ratio": args.select_ratio, "threads": args.threads, "repeats": args.repeats}
        options |= {"paper-seconds": args.paper_seconds, "limit": args.limit}
        command = [sys.executable, __file__, *map(str, args.paths)]
        command += [f"--{option}={value}" for option, value in options.items()]
        command += ["--work", case, name, str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "NUMBA_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGALRM:
            return {"failure": f"stopped after {args.limit:g} s"}
        if done.returncode or not output.exists():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            return {"failure": f"failed ({done.returncode}): {lines[-1]}"}
        result: Result = json.loads(output.read_text())
        return result


def run_case(args: argparse.Namespace, case: str, base_bytes: int) -> dict[str, Result]:
    kind, _, weight = case.partition(":")
    results = {}
    for name in competitors(kind, float(weight), args.paper_seconds):  # type: ignore[arg-type]
        if name != "greedy" and args.only and not name.startswith(tuple(args.only)):
            continue
        results[name] = result = run_apart(args, case, name)
        if "memory_bytes" in result:
            result["memory_bytes"] = max(0, result["memory_bytes"] - base_bytes)
        seen = result.get("failure") or f"f {result['points'][-1]['f']:.6f}, {result['points'][-1]['seconds']:.2f} s"
        print(f"{case}  {name}: {seen}", file=sys.stderr, flush=True)
    return results


def table(results: dict[str, Result], *, has_similarities: bool) -> list[str]:
    """The rows of one case: a row a competitor, or a row a point where it has several."""
    greedy, ours = results["greedy"], results.get("ours", {}).get("points", [])
    target = greedy["points"][-1]["f"] if "points" in greedy else float("nan")
    heads = ["", "seconds to greedy's f", "f", "f - greedy's", "seconds", "ours by then"]
    if has_similarities:
        heads += ["seconds after similarities", "ours by then"]
    heads += ["memory", "runs"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, result in results.items():
        if "failure" in result:
            lines.append(f"| {name}: {result['failure']} |{' |' * (len(heads) - 1)}")
            continue
        points = result["points"]
        reached = min((point["seconds"] for point in points if point["f"] >= target - TOLERANCE), default=None)
        for point in points[-1:] if name == PAPER else points:
            is_last = point is points[-1]
            cells = [f"{name}, {point['label']}" if point["label"] else name]
            cells[0] += " (the default)" if name == "ours" and is_last else ""
            cells.append(("never" if reached is None else f"{reached:.2f}") if is_last else "")
            cells += [f"{point['f']:.6f}", _signed(point["f"] - target)]
            for start in ("", "prepared_s") if has_similarities else ("",):
                cells += [f"{_spent(point, start):.2f}", "" if name == "ours" else _lead(ours, point, start)]
            cells += [f"{result['memory_bytes'] / 1e9:.2f} GB", str(result["runs"])] if is_last else ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    longest = results.get(compiled(TABLES[-1]), {}).get("points")
    if longest and ours:
        lead = ours[-1]["f"] - longest[-1]["f"]
        lines += ["", f"At its end ours has f {_signed(lead)} from that of {compiled(TABLES[-1])}."]
    return lines


def _signed(difference: float) -> str:
    return f"{round(difference, 6) + 0.0:+.6f}"  # not -0.000000


def _spent(point: Result, start: str) -> float:
    return float(point["seconds"] - (point[start] if start else 0.0))


def _lead(ours: list[Result], point: Result, start: str) -> str:
    """By how much the best mask that ours had when another ended was above the other's."""
    values = [own["f"] for own in ours if _spent(own, start) <= _spent(point, start)]
    return _signed(max(values) - point["f"]) if values else "no mask yet" if ours else ""


def describe_machine(args: argparse.Namespace) -> str:
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for library in LIBRARIES:
        try:
            versions.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            versions.append(f"no {library}")
    return (
        f"{args.threads} threads of {model}, {memory:.0f} GiB; Python {platform.python_version()}, "
        f"{', '.join(versions)}; {time.strftime('%Y-%m-%d')}."
    )


def main() -> None:
    args = parse_arguments()
    if args.work:
        with torch.no_grad():
            result = work(args)
        Path(args.work[2]).write_text(json.dumps(result))
        return
    features_ND, quality_N = load(args)
    base = run_apart(args, args.cases[0], "")
    if "failure" in base:
        raise SystemExit(f"the data cannot be loaded: {base['failure']}")
    num_samples, num_features = features_ND.shape
    num_selected = num_to_keep(args.select_ratio, num_samples)
    command = " ".join(["python", "benchmarks/suite.py", *[Path(path).name for path in args.paths]])
    text = [
        f"`{command}`: {num_samples:,} samples of {num_features} features, {num_selected:,} kept. "
        + describe_machine(args),
        "",
        *__doc__.split("\n\n", 2)[2].strip().splitlines(),
    ]
    results: dict[str, dict[str, Result]] = {}
    floors = {}
    for case in args.cases:
        problem = problem_of(case, features_ND, quality_N, args.select_ratio)
        masks = {
            "random": random_mask(num_samples, num_selected, generator=torch.Generator().manual_seed(0)),
            "top quality": top_quality_mask(quality_N, num_selected),
        }
        f = {
            name: evaluate(features_ND, quality_N, mask, problem.kind, problem.quality_weight).f
            for name, mask in masks.items()
        }
        results[case] = run_case(args, case, base["memory_bytes"])
        floors[case] = f["random"]
        text += [
            "",
            f"**{problem.kind}, quality_weight {problem.quality_weight:g}**; "
            f"a random mask has f {f['random']:.6f}, top quality {f['top quality']:.6f}.",
            "",
        ]
        text += table(results[case], has_similarities=problem.kind == FACILITY)
    if args.write is None:
        print("\n".join(text))
        return
    args.write.mkdir(parents=True, exist_ok=True)
    from suite_plot import plot

    plot(results, floors, args.write / "suite.svg")
    (args.write / "suite.json").write_text(json.dumps({"results": results, "random": floors}, indent=1) + "\n")
    text += ["", "![f against seconds](suite.svg)", ""]
    (args.write / "suite.md").write_text("\n".join(text))
    print(f"wrote suite.md, suite.svg and suite.json to {args.write}")


if __name__ == "__main__":
    main()
