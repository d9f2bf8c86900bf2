#!/usr/bin/env bash
# iroh 1.2.0, Python: an endpoint that is told to bind one address listens on the other family's wildcard, too.
#
# Guess: `builder.bind_addr("[::1]:0")` binds this address alone, as in Rust, where the builder's own addresses
# replace the default ones.
# Seen: only the default of the same family is replaced. Told ::1, it also listens at 0.0.0.0; told 127.0.0.1, also at
# [::]. `bound_sockets` names both. Whoever means loopback alone has to bind both families.
#
# Prints for each address told: the sockets of this process, by psutil.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check iroh==1.2.0 psutil==7.1.3
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import importlib.metadata

import iroh
import psutil


async def wildcards(told):
    builder = iroh.EndpointBuilder()
    builder.apply_minimal()
    builder.relay_mode(iroh.RelayMode.disabled())
    builder.bind_addr(told)
    endpoint = await builder.bind()
    named = endpoint.bound_sockets()
    ports = {int(one.rpartition(":")[2]) for one in named}
    open_here = {one.laddr.ip for one in psutil.Process().net_connections("udp") if one.laddr.port in ports}
    print(f"told {told}: iroh names {sorted(one.rpartition(':')[0] for one in named)}, open are {sorted(open_here)}")
    await endpoint.close()
    return open_here


async def main():
    assert await wildcards("[::1]:0") == {"::1", "0.0.0.0"}
    assert await wildcards("127.0.0.1:0") == {"127.0.0.1", "::"}


print("iroh", importlib.metadata.version("iroh"))
asyncio.run(main())
PYTHON
