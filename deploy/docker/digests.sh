#!/bin/sh
# Prints the digests of the images that deploy/ builds on and starts, and the hash of PyTorch's wheel, as they are now:
#   deploy/docker/digests.sh > deploy/compose/.env
# Look at the change before you keep it: from then on exactly these are taken. Needs docker with buildx, and curl.
set -eu

digest() {
    docker buildx imagetools inspect --format '{{json .Manifest.Digest}}' "$1" | tr -d '"'
}

here=$(dirname "$0")
wheel=$(sed -n 's/^ARG TORCH_WHEEL=//p' "$here/Dockerfile")
torch=$(curl --fail --silent --show-error https://download.pytorch.org/whl/cpu/torch/ \
    | sed -n "s|.*${wheel##*/}#sha256=\\([0-9a-f]*\\).*|\\1|p" | head -n 1)
test -n "$torch" || { echo "PyTorch's index has no ${wheel##*/}" >&2; exit 1; }

echo "PYTHON_DIGEST=$(digest python:3.11-slim-bookworm)"
echo "TORCH_SHA256=$torch"
echo "PROMETHEUS_DIGEST=$(digest prom/prometheus:v2.55.1)"
echo "GRAFANA_DIGEST=$(digest grafana/grafana:11.3.0)"
