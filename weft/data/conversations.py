"""Conversations as tokens to learn from: rows with `messages`, or with `prompt` and `completion`, or preferences.

A model is trained on what it is asked with and on what it shall answer then. What it is asked with is the text that the
chat template writes for a server: the messages before an answer, and what begins an answer. The text is tokenized
whole. A token is a target if one of its characters is of an answer, blanks at the answer's end left out if they are in
a token with what follows. An answer is what a template puts into `{% generation %}`; without that tag it is everything
that the template writes after what it asks with, up to the end of that message.

Most templates only append, so that a conversation is one document with several answers. Some write earlier messages in
another way when later ones follow: those of Qwen3 and of DeepSeek-R1 leave out earlier reasoning. Then each answer has
a document of its own, with the text that comes before it at serving. An answer also has its own document if the text
before it has other tokens by itself: if a token would hold characters of both, or if blanks before an answer are cut in
another way (GPT-2's two line breaks are one token only at the end of a text). So the tokens before an answer are those
of serving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data.chat_template import ChatTemplate, Span
from weft.data.messages import Messages, read_messages, read_tools, reasoning_of
from weft.data.sources import is_unicode
from weft.data.tokenizer import Tokenizer, document_marks
from weft.errors import DataError

ASSISTANT, USER = "assistant", "user"
ANSWERS = ("chosen", "rejected")
THINKING = re.compile(r"<think>\s*\Z")  # what asks for an answer may begin its reasoning
THOUGHT = "</think>"
ANCHORS = ("\n", "a", ".")  # texts before others that few tokenizers join with them


class Document(NamedTuple):
    """Tokens, and which of them are targets."""

    ids: list[int]
    is_target: list[bool]


@dataclass(frozen=True)
class AnswerPlace:
    """An answer in a text: where the text before it ends that the model is asked with, and its targets."""

    begin: int
    targets: tuple[Span, ...]
    content: str | None = None  # of its message


@dataclass(frozen=True)
class Rendering:
    """A text with answers."""

    text: str
    answers: tuple[AnswerPlace, ...]


@dataclass(frozen=True)
class Chat:
    """Messages, of which those of the assistant from number `first` on are answers, and what the model may call."""

    messages: list[dict[str, Any]]
    first: int
    tools: Messages


@dataclass(frozen=True)
class ChatRenderer:
    """Turns rows of the data into tokens and targets. `place` names a row in errors."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    def documents(self, row: Mapping[str, Any], place: str) -> list[Document]:
        """Returns the documents of a conversation; none if it has no answer."""
        try:
            if "messages" in row:
                return self._documents_of(Chat(read_messages(row["messages"]), 0, _tools(row)))
            if "prompt" in row and "completion" in row:
                return self._answered(row, "completion")
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        raise DataError(
            f"{place} has neither 'messages' nor 'prompt' and 'completion' (two texts, or two lists of messages); "
            f"it has {', '.join(map(repr, row))}"
        )

    def pair(self, row: Mapping[str, Any], place: str) -> list[list[Document]]:
        """Returns the documents of the chosen and of the rejected answer of a preference, at most one for each."""
        try:
            if missing := [key for key in ANSWERS if key not in row]:
                raise DataError(f"it has no '{missing[0]}'; a preference has 'prompt', 'chosen' and 'rejected'")
            if "prompt" not in row:
                row = {**row, "prompt": _common_prompt(row)}
            both = [self._answered(row, key) for key in ANSWERS]
            for key, found in zip(ANSWERS, both, strict=True):
                if len(found) > 1:
                    raise DataError(
                        f"'{key}' has {len(found)} answers that the template writes after different texts, and a "
                        f"preference compares two texts; leave one answer in it, and put those before it into 'prompt'"
                    )
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        return both

    def _answered(self, row: Mapping[str, Any], key: str) -> list[Document]:
        """Returns the documents of a row with a prompt, and an answer under a key."""
        prompt, answer = row["prompt"], row[key]
        if isinstance(answer, list):
            messages, first = _after_prompt(prompt, answer, key)
            return self._documents_of(Chat(messages, first, _tools(row)))
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise DataError(
                f"'prompt' is a {type(prompt).__name__} and '{key}' a {type(answer).__name__}; give two texts, or two "
                f"lists of messages"
            )
        text, begin = prompt + answer, len(prompt)
        (found,) = self._tokenized(Rendering(text, (AnswerPlace(begin, ((begin, len(text)),)),)))
        before, after = document_marks(self.tokenizer)  # no template begins or ends it
        is_target = [*[False] * len(before), *found.is_target, *[True] * len(after)]
        return [Document([*before, *found.ids, *after], is_target)]

    def _documents_of(self, chat: Chat) -> list[Document]:
        return [document for rendering in self._renderings(chat) for document in self._tokenized(rendering)]

    def _renderings(self, chat: Chat) -> list[Rendering]:
        """Returns the texts of a conversation: as few as have before each answer what comes before it at serving."""
        if self.template is None:
            raise DataError(
                "it has messages, and the tokenizer's folder has no chat template; give data.template, a file"
            )
        render, found = partial(self.template.render, tools=chat.tools), list[Rendering]()
        answers = [number for number in range(len(chat.messages)) if _is_answer(chat, number)]
        for number in answers:
            asked = render(chat.messages[:number], asks=True)
            text, answer = self._answer(chat, number, asked)
            last = _without_last_end(found[-1], self.template.eos_token, asked) if found else None
            if last is None:
                found.append(Rendering(text, (answer,)))
            else:
                found[-1] = Rendering(text, (*last.answers, answer))
        if answers and answers[-1] + 1 < len(chat.messages):
            whole = render(chat.messages)
            if whole.startswith(found[-1].text):
                found[-1] = replace(found[-1], text=whole)
        return found

    def _answer(self, chat: Chat, number: int, asked: str) -> tuple[str, AnswerPlace]:
        """Returns the text that ends with a message that answers what is asked, and where the answer is in it."""
        assert self.template is not None
        text, spans = self.template.render_with_answers(chat.messages[: number + 1], chat.tools)
        message, begin = chat.messages[number], len(asked)
        tail = _with_reasoning(_tail(text, asked, chat.messages[number - 1], number), message, asked)
        marked = [(begin, begin + len(tail))]
        if self.template.marks_answers and text == asked + tail:
            marked = [span for span in spans if span[1] > begin]
        return asked + tail, AnswerPlace(begin, tuple(marked), message["content"])

    def _tokenized(self, rendering: Rendering) -> Iterator[Document]:
        if not is_unicode(rendering.text):
            raise DataError("it holds half a surrogate pair, which is not Unicode text; correct it")
        ids, spans = self.tokenizer.encode_with_spans(rendering.text)
        targets = list[Span]()
        for answer in rendering.answers:
            before = self.tokenizer.encode(rendering.text[: answer.begin])
            # Do the tokens begin with those that this text has by itself, and does one end there?
            is_alike = np.array_equal(ids[: len(before)], before) and not _is_within_token(spans, answer.begin)
            if answer.targets and not is_alike:
                yield self._apart(rendering.text, answer, before.tolist())
            else:
                targets += [(start, _end(rendering.text, spans, end)) for start, end in answer.targets]
        if targets:
            yield Document(ids.tolist(), _overlap(spans, targets).tolist())

    def _apart(self, text: str, answer: AnswerPlace, before: list[int]) -> Document:
        """Returns a document of an answer after the tokens that the text before it has by itself."""
        after = text[answer.begin : max(end for _, end in answer.targets)]
        for anchor in ANCHORS:
            ids, spans = self.tokenizer.encode_with_spans(anchor + after)
            own = spans[:, 0] >= len(anchor)
            if not _is_within_token(spans, len(anchor)):
                break
        else:
            raise DataError(f"no token begins an answer after {text[: answer.begin][-20:]!r}; change where it begins")
        is_target = _overlap(spans + answer.begin - len(anchor), answer.targets)[own].tolist()
        return Document([*before, *ids[own].tolist()], [*[False] * len(before), *is_target])


