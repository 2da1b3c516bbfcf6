"""TensorBoard: event files in the run's own folder, `tensorboard/`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from brimful.integrations.trackers.tracker import Begun, Point, TrackedRun


class TensorBoard:
    """Write event files with tensorboard's own writer, which loads neither torch nor TensorFlow."""

    def begin(self, run: TrackedRun) -> Begun:
        """Open a file of this process's own; settings are written with the first one."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(run.folder / "tensorboard"))
        if run.tracked_id is None:
            self._write_text("settings", json.dumps(dict(run.settings), indent=2))
        return Begun(tracked_id=run.run)

    def send(self, points: list[Point]) -> None:
        """Write and flush scalars."""
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._write(point.step, values)
        self._writer.flush()

    def finish(self, summary: Mapping[str, float], *, step: int, complete: bool) -> None:
        """Write the summary as scalars at the last step, and close the file."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in summary.items()]
        if complete and values:
            self._write(step, values)
        self._writer.close()

    def _write(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def _write_text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown for text as it is
        tensor = TensorProto(dtype=DT_STRING, string_val=[indented.encode()])
        tensor.tensor_shape.dim.add().size = 1
        metadata = create_summary_metadata(display_name=name, description="")
        self._write(0, [self._summary.Value(tag=name, metadata=metadata, tensor=tensor)])
