#!/usr/bin/env python3
"""The direction of dependencies: which folder may include which. ARCHITECTURE.md draws it, this keeps it true."""
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# folder -> folders it may include besides itself; None: not under these rules
ALLOWED = {
    "daemon/base": set(),
    "daemon/platform": {"daemon/base", "proto/shm"},
    "daemon/model": {"daemon/base", "proto/shm"},
    "daemon/policy": {"daemon/base"},
    "daemon/tier": {"daemon/base", "daemon/platform"},
    "daemon/residency": {"daemon/base", "daemon/policy"},
    "daemon/config": {"daemon/base", "daemon/platform", "daemon/tier", "daemon/policy"},
    "daemon/warmth": {"daemon/base", "daemon/platform", "daemon/model"},
    "daemon/ipc": {"daemon/base", "daemon/platform", "daemon/model", "daemon/warmth", "daemon/policy", "daemon/tier", "daemon/residency",
                   "daemon/config", "proto/shm"},
    "daemon/control": {"daemon/base", "daemon/platform", "daemon/tier", "daemon/config", "daemon/ipc", "proto/control"},
    "daemon/app": {"daemon/base", "daemon/platform", "daemon/config", "daemon/control", "daemon/ipc"},
    "client/src": {"proto/shm", "client/include"},
    "client/ctl": {"proto/control"},
    "client/examples": {"client/include"},
    "shim/ggml": {"client/include"},
    "bench/replay": {"daemon/base", "daemon/policy", "daemon/residency"},
}
# The brain and the policies are pure: no clock, no thread, no system call.
PURE = ("daemon/residency", "daemon/policy")
IMPURE = re.compile(r"<(chrono|thread|mutex|atomic|condition_variable|future|fstream|filesystem|iostream|unistd\.h|sys/[^>]+|time\.h|ctime|random)>")


def folder_of(path):
    parts = path.split("/")
    return "/".join(parts[:2])


def problems(root):
    for folder, allowed in ALLOWED.items():
        for source in sorted((root / folder).glob("*.*")):
            if source.suffix not in (".h", ".cc", ".c"):
                continue
            for number, line in enumerate(source.read_text().splitlines(), 1):
                place = f"{source.relative_to(root)}:{number}"
                if folder in PURE and IMPURE.search(line):
                    yield f"{place}: {folder} is pure, it may not use {line.strip()}"
                found = re.match(r'\s*#include ["<]((daemon|client|proto|shim|moecached|bench)/[^">]+)[">]', line)
                if not found:
                    continue
                target = "client/include" if found[1].startswith("moecached/") else folder_of(found[1])
                if target != folder and target not in allowed:
                    yield f"{place}: {folder} may not include {found[1]}"


def check_that_it_can_fail():
    with tempfile.TemporaryDirectory() as folder:
        bad = Path(folder) / "daemon/policy/bad.cc"
        bad.parent.mkdir(parents=True)
        bad.write_text('#include <chrono>\n#include "daemon/ipc/core.h"\n#include "daemon/base/ids.h"\n')
        assert len(list(problems(Path(folder)))) == 2, "planted violations were not found"


if __name__ == "__main__":
    check_that_it_can_fail()
    found = list(problems(ROOT))
    print("\n".join(found) or "layers: ok")
    sys.exit(1 if found else 0)
