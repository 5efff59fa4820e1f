"""The schemas of clients wait for each other here, and not in the threads that read bodies: some take seconds."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from weft.serve.scheduling.grammar import CompiledSchema, Grammars
from weft.serve.scheduling.request import RequestError
from weft.serve.scheduling.schema_trial import NUM_PROCESSES, SchemaTrial

MAX_WAITING = 16  # schemas that nobody knows yet; each takes milliseconds, or a few seconds until it is refused


class SchemaQueue:
    """Compiles schemas for an event loop, a few at a time and in the order in which they come."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, "schemas")
        self._num_waiting = 0

    async def compiled(self, schema: str | None) -> CompiledSchema | None:
        """Returns a schema for answers; None for none. If it is cancelled, the schema's process ends. Raises
        RequestError for a schema that cannot be used, and if too many wait.
        """
        known = None if schema is None else self._grammars.known(schema)
        if schema is None or known is not None:
            return known
        if self._num_waiting >= MAX_WAITING:
            raise RequestError("queue_full", f"{MAX_WAITING} new schemas wait to be compiled; try again later")
        trial = SchemaTrial()
        self._num_waiting += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(self._grammars.compile, schema, trial))
        finally:
            self._num_waiting -= 1
            trial.cancel()
