#!/bin/sh
set -eu
cd "$$(dirname "$$0")"
address=$address
$launches
$last