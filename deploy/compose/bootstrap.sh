#!/bin/sh
# Makes the demo's run once, then is its meeting point; nodes find its address in $SHARE/bootstrap.
set -eu
SHARE=${SHARE:-/share}
HOME_DIR=${HOME_DIR:-/var/lib/swarmnode/bootstrap}
PORT=${PORT:-4001}
METRICS_PORT=${SWARMNODE_METRICS_PORT:-9464}

test -e "$SHARE/run/manifest.toml" || swarmnode init "$SHARE/run"
rm -f "$SHARE/bootstrap"
# stdout is the addresses, one a line; the file is complete at its first line.
exec swarmnode bootstrap "$SHARE/run" --home "$HOME_DIR" --listen "/ip4/${LISTEN:-0.0.0.0}/tcp/$PORT" \
    --metrics-host "${METRICS_HOST:-0.0.0.0}" --metrics-port "$METRICS_PORT" >"$SHARE/bootstrap"
