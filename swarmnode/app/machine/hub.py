"""Models on the Hugging Face Hub: a folder as one commit of a repository, with a tag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.base.errors import Unavailable, UsageError, cause_of
from swarmnode.base.plugin import library

KEPT = (".gitattributes",)  # of the repository; all else there is of an earlier checkpoint
ADVICE = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def push_folder(folder: Path, repo: str, tag: str, message: str) -> str:
    """The URL of the commit that makes repository `repo` (OWNER/NAME, made private if it is new) hold the files of
    `folder` and no others, tagged `tag`. The Hub's address and key come from HF_ENDPOINT and HF_TOKEN, or `hf auth
    login`. Raises UsageError without the library or for a name that the Hub does not take, Unavailable."""
    hub: Any = library("huggingface_hub", "--push-to-hub")
    api = hub.HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        ours = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
        stale = set(api.list_repo_files(repo)) - {*ours, *KEPT}
        operations = [hub.CommitOperationAdd(name, str(path)) for name, path in ours.items()]
        operations += [hub.CommitOperationDelete(name) for name in sorted(stale)]
        commit = api.create_commit(repo, operations, commit_message=message)
        api.create_tag(repo, tag=tag, revision=commit.oid, exist_ok=True)
    except hub.errors.HFValidationError as error:
        raise UsageError(f"--push-to-hub {repo!r}: {cause_of(error)}") from None
    except (OSError, hub.errors.HfHubHTTPError) as error:  # what its HTTP client raises are OSErrors or these
        code = getattr(getattr(error, "response", None), "status_code", None)
        advice = ADVICE if code in (401, 403) else "try again"
        raise Unavailable(f"the Hub did not take {repo}: {cause_of(error)[:200]}; {advice}") from None
    return str(commit.commit_url)
