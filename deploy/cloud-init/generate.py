"""Writes aws.yaml, gcp.yaml, azure.yaml: spot instances that join at boot, with the unit of ../systemd inside."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from address import address  # type: ignore[import-not-found]  # noqa: E402
from release import version_in  # type: ignore[import-not-found]  # noqa: E402

UNIT = HERE.parent / "systemd" / "swarmnode.service"
EXAMPLE = HERE.parent / "systemd" / "swarmnode.env"


@dataclass(frozen=True, slots=True)
class Cloud:
    """What differs: the command that starts such an instance, and how its end is announced."""

    name: str
    launch: str
    notice: str


CLOUDS = (
    Cloud(
        "aws",
        "aws ec2 run-instances --instance-market-options MarketType=spot \\\n"
        "#     --metadata-options HttpTokens=required --user-data file://aws.yaml ...",
        "An interruption is announced two minutes before, at the metadata service (IMDSv2).",
    ),
    Cloud(
        "gcp",
        "gcloud compute instances create NAME --provisioning-model=SPOT \\\n"
        "#     --instance-termination-action=DELETE --metadata-from-file=user-data=gcp.yaml ...  (Ubuntu)",
        "A preemption is announced 30 s before, as ACPI shutdown and at the metadata server.",
    ),
    Cloud(
        "azure",
        "az vm create --priority Spot --eviction-policy Delete --custom-data azure.yaml ...",
        "An eviction is announced at least 30 s before, as a Scheduled Event (Preempt).",
    ),
)

TEMPLATE = """\
#cloud-config
# Made by deploy/cloud-init/generate.py. A spot instance ({name}) that joins a run at boot.
#   {launch}
# {notice}
# Put your invite in below, and for HASH the wheel's SHA-256, which SHA256SUMS beside it has.
# Who may read this instance's user data can read them.
package_update: true
packages: [python3, python3-venv]

users:
  - default
  - name: swarmnode
    system: true
    homedir: /var/lib/swarmnode
    shell: /usr/sbin/nologin
    lock_passwd: true

write_files:
  # systemd reads it as root before it becomes the service's user.
  - path: /etc/swarmnode/swarmnode.env
    owner: root:root
    permissions: "0600"
    content: |
{environment}
  - path: /etc/systemd/system/swarmnode.service
    permissions: "0644"
    content: |
{unit}

runcmd:
  - [python3, -m, venv, /opt/swarmnode]
  - [/opt/swarmnode/bin/pip, install, --quiet, --require-hashes, -r, "{address}/requirements.txt"]
  - [/opt/swarmnode/bin/pip, install, --quiet, --no-deps, "{wheel}#sha256=HASH"]
  - [systemctl, daemon-reload]
  - [systemctl, enable, --now, swarmnode.service]
"""


def indented(text: str, spaces: int = 6) -> str:
    """`text` as a block of YAML; comments of its own are left out, since user data is short (16 KiB at AWS)."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return "\n".join(" " * spaces + line for line in lines)


def main(folder: Path) -> None:
    """Write the three."""
    for cloud in CLOUDS:
        filled = TEMPLATE.format(
            address=address(),
            wheel=f"{address()}/swarmnode_trainer-{version_in(HERE.parents[1])}-py3-none-any.whl",
            name=cloud.name,
            launch=cloud.launch,
            notice=cloud.notice,
            environment=indented(EXAMPLE.read_text()),
            unit=indented(UNIT.read_text()),
        )
        (folder / f"{cloud.name}.yaml").write_text(filled)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
