#!/bin/sh
# Waits for the bootstrap's address, then joins its run with a home of this container's own.
set -eu
SHARE=${SHARE:-/share}
HOME_DIR=${HOME_DIR:-/var/lib/swarmnode/node}
METRICS_PORT=${SWARMNODE_METRICS_PORT:-9464}

until [ -s "$SHARE/bootstrap" ]; do sleep 1; done
# In a container 127.0.0.1 is its own: take another address where there is one.
bootstrap=$(grep -v -e '/127\.0\.0\.1/' -e '/ip6/::1/' "$SHARE/bootstrap" | head -n 1)
: "${bootstrap:=$(head -n 1 "$SHARE/bootstrap")}"
exec swarmnode join "$bootstrap" --run "$SHARE/run/manifest.signed" --home "$HOME_DIR" \
    --metrics-host "${METRICS_HOST:-0.0.0.0}" --metrics-port "$METRICS_PORT"
