#!/usr/bin/env python3
"""Builds the fuzz targets with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and runs them.

    run.py --build build --seconds 600 [TARGET...]

A target begins with its corpus here, the files of fuzz_seeds, and what earlier runs found to cover something new (in
build/fuzz/corpus; not with --quick). An input that fails is left in build/fuzz/findings; when the fault is mended, it
belongs into tests/fuzz/corpus. The target `canary` has a planted fault and must fail.
"""
import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGETS = sorted(path.name.removesuffix("_fuzz.cc") for path in HERE.glob("*_fuzz.cc"))
# Each byte of these is a move, which costs more than a byte of a file; longer inputs find nothing that these do not.
BYTES_MAX = {"policy_library": 256, "ring": 1024}
CANARY = "canary"
# What the canary's report must name: the kind of fault, and where it was planted.
CANARY_REPORT = re.compile(r"heap-buffer-overflow.*planted_fault", re.DOTALL)


def build(directory, clang, optimisation):
    # Debug lines alone: with all that -g writes, compiling takes half as long again.
    configure = ["cmake", "-S", HERE.parent.parent, "-B", directory, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={clang}",
                 f"-DCMAKE_C_COMPILER={clang.replace('clang++', 'clang')}", "-DCMAKE_BUILD_TYPE=Debug",
                 f"-DCMAKE_CXX_FLAGS_DEBUG={optimisation} -gline-tables-only", "-DMOECACHED_SANITIZE=fuzzer-no-link,address,undefined",
                 "-DMOECACHED_BENCH=OFF", "-DMOECACHED_CUDA=OFF"]
    for command in (configure, ["cmake", "--build", directory, "--target", *(f"fuzz_{name}" for name in TARGETS)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout)


def run(name, directory, options, corpus):
    findings = directory / "findings"
    findings.mkdir(exist_ok=True)
    command = [directory / "tests/fuzz" / f"fuzz_{name}", f"-max_total_time={options.seconds}",
               f"-artifact_prefix={findings}/{name}-", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1",
               f"-max_len={BYTES_MAX.get(name, 4096)}"]
    if name != CANARY:  # which ends with the first finding
        command.append(f"-runs={options.runs}")
    dictionary = HERE / f"{name}.dict"
    if dictionary.exists():
        command.append(f"-dict={dictionary}")
    folders = [corpus, HERE / "corpus" / name, options.build / "tests/fuzz/seeds" / name]
    command += [folder for folder in folders if folder.is_dir()]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    report = done.stderr.decode(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", report)
    covered = re.findall(r" cov: (\d+) ft: (\d+) corp: (\d+)", report) or [("0", "0", "0")]
    print(f"{name}: {runs[1] if runs else 0} runs, {covered[-1][0]} edges, {covered[-1][2]} inputs kept, exit code {done.returncode}")
    if name == CANARY:
        if done.returncode != 0 and CANARY_REPORT.search(report):
            return True
        print("the planted fault was not found: this fuzzer finds nothing")
    elif done.returncode == 0 and runs and int(runs[1]) > 0:
        return True
    print(report[-6000:])
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="the ordinary build folder")
    parser.add_argument("--clang", default="clang++")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--runs", type=int, default=-1, help="for each target; -1: no limit (-1)")
    parser.add_argument("--quick", action="store_true",
                        help="for tests: not optimised, compiles in half the time; begins anew each time")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    options.build = options.build.resolve()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    directory = options.build / ("fuzz-quick" if options.quick else "fuzz")
    if not options.no_build:
        build(directory, options.clang, "-O0" if options.quick else "-O1")
    if options.build_only:
        return 0
    good = True
    for name in options.targets or TARGETS:
        with contextlib.ExitStack() as stack:
            if options.quick or name == CANARY:
                corpus = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moecached-fuzz-")))
            else:
                corpus = directory / "corpus" / name
                corpus.mkdir(parents=True, exist_ok=True)
            good = run(name, directory, options, corpus) and good
        sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=1")
    sys.exit(main())
