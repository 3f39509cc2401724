#!/bin/sh
# Starts the processes of cluster.json, each in a terminal:
#     sh ssh.sh prepare
#     sh ssh.sh coordinator
#     sh ssh.sh worker-1
#     sh ssh.sh worker-2
#     sh ssh.sh worker-laptop
# Ctrl-C ends one. `hetero launch --ssh --run` does all of it in one terminal.
set -eu
on() { ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=3 -- "$@"; }
case "${1:-}" in
prepare)
    on ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && exec hetero --version' < /dev/null
    on 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && exec hetero --version' < /dev/null
    on 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && exec hetero --version' < /dev/null
    on ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster && cat > hetero_launch/cluster/cluster.json.new && mv hetero_launch/cluster/cluster.json.new hetero_launch/cluster/cluster.json' < '/srv/my cluster/cluster.json'
    on ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster/hetero_keys && cat > hetero_launch/cluster/hetero_keys/worker-1.pem.new && mv hetero_launch/cluster/hetero_keys/worker-1.pem.new hetero_launch/cluster/hetero_keys/worker-1.pem' < '/srv/my cluster/hetero_keys/worker-1.pem'
    on 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster && cat > hetero_launch/cluster/cluster.json.new && mv hetero_launch/cluster/cluster.json.new hetero_launch/cluster/cluster.json' < '/srv/my cluster/cluster.json'
    on 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster/hetero_keys && cat > hetero_launch/cluster/hetero_keys/worker-2.pem.new && mv hetero_launch/cluster/hetero_keys/worker-2.pem.new hetero_launch/cluster/hetero_keys/worker-2.pem' < '/srv/my cluster/hetero_keys/worker-2.pem'
    on 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster && cat > hetero_launch/cluster/cluster.json.new && mv hetero_launch/cluster/cluster.json.new hetero_launch/cluster/cluster.json' < '/srv/my cluster/cluster.json'
    on 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster/hetero_keys && cat > hetero_launch/cluster/hetero_keys/worker-laptop.pem.new && mv hetero_launch/cluster/hetero_keys/worker-laptop.pem.new hetero_launch/cluster/hetero_keys/worker-laptop.pem' < '/srv/my cluster/hetero_keys/worker-laptop.pem'
    ;;
coordinator)
    hetero train --life-line --keys '/srv/my cluster/hetero_keys' --role coordinator --config '/srv/my cluster/cluster.json' --set training.seed=3
    ;;
worker-1)
    on ann@gpu1 'cd hetero_launch/cluster && exec hetero worker --life-line --worker-id 1 --config cluster.json --set training.seed=3'
    ;;
worker-2)
    on 192.168.1.20 'cd hetero_launch/cluster && exec hetero worker --life-line --worker-id 2 --config cluster.json --set training.seed=3'
    ;;
worker-laptop)
    on 2001:db8::30 'cd hetero_launch/cluster && exec hetero worker --life-line --worker-id laptop --config cluster.json --set training.seed=3'
    ;;
*) sed -n '2,/^# Ctrl/p' "$0"; exit 2 ;;
esac
