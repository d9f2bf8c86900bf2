#!/bin/sh
# Makes the demo's run once, then is its meeting point and its page; nodes find an invite in $SHARE/invite.
# The run's folder holds the owner's key, so it stays on this container's own disk.
set -eu
SHARE=${SHARE:-/share}
HOME_DIR=${HOME_DIR:-/var/lib/swarmnode}

test -e "$HOME_DIR/run/manifest.toml" || swarmnode init "$HOME_DIR/run"
rm -f "$SHARE/invite"
(
    until swarmnode invite "$HOME_DIR/run" --home "$HOME_DIR/bootstrap" >"$SHARE/invite.new" 2>/dev/null; do sleep 1; done
    mv "$SHARE/invite.new" "$SHARE/invite"
) &
exec swarmnode coordinator "$HOME_DIR/run" --home "$HOME_DIR/bootstrap" --listen "${LISTEN:-/ip4/0.0.0.0/tcp/4001}" \
    --bind "${BIND:-0.0.0.0}" --port "${PORT:-7070}" \
    --metrics-host "${METRICS_HOST:-0.0.0.0}" --metrics-port "${SWARMNODE_METRICS_PORT:-9464}"
