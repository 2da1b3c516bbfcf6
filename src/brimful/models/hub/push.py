"""A saved model to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from brimful.core.errors import OptionError, OutputError, printable
from brimful.models.hub.quiet import first_line

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_push(repository: str) -> None:
    """Check before a run that its model can be pushed: a name, a network, a login.

    Raises: OptionError for what is no name of a repository; OutputError where the hub does not answer, or to nobody.
    """
    if not _NAME.fullmatch(repository) or len(repository) > 96 or ".." in repository or "--" in repository:
        raise OptionError(
            f"--push-to-hub {printable(repository)!r} is no name of a repository", hint="as in my-name/my-model"
        )
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # its own errors, and those of the HTTP client under it
        raise _refused(error, hint="leave --push-to-hub out, and push later") from None


def push_model(folder: Path, repository: str) -> str:
    """Upload a model's folder as one commit; return the address of its page. A repository that is not there is made,
    and is private.

    Raises: OutputError; the folder is as it was.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Add a classifier made by brimful")
    except Exception as error:
        again = f"the model is saved: push it with `hf upload {repository} {printable(folder, 300)}`"
        raise _refused(error, hint=again) from None
    return str(made)


def _refused(error: Exception, hint: str) -> OutputError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "LocalTokenNotFoundError" in kinds or status == 401:
        return OutputError("the hub cannot be pushed to: nobody is logged in", hint=_LOGIN)
    if status == 403:
        return OutputError("the hub cannot be pushed to: this login may not write there", hint=_LOGIN)
    unreachable = kinds & {"OfflineModeIsEnabled", "ConnectError", "ConnectionError", "TimeoutException"}
    why = "it cannot be reached (no network, or it is turned off)" if unreachable else first_line(error)
    return OutputError(f"the hub cannot be pushed to: {why}", hint=hint)
