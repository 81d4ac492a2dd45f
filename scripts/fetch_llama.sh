#!/bin/sh
# Fetches an unmodified llama.cpp for the demo and the host tests: the prebuilt libraries of the npm package node-llama-cpp and, from
# the same package, the sources they were built from (for the headers). Usage: fetch_llama.sh DIR. Result: DIR/lib, DIR/source.
set -eu
version=3.22.1  # llama.cpp v0.5.0, ggml 0.25.1
dir=$1
[ -f "$dir/.done-$version" ] && exit 0
case $(uname -m) in
  x86_64) platform=linux-x64 ;;
  aarch64) platform=linux-arm64 ;;
  *) echo "moecached: no prebuilt llama.cpp for $(uname -m); set MOECACHED_LLAMA_DIR and MOECACHED_LLAMA_LIBS yourself" >&2; exit 1 ;;
esac
echo "moecached: fetching llama.cpp (npm node-llama-cpp $version)"
rm -rf "$dir"
mkdir -p "$dir/npm"
(cd "$dir/npm" && npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional --no-save --no-package-lock \
  "node-llama-cpp@$version" "@node-llama-cpp/$platform@$version" >/dev/null)
bundle=$dir/npm/node_modules/node-llama-cpp/llama/gitRelease.bundle
git -c advice.detachedHead=false clone -q "$bundle" "$dir/source"
ln -s "npm/node_modules/@node-llama-cpp/$platform/bins/$platform" "$dir/lib"
[ -e "$dir/lib/libllama.v0.5.0.so" ] || { echo "moecached: the npm package has no libllama.v0.5.0.so" >&2; exit 1; }
touch "$dir/.done-$version"
