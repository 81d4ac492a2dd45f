"""Turns the kernel launches of a CUDA source into calls that a C++ compiler takes: kernel<<<a, b, c, d>>>(..) becomes
SOFT_LAUNCH(kernel, a, b, c, d)(..), which runtime/cuda_runtime.h knows.

usage: launches_to_calls.py SOURCE OUT
"""
import re
import sys
from pathlib import Path

source = Path(sys.argv[1]).read_text()
calls, n = re.subn(r"(\w+)<<<(.*?)>>>", r"SOFT_LAUNCH(\1, \2)", source, flags=re.S)
if n == 0:
    sys.exit(f"{sys.argv[1]} launches no kernel")
Path(sys.argv[2]).write_text(calls)
