"""What a run is made of: the model's shape (`ModelConfig`) and the cache's (`CacheConfig`).

Both are frozen and hashable, so they travel as static arguments of `jax.jit`. Field names of `ModelConfig` are
those of the published checkpoint's `config.json`. A wrong value is refused here, with the value and a remedy.
"""

import dataclasses
import json
import pathlib
from typing import Any

from pallas_kernels.resolve_topk import MAX_REFERENCES

SWA, C4, C128 = 0, 4, 128
"""Compress ratios: sliding window only, top-k of 4-token entries, all 128-token entries."""

MAX_HOT_SLOTS = 32_768
"""Slot numbers are kept as int16."""


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the rotary frequencies of C4 and C128 layers (no magnitude factor)."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65_536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """DeepSeek V4 as its `config.json` describes it. Source: spec of the published checkpoints."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    compress_ratios: tuple[int, ...]
    """One ratio a layer: 0, 4 or 128. Entries past `num_hidden_layers` (MTP) are cut off."""
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    sliding_window: int = 128
    n_shared_experts: int = 1
    num_hash_layers: int = 3
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_scaling: Yarn | None = Yarn()
    max_position_embeddings: int = 1_048_576
    index_leaders: tuple[int, ...] | None = None
    """Layers that run their own indexer; the other C4 layers follow the last leader. None: every C4 layer leads (V4)."""

    def __post_init__(self):
        ratios = tuple(self.compress_ratios)[: self.num_hidden_layers]
        object.__setattr__(self, "compress_ratios", ratios)
        if len(ratios) != self.num_hidden_layers:
            raise ConfigError(
                f"compress_ratios has {len(ratios)} entries, num_hidden_layers={self.num_hidden_layers}; give one ratio a layer."
            )
        if unknown := sorted(set(ratios) - {SWA, C4, C128}):
            raise ConfigError(f"compress_ratios holds {unknown}; a layer's ratio is 0, 4 or 128.")
        for name in (
            "vocab_size", "hidden_size", "num_attention_heads", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads",
            "index_topk", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim",
            "qk_rope_head_dim", "index_head_dim", "sliding_window", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even and at most head_dim={self.head_dim} "
                f"and index_head_dim={self.index_head_dim}."
            )
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(f"num_attention_heads={self.num_attention_heads} must be a multiple of o_groups={self.o_groups}.")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts={self.n_routed_experts}.")
        if self.n_shared_experts != 1:
            raise ConfigError(f"n_shared_experts={self.n_shared_experts} is not built; V4 has 1.")
        if self.index_leaders is not None:
            leaders, c4 = tuple(self.index_leaders), self.layers_of(C4)
            if not set(leaders) <= set(c4) or (c4 and c4[0] not in leaders):
                raise ConfigError(f"index_leaders={leaders} must be C4 layers and include the first, of {c4}.")

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Layer numbers of one compress ratio, ascending."""
        return tuple(i for i, r in enumerate(self.compress_ratios) if r == ratio)

    @property
    def c4_layers(self) -> tuple[int, ...]:
        return self.layers_of(C4)

    @property
    def c128_layers(self) -> tuple[int, ...]:
        return self.layers_of(C128)

    def followers_of(self, layer: int) -> tuple[int, ...]:
        """The C4 layers that use the top-k indices and plan of `layer`, ascending; none where it does not lead."""
        return tuple(i for i in self.c4_layers if i != layer and self.leader_of(i) == layer)

    def leader_of(self, layer: int) -> int:
        """The C4 layer whose top-k indices and plan `layer` uses; itself where it leads."""
        leaders = self.c4_layers if self.index_leaders is None else self.index_leaders
        return max(i for i in leaders if i <= layer)


_FIXED = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""Fields this implementation fixes: another value is refused, never ignored."""


