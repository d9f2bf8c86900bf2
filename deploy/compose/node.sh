#!/bin/sh
# Waits for the bootstrap's invite, then joins with a home of this container's own.
set -eu
SHARE=${SHARE:-/share}
HOME_DIR=${HOME_DIR:-/var/lib/swarmnode}

until [ -s "$SHARE/invite" ]; do sleep 1; done
exec swarmnode join --invite-file "$SHARE/invite" --home "$HOME_DIR/node" --listen "${LISTEN:-/ip4/0.0.0.0/tcp/4001}" \
    --metrics-host "${METRICS_HOST:-0.0.0.0}" --metrics-port "${SWARMNODE_METRICS_PORT:-9464}"
