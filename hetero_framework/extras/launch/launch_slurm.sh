#!/bin/bash
#SBATCH --job-name=hetero --output=hetero-%j.log
$components
$nodes
shared=$$(printf '%s\n' $names | sort | uniq -d)
[ -z "$$shared" ] || { echo "$$shared has two: use --exclusive"; exit 2; }
set -- $settings
${workers}$coordinator
code=$$?
kill $$(jobs -p) 2> /dev/null
wait
exit $$code
