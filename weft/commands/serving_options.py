"""Options of serving (`weft/serve/spec.py`) as parameters of commands, and as the table of docs/serving_options.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from weft.commands.arguments import chosen_device
from weft.serve.spec import Command, Device, ServingSpec, default_on, flag_of, option_of, options_of

PAGE = """# Options of serving

Made from `weft/serve/spec.py` by `python -m weft.commands.serving_options`. `weft serve --help`, `weft generate --help`
and `weft plan --help` say the same. Options that do not go together are in the table of `weft/serve/refusals.py`.

| option | commands | default | meaning |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Given:
    """The options that a command was given: None, or no value, for those that were not."""

    values: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """Return the value of an option that has one default on all devices."""
        found = self.values.get(name)
        return default_on(name, "cpu") if found is None else found

    def __call__(self, device: Device | None = None) -> ServingSpec:
        """Return all options, with the defaults of a device: the one that is named, or that of --device. Looks for a
        GPU, which imports torch, if that is auto.
        """
        values = dict(self.values)
        device = device or (chosen_device(values["device"] or "auto") if "device" in values else "cpu")
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        defaults = {name: default_on(name, device) for name, value in given.items() if value is None}
        return ServingSpec(**{**given, **defaults, "device": device})


def takes_options(command: Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `given`, of type `Given`, by one for each option of serving that it takes."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        options = options_of(command)

        @wraps(function)
        def call(**arguments: Any) -> None:
            values = {one.name: arguments.pop(one.name, None) for one in options}
            function(**arguments, given=Given(values))

        own = list(inspect.signature(function, eval_str=True).parameters.values())
        index = [one.name for one in own].index("given")
        made = [*own[:index], *(_parameter(one, command) for one in options), *own[index + 1 :]]
        keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in made]
        call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in keywords}
        return call

    return decorate


def _parameter(one: Field[Any], command: Command) -> inspect.Parameter:
    """Return the parameter of a command that an option is, as typer reads it."""
    about, default = option_of(one), one.default
    hint = get_type_hints(ServingSpec)[one.name]
    hint, default = (list[str] | None, None) if default == () else (hint, default)
    words = about.help if command != "plan" or about.help.startswith("with ") else f"with --serve: {about.help}"
    if about.on_gpu is not None:
        words += f"; if not given, {about.on_gpu} on a GPU, {default} on CPUs"
        hint, default = int | None, None
    flags = [flag_of(one)] if about.flag or default is False else []
    annotation = typer.Option(*flags, help=words, envvar=about.variable, min=about.minimum, max=about.maximum)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, annotation]
    )


def reference() -> str:
    """Return docs/serving_options.md."""
    rows = []
    for one in options_of("serve"):
        about = option_of(one)
        commands = ", ".join("plan --serve" if name == "plan" else name for name in about.commands)
        default = "" if one.default in (None, ()) else f"`{one.default}`".lower()
        default += f", on a GPU `{about.on_gpu}`" if about.on_gpu is not None else ""
        rows.append(f"| `{flag_of(one)}` | {commands} | {default} | {about.help} |\n")
    return PAGE + "".join(rows)


if __name__ == "__main__":
    print(reference(), end="")
