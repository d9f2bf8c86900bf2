"""README.md as the wheel's metadata shows it, far from the repository: its links lead there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#)([^)]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """The project's readme with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata["urls"]["Source"].rstrip("/")
        there = {"!": f"{source}/raw/main/", "[": f"{source}/blob/main/"}
        absolute = LINK.sub(lambda link: f"{link[1]}({there[link[1][0]]}{link[2]})", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute}
