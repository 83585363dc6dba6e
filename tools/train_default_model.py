"""Train colibri's default model, a tiny Mixture-of-Experts that remembers what it is told, on a CPU.

    python tools/train_default_model.py train  --run RUN [--minutes 90]   # goes on where it stopped
    python tools/train_default_model.py train  --run RUN --start FOLDER     # a new run from a checkpoint's weights
    python tools/train_default_model.py export --run RUN --out FOLDER       # a Hugging Face folder (qwen3_moe)
    python tools/train_default_model.py check  --out FOLDER                 # the same logits from transformers?

The model here is the mathematics of `qwen3_moe` written for speed on few cores: tokens are sorted by expert so that
each expert is one matrix product, only the positions that carry loss reach the vocabulary, and conversations of like
length share a batch. `export` writes its weights under the names that transformers expects; `check` holds the two
against each other.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import default_model_data as data
import torch
import torch.nn.functional as F
from default_model_data import Message
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The geometry, chosen so that the converted q8 file stays under 8 MB."""

    vocabulary: int = 1280
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head: int = 32
    experts: int = 8
    chosen: int = 2
    width: int = 224
    theta: float = 10000.0
    epsilon: float = 1e-6
    positions: int = 4096


# ------------------------------------------------------------------------------------------------------------ tokenizer


def corpus(count: int = 12000) -> Iterator[str]:
    """Generated text for the tokenizer: no invented words, so that every merge goes to a word of the grammar."""
    rng = random.Random("tokenizer")
    for _ in range(count):
        level = data.LEVELS[rng.randint(0, 4)]
        talk = data.telling(rng, level, free=0.0) if rng.random() < 0.4 else data.remembering(rng, level, free=0.0)
        yield "".join(f"{message.role}\n{data.plain(message.text)}\n" for message in talk if message.text[0].isupper())
    for words in data.VOCABULARY:
        yield from [" " + " ".join(words)] * 1200


def make_tokenizer(vocabulary: int) -> Tokenizer:
    """Byte-level BPE: whole words for the grammar, bytes for all else; digits stay single so that they copy well."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


# -------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Example:
    """A tokenised conversation: each token's weight in the loss (0 unless the model says it), and what is recalled."""

    tokens: list[int]
    weights: list[float]
    recalled: list[bool]


@dataclass(frozen=True)
class Batch:
    """Conversations of like length, padded on the right."""

    tokens: Tensor
    real: Tensor
    weights: Tensor
    recalled: Tensor


def render(messages: list[Message]) -> str:
    return "".join(f"{START}{message.role}\n{data.plain(message.text)}{END}\n" for message in messages)


def example(tokenizer: Tokenizer, messages: list[Message], emphasis: float) -> Example:
    """Tokens of a conversation; only replies carry loss, remembered words `emphasis` times as much as others."""
    weights, recalled, position = [], [], 0
    speaking: list[tuple[int, int]] = []
    remembered: list[tuple[int, int, bool]] = []
    for message in messages:
        position += len(START) + len(message.role) + 1
        if message.role == "assistant":
            speaking.append((position, position + len(data.plain(message.text)) + len(END)))
            asked = message.sort == "recall"
            if message.sort in ("recall", "unknown"):
                remembered.append((position, position + opening(message.text), False))
            remembered += [(position + a, position + b, asked) for a, b in data.spans(message.text)]
        position += len(data.plain(message.text)) + len(END) + 1
    encoding = tokenizer.encode(render(messages))
    turn = word = 0
    for first, last in encoding.offsets:
        while turn < len(speaking) and first >= speaking[turn][1]:
            turn += 1
        while word < len(remembered) and first >= remembered[word][1]:
            word += 1
        spoken = turn < len(speaking) and first >= speaking[turn][0]
        marked = word < len(remembered) and last > remembered[word][0]
        weights.append(emphasis if spoken and marked else float(spoken))
        recalled.append(spoken and marked and remembered[word][2])
    return Example(encoding.ids, weights, recalled)


def opening(reply: str) -> int:
    """Where the second word of a reply ends: by then it is decided whether the answer is known."""
    return len(" ".join(data.plain(reply).split(" ")[:2]))


