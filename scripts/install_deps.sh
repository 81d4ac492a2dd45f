#!/bin/sh
# Installs what moecached is built and tested with, from Debian's packages, and the packages that are given; does nothing
# when all is there. clang is not among them: 300 MB for the fuzzers alone, whose corpora any compiler's build runs.
set -eu
packages="g++ cmake ninja-build make pkg-config ccache git ca-certificates
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libspdlog-dev liburing-dev libgtest-dev libgmock-dev
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libsystemd-dev libzstd-dev libxxhash-dev libgomp1 fio python3"
command -v npm >/dev/null 2>&1 || packages="$packages npm"
packages="$packages $*"
missing=""
for package in $packages; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
sudo=""
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null 2>&1 || { echo "moecached: run as root, or install sudo; missing packages:$missing" >&2; exit 1; }
  sudo=sudo
fi
echo "moecached: installing$missing"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
# shellcheck disable=SC2086
$sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
