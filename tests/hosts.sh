#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts on one machine: network namespaces with names of their own and a link between them, which
# end with the command.
# usage: hosts.sh COMMAND...            runs it on the first host, 10.77.0.1; 77: not possible here
#        hosts.sh 10.77.0.2 COMMAND...  from there: runs it on the second, as rsh would
set -eu
if [ -n "${SECOND_HOST:-}" ]; then
    shift
    exec nsenter --target "$SECOND_HOST" --net --uts sh -c "$*"
fi

if [ "$1" != inside ]; then
    self=$(readlink -f "$0")
    for user in "--user --map-root-user" ""; do
        # shellcheck disable=SC2086
        if unshare $user --net --uts ip link set lo up 2>/dev/null; then
            exec unshare $user --net --uts "$self" inside "$@"
        fi
    done
    echo "skipped: no network namespaces can be made here"
    exit 77
fi
shift

unshare --net --uts setpriv --pdeathsig KILL sleep 600 &
export SECOND_HOST=$!
while [ "$(readlink "/proc/$SECOND_HOST/ns/net")" = "$(readlink /proc/$$/ns/net)" ]; do
    sleep 0.01
done
on_second() {
    "$0" 10.77.0.2 "$@"
}
ip link set lo up
ip link add first type veth peer name second netns "$SECOND_HOST"
ip addr add 10.77.0.1/24 dev first
ip link set first up
hostname first
on_second "ip link set lo up && ip addr add 10.77.0.2/24 dev second && ip link set second up &&
    hostname second"
status=0
"$@" || status=$?
kill "$SECOND_HOST"
exit $status
