"""Every command: what it prints, what it sends, and --json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from colibri.ctl import output
from colibri.protocol import Done
from colibri.protocol.messages import Chat, Generate, Message, Request, Sampling
from support.ctl import Ctl, as_json
from support.fake_daemon import Connection, FakeDaemon, token
from support.wire import SERVER_INFO, completion

# generate


def test_generate_prints_the_text(ctl: Ctl) -> None:
    result = ctl("generate", "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "You said: hello\n", "")


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_generate_reads_a_pipe(ctl: Ctl, arguments: list[str]) -> None:
    assert ctl(*arguments, stdin="hello").stdout == "You said: hello\n"


def test_generate_as_json_has_all_of_the_reply(ctl: Ctl) -> None:
    reply = as_json(ctl("generate", "hello", "--json", "--logprobs", "1"))
    assert reply["text"] == "You said: hello"
    assert reply["finish_reason"] == "stop"
    assert reply["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 15}
    assert len(reply["tokens"]) == len(reply["logprobs"]) == len(reply["top"])
    assert "session" not in reply


def test_options_become_fields(ctl: Ctl, daemon: FakeDaemon) -> None:
    options = "--max_tokens 9 --temperature 0.5 --top-k 3 --seed 4 --stop A --stop B --deadline-s 60 --parse-special"
    assert ctl("generate", "a", *options.split()).exit_code == 0
    sampling = Sampling(temperature=0.5, top_k=3, seed=4)
    assert daemon.received == [
        Generate(prompt="a", max_tokens=9, sampling=sampling, stop=["A", "B"], deadline_s=60.0, parse_special=True)
    ]


def test_stats_and_notes_go_to_stderr(ctl: Ctl, daemon: FakeDaemon) -> None:
    def answer(connection: Connection, id: int, request: Request) -> None:
        done = completion(prompt=100, cached=90, generated=10)
        note = "model changed: pages not reused"
        connection.answer(id, token("text"), Done(type(done)(**vars(done) | {"note": note})))

    daemon.script["generate"] = answer
    result = ctl("generate", "a", "--stats")
    assert result.stdout == "text\n"
    assert result.stderr.splitlines() == [
        "note: model changed: pages not reused",
        "100 prompt tokens (90 cached) in 0.01 s, 10 generated, 500.0 tokens/s, ended by stop",
    ]


def test_generate_goes_on_in_a_session(ctl: Ctl, alice: str) -> None:
    assert as_json(ctl("generate", "more", "--session", alice, "--json"))["session"]["n_turns"] == 1


# chat with one message


def test_chat_answers_one_message(ctl: Ctl, daemon: FakeDaemon) -> None:
    assert ctl("chat", "hi", "--system", "Be brief.").stdout == "You said: Be brief.hi\n"
    system, user = Message(role="system", content="Be brief."), Message(role="user", content="hi")
    assert daemon.received == [Chat(messages=[system, user])]


def test_chat_reads_a_pipe_without_its_last_newline(ctl: Ctl) -> None:
    assert ctl("chat", stdin="hi\n").stdout == "You said: hi\n"


def test_chat_tells_that_it_resumes(ctl: Ctl, alice: str) -> None:
    result = ctl("chat", "again", "--session", alice)
    assert result.stdout == "You said: again\n"
    assert result.stderr == "session 'alice': resumed, 2 h old, 1 turn, 14 tokens\n"


def test_chat_in_a_new_session_says_nothing(ctl: Ctl, daemon: FakeDaemon) -> None:
    assert ctl("chat", "hi", "--session", "bob").stderr == ""
    assert list(daemon.sessions) == ["bob"]


def test_chat_as_json_tells_the_session(ctl: Ctl, alice: str) -> None:
    session = as_json(ctl("chat", "again", "--session", alice, "--json"))["session"]
    assert session == {"name": "alice", "n_tokens": 34, "n_turns": 2, "created": False, "age_s": 0.5}


def test_a_new_chat_never_continues_an_old_one(ctl: Ctl, alice: str) -> None:
    result = ctl("chat", "hi", "--session", alice, "--new")
    assert result.exit_code == 1
    assert result.stderr.startswith("colibrictl: alice: there is a session of this name")


def test_resume_never_begins_a_new_one(ctl: Ctl) -> None:
    assert ctl("chat", "hi", "--session", "nobody", "--resume").exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [["--new"], ["--resume"], ["--session", "a", "--new", "--resume"], ["--session", "alice", "--system", "Be brief."]],
)
def test_options_that_make_no_sense_together_are_wrong_usage(ctl: Ctl, alice: str, arguments: list[str]) -> None:
    assert ctl("chat", "hi", *arguments).exit_code == 2


# score, tokenize, detokenize


def test_score_shows_each_token_and_the_sum(ctl: Ctl) -> None:
    lines = ctl("score", "abc").stdout.split()
    assert lines[-4:] == ["total", "-1.0000,", "perplexity", "1.6487"]
    assert "98" in lines


def test_score_takes_token_ids(ctl: Ctl) -> None:
    scores = as_json(ctl("score", "--tokens", "[1, 2 3]", "--json"))
    assert (scores["tokens"], scores["logprobs"], scores["total"]) == ([1, 2, 3], [-0.5, -0.5], -1.0)
    assert scores["perplexity"] == pytest.approx(1.6487, abs=1e-4)


def test_score_of_one_token_has_no_perplexity(ctl: Ctl) -> None:
    assert as_json(ctl("score", "--tokens", "1", "--json"))["perplexity"] is None


def test_tokens_go_through_a_pipe(ctl: Ctl) -> None:
    tokens = ctl("tokenize", "für").stdout
    assert tokens == "102 195 188 114\n"
    assert ctl("detokenize", stdin=tokens).stdout == "für\n"
    assert as_json(ctl("detokenize", "102", "114", "--json")) == {"text": "fr"}
    assert as_json(ctl("tokenize", "a", "--json")) == {"tokens": [97]}


# sessions


def test_sessions_are_listed(ctl: Ctl, alice: str) -> None:
    words = ctl("sessions", "list").stdout.split()
    assert words[:7] == ["name", "turns", "tokens", "state", "made", "last", "used"]
    assert words[-10:] == ["alice", "1", "14", "idle", "2", "h", "ago", "1", "h", "ago"]
    assert [summary["name"] for summary in as_json(ctl("sessions", "list", "--json"))] == ["alice"]


def test_no_sessions_are_said_on_stderr(ctl: Ctl) -> None:
    result = ctl("sessions", "list")
    assert (result.stdout, result.stderr) == ("", "no sessions\n")


def test_a_session_is_shown_with_its_messages(ctl: Ctl, alice: str) -> None:
    text = ctl("sessions", "show", alice, "--tokens").stdout
    assert text.startswith("alice: 1 turn, 14 tokens, idle, made 2 h ago, last used 1 h ago\n\nuser:\nhi\n")
    assert "tokens: 104 105 89" in text
    assert "tokens" not in as_json(ctl("sessions", "show", alice, "--json"))


def test_a_session_is_forked_truncated_and_deleted(ctl: Ctl, alice: str, daemon: FakeDaemon) -> None:
    assert ctl("sessions", "fork", alice, "bob", "--n-tokens", "9").stdout == (
        "session 'bob' has the first 9 tokens of 'alice'\n"
    )
    assert ctl("sessions", "truncate", "bob", "3").stdout == "session 'bob' has 3 tokens\n"
    assert ctl("sessions", "delete", alice).stdout == "session 'alice' is deleted\n"
    assert as_json(ctl("sessions", "truncate", "bob", "2", "--json")) == {"name": "bob", "n_tokens": 2, "n_turns": 1}
    assert as_json(ctl("sessions", "fork", "bob", "c", "--json")) == {"name": "c", "n_tokens": 2, "n_turns": 1}
    assert as_json(ctl("sessions", "delete", "bob", "--yes", "--json")) == {"name": "bob", "deleted": True}
    assert list(daemon.sessions) == ["c"]


@pytest.mark.parametrize("arguments", [["show", "x"], ["fork", "x", "y"], ["truncate", "x", "1"], ["delete", "x"]])
def test_a_session_that_is_not_there_is_named(ctl: Ctl, arguments: list[str]) -> None:
    result = ctl("sessions", *arguments)
    assert result.exit_code == 1
    assert result.stderr == "colibrictl: x: there is no session of this name\n"


# status


FULL_STATS: dict[str, Any] = {
    "uptime_s": 7300.0,
    "scheduler": {"running": 2, "waiting": 0, "max_batch_size": 8, "max_queue": 256},
    "server": {"connections": 3, "max_connections": 256},
    "pages": {"total": 512, "free": 400, "active": 12, "cached": 100, "page_bytes": 65536, "bad": 0},
    "store": {"pages": 1, "bytes": 1 << 20, "budget_bytes": 20 << 30, "corrupt": 0},
    "engine": {"isa": "avx2", "memory_bytes": 3 << 20},
}


def answering(daemon: FakeDaemon, op: str, result: dict[str, Any]) -> None:
    daemon.script[op] = lambda connection, id, request: connection.answer(id, Done(result))


def test_status_fits_on_a_screen(ctl: Ctl, daemon: FakeDaemon) -> None:
    answering(daemon, "stats", FULL_STATS)
    lines = ctl("status").stdout.splitlines()
    assert lines[0] == f"colibrid 0.1.0 at {daemon.path}: ok, up 2 h"
    assert lines[1].startswith("tiny (mixtral): 2 layers, 8 experts, 2 per token, context 4096")
    assert lines[2:] == [
        "requests    2 of 8 running, 0 of 256 waiting",
        "connections 3 of 256",
        "KV in RAM   12 of 512 pages in use (768.0 KiB), 100 cached",
        "KV on disk  1.0 MiB of 20.0 GiB, 1 page",
        "engine      avx2, 3.0 MiB of buffers and KV",
    ]


def test_status_tells_of_the_memory_for_experts(ctl: Ctl, daemon: FakeDaemon) -> None:
    experts = {"slots": 4, "slot_bytes": 1 << 20, "slots_used": 3, "budget_bytes": 4 << 20, "bytes_read": 5 << 20}
    answering(daemon, "stats", {"experts": experts | {"hits": 9, "misses": 1, "read_ahead": 4, "read_ahead_used": 3}})
    words = "3.0 MiB of 4.0 MiB, 5.0 MiB read, 90.0% in memory when needed, 75% of those read ahead were needed"
    assert ctl("status").stdout.splitlines()[2] == f"experts     {words}"


def test_status_says_what_is_wrong_before_all_else(ctl: Ctl, daemon: FakeDaemon) -> None:
    answering(daemon, "health", {"status": "degraded", "problems": ["the disk is full"], "model_file": "removed"})
    answering(daemon, "stats", FULL_STATS | {"pages": {"bad": 1, "write_failures": 2}, "store": {"corrupt": 1}})
    lines = ctl("status").stdout.splitlines()
    assert lines[0].endswith(": degraded, up 2 h")
    assert lines[1:3] == ["  the disk is full", "  model file removed"]
    assert lines[-1] == "mended      2 damaged pages, 2 pages could not be written"


def test_status_all_shows_every_figure(ctl: Ctl, daemon: FakeDaemon) -> None:
    lines = ctl("status", "--all").stdout.splitlines()
    assert lines[2:] == ["health", "  status  ok", "pages", "  total  10", "  free   8", "queue  0"]


def test_status_as_json_has_it_all(ctl: Ctl, daemon: FakeDaemon) -> None:
    assert as_json(ctl("status", "--json")) == {
        "server": SERVER_INFO.to_wire(),
        "socket": daemon.path,
        "health": {"status": "ok"},
        "stats": {"pages": {"total": 10, "free": 8}, "queue": 0},
    }


# convert, inspect: thin over colibri.convert, which has its own tests


class Figures:
    def to_dict(self) -> dict[str, Any]:
        return {"file_bytes": 3 << 20, "notes": ["a", "b"]}


def recording(calls: list[Any]) -> Callable[..., Figures]:
    """A function that notes what it is called with."""

    def function(*arguments: Any, **options: Any) -> Figures:
        calls.append((arguments, options))
        return Figures()

    return function


def test_convert_calls_the_library(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("colibri.convert.convert", recording(calls))
    result = ctl(
        "convert", "SRC", str(tmp_path / "o"), "--quantize", "int8", "--expert_shard", "3", "--flash_attn_compatible"
    )
    options = {"quantize": "int8", "expert_shards": 3, "flash_attn_compatible": True, "progress": None}
    assert calls == [(("SRC", tmp_path / "o"), options)]
    assert result.stdout == "file_bytes  3.0 MiB\nnotes       a, b\n"
    assert as_json(ctl("convert", "SRC", "o", "--json"))["notes"] == ["a", "b"]
    ctl("convert", "SRC", "o", "--no-flash-attn-compatible")
    assert [options["flash_attn_compatible"] for _, options in calls] == [True, True, False]


def test_a_checkpoint_that_is_not_there_is_one_line(ctl: Ctl, tmp_path: Path) -> None:
    result = ctl("convert", str(tmp_path / "none"), str(tmp_path / "out"))
    assert result.exit_code == 1
    assert result.stderr.startswith("colibrictl: ")
    assert len(result.stderr.splitlines()) == 1
    error = json.loads(ctl("convert", str(tmp_path / "none"), str(tmp_path / "out"), "--json").stdout)["error"]
    assert error["message"]


def test_inspect_knows_the_model_that_comes_along_as_the_daemon_does(ctl: Ctl) -> None:
    assert as_json(ctl("inspect", "default", "--json"))["path"].endswith("models/default.colibri")


def test_inspect_calls_the_library(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("colibri.convert.inspect", recording(calls), raising=False)
    assert as_json(ctl("inspect", str(tmp_path / "m"), "--verify", "--json"))["file_bytes"] == 3 << 20
    assert calls == [((tmp_path / "m",), {"verify": True})]


# printing


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert output.printable("a\x1b[2Jb\r\x9b1m\tc\n") == "a�[2Jb��1m\tc\n"


def test_a_pipe_gets_what_the_model_wrote() -> None:
    assert output.printable("\x1b[1m") == "\x1b[1m"


def test_maps_of_the_same_keys_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_figures({"layers": [{"kind": "dense", "bytes": 1024}, {"kind": "experts", "bytes": 2048}], "none": []})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["layers"],
        ["kind", "bytes"],
        ["dense", "1.0", "KiB"],
        ["experts", "2.0", "KiB"],
        ["none", "-"],
    ]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("used_bytes", 1536, "1.5 KiB"),
        ("used_bytes", 12, "12 B"),
        ("bytes", 5 << 40, "5.0 TiB"),
        ("wait_s", 0.12345, "0.123"),
        ("rate", 12.3456, "12.35"),
        ("on", True, "yes"),
        ("none", None, "-"),
        ("ids", [1, 2], "1, 2"),
    ],
)
def test_figures_are_said_in_their_unit(name: str, value: Any, words: str) -> None:
    assert output.human(name, value) == words


def test_help_is_there_for_every_command(ctl: Ctl) -> None:
    result: Result = ctl("-h")
    assert result.exit_code == 0
    assert "chat" in result.stdout
