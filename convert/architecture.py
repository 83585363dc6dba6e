"""What the engine must know of a model besides its weights: the architecture fields of the header, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import ConfigError
from .format import MAX_HEAD_DIM, MAX_LAYERS, NO_LAYER, ArchFlag, Format, Role, TensorSpec
from .rope import Rope


@dataclass(frozen=True)
class Architecture:
    """One decoder of attention and experts. Widths are numbers of neurons; `dense_layers` have no experts."""

    n_layers: int
    hidden: int
    vocabulary: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    top_k: int
    expert_width: int
    max_positions: int
    rms_eps: float
    rope: Rope
    flags: ArchFlag
    dense_width: int = 0
    dense_layers: frozenset[int] = field(default_factory=frozenset)
    shared_width: int = 0
    qkv_clip: float = 0.0
    router_scale: float = 1.0

    def __post_init__(self) -> None:
        def demand(holds: bool, key: str, message: str) -> None:
            if not holds:
                raise ConfigError(message, where=f"config.json: {key}")

        demand(self.n_layers <= MAX_LAYERS, "num_hidden_layers", f"is {self.n_layers}, more than {MAX_LAYERS}")
        demand(
            self.n_heads % self.n_kv_heads == 0,
            "num_key_value_heads",
            f"is {self.n_kv_heads}, which does not divide {self.n_heads} attention heads",
        )
        demand(
            self.head_dim % 2 == 0 and self.head_dim <= MAX_HEAD_DIM,
            "head_dim",
            f"is {self.head_dim}; it must be even and at most {MAX_HEAD_DIM}",
        )
        demand(self.top_k <= self.n_experts, "num_experts_per_tok", f"is {self.top_k} of {self.n_experts} experts")

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def moe_layers(self) -> list[int]:
        return [layer for layer in range(self.n_layers) if layer not in self.dense_layers]

    def model_shapes(self) -> dict[Role, tuple[int, int]]:
        """[rows, cols] of the tensors that the model has once."""
        shapes = {Role.EMBEDDING: (self.vocabulary, self.hidden)}
        if ArchFlag.TIED not in self.flags:
            shapes[Role.HEAD] = (self.vocabulary, self.hidden)
        return shapes | {Role.FINAL_NORM: (1, self.hidden), Role.INV_FREQ: (1, self.rope.rotary_dim // 2)}

    def layer_shapes(self, layer: int) -> dict[Role, tuple[int, int]]:
        """[rows, cols] of the tensors of one layer, experts apart."""
        q_width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        fused = ArchFlag.QKV_FUSED in self.flags
        separate = {Role.Q: (q_width, self.hidden), Role.K: (kv_width, self.hidden), Role.V: (kv_width, self.hidden)}
        shapes = {Role.ATTN_NORM: (1, self.hidden)}
        shapes |= {Role.QKV: (q_width + 2 * kv_width, self.hidden)} if fused else separate
        shapes[Role.O] = (self.hidden, q_width)
        if ArchFlag.QK_NORM_HEAD in self.flags:
            shapes |= {Role.Q_NORM: (1, self.head_dim), Role.K_NORM: (1, self.head_dim)}
        if ArchFlag.QK_NORM_WHOLE in self.flags:
            shapes |= {Role.Q_NORM: (1, q_width), Role.K_NORM: (1, kv_width)}
        if ArchFlag.QKV_BIAS in self.flags:
            biases = {Role.Q_BIAS: (1, q_width), Role.K_BIAS: (1, kv_width), Role.V_BIAS: (1, kv_width)}
            shapes |= {Role.QKV_BIAS: (1, q_width + 2 * kv_width)} if fused else biases
        if ArchFlag.O_BIAS in self.flags:
            shapes[Role.O_BIAS] = (1, self.hidden)
        shapes[Role.FFN_NORM] = (1, self.hidden)
        return shapes | (self._dense_shapes() if layer in self.dense_layers else self._gate_shapes())

    def _dense_shapes(self) -> dict[Role, tuple[int, int]]:
        return {
            Role.DENSE_GATE: (self.dense_width, self.hidden),
            Role.DENSE_UP: (self.dense_width, self.hidden),
            Role.DENSE_DOWN: (self.hidden, self.dense_width),
        }

    def _gate_shapes(self) -> dict[Role, tuple[int, int]]:
        """Router and shared expert."""
        shapes = {Role.ROUTER: (self.n_experts, self.hidden)}
        if ArchFlag.SHARED_EXPERT in self.flags:
            shapes |= {
                Role.SHARED_GATE: (self.shared_width, self.hidden),
                Role.SHARED_UP: (self.shared_width, self.hidden),
                Role.SHARED_DOWN: (self.hidden, self.shared_width),
            }
        if ArchFlag.SHARED_GATED in self.flags:
            shapes[Role.SHARED_EXPERT_GATE] = (1, self.hidden)
        return shapes

    def expert_shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """[rows, cols] of gate, up and down, in the order of a block."""
        return (self.expert_width, self.hidden), (self.expert_width, self.hidden), (self.hidden, self.expert_width)


_MATRICES = frozenset(
    {
        *(Role.EMBEDDING, Role.HEAD, Role.Q, Role.K, Role.V, Role.QKV, Role.O),
        *(Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN),
        *(Role.DENSE_GATE, Role.DENSE_UP, Role.DENSE_DOWN),
    }
)
# What decides: which experts a token goes to, and how much of the shared one it takes. SHARED_GATE is no such gate, but
# the matrix that the shared expert gates its own neurons with.
GATES = frozenset({Role.ROUTER, Role.SHARED_EXPERT_GATE})


def tensor_format(role: Role, weights: Format) -> Format:
    """Gates stay in f32 tiles and vectors plain f32, whatever the weights become."""
    if role in GATES:
        return Format.F32
    return weights if role in _MATRICES else Format.VECTOR


def tensor_specs(architecture: Architecture, weights: Format) -> list[TensorSpec]:
    """The tensor table in its order: the model's own, then layer by layer."""
    places = [(NO_LAYER, architecture.model_shapes())]
    places += [(layer, architecture.layer_shapes(layer)) for layer in range(architecture.n_layers)]
    return [
        TensorSpec(role, layer, tensor_format(role, weights), *shape)
        for layer, shapes in places
        for role, shape in shapes.items()
    ]
