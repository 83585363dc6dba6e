"""Score a checkpoint of colibri's default model on conversations that training never saw, with transformers.

    python tools/default_model_eval.py FOLDER [--count 200] [--json scores.json]

Recall is counted on the replies the model writes itself, greedily, with the told value in them just as it was typed.
A story counts only if the generator's grammar can parse all of it and it is about what was asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import default_model_data as data
import torch
from default_model_data import Level, Message
from transformers import AutoModelForCausalLM, AutoTokenizer

LEVEL = Level(facts=5, gap=0, stories=0.15, unknown=0.25, updates=0.2)
GAPS = (0, 1, 3, 5, 10, 20, 30)


@dataclass(frozen=True)
class Case:
    """A conversation up to a question, and the reply the generator would give."""

    history: tuple[Message, ...]
    reply: Message


def asked(messages: list[Message], sorts: Iterable[str], least_gap: int = 0) -> Iterator[Case]:
    """Every question of a conversation whose answer is of one of these sorts and lies far enough back."""
    for number, message in enumerate(messages):
        if (
            message.role == "assistant"
            and message.sort in sorts
            and (message.sort != "recall" or message.gap >= least_gap)
        ):
            yield Case(tuple(messages[:number]), message)


def remembered(reply: Message) -> list[str]:
    """The marked words of a reply."""
    return [data.plain(reply.text)[first:last] for first, last in data.spans(reply.text)]


def familiar(case: Case) -> bool:
    """Whether the value asked for is made of words from the generator's lists, or a number."""
    listed = {word for words in data.VOCABULARY for phrase in words for word in phrase.lower().split()} | {"a", "an"}
    return all(word in listed or word.isdigit() for value in remembered(case.reply) for word in value.lower().split())


def recall_cases(gap: int, count: int, words: str = "known") -> list[Case]:
    """Questions with at least `gap` exchanges since the telling; at most two from one conversation.

    The values are `known` words of the generator's lists, `unseen` words that no training conversation holds, or
    `invented` ones, made of random syllables.
    """
    rng = random.Random(f"held out/{words}/{gap}")
    cases: list[Case] = []
    while len(cases) < count:
        talk = data.remembering(rng, LEVEL, gap, words == "unseen", 1.0 if words == "invented" else 0.0)
        found = [case for case in asked(talk, ("recall",), gap) if (words == "known") == familiar(case)]
        cases += rng.sample(found, min(2, len(found)))
    return cases[:count]


def corrected_cases(count: int) -> list[Case]:
    """Questions about a fact that was told, then told otherwise."""
    rng = random.Random("held out/corrected")
    cases: list[Case] = []
    while len(cases) < count:
        talk = data.Conversation(rng, LEVEL, free=0.0)
        for _ in range(rng.randint(1, 4)):
            talk.tell()
        kind = rng.choice([kind for kind, _, _ in talk.facts.values()])
        for _ in range(rng.randint(0, 3)):
            talk.pass_time({kind.key})
        talk.tell(update=kind)
        for _ in range(rng.randint(0, 5)):
            talk.pass_time({kind.key})
        talk.ask(kind)
        cases.append(Case(tuple(talk.messages[:-1]), talk.messages[-1]))
    return cases


def other_cases(sort: str, count: int) -> list[Case]:
    """Questions of another sort: unknown facts, details of a story."""
    rng = random.Random(f"held out/{sort}")
    cases: list[Case] = []
    while len(cases) < count:
        level = data.LEVELS[rng.randint(3, 5)]
        make = data.telling if sort == "detail" else data.remembering
        cases += asked(make(rng, level), (sort,))
    return cases[:count]


def story_cases(count: int) -> list[Case]:
    """Requests for stories, most with nothing before them."""
    rng = random.Random("held out/story")
    cases: list[Case] = []
    while len(cases) < count:
        cases += asked(data.telling(rng, data.LEVELS[3], free=0.2), ("story",))
    return cases[:count]


