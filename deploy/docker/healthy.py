#!/usr/bin/env python3
"""Exit 0 when the node in this container turns its event loop: GET /healthz at $SWARMNODE_METRICS_PORT (9464)."""

import os
import sys
import urllib.request

PORT = os.environ.get("SWARMNODE_METRICS_PORT", "9464")

try:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/healthz", timeout=8) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(f"no answer: {error}")
