"""Conversations as tokens: the checkpoint's own chat template, and how a conversation goes on without being read again.

Rules:
  - The template runs in a sandbox (sandbox.py) with what `transformers` gives it.
  - Only the template makes control tokens. A control string in a message or a tool goes through the template as an
    opaque mark and is put back as plain text, so that neither the template nor the tokenizer sees a forged marker.
  - A new turn costs what is new: the template is rendered with a mark for the last reply, and what follows the mark is
    the suffix. It is used if what precedes it says what the stored tokens say. Otherwise the template has rewritten the
    past (it drops old thinking, say): the whole is rendered, and the longest common beginning is kept.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2

from colibri.daemon.sandbox import Sandbox, budget
from colibri.daemon.text import Tokenizer
from colibri.protocol.errors import TemplateError

Message = Mapping[str, Any]
"""role and content, both text, and whatever else the template may know: tool_calls, reasoning_content, name …"""
Names = Mapping[str, Any]
"""What a template is given beside the messages: tools, and switches of its own like enable_thinking."""


# Those of OpenAI's interface, which programs use whatever the model.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# How a template names the roles that it has beside them (ipython, observation …), among other words.
_QUOTED_WORD = re.compile(r"""["']([A-Za-z][A-Za-z0-9_-]*)["']""")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this one escapes no HTML, as templates expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> Sandbox:
    environment = Sandbox({"tojson": _to_json})
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """A jinja2 chat template. `tokens`: the names it may use, like bos_token. Raises TemplateError for bad syntax.

    `roles`: those that a message may have. Most templates write any role as it is, so a misspelt one would become
    a turn that the model was never trained on.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(tokens or {})
        self.roles = ROLES | set(_QUOTED_WORD.findall(source))
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise _template_error(error) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, now: datetime, names: Names | None = None
    ) -> str:
        """The conversation as text; `now` is for strftime_now. `names` cannot replace what is given here.

        Raises TemplateError, also if the template does.
        """
        variables = {
            "tools": None,
            "documents": None,
            **(names or {}),
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }
        try:
            with budget():
                return self._template.render(variables)
        except Exception as e:  # a template may raise anything, and none of it is our bug
            raise _template_error(e) from e


def _template_error(error: Exception) -> TemplateError:
    line = getattr(error, "lineno", None)
    where = f"chat_template line {line}" if line else "chat_template"
    return TemplateError(str(error) or type(error).__name__, where=where)


def special_token_names(model_json: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as tokenizer_config.json and special_tokens_map.json name them."""
    names: dict[str, str] = {}
    for part in (model_json.get("special_tokens_map"), model_json.get("tokenizer_config")):
        for name, value in (part or {}).items():
            content = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(content, str):
                names[name] = content
    return names


@dataclass(frozen=True, slots=True)
class Continuation:
    """A new turn: the first `keep` tokens of the history stay, `tokens` follow them."""

    keep: int
    tokens: list[int]
    rewritten: bool
    """Whether the template rewrote what was there, so that less than all of it could be kept."""


class _Marks:
    """Stands marks in for control strings that people wrote, for one conversation: equal strings have equal marks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Nobody can type what was drawn by lot after they typed.
        self._secret = secrets.token_hex(12)
        self._numbers: dict[str, int] = {}
        self._pattern = re.compile(f"mark{self._secret}n([0-9]+)e")

    def hide(self, value: Any, *, special_only: bool = False) -> Any:
        """The value with marks for control strings (those flagged special) in all its texts, keys too."""
        if isinstance(value, str):
            return self._hide_text(value, special_only)
        if isinstance(value, Mapping):
            return {
                self.hide(k, special_only=special_only): self.hide(v, special_only=special_only)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, special_only=special_only) for item in value]
        return value

    def _hide_text(self, text: str, special_only: bool) -> str:
        if not self._tokenizer.has_control(text, special_only=special_only):
            return text
        hidden = self._tokenizer.replace_control(text, self._mark, special_only=special_only)
        # What only becomes a control string when it is normalised is hidden as a whole.
        return self._mark(text) if self._tokenizer.has_control(hidden, special_only=special_only) else hidden

    def _mark(self, text: str) -> str:
        return f"mark{self._secret}n{self._numbers.setdefault(text, len(self._numbers))}e"

    def are_in(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def restore(self, text: str) -> str:
        """The text as it was typed."""
        texts = list(self._numbers)
        return self._pattern.sub(lambda match: texts[int(match[1])], text)


class ChatEncoder:
    """Messages → tokens, from nothing or behind a stored history. Thread-safe.

    `template` None: the model has none, and every call raises TemplateError. `names`: see Names. What is surely more
    than `max_tokens` is refused as PromptTooLong before it is tokenised.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        max_tokens: int = sys.maxsize,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._max_tokens = max_tokens
        self._reply = f"reply{secrets.token_hex(12)}"

    def knows_role(self, role: str) -> bool:
        """Whether a message may have this role."""
        return role in (self._template.roles if self._template else ROLES)

    @staticmethod
    def from_model(
        model_json: Mapping[str, Any], tokenizer: Tokenizer, end_tokens: frozenset[int], max_tokens: int = sys.maxsize
    ) -> ChatEncoder:
        """For the template in a model file. Raises TemplateError if it does not compile."""
        source = model_json.get("chat_template")
        template = ChatTemplate(source, special_token_names(model_json)) if source else None
        return ChatEncoder(template, tokenizer, end_tokens, max_tokens)

    def encode(self, messages: Sequence[Message], now: datetime, names: Names | None = None) -> list[int]:
        """The whole conversation, up to where the reply begins."""
        marks = _Marks(self._tokenizer)
        return self._tokenizer.with_bos(self._tokens(self._render(messages, now, names, marks), marks))

    def append(self, messages: Sequence[Message], now: datetime, names: Names | None = None) -> list[int]:
        """The conversation as tokens that stand behind others: without a BOS."""
        marks = _Marks(self._tokenizer)
        tokens = self._tokens(self._render(messages, now, names, marks), marks)
        return tokens[1:] if tokens[:1] == [self._tokenizer.bos] else tokens

    def resume(
        self,
        history: Sequence[int],
        past: Sequence[Message],
        new: Sequence[Message],
        now: datetime,
        names: Names | None = None,
    ) -> Continuation:
        """Goes on behind `history`: the tokens of the messages `past`, the last of which is the reply, whole or cut.

        Without `past` nothing is known about what the history says, and only a common beginning is kept.
        """
        marks = _Marks(self._tokenizer)
        whole = self._render([*past, *new], now, names, marks)
        suffix = self._suffix(past, new, now, names, marks)
        end = history[-1] if history and history[-1] in self._end_tokens else None
        said = history[:-1] if end is not None else history
        if suffix and whole.endswith(suffix) and self._says(said, marks.restore(whole.removesuffix(suffix))):
            tokens = self._tokens(suffix, marks)
            # The model's own end token stays if the template would put the same; another one makes way for it.
            if end is not None and tokens[:1] == [end]:
                return Continuation(len(history), tokens[1:], rewritten=False)
            return Continuation(len(said), tokens, rewritten=False)
        tokens = self._tokenizer.with_bos(self._tokens(whole, marks))
        keep = _n_common(history, tokens)
        return Continuation(keep, tokens[keep:], rewritten=True)

    def _suffix(
        self, past: Sequence[Message], new: Sequence[Message], now: datetime, names: Names | None, marks: _Marks
    ) -> str | None:
        """What the template puts behind the last reply; None if there is none, or it is not shown exactly once."""
        if not past:
            return None
        marked = [*past[:-1], {**past[-1], "content": self._reply}, *new]
        parts = self._render(marked, now, names, marks).split(self._reply)
        return parts[1] if len(parts) == 2 else None

    def _says(self, tokens: Sequence[int], expected: str) -> bool:
        """Whether the stored tokens read as the rendered text does, apart from white space, which templates trim."""
        return _essence(self._tokenizer.decode(self._without_own_bos(tokens, expected))) == _essence(expected)

    def _without_own_bos(self, tokens: Sequence[int], rendered: str) -> Sequence[int]:
        """Tokens without a BOS that came from the tokenizer and not from the template."""
        bos = self._tokenizer.bos
        if bos is None or tokens[:1] != [bos] or rendered.startswith(self._tokenizer.decode([bos])):
            return tokens
        return tokens[1:]

    def _render(self, messages: Sequence[Message], now: datetime, names: Names | None, marks: _Marks) -> str:
        """Text in which marks stand for the control strings that people wrote."""
        if self._template is None:
            raise TemplateError(
                "the model has no chat template", where="chat_template", hint="use generate with a raw prompt"
            )
        # A reply may hold the marks of its thinking: they are the model's, and the template has to see them.
        hidden = [marks.hide(message, special_only=message["role"] == "assistant") for message in messages]
        return self._template.render(hidden, add_generation_prompt=True, now=now, names=marks.hide(names or {}))

    def _tokens(self, rendered: str, marks: _Marks) -> list[int]:
        """Tokens of rendered text; a stretch between control strings that holds a mark is encoded as plain."""
        self._tokenizer.refuse_longer_than(marks.restore(rendered), self._max_tokens)
        if not marks.are_in(rendered):
            return self._tokenizer.encode(rendered, parse_special=True)
        tokens: list[int] = []
        trusted: list[str] = []
        for piece in self._tokenizer.split_at_control(rendered):
            if not marks.are_in(piece):
                trusted.append(piece)
                continue
            tokens += self._tokenizer.encode("".join(trusted), parse_special=True)
            trusted.clear()
            tokens += self._tokenizer.encode(marks.restore(piece))
        return tokens + self._tokenizer.encode("".join(trusted), parse_special=True)


def _essence(text: str) -> str:
    """Text without white space and composition, which tokenizers and templates may change."""
    return "".join(unicodedata.normalize("NFC", text).split())


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
