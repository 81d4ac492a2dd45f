#!/bin/sh
# systemd_units_test.sh FOLDER MOECACHED: `systemd-analyze verify` finds nothing to say about the units of FOLDER, and does find a
# fault that is put into one.
set -eu
units=$1
moecached=$2
command -v systemd-analyze >/dev/null 2>&1 || { echo "skipped: no systemd-analyze"; exit 77; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# verify wants the programs to exist; they are not installed here.
for unit in moecached.service llama-server@.service; do
  sed "s|/usr/bin/moecached|$moecached|" "$units/$unit" >"$work/$unit"
done
# The folder first, so that After=moecached.service means the one under test.
export SYSTEMD_UNIT_PATH="$work:/usr/lib/systemd/system:/lib/systemd/system"

verify() {
  said=$(systemd-analyze verify "$1" 2>&1) && code=0 || code=$?
  [ "$code" = 0 ] && [ -z "$said" ]
}
for unit in moecached.service llama-server@example.service; do
  verify "$work/$unit" || { echo "$unit: exit $code"; echo "$said"; exit 1; }
done

echo 'TimeoutStopSec=soon' >>"$work/moecached.service"
if verify "$work/moecached.service"; then
  echo "a broken unit was found clean: this test cannot fail"
  exit 1
fi

# What breaks CUDA in a service, each by itself or by implying NoNewPrivileges= (systemd.exec(5)).
for setting in PrivateDevices DevicePolicy DeviceAllow ProcSubset ProtectClock MemoryDenyWriteExecute NoNewPrivileges DynamicUser SystemCallFilter RestrictSUIDSGID \
               RestrictAddressFamilies RestrictNamespaces ProtectKernelTunables ProtectKernelModules LockPersonality; do
  if grep -q "^$setting=" "$units/moecached.service"; then
    echo "moecached.service sets $setting="
    exit 1
  fi
done
# And what a GPU needs: its device files where they are not open to all, RAM that may be pinned.
for unit in moecached.service llama-server@.service; do
  grep -q '^SupplementaryGroups=.*video' "$units/$unit" || { echo "$unit: not in group video"; exit 1; }
  grep -qx 'LimitMEMLOCK=infinity' "$units/$unit" || { echo "$unit: LimitMEMLOCK= is not infinity"; exit 1; }
done
