"""README.md as the wheel's metadata shows it, far from the repository: its links lead to the project's address."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from address import address, with_links  # type: ignore[import-not-found]


class CustomMetadataHook(MetadataHookInterface):
    """The project's readme with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        root = Path(self.root)
        text = with_links((root / "README.md").read_text(encoding="utf-8"), "README.md", address(root))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
