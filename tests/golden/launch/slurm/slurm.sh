#!/bin/bash
#SBATCH --job-name=hetero --output=hetero-%j.log
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --partition=a100 --gpus=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=1
node0=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
node1=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
node2=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_2")
node3=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_3")
node4=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_4")
shared=$(printf '%s\n' "$node0" "$node1" "$node2" "$node3" "$node4" | sort | uniq -d)
[ -z "$shared" ] || { echo "$shared has two: use --exclusive"; exit 2; }
set -- --set "coordinator.ip=$node0" --set "coordinator.hostname=null" --set "coordinator.device=cuda" --set "workers[0].ip=$node1" --set "workers[0].hostname=null" --set "workers[0].device=cuda" --set "workers[1].ip=$node2" --set "workers[1].hostname=null" --set "workers[1].device=rocm" --set "workers[2].ip=$node3" --set "workers[2].hostname=null" --set "workers[2].device=cpu" --set "workers[3].ip=$node4" --set "workers[3].hostname=null" --set "workers[3].device=cuda"
srun --het-group=1 --output="hetero-$SLURM_JOB_ID-worker-1.log" hetero worker --worker-id=1 '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/launch/keys/worker-1' --set=training.seed=3 '--import=/srv/my cluster/my model.py' "$@" &
srun --het-group=2 --output="hetero-$SLURM_JOB_ID-worker-2.log" hetero worker --worker-id=2 '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/launch/keys/worker-2' --set=training.seed=3 '--import=/srv/my cluster/my model.py' "$@" &
srun --het-group=3 --output="hetero-$SLURM_JOB_ID-worker-laptop.log" hetero worker --worker-id=laptop '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/launch/keys/worker-laptop' --set=training.seed=3 '--import=/srv/my cluster/my model.py' "$@" &
srun --het-group=4 --output="hetero-$SLURM_JOB_ID-worker-4.log" hetero worker --worker-id=4 '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/launch/keys/worker-4' --set=training.seed=3 '--import=/srv/my cluster/my model.py' "$@" &
srun --het-group=0 --output="hetero-$SLURM_JOB_ID-coordinator.log" hetero train --role=coordinator '--config=/srv/my cluster/cluster.json' '--keys=/srv/my cluster/launch/keys/coordinator' --set=training.seed=3 '--import=/srv/my cluster/my model.py' --resume latest "$@"
code=$?
kill $(jobs -p) 2> /dev/null
wait
exit $code
