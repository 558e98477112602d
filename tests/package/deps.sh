#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# scripts/install-deps installs what is missing and nothing else, on a system made of stubs:
# deps.sh ROOT
set -euo pipefail
script=$1/scripts/install-deps
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"

stub() {
    printf '#!/bin/sh\n%s\n' "$2" >"$work/bin/$1"
    chmod +x "$work/bin/$1"
}
# The last argument is the package; those in $work/missing are not installed.
stub dpkg-query 'for package; do :; done
! grep -qx "$package" "'"$work"'/missing" || { echo "no such package" >&2; exit 1; }
printf "ii "'
stub apt-get 'echo "apt-get $*" >>"'"$work"'/calls"'
stub sudo 'echo "sudo" >>"'"$work"'/calls"; exec "$@"'
stub id 'cat "'"$work"'/uid"'
ln -s "$(command -v sh)" "$(command -v env)" "$(command -v grep)" "$(command -v cat)" "$work/bin"

failed=0
# check NAME UID MISSING CALLS ARGUMENT...: `calls` is what reaches apt-get and sudo.
check() {
    local name=$1 uid=$2 missing=$3 calls=$4
    shift 4
    echo "$uid" >"$work/uid"
    tr ' ' '\n' <<<"$missing" >"$work/missing"
    : >"$work/calls"
    PATH=$work/bin "$script" "$@" >"$work/output" 2>&1 || echo "exit $?" >>"$work/calls"
    if [ "$(cat "$work/calls")" = "$calls" ]; then
        echo "ok $name"
    else
        echo "FAILED $name: expected:"
        echo "$calls"
        echo "got:"
        cat "$work/calls" "$work/output"
        failed=1
    fi
}

install='apt-get install -qq -y --no-install-recommends'
check 'nothing missing' 1000 '' '' build quality fuzz
check 'as root' 0 'scdoc gcc' "apt-get update -qq
$install gcc scdoc"
grep -q 'Installing missing Debian packages: gcc scdoc' "$work/output" || failed=1
check 'another group' 0 'scdoc clang-tidy' "apt-get update -qq
$install clang-tidy" quality
check 'with sudo' 1000 'ninja-build' "sudo
apt-get update -qq
sudo
$install ninja-build" build
grep -q 'with sudo: ninja-build' "$work/output" || failed=1
check 'unknown group' 0 '' 'exit 2' wrong
rm "$work/bin/sudo"
check 'without sudo' 1000 'gcc' 'exit 1' build
grep -q 'Missing packages: gcc' "$work/output" || failed=1
rm "$work/bin/dpkg-query"
check 'not a Debian' 1000 'gcc' '' build
exit "$failed"
