#!/bin/sh
# Compares three lists that must be one: what the shared library exports, what the public header declares, and the list
# checked in next to this script. A name that leaves is a broken engine somewhere; a name that comes is a promise.
# usage: check_exports.sh LIBRARY HEADER LIST
set -eu
library=$1 header=$2 list=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The version node itself (an absolute symbol, type A) is no function. Names keep their @@VERSION: a program has it compiled in.
nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | LC_ALL=C sort > "$scratch/exported"
# A declaration is MOECACHED_API, a type, a name and a parenthesis; it may go on in the next line.
tr '\n' ' ' < "$header" | grep -o 'MOECACHED_API [a-z][^;(]*(' | sed 's/($//; s/.*[ *]//' | LC_ALL=C sort > "$scratch/declared"
LC_ALL=C sort "$list" > "$scratch/listed"
sed 's/@@.*//' "$scratch/listed" > "$scratch/names"

if ! diff -u "$scratch/listed" "$scratch/exported"; then
  echo "$library does not export what $list promises (lines with -: missing, with +: too many)" >&2
  exit 1
fi
if ! diff -u "$scratch/names" "$scratch/declared"; then
  echo "$header does not declare what $list promises (lines with -: missing, with +: too many)" >&2
  exit 1
fi
echo "$(wc -l < "$scratch/exported") functions, as promised"
