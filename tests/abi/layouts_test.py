"""Sizes, offsets and numbers that programs built against a header have compiled in, compared with those that were promised.

usage: layouts_test.py HEADER PROMISED COMPILER... [--update]

Every struct, enumerator and numeric macro of the header is listed, so nothing can be added without showing. Each COMPILER
(a command line) must give the same answer: C and C++ programs share these structs. --update writes PROMISED anew.
"""
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def members(body):
    """The names of a struct's members, in order."""
    names = []
    for declaration in filter(str.strip, body.split(";")):
        pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)\s*\(", declaration)
        if pointer:
            names.append(pointer.group(1))
            continue
        names += [re.search(r"(\w+)\s*(\[[^\]]*\]\s*)*$", declarator.strip()).group(1) for declarator in declaration.split(",")]
    return names


def questions(header):
    """C statements that print what the header says."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", header.read_text(), flags=re.S)
    # A struct of a header is named by its tag; where there is a typedef, the two are the same.
    for tag, body in re.findall(r"struct (\w+) \{(.*?)\}", text, flags=re.S):
        yield f'printf("struct {tag}: %zu bytes\\n", sizeof(struct {tag}));'
        for name in members(body):
            yield (f'printf("  %zu %s: %zu\\n", offsetof(struct {tag}, {name}), "{name}", '
                   f'sizeof(((struct {tag}*)0)->{name}));')
    for body in re.findall(r"enum(?: \w+)? \{(.*?)\}", text, flags=re.S):
        for name in re.findall(r"^\s*(\w+)", "\n".join(body.split(",")), flags=re.M):
            yield f'printf("{name} = %lld\\n", (long long){name});'
    for name in re.findall(r"^#define (\w+) +(?:\d|UINT)", text, flags=re.M):
        yield f'printf("{name} = %lld\\n", (long long){name});'


def answer(header, compiler, folder):
    source = folder / "ask.c"
    source.write_text(f'#include "{header}"\n#include <stdio.h>\nint main(void) {{\n' + "\n".join(questions(header)) +
                      "\nreturn 0; }\n")
    subprocess.run([*shlex.split(compiler), str(source), "-o", str(folder / "ask")], check=True)
    return subprocess.run([folder / "ask"], check=True, capture_output=True, text=True).stdout


def main(arguments):
    update = arguments[-1] == "--update"
    header, promised, *compilers = arguments[:-1] if update else arguments
    header, promised = Path(header).resolve(), Path(promised)
    with tempfile.TemporaryDirectory() as folder:
        answers = [answer(header, compiler, Path(folder)) for compiler in compilers]
    if len(set(answers)) != 1:
        sys.exit(f"{header.name} means different things to {' and '.join(compilers)}")
    if update:
        promised.write_text(answers[0])
    elif answers[0] != promised.read_text():
        with tempfile.NamedTemporaryFile("w", suffix=header.name) as found:
            found.write(answers[0])
            found.flush()
            subprocess.run(["diff", "-u", promised, found.name])
        sys.exit(f"{header.name} is not what {promised.name} promises. Programs that are built have the old numbers compiled in: "
                 "raise the version that the two sides compare, then write the file anew with --update")
    print(f"{header.name}: {len(answers[0].splitlines())} numbers, as promised")


main(sys.argv[1:])