class Chat:
    """The checkpoint behind its own chat template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def replies(self, histories: list[tuple[Message, ...]], longest: int, temperature: float = 0.0) -> list[str]:
        """A reply to each history; histories of like length share a batch."""
        order = sorted(range(len(histories)), key=lambda number: sum(len(m.text) for m in histories[number]))
        replies = [""] * len(histories)
        for start in range(0, len(order), 25):
            part = order[start : start + 25]
            for number, reply in zip(
                part, self._batch([histories[n] for n in part], longest, temperature), strict=True
            ):
                replies[number] = reply
        return replies

    @torch.inference_mode()
    def _batch(self, histories: list[tuple[Message, ...]], longest: int, temperature: float) -> list[str]:
        chats = [[{"role": m.role, "content": data.plain(m.text)} for m in history] for history in histories]
        texts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        how = (
            {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        output = self.model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=longest, **how
        )
        fresh = output[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(fresh, skip_special_tokens=True)]

    @torch.inference_mode()
    def expert_shares(self, cases: list[Case]) -> list[list[float]]:
        """Per layer, which share of all choices each expert got."""
        counts = torch.zeros(self.model.config.num_hidden_layers, self.model.config.num_experts)
        for case in cases:
            chat = [{"role": m.role, "content": data.plain(m.text)} for m in (*case.history, case.reply)]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            output = self.model(**self.tokenizer(text, return_tensors="pt"), output_router_logits=True)
            for layer, logits in enumerate(output.router_logits):
                picks = logits.topk(self.model.config.num_experts_per_tok, dim=-1).indices
                counts[layer] += torch.bincount(picks.flatten(), minlength=counts.shape[1])
        return (counts / counts.sum(1, keepdim=True)).tolist()


def holds(reply: str, case: Case) -> bool:
    """Whether every remembered word of the expected reply stands in the reply, as it was typed and as a whole word."""
    return all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", reply) for word in remembered(case.reply))


def score(chat: Chat, cases: list[Case], show: int, longest: int = 48) -> float:
    """The share of cases answered rightly; some failures are printed."""
    replies = chat.replies([case.history for case in cases], longest)
    wrong = [(case, reply) for case, reply in zip(cases, replies, strict=True) if not holds(reply, case)]
    for case, reply in wrong[:show]:
        print(f"    asked {case.history[-1].text!r}, wanted {case.reply.text!r}, got {reply!r}")
    return 1 - len(wrong) / len(cases)


def story_score(chat: Chat, cases: list[Case], temperature: float, show: int) -> float:
    torch.manual_seed(0)
    replies = chat.replies([case.history for case in cases], 200, temperature)
    wrong = [
        (case, reply) for case, reply in zip(cases, replies, strict=True) if not data.parses(reply, case.reply.pinned)
    ]
    for case, reply in wrong[:show]:
        print(f"    asked {case.history[-1].text!r}, got {reply!r}")
    return 1 - len(wrong) / len(cases)


def evaluate(chat: Chat, count: int, show: int) -> dict[str, object]:
    """All scores of the model card."""
    scores: dict[str, object] = {}

    def note(name: str, value: object) -> None:
        scores[name] = value
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}", flush=True)

    for gap in GAPS:
        note(f"recall, {gap} turns between", score(chat, recall_cases(gap, count), show))
    for words in ("unseen", "invented"):
        for gap in (0, 10):
            note(f"recall of {words} words, {gap} turns between", score(chat, recall_cases(gap, count, words), show))
    note("corrected facts", score(chat, corrected_cases(count), show))
    note("honest about unknown facts", score(chat, other_cases("unknown", count), show))
    note("details of a story", score(chat, other_cases("detail", count), show))
    note("stories grammatical and on the subject, greedy", story_score(chat, story_cases(count), 0.0, show))
    note("stories grammatical and on the subject, temperature 0.7", story_score(chat, story_cases(count), 0.7, show))
    shares = chat.expert_shares(recall_cases(10, 40))
    note(
        "least and greatest share of an expert (even: 0.125)",
        [round(min(map(min, shares)), 4), round(max(map(max, shares)), 4)],
    )
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="cases per score")
    parser.add_argument("--show", type=int, default=3, help="failures to print per score")
    parser.add_argument("--json", type=Path, help="where to write the scores")
    arguments = parser.parse_args()
    scores = evaluate(Chat(arguments.folder), arguments.count, arguments.show)
    if arguments.json:
        arguments.json.write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
