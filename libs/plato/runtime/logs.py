"""JSON logs, one object per line on standard error: ts, level, event, process, and conn_id, msg_id, trace_id where known.

Ids are text (JavaScript and many log stores cut 64-bit numbers), trace ids hex.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_AS_TEXT = ("conn_id", "msg_id", "by_conn_id", "old_conn_id")


class _Unfailing:
    """Standard error, except that a full disk or a closed pipe loses lines instead of raising where something was to be
    told: a process whose logs cannot be written serves on."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(process: str, level: str = "info") -> None:
    """Sets up structlog and the standard library's logging for this process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            _plain,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Unfailing())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s", force=True)


def bind(**fields: str) -> None:
    """Adds fields to each line of the present task, and of those that it starts from now on."""
    structlog.contextvars.bind_contextvars(**fields)


def get(name: str) -> Any:
    """A logger; `name` is the part that speaks, e.g. "link"."""
    return structlog.get_logger(part=name)


def _plain(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _AS_TEXT:
        if isinstance(event.get(key), int):
            event[key] = str(event[key])
    trace = event.get("trace_id")
    if isinstance(trace, bytes):
        event["trace_id"] = trace.hex()
    return event
