"""Runs the real command line in this process, and ends it or disturbs it at a chosen place. The product has no hooks.

    python kill_driver.py PLAN train ...     one run, or `classify ...`
    python kill_driver.py --serve            runs as JSON lines on stdin, each in a fork of this warm process

A plan is empty, or `ACT:OPERATION:NAME:COUNT`:

    ACT        kill   SIGKILL before the operation          term, int, stop  send the signal before it
               tear   write half of it, sync, then SIGKILL     count      nothing: COUNT is a file for the number
    OPERATION  open write fsync replace rename unlink rmdir mkdir ftruncate, `any` of these, `event`,
               or `call` of a function of brimful.engine.training.evaluations
    NAME       of the file it is about (for a rename the new one), temporary marks left out, as a pattern; for `event`
               the kind of event, after it was written
    COUNT      which one of these, from 1
"""

from __future__ import annotations

import fnmatch
import gc
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MARKS = re.compile(r"^\.(?:tmp|old)-(.*?)(?:-[0-9a-f]{8})?$")
_SIGNALS = {"kill": signal.SIGKILL, "tear": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
_SIGNALS["stop"] = signal.SIGSTOP
_at_end: list[Callable[[], Any]] = []
_OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate")


def arrange(plan: str, folder: str) -> None:
    """Wraps os's functions, so that `plan` happens to what they do under `folder`."""
    if not plan:
        return
    act, wanted, pattern, count = plan.split(":")
    left = [0 if act == "count" else int(count)]
    if act == "count":
        _at_end.append(lambda: Path(count).write_text(str(-left[0]), "utf-8"))
    owner = os.getpid()

    def due(path: str) -> bool:
        inside = path.startswith(folder + os.sep) or path == folder
        if os.getpid() != owner or not inside or not fnmatch.fnmatch(_plain_name(path), pattern):
            return False
        left[0] -= 1
        return left[0] == 0 and act != "count"

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if due(_subject(name, arguments, options.get("dir_fd"))):
                if act == "tear":
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    os.fsync(arguments[0])
                os.kill(owner, _SIGNALS[act])
            return original(*arguments, **options)

        return wrapped

    def after_event(descriptor: int, data: Any) -> int:
        written = write(descriptor, data)
        for kind in re.findall(rb'^\{"kind": "(\w+)"', bytes(data), re.MULTILINE):
            if os.getpid() == owner and fnmatch.fnmatch(kind.decode(), pattern):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(owner, _SIGNALS[act])
        return written

    write = os.write
    if wanted == "event":
        os.write = after_event
        return
    for name in _OPERATIONS:
        if wanted in (name, "any"):
            setattr(os, name, wrap(name, getattr(os, name)))


def _subject(name: str, arguments: tuple[Any, ...], folder: int | None) -> str:
    """The path that an operation changes; empty for one that only reads."""
    if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
        return ""
    subject = arguments[1] if name in ("replace", "rename") else arguments[0]
    if isinstance(subject, int):
        return _path_of(subject)
    return str((Path.cwd() if folder is None else Path(_path_of(folder))) / subject)


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _plain_name(path: str) -> str:
    """The last part of a path that names something; `.tmp-state.json-1a2b3c4d` is `state.json`."""
    name = Path(path).name
    found = _MARKS.match(name)
    return found[1] if found else name


def run(plan: str, arguments: list[str]) -> None:
    """Never returns: the command line ends the process."""
    output = Path(arguments[arguments.index("--output") + 1] if "--output" in arguments else "").absolute()
    # What a classification of a file writes before it is done stands beside its output.
    arrange(plan, str(output.parent if arguments[0] == "classify" else output))
    from brimful.cli import main

    if ":call:" in plan:
        _arrange_call(plan)
    try:
        main(arguments)
    finally:
        for write_down in _at_end:
            write_down()


def _arrange_call(plan: str) -> None:
    from brimful.engine.training import evaluations

    act, _, name, count = plan.split(":")
    left, original = [int(count)], getattr(evaluations, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), _SIGNALS[act])
        return original(*arguments, **options)

    setattr(evaluations, name, wrapped)


# --- the server ------------------------------------------------------------------------------------------------------


def _child(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if limit := request.get("file_bytes"):
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    code = 70
    try:
        run(request["plan"], request["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        if request.get("modules"):
            Path(request["modules"]).write_text("\n".join(sorted(sys.modules)), "utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, request: dict[str, Any]) -> dict[str, Any]:
    """Waits for a child, and kills it after `kill_after_s` if it is given."""
    began = time.perf_counter()
    descriptor = os.pidfd_open(child)
    ended = select.select([descriptor], [], [], request.get("kill_after_s", request.get("limit_s", 120)))[0]
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    os.close(descriptor)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.perf_counter() - began,
        "peak_bytes": used.ru_maxrss << 10,
        "timed_out": not ended and "kill_after_s" not in request,
    }


def serve() -> None:
    """Answers requests one at a time until stdin ends. A request with `modules` teaches what to import beforehand."""
    import brimful.api
    import brimful.cli.flags  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(request)
        answer = _wait(child, request)
        if request.get("modules"):
            _import(Path(request["modules"]).read_text("utf-8").split())
            gc.collect()
            gc.freeze()  # a fork's collections would look at all of it, and copy it
        print(json.dumps(answer), flush=True)


def _import(names: list[str]) -> None:
    import importlib

    for name in names:
        if name not in sys.modules and not name.startswith(("__", "brimful_transform", "torch._inductor")):
            try:
                importlib.import_module(name)
            except Exception:  # it is made when it is needed
                continue


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        run(sys.argv[1], sys.argv[2:])