def _is_within_token(spans: NDArray[np.int64], place: int) -> bool:
    """Does a token have characters before a place and from it on?"""
    return bool(((spans[:, 0] < place) & (spans[:, 1] > place)).any())


def _end(text: str, spans: NDArray[np.int64], end: int) -> int:
    """Returns the end of an answer: without its last blanks, if the first of what follows is in a token with them."""
    return len(text[:end].rstrip()) if _is_within_token(spans, end) else end


def _overlap(spans: NDArray[np.int64], targets: Sequence[Span]) -> NDArray[np.bool_]:
    """Returns which tokens have a character of the targets."""
    starts, ends = spans[:, 0], np.maximum(spans[:, 1], spans[:, 0] + 1)
    found = np.zeros(len(spans), dtype=np.bool_)
    for start, end in targets:
        found |= (starts < end) & (ends > start)
    return found


def _without_last_end(before: Rendering, eos_token: str, asked: str) -> Rendering | None:
    """Returns what of a text stays in the text that asks for the next answer; None if that goes on otherwise.

    Some templates write `eos_token` once more after the last message (Phi-3). Earlier messages then go without it, if
    the template ends them with something of its own.
    """
    if asked.startswith(before.text):
        return before
    *earlier, last = before.answers
    kept = before.text.removesuffix(eos_token)
    ends_itself = last.content is not None and not kept.rstrip().endswith(last.content.strip())
    if not eos_token or not ends_itself or not asked.startswith(kept):
        return None
    targets = tuple((start, min(end, len(kept))) for start, end in last.targets if start < len(kept))
    return Rendering(kept, (*earlier, replace(last, targets=targets)))


