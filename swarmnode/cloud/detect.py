"""Detect this machine's cloud from its firmware, so that outside of clouds no request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from swarmnode.cloud.metadata_client import Metadata
from swarmnode.cloud.watch import (
    AZURE_HEADERS,
    AZURE_NAME,
    GCP_HEADERS,
    GCP_INSTANCE,
    TIMEOUT_S,
    Aws,
    Azure,
    Gcp,
    Watcher,
)
from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ports import Clock, Telemetry

DMI = Path("/sys/class/dmi/id")
DMI_FIELDS = ("sys_vendor", "bios_vendor", "board_vendor", "product_name", "chassis_asset_tag")
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"  # Hyper-V at home has Microsoft's name but not this tag
CLOUDS = ("aws", "gcp", "azure")


def read_dmi(folder: Path = DMI) -> dict[str, str]:
    """The firmware's description of the machine; empty if the system offers none."""
    dmi = {}
    for field in DMI_FIELDS:
        try:
            dmi[field] = (folder / field).read_text(errors="replace").strip()
        except OSError:
            continue
    return dmi


def by_dmi(dmi: Mapping[str, str]) -> str | None:
    """The cloud named by the firmware, or None."""
    if dmi.get("chassis_asset_tag") == AZURE_ASSET_TAG:
        return "azure"
    vendors = [dmi.get(field, "").lower() for field in DMI_FIELDS]
    if any(vendor.startswith("amazon") for vendor in vendors):
        return "aws"
    if any(vendor.startswith("google") for vendor in vendors):
        return "gcp"
    return None


async def by_asking(metadata: Metadata) -> str | None:
    """The first of CLOUDS that answers at `metadata` within TIMEOUT_S, or None."""
    async with asyncio.TaskGroup() as tasks:
        asked = [(cloud, tasks.create_task(_answers(metadata, cloud))) for cloud in CLOUDS]
    return next((cloud for cloud, answer in asked if answer.result()), None)


async def _answers(metadata: Metadata, cloud: str) -> bool:
    method, path, headers = {
        "aws": ("PUT", "latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
        "gcp": ("GET", f"{GCP_INSTANCE}/preempted", GCP_HEADERS),
        "azure": ("GET", AZURE_NAME, AZURE_HEADERS),
    }[cloud]
    try:
        answer = await metadata.ask(method, path, headers, timeout_s=TIMEOUT_S)
    except (RemoteFault, Unavailable):
        return False
    return answer.status == 200


def watcher_of(cloud: str, metadata: Metadata, clock: Clock, telemetry: Telemetry) -> Watcher:
    """The watcher for one of CLOUDS."""
    kinds: Mapping[str, Callable[[Metadata, Clock, Telemetry], Watcher]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
    return kinds[cloud](metadata, clock, telemetry)
