#!/usr/bin/env python3
"""make bench-replay: every policy on every trace, against the policies that know the future.

One table a trace: hits, uploads and link traffic per access at 12.5, 25 and 50 % slots, where every miss is loaded (mode pool) and
where misses are read in place (mode covered), the default policy and the best one also with layers that trade slots (scope global,
in brackets what that gains); then 2 and 4 processes on one pool against private pools of the same total. The goals
below are printed with each, met or not, and the whole is written as JSON. Replays are exact: only lookups/s differ from run to run.
"""
import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = ("12.5 %", "25 %", "50 %")
POOL_DEFAULT, COVERED_DEFAULT = "slru", "ewma"  # of the daemon's configuration
GOALS = {
    "speed": ("slowest policy, million lookups/s on one core", 5.0),
    "bypass25": ("best policy at 25 % slots, of Belady with bypass", 0.90),
    "bypass50": ("best policy at 50 % slots, of Belady with bypass", 0.97),
    "ahead25": ("the same with reading ahead", 0.90),
    "value lost": ("value admission at {size}: points behind the best that loads every miss", 0.5),
    "value uploads": ("value admission at {size}: uploads, of that one's", 1 / 3),
    "link": ("covered, {policy} at 25 %: link traffic, of LRU's", 0.70),
    "shared 2": ("2 processes at 50 %: points more than private pools", 15.0),
    "shared 4": ("4 processes at 50 %: points more than private pools", 25.0),
}


