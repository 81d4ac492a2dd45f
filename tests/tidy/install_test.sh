#!/bin/sh
# install_test.sh CMAKE BUILD: what is installed is complete, and its units name the programs where they are installed.
set -eu
cmake=$1
build=$2
if [ ! -x "$build/client/ctl/moecachectl" ] || [ ! -x "$build/daemon/app/moecached" ] || [ ! -x "$build/bench/replay/moecache-sim" ]; then
  echo "skipped: not everything is built"
  exit 77
fi
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
for folder in daemon/app client/ctl bench/replay; do
  DESTDIR="$stage" "$cmake" --install "$build/$folder" >"$stage/log" 2>&1 || { cat "$stage/log"; exit 1; }
done
prefix=$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' "$build/CMakeCache.txt")
for file in bin/moecached bin/moecachectl bin/moecache-sim lib/systemd/system/moecached.service lib/systemd/system/llama-server@.service \
            lib/sysusers.d/moecached.conf share/moecached/moecached.toml; do
  [ -f "$stage$prefix/$file" ] || { echo "not installed: $prefix/$file"; exit 1; }
done
grep -qx "ExecStart=$prefix/bin/moecached" "$stage$prefix/lib/systemd/system/moecached.service" || { echo "ExecStart= is not $prefix/bin/moecached"; exit 1; }
grep -qx "Environment=GGML_BACKEND_PATH=$prefix/lib/moecached/libggml-moecache.so" "$stage$prefix/lib/systemd/system/llama-server@.service" || { echo "GGML_BACKEND_PATH is not under $prefix"; exit 1; }
"$stage$prefix/bin/moecached" --config="$stage$prefix/share/moecached/moecached.toml" --check-config