def model_config_from_dict(raw: dict[str, Any]) -> ModelConfig:
    """`config.json`'s fields to a `ModelConfig`; a field that changes the model and is not built is refused."""
    for name, value in _FIXED.items():
        if name in raw and raw[name] != value:
            raise ConfigError(f"config: {name}={raw[name]!r} is not built; this implementation has {value!r}.")
    fields = {f.name: f for f in dataclasses.fields(ModelConfig)}
    given = {name: raw[name] for name in fields if name in raw and name != "rope_scaling"}
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given]
    if required:
        raise ConfigError(f"config lacks {', '.join(required)}.")
    for name in ("compress_ratios", "index_leaders"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    given |= {name: float(given[name]) for name in given if fields[name].type is float}
    return ModelConfig(**given, rope_scaling=_yarn(raw.get("rope_scaling")))


def _yarn(raw: dict[str, Any] | None) -> Yarn | None:
    if raw is None:
        return None
    kind = raw.get("rope_type", raw.get("type"))
    if kind != "yarn":
        raise ConfigError(f"config: rope_scaling type {kind!r} is not built; V4 uses 'yarn'.")
    plain = Yarn()
    names = [f.name for f in dataclasses.fields(Yarn) if f.name in raw]
    return dataclasses.replace(plain, **{name: type(getattr(plain, name))(raw[name]) for name in names})


def load_model_config(path: pathlib.Path) -> ModelConfig:
    """Reads a `config.json`. Raises `ConfigError` where it is missing, unreadable or describes another model."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a checkpoint folder with a config.json.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not an object of fields.")
    return model_config_from_dict(raw)


_TINY = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=2, o_lora_rank=16, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
    num_hash_layers=1, index_n_heads=16, index_head_dim=32, index_topk=16, compress_ratios=(0, 4, 128, 4),
    rope_scaling=Yarn(original_max_position_embeddings=256), max_position_embeddings=4_096,
)  # fmt: skip
_DEMO = dict(
    vocab_size=256, hidden_size=64, num_hidden_layers=8, num_attention_heads=2, q_lora_rank=64, o_groups=2,
    o_lora_rank=32, index_n_heads=8, index_head_dim=256, index_topk=32, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=64, num_hash_layers=1, compress_ratios=(0, 4, 4, 128, 4, 4, 4, 4),
    rope_scaling=Yarn(original_max_position_embeddings=1_024), max_position_embeddings=8_192,
)  # fmt: skip
_FLASH = dict(
    vocab_size=129_280, hidden_size=4_096, num_hidden_layers=43, num_attention_heads=64, q_lora_rank=1_024, o_groups=8,
    o_lora_rank=1_024, index_n_heads=64, index_topk=512, n_routed_experts=256, num_experts_per_tok=6,
    moe_intermediate_size=2_048, compress_ratios=(0, 0) + (4, 128) * 20 + (4,),
)  # fmt: skip
_PRO = dict(
    vocab_size=129_280, hidden_size=7_168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1_536, o_groups=16,
    o_lora_rank=1_024, index_n_heads=64, index_topk=1_024, n_routed_experts=384, num_experts_per_tok=6,
    moe_intermediate_size=3_072, routed_scaling_factor=2.5, compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
)  # fmt: skip
PRESETS = {name: ModelConfig(**fields) for name, fields in
           {"tiny": _TINY, "demo": _DEMO, "v4-flash": _FLASH, "v4-pro": _PRO}.items()}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """One of `PRESETS`, by name."""
    if name not in PRESETS:
        raise ConfigError(f"model {name!r} is unknown; presets are {', '.join(PRESETS)}.")
    return PRESETS[name]


ROW_FORMATS = ("f32", "bf16", "fp8")
INDEX_FORMATS = ("f32", "bf16", "fp8", "fp4")
_CHOICES = {
    "rows": ROW_FORMATS,
    "rule": ("searched", "base"),
    "backup": ("write_through", "spill"),
    "reclaim": ("base", "eager", "unpin"),
}


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Budgets, formats and policies of the two tiers."""

    max_model_len: int
    """Longest context of one request, in tokens."""
    max_requests: int = 4
    """Request slots `B` compiled into every program: a power of two, at least 2."""
    gpu_pool_bytes: int | None = None
    """Bytes of the slab; or give `gpu_blocks`."""
    host_pool_bytes: int | None = None
    """Bytes of all C4 host pools together; or give `host_blocks`."""
    gpu_blocks: int | None = None
    """Overrides the count that `gpu_pool_bytes` gives; null block included."""
    host_blocks: int | None = None
    """Overrides the count that `host_pool_bytes` gives; null block included."""
    parked_requests: int = 0
    """Requests kept on the host over preemption at once, beside the `max_requests` that run; 0: no parking."""
    parked_pages: int | None = None
    """Pages of all of them together, null block excluded; None: `max_model_len` tokens for each."""
    cached_prefixes: int = 0
    """Prompt prefixes kept on the host for later requests at once, in places beside the parked requests'; 0: no cache."""
    cached_pages: int | None = None
    """Parking pages of all of them together; None: `max_model_len` tokens for each."""
    num_hot_slots: int | None = None
    """Hot slots per request and C4 layer; None: `(query_rows + 1) * index_topk`."""
    rows: str = "fp8"
    """Row format of window, C4 and C128 entries."""
    index_keys: str | None = None
    """Index key format; None: as `rows` (fp8 for fp8)."""
    hadamard: bool = False
    """Rotate index queries and keys by a Hadamard matrix (both sides or neither)."""
    page_entries: int = 64
    """C4 entries of one page; 64 is the product's."""
    rule: str = "searched"
    """Layout: searched for the least steady-state bytes per request, or the base bound."""
    backup: str = "write_through"
    """Host copy of decode rows: in the step that writes them, or page-wise when a page is spilled."""
    reclaim: str = "base"
    """base: give pages up when an allocation is short. eager: give every page up as soon as it may go. unpin: a page that may go
    counts as free and is read in place until its block is handed out."""
    watermark: int | None = None
    """unpin: free GPU blocks below which requests take their hot regions; None: `max(hot_blocks, gpu_blocks // 10)`."""
    admission_window: int | None = None
    """unpin: tokens on the GPU from which on a request takes its hot region, however many blocks are free; None: no limit."""
    tail_pages: int = 2
    """Last pages of a request that never leave the GPU: decode writes there."""
    prefetch_followers: bool = False
    """Layers that follow another's plan get their rows as soon as it is made, not when their turn comes (`index_leaders`)."""
    draft_rows: int = 0
    """Most draft tokens that one step verifies for a request (`decode.verify_steps`): 0, 1, 3, 7, ..."""
    chunk_tokens: int = 256
    """Tokens of one compiled prefill chunk: a power of two, at least 2."""
    stretch_steps: int = 64
    """Decode steps between two looks at growth and reclaim; at most 64."""

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; choose from {', '.join(choices)}.")
        if self.index_keys is not None and self.index_keys not in INDEX_FORMATS:
            raise ConfigError(f"index_keys={self.index_keys!r} is unknown; choose from {', '.join(INDEX_FORMATS)}.")
        if self.rows != "fp8" and self.index_keys not in (None, self.rows):
            raise ConfigError(f"rows={self.rows} stores index keys as {self.rows}, not {self.index_keys}; leave index_keys out.")
        if self.rows == "fp8" and self.index_keys not in (None, "fp8", "fp4"):
            raise ConfigError(f"rows=fp8 stores index keys as fp8 or fp4, not {self.index_keys}.")
        for name in ("max_requests", "chunk_tokens"):
            value = getattr(self, name)
            if value < 2 or value & (value - 1):
                raise ConfigError(f"{name}={value} must be a power of two and at least 2: compiled shapes stay bit-stable then.")
        if self.max_model_len < 1:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 1.")
        if self.draft_rows < 0 or self.query_rows & self.draft_rows:
            raise ConfigError(
                f"draft_rows={self.draft_rows} makes {self.query_rows} query rows, which must be a power of two: compiled shapes "
                "stay bit-stable then. Take 0, 1, 3 or 7 and propose fewer drafts where there are fewer."
            )
        for name in ("gpu_pool_bytes", "host_pool_bytes", "gpu_blocks", "host_blocks", "parked_pages", "cached_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be positive.")
        for places, pages in (("parked_requests", "parked_pages"), ("cached_prefixes", "cached_pages")):
            if getattr(self, places) < 0:
                raise ConfigError(f"{places}={getattr(self, places)} must not be negative; 0 keeps none.")
            if getattr(self, pages) is not None and not getattr(self, places):
                raise ConfigError(f"{pages}={getattr(self, pages)} has no effect without {places}; give both or neither.")
        if self.tail_pages < 2:
            raise ConfigError(f"tail_pages={self.tail_pages} must be at least 2: decode writes to the last two pages.")
        for name in ("watermark", "admission_window"):
            value = getattr(self, name)
            if value is not None and self.reclaim != "unpin":
                raise ConfigError(f"{name}={value} has no effect with reclaim={self.reclaim!r}; leave it out or choose 'unpin'.")
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value} must not be negative.")
        if self.page_entries < 32 or self.page_entries % 32:
            raise ConfigError(f"page_entries={self.page_entries} must be a multiple of 32: a page holds whole C128 entries.")
        if not 1 <= self.stretch_steps <= 64:
            raise ConfigError(
                f"stretch_steps={self.stretch_steps} must lie in 1..64: a stretch grows a request by at most one page."
            )
        if (most := C4 * self.page_entries // self.query_rows) < self.stretch_steps:
            raise ConfigError(
                f"stretch_steps={self.stretch_steps} steps of {self.query_rows} rows may fill more than a page of "
                f"{C4 * self.page_entries} tokens, and the page being written must be one of a request's last two; lower "
                f"stretch_steps to {most}."
            )

    @property
    def index_format(self) -> str:
        return self.index_keys or self.rows

    @property
    def query_rows(self) -> int:
        """Rows of one request that a step computes, resolved as one transaction: its next token and the drafts after it."""
        return 1 + self.draft_rows

    @property
    def chunk_pages(self) -> int:
        """Most pages that one prefill chunk can add to a request, or seal."""
        return -(-self.chunk_tokens // (C4 * self.page_entries)) + 1

    def hot_slots(self, model: ModelConfig) -> int:
        """Hot slots per request and layer; refuses a count that one transaction overflows."""
        need = self.query_rows * model.index_topk
        slots = need + model.index_topk if self.num_hot_slots is None else self.num_hot_slots
        if slots < need:
            raise ConfigError(
                f"num_hot_slots={slots} holds {slots}, one transaction needs {need}; raise num_hot_slots to {need}."
            )
        if self.draft_rows and need > MAX_REFERENCES:
            raise ConfigError(
                f"draft_rows={self.draft_rows} makes transactions of {need} references ({self.query_rows} rows of "
                f"{model.index_topk}), the kernels take {MAX_REFERENCES}; lower draft_rows below "
                f"{MAX_REFERENCES // model.index_topk}."
            )
        if slots > MAX_HOT_SLOTS:
            raise ConfigError(f"num_hot_slots={slots} exceeds {MAX_HOT_SLOTS}: slot numbers are int16; lower num_hot_slots.")
        return slots