def batches(examples: list[Example], budget: int, rng: random.Random) -> list[Batch]:
    """Batches of at most `budget` positions from examples sorted by length, in random order."""
    ordered = sorted(examples, key=lambda one: len(one.tokens))
    groups: list[list[Example]] = []
    while ordered:
        width = round_up(len(ordered[-1].tokens), 16)
        groups.append(ordered[-(budget // width) :])
        del ordered[-(budget // width) :]
    rng.shuffle(groups)
    return [collate(group) for group in groups if len(group) == budget // round_up(len(group[-1].tokens), 16)]


def round_up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


def collate(group: list[Example]) -> Batch:
    width = round_up(max(len(one.tokens) for one in group), 16) + 1

    def padded(rows: list[list], kind: torch.dtype) -> Tensor:
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=kind)

    return Batch(
        padded([one.tokens for one in group], torch.long),
        padded([[1] * len(one.tokens) for one in group], torch.bool),
        padded([one.weights for one in group], torch.float32),
        padded([one.recalled for one in group], torch.bool),
    )


# ---------------------------------------------------------------------------------------------------------------- model


class Dispatch(torch.autograd.Function):
    """Rows copied to where their experts want them. The gradient is a gather too: adding by index is far slower."""

    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, slots: Tensor, chosen: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(slots)
        ctx.chosen = chosen
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots).view(-1, ctx.chosen, gradient.shape[1]).sum(1), None, None, None


class Collect(torch.autograd.Function):
    """The experts' replies back in the tokens' order; what fills an expert's last rows gets no gradient."""

    @staticmethod
    def forward(ctx, replies: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(slots)
        ctx.shape = replies.shape
        return replies.index_select(0, slots)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], gradient), None


def seats(picks: Tensor, experts: int, chosen: int, unit: int = 128) -> tuple[Tensor, Tensor, list[int]]:
    """Where each choice sits when experts stand one after another, each padded to whole units of rows.

    Matrix products are compiled per shape, so a few round sizes are much faster than a new one at every step.
    """
    order = picks.argsort(stable=True)
    counts = torch.bincount(picks, minlength=experts)
    sizes = (counts + unit - 1) // unit * unit
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    places = torch.arange(len(order)) + shift[picks[order]]
    slots = torch.empty_like(order).scatter_(0, order, places)
    source = torch.zeros(int(sizes.sum()), dtype=torch.long).scatter_(0, places, order // chosen)
    return source, slots, sizes.tolist()


class Experts(nn.Module):
    """A router and its experts; also says how unevenly the router chose, for the balance loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Parameter(torch.randn(shape.experts, shape.hidden) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.width, shape.hidden) * 0.02)
        self.down = nn.Parameter(
            torch.randn(shape.experts, shape.hidden, shape.width) * 0.02 / math.sqrt(2 * shape.layers)
        )

    def forward(self, rows: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        chances = F.linear(rows, self.router).float().softmax(-1)
        weights, picks = chances.topk(shape.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        source, slots, sizes = seats(picks.flatten(), shape.experts, shape.chosen)
        parts = []
        for expert, part in enumerate(Dispatch.apply(rows, source, slots, shape.chosen).split(sizes)):
            parts.append(F.linear(gated(F.linear(part, self.gate_up[expert])), self.down[expert]))
        replies = Collect.apply(torch.cat(parts), slots).view(len(rows), shape.chosen, -1)
        mixed = mix(replies, weights)
        share = F.one_hot(picks[real], shape.experts).float().mean((0, 1))
        balance = shape.experts * (share * chances[real].mean(0)).sum()
        return mixed, balance, share.detach()


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_norm = nn.Parameter(torch.ones(shape.head))
        self.k_norm = nn.Parameter(torch.ones(shape.head))
        self.q_proj = nn.Parameter(torch.randn(shape.heads * shape.head, shape.hidden) * 0.02)
        self.k_proj = nn.Parameter(torch.randn(shape.kv_heads * shape.head, shape.hidden) * 0.02)
        self.v_proj = nn.Parameter(torch.randn(shape.kv_heads * shape.head, shape.hidden) * 0.02)
        self.o_proj = nn.Parameter(
            torch.randn(shape.hidden, shape.heads * shape.head) * 0.02 / math.sqrt(2 * shape.layers)
        )

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        shape, (rows, width, _) = self.shape, x.shape
        q, k, v = F.linear(x, torch.cat((self.q_proj, self.k_proj, self.v_proj)).to(x.dtype)).split(
            (shape.heads * shape.head, shape.kv_heads * shape.head, shape.kv_heads * shape.head), dim=-1
        )
        q = place(q.view(rows, width, -1, shape.head), self.q_norm, turn, shape.epsilon).transpose(1, 2)
        k = place(k.view(rows, width, -1, shape.head), self.k_norm, turn, shape.epsilon).transpose(1, 2)
        seen = attend(q, k, v.view(rows, width, -1, shape.head).transpose(1, 2))
        return F.linear(seen.transpose(1, 2).reshape(rows, width, -1), self.o_proj)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention. Up to some hundred positions two plain products beat the fused kernel's backward pass."""
    rows, heads, width, size = q.shape
    groups = heads // k.shape[1]
    if width > 450:
        return F.scaled_dot_product_attention(
            q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True
        )
    shared = q.reshape(-1, groups * width, size) * size**-0.5
    later = torch.full((width, width), -1e4, dtype=q.dtype).triu(1).repeat(groups, 1)
    scores = torch.baddbmm(later, shared, k.reshape(-1, width, size).mT)
    return (scores.softmax(-1).to(v.dtype) @ v.reshape(-1, width, size)).view(rows, heads, width, size)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def place(x: Tensor, weight: Tensor, turn: tuple[Tensor, Tensor], epsilon: float) -> Tensor:
    """Normalised heads with rotary positions, in the half-split layout of the Hugging Face family."""
    first, second = norm(x, weight, epsilon).chunk(2, dim=-1)
    cosine, sine = turn
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def mix(replies: Tensor, weights: Tensor) -> Tensor:
    return (replies * weights.to(replies.dtype).unsqueeze(-1)).sum(1)


def fuse() -> None:
    """Let the compiler fuse what is not a matrix product; about twice as fast, after most of a minute to start."""
    for name in ("norm", "place", "gated", "mix"):
        globals()[name] = torch.compile(globals()[name], dynamic=True)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.epsilon = shape.epsilon
        self.input_norm = nn.Parameter(torch.ones(shape.hidden))
        self.attention = Attention(shape)
        self.middle_norm = nn.Parameter(torch.ones(shape.hidden))
        self.experts = Experts(shape)

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        return x + self.attention(norm(x, self.input_norm, self.epsilon), turn)

    def think(self, rows: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, balance, share = self.experts(norm(rows, self.middle_norm, self.epsilon), real)
        return rows + mixed, balance, share


class Model(nn.Module):
    """qwen3_moe with tied embeddings: copying a word is then the same direction in and out, and the file is smaller."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        steps = shape.theta ** -(torch.arange(0, shape.head, 2) / shape.head)
        angles = torch.outer(torch.arange(shape.positions), steps)[:, None, :]
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, real: Tensor, wanted: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Logits where `wanted`, the summed balance loss, and each layer's share of tokens per expert."""
        x = F.embedding(tokens, self.embedding).to(kind)
        turn = (self.cosine[: tokens.shape[1]].to(kind), self.sine[: tokens.shape[1]].to(kind))
        flat, balances, shares = real.flatten(), [], []
        for layer in self.layers:
            rows = layer.attend(x, turn).flatten(0, 1)
            if layer is self.layers[-1]:  # nothing reads what the last experts would say elsewhere
                asked = wanted.flatten().nonzero().squeeze(1)
                rows, flat = rows[asked], flat[asked]
            rows, balance, share = layer.think(rows, flat)
            x = rows.view_as(x) if rows.numel() == x.numel() else rows
            balances.append(balance)
            shares.append(share)
        hidden = norm(rows, self.norm, self.shape.epsilon)
        return F.linear(hidden, self.embedding).float(), torch.stack(balances).sum(), torch.stack(shares)


# ------------------------------------------------------------------------------------------------------------ optimiser


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal: every direction of a weight learns, not only the loudest ones."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                state.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(state, group["momentum"]))
                scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly, by a quintic Newton-Schulz iteration; batched over experts."""
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def optimisers(model: Model, matrix_rate: float, other_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for embeddings, routers and norms."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim >= 2 and not name.endswith("router") and name != "embedding"
        (matrices if inside else others).append(parameter)
    return [Muon(matrices, matrix_rate), torch.optim.AdamW(others, other_rate, betas=(0.9, 0.98), weight_decay=0.0)]


# ------------------------------------------------------------------------------------------------------------- training


@dataclass
class Progress:
    """What a run has to know to go on where it stopped."""

    pool: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    recall: float = 0.0
    steps_in_stage: int = 0


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. The numbers were chosen on two cores."""

    seed: str = "colibri"
    budget: int = 8192
    pool: int = 131072
    matrix_rate: float = 0.01
    other_rate: float = 0.003
    warm_up: int = 50
    emphasis: float = 5.0
    balance: float = 0.01
    ready: float = 0.85
    least_steps: int = 40


class Trainer:
    """One training run in a folder: tokenizer, checkpoint, log."""

    def __init__(self, run: Path, recipe: Recipe, start: Path | None = None) -> None:
        self.run, self.recipe, self.shape = run, recipe, Shape()
        run.mkdir(parents=True, exist_ok=True)
        fresh = start is not None and not (run / "checkpoint.pt").exists()
        if fresh:
            shutil.copyfile(start / "tokenizer.json", run / "tokenizer.json")
        self.tokenizer = load_or_make_tokenizer(run, self.shape)
        torch.manual_seed(0)
        self.model = Model(self.shape)
        self.optimisers = optimisers(self.model, recipe.matrix_rate, recipe.other_rate)
        self.progress = Progress()
        self.stopped = False
        if fresh:
            self.take(start)
        self.load()

    def take(self, start: Path) -> None:
        """Begin with the weights of a folder that `export` or default_model_checkpoint.py wrote, at the last level."""
        from safetensors.torch import load_file

        found = load_file(start / "model.safetensors")
        own = views(self.model)
        if found.keys() != own.keys() or any(found[name].shape != own[name].shape for name in own):
            raise ValueError(f"{start} is not a model of this shape")
        for name, weight in own.items():
            weight.copy_(found[name])
        self.progress.stage = len(data.LEVELS) - 1

    def load(self) -> None:
        path = self.run / "checkpoint.pt"
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
                optimiser.load_state_dict(state)
            self.progress = Progress(**saved["progress"])

    def save(self) -> None:
        """Written beside and moved into place, so that a crash leaves the last whole checkpoint."""
        states = [optimiser.state_dict() for optimiser in self.optimisers]
        saved = {"model": self.model.state_dict(), "optimisers": states, "progress": asdict(self.progress)}
        torch.save(saved, self.run / "checkpoint.new")
        (self.run / "checkpoint.new").replace(self.run / "checkpoint.pt")

    def log(self, **values: object) -> None:
        line = json.dumps({**asdict(self.progress), **values})
        with (self.run / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def pool(self) -> list[Batch]:
        """The next batches; the seed is the pool's number, so a resumed run sees what it would have seen."""
        seed, examples, total = f"{self.recipe.seed}/{self.progress.pool}", [], 0
        for messages in data.conversations(seed, self.progress.stage, 1 << 20):
            one = example(self.tokenizer, messages, self.recipe.emphasis)
            if len(one.tokens) > self.recipe.budget // 2:
                continue
            examples.append(one)
            total += len(one.tokens)
            if total >= self.recipe.pool:
                break
        return batches(examples, self.recipe.budget, random.Random(seed))

    def rate(self, left: float) -> float:
        """The learning rate's factor: a warm-up, then flat, then down to nothing over the last part of the time."""
        return min(1.0, (self.progress.step + 1) / self.recipe.warm_up, max(left, 0.02))

    def step(self, batch: Batch, factor: float) -> dict[str, float]:
        for optimiser, rate in zip(self.optimisers, (self.recipe.matrix_rate, self.recipe.other_rate), strict=True):
            optimiser.param_groups[0]["lr"] = rate * factor
            optimiser.zero_grad(set_to_none=True)
        wanted = batch.weights[:, 1:] > 0
        inputs, real = batch.tokens[:, :-1], batch.real[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            logits, balance, share = self.model(inputs, real, wanted, torch.bfloat16)
        targets, weights = batch.tokens[:, 1:][wanted], batch.weights[:, 1:][wanted]
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        (loss + self.recipe.balance * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        recalled = batch.recalled[:, 1:][wanted]
        right = (logits.argmax(-1) == targets)[recalled].float()
        return {
            "loss": loss.item(),
            "recall": right.mean().item() if len(right) else math.nan,
            "balance": balance.item() / self.shape.layers,
            "least": share.min().item(),
        }

    def advance(self, recall: float) -> None:
        """The distance grows when what is asked for is mostly answered."""
        progress = self.progress
        progress.steps_in_stage += 1
        if not math.isnan(recall):
            progress.recall += 0.05 * (recall - progress.recall)
        if (
            progress.recall > self.recipe.ready
            and progress.steps_in_stage > self.recipe.least_steps
            and progress.stage + 1 < len(data.LEVELS)
        ):
            progress.stage, progress.steps_in_stage = progress.stage + 1, 0

    def train(self, minutes: float, cool: float, steps: int) -> None:
        """Train for so many minutes (all runs together), the last `cool` of them with a falling rate."""
        sums: dict[str, list[float]] = {}
        saved = time.monotonic()
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopped", True))
        while not self.stopped and self.progress.seconds < 60 * minutes and self.progress.step < steps:
            for batch in self.pool():
                if self.stopped:
                    return self.save()
                begun = time.monotonic()
                left = (60 * minutes - self.progress.seconds) / (60 * cool) if cool else 1.0
                seen = self.step(batch, self.rate(left))
                self.progress.step += 1
                self.progress.tokens += int(batch.real.sum())
                self.progress.seconds += time.monotonic() - begun
                self.advance(seen["recall"])
                for name, value in seen.items():
                    sums.setdefault(name, []).append(value)
                if self.progress.step % 20 == 0:
                    self.log(
                        **{"now": time.strftime("%H:%M:%S"), "width": batch.tokens.shape[1]},
                        **{
                            f"{name}_mean": round(float(torch.tensor(values).nanmean()), 4)
                            for name, values in sums.items()
                        },
                    )
                    sums.clear()
            self.progress.pool += 1
            if time.monotonic() - saved > 120:
                self.save()
                saved = time.monotonic()
        self.save()


def load_or_make_tokenizer(run: Path, shape: Shape) -> Tokenizer:
    path = run / "tokenizer.json"
    if not path.exists():
        make_tokenizer(shape.vocabulary).save(str(path))
    return Tokenizer.from_file(str(path))


# --------------------------------------------------------------------------------------------------------------- export


def views(model: Model) -> dict[str, Tensor]:
    """The weights under the names that `qwen3_moe` checkpoints use, one matrix per expert."""
    weights = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        weights[prefix + "input_layernorm.weight"] = layer.input_norm
        weights[prefix + "post_attention_layernorm.weight"] = layer.middle_norm
        for name, parameter in layer.attention.named_parameters():
            weights[f"{prefix}self_attn.{name}.weight"] = parameter
        weights[prefix + "mlp.gate.weight"] = layer.experts.router
        for expert in range(model.shape.experts):
            gate, up = layer.experts.gate_up[expert].chunk(2)
            named = {"gate_proj": gate, "up_proj": up, "down_proj": layer.experts.down[expert]}
            weights |= {f"{prefix}mlp.experts.{expert}.{name}.weight": part for name, part in named.items()}
    return {name: weight.detach() for name, weight in weights.items()}


def hugging_face_weights(model: Model) -> dict[str, Tensor]:
    """Copies of the weights, as `qwen3_moe` checkpoints hold them."""
    return {name: weight.clone().contiguous() for name, weight in views(model).items()}


def configuration(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "moe_intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "norm_topk_prob": True,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.positions,
        "initializer_range": 0.02,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": shape.vocabulary,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "dtype": "float32",
    }


def export(trainer: Trainer, out: Path) -> None:
    """A folder that `AutoModelForCausalLM` and `AutoTokenizer` open."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = trainer.tokenizer
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    save_file(hugging_face_weights(trainer.model), str(out / "model.safetensors"), {"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    write_json(out / "config.json", configuration(trainer.shape, tokenizer))
    write_json(
        out / "generation_config.json",
        {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": True, "temperature": 0.7, "top_p": 0.95},
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "bos_token": None,
            "additional_special_tokens": [START],
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
            "model_max_length": trainer.shape.positions,
        },
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def check(trainer: Trainer, out: Path) -> float:
    """The largest difference between the logits here and in transformers, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    messages = next(data.conversations("check", 4, 1))
    chat = [{"role": message.role, "content": data.plain(message.text)} for message in messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == render(messages)
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    assert tokens[0].tolist() == trainer.tokenizer.encode(text).ids
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        here, _, _ = trainer.model(tokens, everywhere, everywhere, torch.float32)
        return (here - reference(tokens).logits[0]).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "export", "check"))
    parser.add_argument("--run", type=Path, default=Path("default-model-run"), help="folder of checkpoint and log")
    parser.add_argument("--start", type=Path, help="checkpoint whose weights a new run begins with")
    parser.add_argument("--out", type=Path, default=Path("default-model"), help="folder of the Hugging Face checkpoint")
    parser.add_argument("--minutes", type=float, default=100.0, help="training time, all runs together")
    parser.add_argument("--cool", type=float, default=20.0, help="minutes at the end with a falling learning rate")
    parser.add_argument("--steps", type=int, default=1 << 30, help="stop after so many steps at the latest")
    arguments = parser.parse_args()
    trainer = Trainer(arguments.run, Recipe(), arguments.start)
    if arguments.command == "train":
        fuse()
        trainer.train(arguments.minutes, arguments.cool, arguments.steps)
    elif arguments.command == "export":
        export(trainer, arguments.out)
    else:
        print(f"largest difference of a logit: {check(trainer, arguments.out):.2e}")


if __name__ == "__main__":
    main()
