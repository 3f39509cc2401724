#!/bin/sh
set -eu
cd "$(dirname "$0")"
address=192.168.1.10
sky launch -y -d -c hetero-worker-1 worker-1.yaml --env ADDRESS="$address"
sky launch -y -d -c hetero-worker-2 worker-2.yaml --env ADDRESS="$address"
sky launch -y -d -c hetero-worker-laptop worker-laptop.yaml --env ADDRESS="$address"
sky launch -y -d -c hetero-worker-4 worker-4.yaml --env ADDRESS="$address"
exec hetero train --role=coordinator '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/launch/keys/coordinator' --set=training.seed=3 --set=coordinator.ip=192.168.1.10 --set=coordinator.hostname=null --set=coordinator.device=cuda '--set=workers[0].ip=worker-1' '--set=workers[0].hostname=null' '--set=workers[0].device=cuda' '--set=workers[1].ip=worker-2' '--set=workers[1].hostname=null' '--set=workers[1].device=rocm' '--set=workers[2].ip=worker-laptop' '--set=workers[2].hostname=null' '--set=workers[2].device=cpu' '--set=workers[3].ip=worker-4' '--set=workers[3].hostname=null' '--set=workers[3].device=cuda' '--set=workers[0].port=null' '--set=workers[1].port=null' '--set=workers[2].port=null' '--set=workers[3].port=null' --set=training.connect_timeout_s=3600 '--import=/srv/my cluster/my model.py' --resume latest
