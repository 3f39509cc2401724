#!/bin/sh
# Checks the machines, copies their files, and prints what to start.
set -eu
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && exec hetero --version' < /dev/null
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && cat > cluster.json.$$ && mv cluster.json.$$ cluster.json' < '/srv/my cluster/cluster.json'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster/imports && cd hetero_launch/cluster/imports && cat > 0.py.$$ && mv 0.py.$$ 0.py' < '/srv/my cluster/my model.py'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- ann@gpu1 'umask 077; mkdir -p hetero_launch/cluster/hetero_keys && cd hetero_launch/cluster/hetero_keys && cat > worker-1.pem.$$ && mv worker-1.pem.$$ worker-1.pem' < '/srv/my cluster/hetero_keys/worker-1.pem'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && exec hetero --version' < /dev/null
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && cat > cluster.json.$$ && mv cluster.json.$$ cluster.json' < '/srv/my cluster/cluster.json'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster/imports && cd hetero_launch/cluster/imports && cat > 0.py.$$ && mv 0.py.$$ 0.py' < '/srv/my cluster/my model.py'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 192.168.1.20 'umask 077; mkdir -p hetero_launch/cluster/hetero_keys && cd hetero_launch/cluster/hetero_keys && cat > worker-2.pem.$$ && mv worker-2.pem.$$ worker-2.pem' < '/srv/my cluster/hetero_keys/worker-2.pem'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && exec hetero --version' < /dev/null
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster && cd hetero_launch/cluster && cat > cluster.json.$$ && mv cluster.json.$$ cluster.json' < '/srv/my cluster/cluster.json'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster/imports && cd hetero_launch/cluster/imports && cat > 0.py.$$ && mv 0.py.$$ 0.py' < '/srv/my cluster/my model.py'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 2001:db8::30 'umask 077; mkdir -p hetero_launch/cluster/hetero_keys && cd hetero_launch/cluster/hetero_keys && cat > worker-laptop.pem.$$ && mv worker-laptop.pem.$$ worker-laptop.pem' < '/srv/my cluster/hetero_keys/worker-laptop.pem'
cat <<'END'
Start these, in a terminal each; Ctrl-C ends one:
hetero train --role=coordinator '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/hetero_keys' --set=training.seed=3 '--import=/srv/my cluster/my model.py' --resume latest --life-line
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- ann@gpu1 'cd hetero_launch/cluster && exec hetero worker --worker-id=1 --config=cluster.json --keys=hetero_keys --set=training.seed=3 --import=imports/0.py --life-line'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 192.168.1.20 'cd hetero_launch/cluster && exec hetero worker --worker-id=2 --config=cluster.json --keys=hetero_keys --set=training.seed=3 --import=imports/0.py --life-line'
ssh -T -o Port=2222 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -- 2001:db8::30 'cd hetero_launch/cluster && exec hetero worker --worker-id=laptop --config=cluster.json --keys=hetero_keys --set=training.seed=3 --import=imports/0.py --life-line'
END
