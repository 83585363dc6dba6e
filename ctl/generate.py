"""generate, score, tokenize, detokenize: text and tokens without a conversation."""

from __future__ import annotations

import math
from typing import Any

import click

import colibri

from .command import given, online, sampling_options, text_or_stdin
from .output import ProgressLine, print_json, print_stream, print_table, reply_json, reply_line


@click.command()
@click.argument("prompt", required=False)
@click.option("--session", metavar="NAME", help="Go on in this session, which is kept.")
@click.option("--parse-special", is_flag=True, help="Read control tokens such as <|im_end|> in the prompt.")
@click.option("--stats", is_flag=True, help="Say on stderr what it cost.")
@sampling_options
@online
def generate(
    client: colibri.Client,
    prompt: str | None,
    session: str | None,
    parse_special: bool,
    stats: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Go on from PROMPT (or standard input) as raw text, without a chat template.

    \b
    colibrictl generate "Once upon a time" --max-tokens 64
    """
    text = text_or_stdin(prompt, "a prompt")
    progress = ProgressLine()
    if session is None:
        stream = client.generate(text, parse_special=parse_special, on_progress=progress, **given(options))
    elif parse_special:
        raise click.UsageError("--parse-special is not for sessions")
    else:
        stream = client.session(session).generate(text, on_progress=progress, **given(options))
    show_reply(stream, progress, as_json=as_json, stats=stats)


def show_reply(stream: colibri.Stream, progress: ProgressLine, *, as_json: bool, stats: bool) -> None:
    """Prints a reply as it comes, or whole as JSON; what was not as usual goes to stderr."""
    with stream:
        if as_json:
            print_json(reply_json(stream.result))
            return
        print_stream(stream, progress)
    reply = stream.result
    if reply.note:
        click.echo(f"note: {reply.note}", err=True)
    if stats:
        click.echo(reply_line(reply), err=True)


@click.command()
@click.argument("text", required=False)
@click.option("--tokens", metavar="IDS", help='Token ids instead of text: "1 2 3".')
@online
def score(client: colibri.Client, text: str | None, tokens: str | None, as_json: bool) -> None:
    """How likely each token of TEXT (or standard input) is after those before it.

    \b
    colibrictl score "The capital of France is Paris."
    """
    if tokens is not None and text is not None:
        raise click.UsageError("give TEXT or --tokens, not both")
    scores = client.score(parse_ids(tokens) if tokens is not None else text_or_stdin(text, "a text"))
    total = math.fsum(scores.logprobs)
    perplexity = math.exp(-total / len(scores.logprobs)) if scores.logprobs else None
    if as_json:
        print_json(scores.to_wire() | {"total": total, "perplexity": perplexity})
        return
    rows = zip(scores.tokens[1:], (f"{value:.4f}" for value in scores.logprobs), strict=True)
    print_table(["token", "log-probability"], rows)
    if perplexity is not None:
        click.echo(f"total {total:.4f}, perplexity {perplexity:.4f}")


@click.command()
@click.argument("text", required=False)
@click.option("--parse-special", is_flag=True, help="Read control tokens such as <|im_end|> in the text.")
@click.option("--add-special", is_flag=True, help="Add what the tokenizer puts around a text.")
@online
def tokenize(client: colibri.Client, text: str | None, parse_special: bool, add_special: bool, as_json: bool) -> None:
    """Token ids of TEXT (or standard input).

    \b
    colibrictl tokenize "Hello"
    """
    tokens = client.tokenize(text_or_stdin(text, "a text"), parse_special=parse_special, add_special=add_special)
    print_json({"tokens": tokens}) if as_json else click.echo(" ".join(map(str, tokens)))


@click.command()
@click.argument("tokens", nargs=-1)
@online
def detokenize(client: colibri.Client, tokens: tuple[str, ...], as_json: bool) -> None:
    """Text of TOKENS (or of ids on standard input).

    \b
    colibrictl detokenize 1 2 3
    """
    text = client.detokenize(parse_ids(" ".join(tokens) if tokens else text_or_stdin(None, "token ids")))
    print_json({"text": text}) if as_json else click.echo(text)


def parse_ids(text: str) -> list[int]:
    """Token ids between spaces or commas; brackets, as JSON has them, do no harm."""
    words = text.replace(",", " ").strip().removeprefix("[").removesuffix("]").split()
    if wrong := next((word for word in words if not (word.isascii() and word.isdigit())), None):
        raise click.UsageError(f"{wrong!r} is not a token id")
    return [int(word) for word in words]
