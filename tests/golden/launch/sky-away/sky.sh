#!/bin/sh
set -eu
cd "$(dirname "$0")"
address=192.0.2.1
sky launch -y -d -c hetero-coordinator coordinator.yaml --env ADDRESS="$address"
address=$(sky status --ip hetero-coordinator)
sky launch -y -d -c hetero-worker-1 worker-1.yaml --env ADDRESS="$address"
sky launch -y -d -c hetero-worker-2 worker-2.yaml --env ADDRESS="$address"
sky launch -y -d -c hetero-worker-laptop worker-laptop.yaml --env ADDRESS="$address"
sky launch -y -d -c hetero-worker-4 worker-4.yaml --env ADDRESS="$address"
