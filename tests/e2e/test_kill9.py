"""kill -9 at random moments of conversations: law 2, tokens are the truth and pages are a cache.

A conversation of several greedy turns is held once undisturbed. Then it is held again while the daemon is killed:
before a request is looked at, while the prompt is read, while tokens are generated, just after `done`, and when all
pages are written. After each kill the daemon is started again and the conversation goes on from what is there. Always:

  - every acknowledged turn is there, and all that is there is a beginning of the undisturbed conversation, to the token
  - the conversation ends with the undisturbed tokens and messages
  - the next request says truthfully how much came from the cache: the pages that are on disk, and 31 tokens at most
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from colibri.daemon.pages import common_length, page_id
from colibri.kvstore import PageStore
from colibri.protocol import Answer, Done
from colibri.protocol import messages as wire
from colibri.protocol.errors import ConnectionLost, SessionNotFound
from support.daemon import DaemonProcess, Reply, WireClient, chat

GREEDY = wire.Sampling(temperature=0.0)
PAGE = 32
# (question, tokens of the reply): replies shorter and longer than a page, a prompt of many; {} is the seed.
TURNS = [("{} hello", 40), ("Tell me more. " * 20, 90), ("And?", 7), ("Why " * 9, 64), ("Thank you", 33)]


@dataclass
class Undisturbed:
    """What the conversation is when nobody kills anybody."""

    tokens: list[int]
    messages: list[wire.StoredMessage]
    reply_starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def hold_undisturbed(client: WireClient, seed: int) -> Undisturbed:
    starts, ends = [], []
    for question, n_tokens in TURNS:
        request = chat(question.format(seed), session=f"s{seed}", max_tokens=n_tokens, sampling=GREEDY)
        result = client.ask(request).result
        starts.append(result.usage.prompt_tokens)
        ends.append(result.session.n_tokens)
    info = client.ask(wire.SessionGet(name=f"s{seed}", include_tokens=True)).result
    return Undisturbed(info.tokens, info.messages, starts, ends)


class Killer:
    """Holds the conversation in a session of its own, killing the daemon on the way."""

    def __init__(self, daemon: DaemonProcess, undisturbed: Undisturbed, seed: int) -> None:
        self.daemon = daemon
        self.truth = undisturbed
        self.seed = seed
        self.random = random.Random(seed)
        self.session = f"s{seed}"
        self.n_kills = 0
        self.n_acknowledged = 0  # tokens of the turns that were called done
        self.on_disk: tuple[int, int] | None = None  # after a kill: least and most that may come from the cache
        self.client = daemon.connect()

    def run(self, n_kills: int) -> None:
        """One conversation, with at most so many kills."""
        n_before = self.n_kills
        for turn in range(len(TURNS)):
            while not self._has_turn(turn):
                self._try(turn, kill=self.n_kills - n_before < n_kills and self.random.random() < 0.8)
        info = self._info()
        assert info.tokens == self.truth.tokens
        assert info.messages == self.truth.messages

    def _info(self) -> wire.SessionInfo | None:
        try:
            info: wire.SessionInfo = self.client.ask(wire.SessionGet(name=self.session, include_tokens=True)).result
        except SessionNotFound:
            assert self.n_acknowledged == 0
            return None
        return info

    def _has_turn(self, turn: int) -> bool:
        """Whether the turn is there to its last token. Checks all that is there."""
        info = self._info()
        if info is None or info.tokens is None:
            return False
        assert info.tokens == self.truth.tokens[: len(info.tokens)]
        assert len(info.tokens) >= self.n_acknowledged
        return len(info.tokens) >= self.truth.ends[turn]

    def _try(self, turn: int, *, kill: bool) -> None:
        """Asks for the turn, or for the rest of its reply, and may kill the daemon meanwhile."""
        info = self._info()
        tokens = info.tokens if info is not None and info.tokens is not None else []
        question, n_tokens = TURNS[turn][0].format(self.seed), TURNS[turn][1]
        request: wire.Request
        if len(tokens) >= self.truth.reply_starts[turn]:  # the prompt was accepted: go on with the reply
            n_left = n_tokens - (len(tokens) - self.truth.reply_starts[turn])
            request = wire.Generate(prompt="", session=self.session, max_tokens=n_left, sampling=GREEDY)
        else:
            request = chat(question, session=self.session, max_tokens=n_tokens, sampling=GREEDY)
        if not kill:
            self._acknowledge(self.client.ask(request), tokens)
        elif self.random.random() < 0.25:
            self._acknowledge(self.client.ask(request), tokens)
            if self.random.random() < 0.5:
                self.client.wait_until(all_saved)
                self._kill_and_restart(nothing_lost=True)
            else:
                self._kill_and_restart()
        else:
            self._kill_within(request, tokens)

    def _acknowledge(self, reply: Reply, before: list[int]) -> None:
        usage = reply.result.usage
        assert reply.ids == self.truth.tokens[usage.prompt_tokens :][: len(reply.ids)]
        self.n_acknowledged = reply.result.session.n_tokens
        if self.on_disk is not None:
            least, most = self.on_disk
            assert least <= usage.cached_tokens <= most
        elif before:
            assert usage.cached_tokens == min(len(before), usage.prompt_tokens) - 1  # all is in memory
        self.on_disk = None

    def _kill_within(self, request: wire.Request, before: list[int]) -> None:
        """Kills after a random number of answers; what arrived nevertheless still counts."""
        n_answers = self.random.choice([0, 1, self.random.randrange(2, 60)])
        answers: list[Answer] = []
        id = self.client.send(request)
        try:
            for answer in self.client.answers(id):
                answers.append(answer)
                if len(answers) == n_answers:
                    break
            self.daemon.kill()
            while not (answers and answers[-1].final):
                answers.append(next(self.client.answers(id)))
        except ConnectionLost:
            pass
        if answers and isinstance(answers[-1].body, Done):
            self._acknowledge(Reply(answers), before)
        self._kill_and_restart()

    def _kill_and_restart(self, *, nothing_lost: bool = False) -> None:
        if self.daemon.is_running:
            self.daemon.kill()
        self.n_kills += 1
        key = bytes.fromhex(self.client.server.model.numerics_key)
        self.client.close()
        tokens = self.truth.tokens
        n_full, n_more = pages_on_disk(self.daemon.data / "pages", key, tokens)
        if nothing_lost:
            assert n_full * PAGE + n_more >= self.n_acknowledged - 1
        self.daemon.start()
        self.client = self.daemon.connect()
        n_stored = len(self.truth.tokens) if (info := self._info()) is None else len(info.tokens or ())
        # The last token of what is known is always computed: its logits are needed.
        self.on_disk = (min(n_full * PAGE, max(0, n_stored - PAGE)), n_full * PAGE + n_more)


def all_saved(stats: dict[str, Any]) -> bool:
    return not stats["pages"]["unsaved"] and not stats["pages"]["write_queue"]


def pages_on_disk(path: Path, key: bytes, tokens: list[int]) -> tuple[int, int]:
    """How many full pages of this beginning are stored without a gap, and how many tokens of the one that follows."""
    store = PageStore(path)
    try:
        parent, n_full = page_id(key, b"", ()), 0
        while True:
            rest = tokens[n_full * PAGE :]
            metas = store.children(parent)
            full = next((meta for meta in metas if list(meta.tokens) == rest[:PAGE] and len(meta.tokens) == PAGE), None)
            if full is None:
                return n_full, max((common_length(meta.tokens, rest) for meta in metas), default=0)
            parent, n_full = full.id, n_full + 1
    finally:
        store.close()


def hold_conversations(model: Path, folder: Path, n_kills: int) -> None:
    n_killed = seed = 0
    with (
        DaemonProcess(model, folder / "undisturbed") as calm,
        calm.connect() as client,
        DaemonProcess(model, folder / "disturbed", "--max-step-rows", "48") as daemon,
    ):
        while n_killed < n_kills:
            killer = Killer(daemon, hold_undisturbed(client, seed), seed)
            killer.run(min(n_kills - n_killed, 6))
            killer.client.close()
            n_killed += killer.n_kills
            seed += 1


def test_a_conversation_survives_kill_9_at_any_moment(tiny_model_path: Path, tmp_path: Path) -> None:
    hold_conversations(tiny_model_path, tmp_path, n_kills=8)


@pytest.mark.slow
def test_a_conversation_survives_fifty_times_kill_9(tiny_q8_model_path: Path, tmp_path: Path) -> None:
    hold_conversations(tiny_q8_model_path, tmp_path, n_kills=50)