class Report:
    def __init__(self, sim, commit):
        self.sim = sim
        self.out = {"machine": machine(), "commit": commit, "traces": [], "goals": []}

    def simulate(self, trace, *args):
        done = subprocess.run([self.sim, trace, "-o", "json", *map(str, args)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"moecache-sim {trace}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def goal(self, trace, key, value, at_most=False, **names):
        text, wanted = GOALS[key]
        met = value <= wanted if at_most else value >= wanted
        self.out["goals"].append({"trace": trace, "name": text.format(**names), "value": value, "goal": wanted,
                                  "at_most": at_most, "met": met})
        print(f"  {text.format(**names):<75} {value:8.3f}  {'<=' if at_most else '>='} {wanted:<5g} {'met' if met else 'NOT met'}")


def machine():
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {platform.system()} {platform.release()}"


def commit():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def of(report, policy, slots, private=False):
    return next((r for r in report["runs"] if (r["policy"], r["slots"], r["private"]) == (policy, slots, private)), None)


def table(report):
    print(f"\n  mode {report['mode']:<10}" + "".join(f"{size:>30}" for size in SIZES))
    print(f"  {'':<15}" + f"{'hits %':>10}{'uploads':>10}{'link':>10}" * len(SIZES))
    for policy in dict.fromkeys(run["policy"] for run in report["runs"]):
        cells = ""
        for size in SIZES:
            total = of(report, policy, size)["total"]
            cells += f"{100 * total['hit_rate']:10.2f}{total['uploads_per_access']:10.4f}{total['link_experts_per_access']:10.4f}"
        print(f"  {policy:<15}{cells}")
    for name, key in (("Belady", "mandatory"), ("Belady, bypass", "bypass")):
        cells = ""
        for size in SIZES:
            total = next(b for b in report["belady"] if b["slots"] == size)[key]
            cells += f"{100 * total['hit_rate']:10.2f}{total['uploads_per_access']:10.4f}{'':10}"
        print(f"  {name:<15}{cells}")


def scopes(report, layer, trace, mode, default):
    """The default policy and the best one, with layers that trade slots."""
    best = max(layer["runs"], key=lambda run: run["total"]["hits"])["policy"]
    policies = list(dict.fromkeys((default, best)))
    traded = report.simulate(trace, "--mode", mode, "--layers", "--no-belady", "--scope", "global", *sum((["--policy", p] for p in policies), []))
    for policy in policies:
        cells = ""
        for size in SIZES:
            total, before = of(traded, policy, size)["total"], of(layer, policy, size)["total"]
            gain = f"({100 * (total['hit_rate'] - before['hit_rate']):+.2f})"
            cells += f"{100 * total['hit_rate']:10.2f}{total['uploads_per_access']:10.4f}{gain:>10}"
        print(f"  {policy + ' global':<15}{cells}")
    return traded


def ahead(report, layer, trace, *policies):
    """The same with experts read ahead (pool.prefetch), and layers that trade slots: hits that somebody would have waited for, for more reads."""
    runs = {}
    for policy in dict.fromkeys(policies):
        runs[policy] = report.simulate(trace, "--mode", "pool", "--policy", policy, "--scope", "global", "--prefetch", "--no-belady")
        cells = ""
        for size in SIZES:
            total, before = of(runs[policy], policy, size)["total"], of(layer, policy, size)["total"]
            gain = f"({100 * (total['hit_rate'] - before['hit_rate']):+.2f})"
            cells += f"{100 * total['hit_rate']:10.2f}{total['uploads_per_access']:10.4f}{gain:>10}"
        print(f"  {policy + ' ahead':<15}{cells}")
    return list(runs.values())


def most_hits(reports, size):
    """Of all runs with so many slots, what the one with the most hits counted."""
    totals = [run["total"] for report in reports for run in report["runs"] if run["slots"] == size and not run["private"]]
    return max(totals, key=lambda total: total["hit_rate"])


def value_admission(report, name, pool, covered):
    """Where misses are read in place, uploads that are not worth their cost are not made: the best such policy against the best that loads every
    miss."""
    for size in SIZES[1:]:
        always, value = most_hits(pool, size), most_hits(covered, size)
        report.goal(name, "value lost", 100 * (always["hit_rate"] - value["hit_rate"]), at_most=True, size=size)
        report.goal(name, "value uploads", value["uploads_per_access"] / always["uploads_per_access"], at_most=True, size=size)


def processes(report, trace, name, n):
    shared = report.simulate(trace, "--interleave", n)
    print(f"\n  {n} processes" + "".join(f"{size + ' shared':>18}{'private':>10}" for size in SIZES))
    for policy in dict.fromkeys(run["policy"] for run in shared["runs"]):
        cells = ""
        for size in SIZES:
            for private, width in ((False, 18), (True, 10)):
                run = of(shared, policy, size, private)
                cells += f"{'-' if run is None else format(100 * run['total']['hit_rate'], '.2f'):>{width}}"
        print(f"  {policy:<11}{cells}")
    for note in shared["notes"]:
        print("  note:", note)
    one, many = of(shared, POOL_DEFAULT, "50 %"), of(shared, POOL_DEFAULT, "50 %", True)
    if one and many:
        report.goal(name, f"shared {n}", 100 * (one["total"]["hit_rate"] - many["total"]["hit_rate"]))
    return shared


def replay(report, trace):
    name = trace.name.removesuffix(".zst").removesuffix(".csv")
    pool, covered = (report.simulate(trace, "--mode", mode, "--layers") for mode in ("pool", "covered"))
    about = pool["trace"]
    print(f"\n{name}: {about['model']}{' (synthetic)' if about['synthetic'] else ''}, {about['layers']} layers x {about['experts']} "
          f"experts, top {about['k']}; {about['rows']} rows, {about['sequences']} sequences")
    table(pool)
    pool_global = scopes(report, pool, trace, "pool", POOL_DEFAULT)
    ahead_runs = ahead(report, pool, trace, POOL_DEFAULT, "learned")
    table(covered)
    covered_global = scopes(report, covered, trace, "covered", COVERED_DEFAULT)
    out = {"name": name, "pool": pool, "pool_global": pool_global, "covered": covered, "covered_global": covered_global,
           "ahead": ahead_runs,
           "processes": {}}
    if about["rows"] >= 1000:  # a shorter one is over before its pool is warm
        print()
        report.goal(name, "speed", min(r["lookups_per_second"] for run in (pool, covered) for r in run["runs"]) / 1e6)
        for key, size in (("bypass25", "25 %"), ("bypass50", "50 %")):
            known = next(run for run in pool["runs"] if run["slots"] == size)
            bypass = known["total"]["hit_rate"] / known["of_bypass"]
            report.goal(name, key, most_hits((pool, pool_global, covered, covered_global), size)["hit_rate"] / bypass)
            if key == "bypass25":
                report.goal(name, "ahead25", most_hits(ahead_runs, size)["hit_rate"] / bypass)
        value_admission(report, name, (pool, pool_global), (covered, covered_global))
        link = [of(covered, policy, "25 %")["total"]["link_experts_per_access"] for policy in (COVERED_DEFAULT, "lru")]
        report.goal(name, "link", link[0] / link[1], at_most=True, policy=COVERED_DEFAULT)
    for n in (2, 4):
        if about["sequences"] >= n:
            out["processes"][n] = processes(report, trace, name, n)
    report.out["traces"].append(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build", help="the build folder")
    parser.add_argument("--traces", default=ROOT / "tests/data", type=Path, help="a folder of moetrace-csv files, or one file")
    parser.add_argument("--json", type=Path, help="where to write the figures (BUILD/bench-replay.json)")
    parser.add_argument("--svg", type=Path, help="a folder for hit-rate curves")
    options = parser.parse_args()
    report = Report(Path(options.build).resolve() / "bench/replay/moecache-sim", commit())
    print(f"{report.out['machine']}; commit {report.out['commit']}")
    found = [options.traces] if options.traces.is_file() else sorted(
        path for path in options.traces.glob("*.csv*") if not path.name.startswith("counts_"))
    if not found:
        sys.exit(f"no moetrace-csv file (*.csv, *.csv.zst) in {options.traces}: give --traces")
    for trace in found:
        replay(report, trace)
        if options.svg:
            options.svg.mkdir(parents=True, exist_ok=True)
            report.simulate(trace, "--svg", options.svg / (trace.name.split(".csv")[0] + ".svg"))
    path = options.json or Path(options.build) / "bench-replay.json"
    path.write_text(json.dumps(report.out, indent=1) + "\n")
    goals = report.out["goals"]
    print(f"\n{sum(goal['met'] for goal in goals)} of {len(goals)} goals met; {path}")


if __name__ == "__main__":
    main()