def _tail(text: str, asked: str, before: Mapping[str, Any], number: int) -> str:
    """Returns what a template writes for message `number`, of a text that ends with it. `asked` is the text that asks
    for it, and `before` the message before it.

    Some templates write what comes before in another way once there is an answer. Mistral's writes a system message
    before the last message only. Then the answer follows the place where the text goes on as what asks for it ends, at
    least from the content of the message before it on.
    """
    thinking = THINKING.search(asked)
    for end in (asked, asked[: thinking.start()] if thinking else asked):
        if text.startswith(end):
            return text[len(end) :]
    content = (before["content"] or "").strip()
    last = asked[asked.rfind(content) :] if content else asked
    place = text.rfind(last)
    if place >= 0:
        return text[place + len(last) :]
    raise DataError(
        f"the chat template asks for message {number + 1} with {asked[-40:]!r}, but then writes {text[-60:]!r}; give a "
        f"template that writes an answer after what it asks with (data.template)"
    )


def _with_reasoning(tail: str, message: Mapping[str, Any], asked: str) -> str:
    """Returns what the model writes for a message, of which `tail` is what the template writes.

    Some templates leave the reasoning out, which is in the content before `</think>` or beside it. If what asks for the
    answer begins a reasoning, a message without one gets an empty one, so that its content is not taken for it.
    """
    begins = THINKING.search(asked) is not None
    inner, end, _ = (message["content"] or "").rpartition(THOUGHT)
    if THOUGHT not in tail and (begins or (end and not asked.rstrip().endswith(THOUGHT))):
        beside = reasoning_of(message)
        reasoning = inner if end else "\n" if beside is None else beside.strip("\n") + "\n"
        tail = reasoning + THOUGHT + ("" if tail[:1].isspace() else "\n\n") + tail
    return re.sub(r"\A\s*<think>\n?", "", tail) if begins else tail


def _is_answer(chat: Chat, number: int) -> bool:
    """Is a message one to learn from? The first message answers nothing."""
    message = chat.messages[number]
    if message["role"] != ASSISTANT or number < max(chat.first, 1):
        return False
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"'weight' of message {number + 1} is {weight!r:.100}; 1 trains on it, and 0 does not")
    return weight != 0


def _tools(row: Mapping[str, Any]) -> Messages:
    if row.get("functions"):
        raise DataError("'functions' is an old form of 'tools', which weft does not read; give 'tools'")
    return read_tools(row.get("tools"))


def _after_prompt(prompt: Any, answer: list[Any], key: str) -> tuple[list[dict[str, Any]], int]:
    """Returns the messages of a prompt and an answer, and the number of those of the prompt. The answer may have the
    prompt's messages at its beginning.
    """
    messages = read_messages(answer, key)
    if isinstance(prompt, str):
        asked = next((number for number, message in enumerate(messages) if message["role"] == USER), None)
        if asked is None or messages[asked]["content"].strip() != prompt.strip():
            raise DataError(
                f"'prompt' is a text, and '{key}' a list of messages whose first one of the user is another; give "
                f"'prompt' as a list of messages"
            )
        return messages, asked + 1
    before = read_messages(prompt, "prompt")
    if [_words(message) for message in messages[: len(before)]] != [_words(message) for message in before]:
        messages = before + messages
    if len(messages) > len(before) and messages[len(before)]["role"] in (USER, "system"):
        raise DataError(
            f"'{key}' begins with a message of the {messages[len(before)]['role']} that 'prompt' does not have there; "
            f"begin it with the answer, or with all messages of the prompt"
        )
    return messages, len(before)


def _common_prompt(row: Mapping[str, Any]) -> list[Any]:
    """Returns the messages that two conversations begin with."""
    if not all(isinstance(row[key], list) for key in ANSWERS):
        raise DataError("it has no 'prompt'; only lists of messages may have their prompt in 'chosen' and 'rejected'")
    both = [[_words(message) for message in read_messages(row[key], key)] for key in ANSWERS]
    most = min(map(len, both)) - 1
    number = next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b or n == most), 0)
    if number == 0:
        raise DataError("'chosen' and 'rejected' have no message in common before their answers; give 'prompt'")
    return list(row["chosen"][:number])


def _words(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what makes two messages the same."""
    return message["role"], message["content"], message.get("tool_calls")
