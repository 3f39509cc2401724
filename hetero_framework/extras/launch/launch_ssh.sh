#!/bin/sh
# Checks the machines, copies their files, and prints what to start.
set -eu
$preparations
cat <<'END'
Start these, in a terminal each; Ctrl-C ends one:
$commands
END
