"""Bodies of chats: what their template writes, and how the answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.data.chat_template import ChatTemplate
from weft.data.messages import Messages
from weft.serve.answer_parts import FORCED, AnswerParts, calls_schema, format_of, tool_names
from weft.serve.http.request_body import (
    ApiError,
    Generation,
    GenerationBody,
    generation,
    messages_of,
    refuse_large,
    shown,
)
from weft.serve.text import ServedModel


@dataclass(frozen=True)
class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    add_special_tokens: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Any = "auto"
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of the template, as enable_thinking
    reasoning_effort: str | None = None  # another one
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on with the last message


def chat(body: ChatBody, model: ServedModel, tenant: str) -> Generation:
    """Returns what a chat asks for. Without 'max_tokens' an answer may fill the context."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, f"'top_logprobs' = {body.top_logprobs} needs 'logprobs' true")
    names = tool_names(body.tools)
    called = _called_tools(body.tool_choice, names)
    tools = () if body.tool_choice == "none" else body.tools
    refuse_large("tools", tools)
    text = _chat_text(body, messages_of(body.messages), model.chat_template, tools)
    tokens = model.encode(text, body.add_special_tokens)
    form = FORCED if called else format_of(model.chat_template.source)
    answer = AnswerParts(form, names if tools else (), not called and form.thinks_after(text))
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    limit = model.defaults.get("max_tokens") if limit is None else limit
    if limit == 0:
        raise ApiError(400, "'max_tokens' = 0 generates nothing; it must be at least 1")
    max_tokens = max(1, model.context_length - len(tokens)) if limit is None else limit
    num_logprobs = body.top_logprobs if body.logprobs else None
    schema = calls_schema(body.tools, called) if called else None
    return replace(generation(body, [tokens], max_tokens, num_logprobs, model, tenant, None, schema), answer=answer)


def _chat_text(body: ChatBody, messages: Messages, template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns what a template writes for a chat."""
    variables = dict(body.chat_template_kwargs or {})
    reserved = [key for key in ("messages", "tools", "documents", "add_generation_prompt") if key in variables]
    if reserved:
        raise ApiError(
            400, f"'chat_template_kwargs' has '{reserved[0]}', which is no variable of a client; leave it out"
        )
    refuse_large("chat_template_kwargs", list(variables.values()))
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.continue_final_message:
        return template.render_begun(messages, tools=tools, variables=variables)
    return template.render(messages, asks=body.add_generation_prompt, tools=tools, variables=variables)


def _called_tools(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the tools of which an answer must call one; none if it need not."""
    if choice in ("auto", "none"):
        return ()
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    called = tuple(names) if choice == "required" else (name,) if isinstance(name, str) else ()
    if not called or not set(called) <= set(names):
        raise ApiError(
            400,
            f"'tool_choice' = {shown(choice):.100}; it must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}, of a tool in 'tools'",
        )
    return called
