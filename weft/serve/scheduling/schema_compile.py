"""Compiles JSON schemas by llguidance. Run as a program, it tries them within limits of time and memory.

    python -m weft.serve.scheduling.schema_compile      # lines of JSON: the tokens, then a schema; answers a line each

How long llguidance takes to compile a schema, and how much memory, has no bound: patterns under `allOf` or a large
`multipleOf` take hours. `schema_trial.py` starts this program. It imports no torch, so it starts in a moment.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from weft.serve.scheduling.request import LARK, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 16 << 10  # of a schema as JSON
TRIAL_CPU_SECONDS = 2  # of the process that tries it; counted in whole seconds, so up to one more
TRIAL_BYTES = 256 << 20  # of address space beside what the process had before
MAX_MATCHER_BYTES = 64 << 20  # of memory that a compiled schema keeps
WHITESPACE = " ?"  # between the parts of an answer, as json.dumps writes it: more would let blanks fill answers
STEP_LIMITS: dict[
    str, Any
] = {  # of one token of one answer, about 7 ms of work; an answer that needs more ends as stuck
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB, kept by each answer
}
PANIC = "PanicException"  # of pyo3, when Rust code panics: a BaseException that cannot be imported


@dataclass(frozen=True)
class VocabularyText:
    """What llguidance is told of a tokenizer. Without a `definition` (a tokenizer.json) tokens are bytes."""

    definition: str | None
    end: int
    end_tokens: Sequence[int]

    def tokens(self) -> LLTokenizer:
        """Returns the tokenizer as llguidance has it. Raises RequestError if it cannot use it."""
        from llguidance import LLTokenizer, TokenizerWrapper

        if self.definition is not None:
            try:
                return LLTokenizer(self.definition, eos_token=list(self.end_tokens))
            except ValueError as error:
                raise RequestError(
                    "invalid",
                    f"answers of this model cannot be held to a schema: llguidance says of its tokenizer: {error}",
                ) from None

        class Bytes(SimpleNamespace):
            def __call__(self, text: bytes) -> list[int]:
                return list(text)

        # llguidance marks tokens that are no text by the byte 0xFF.
        tokens = [*(bytes([value]) for value in range(256)), b"\xff<end>"]
        described = Bytes(eos_token_id=self.end, bos_token_id=None, tokens=tokens, special_token_ids=[self.end])
        return LLTokenizer(TokenizerWrapper(described), eos_token=list(self.end_tokens))


def compile_schema(tokens: LLTokenizer, schema: str) -> LLMatcher:
    """Returns the matcher of a JSON schema, or of a grammar after `LARK`, before the first token. Raises RequestError
    if it cannot be used.
    """
    from llguidance import LLMatcher, LLParserLimits

    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    try:
        grammar = schema.removeprefix(LARK)
        if grammar == schema:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**STEP_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()
    except ValueError as error:  # of what Python reads as JSON: endless numbers, and lists in lists in lists ..
        raise unusable(str(error), schema) from None
    except BaseException as error:
        if not is_panic(error):
            raise
        raise unusable(str(error), schema) from None
    if matcher.is_error():
        reason = matcher.get_error()
        raise unusable("no text matches it" if reason.startswith("NoExtension") else reason, schema)
    return matcher


def is_panic(error: BaseException) -> bool:
    """Did Rust code panic?"""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def unusable(words: str, schema: str) -> RequestError:
    """Returns the refusal of a schema or grammar, for a reason in llguidance's words."""
    reason = " ".join(words.split())
    what, remedy = ("grammar", "one") if schema.startswith(LARK) else ("schema", "a JSON schema")
    return RequestError("invalid", f"the {what} cannot be used: {reason:.300}; give {remedy} without it")


def main() -> None:
    """Try schemas until the input ends. A limit of the system ends the process instead of an answer."""
    tokens = VocabularyText(**json.loads(sys.stdin.readline())).tokens()
    compile_schema(tokens, "{}")  # what is made once is no schema's
    for line in sys.stdin:
        limit_process()
        before = memory_bytes()
        answer: dict[str, Any] = {"error": None}
        try:
            matcher = compile_schema(tokens, json.loads(line))
        except (RequestError, MemoryError) as error:
            answer["error"] = str(error) or "it needs too much memory"
        else:
            answer["bytes"] = memory_bytes() - before
            del matcher
        print(json.dumps(answer), flush=True)


def limit_process() -> None:
    """Limit the seconds and the memory of this process from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + TRIAL_CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    size = _pages(0)
    if size:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size + TRIAL_BYTES, hard))


def memory_bytes() -> int:
    """Memory that this process uses now."""
    return _pages(1) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _pages(column: int) -> int:
    """Returns a size of this process: its address space (0) or the part in memory (1). 0 on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def told(vocabulary: VocabularyText) -> str:
    """Returns the first line that the program reads."""
    return json.dumps(asdict(vocabulary)) + "\n"


if __name__ == "__main__":
    main()
