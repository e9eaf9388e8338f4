"""Group records: which layers' pages share a block, which pool holds it, and the rules that groups must keep.

Group order: source, indexer, resident, hot, C128. Each group has one block table per request. The planner makes
groups that keep the rules by construction and passes them through `check_groups` all the same: a group is also what
an importer of a cache, or a new spec class, would bring.

Source: the group and tensor records of vLLM's HiSparse.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from hisparse_jax.config import ConfigError
from hisparse_jax.specs import CacheSpec, ModelSpecs, Pool, kind_of, may_share_group


class LayoutError(ConfigError):
    """No layout serves this model with these budgets; the message names the values and the remedy."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one layer's page stands in a block of its group."""

    layer: int
    group: int
    """Index of the group within its kind: base or resident."""
    offset: int
    """Bytes from the start of the block."""
    page_bytes: int


Places = tuple[Place, ...]
Role = Literal["source", "indexer", "resident", "hot", "c128"]


@dataclasses.dataclass(frozen=True)
class Group:
    """One block table per request: the layers whose pages share a block. `specs[i]` belongs to `places[i]`."""

    role: Role
    places: Places
    specs: tuple[CacheSpec, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(p.layer for p in self.places)

    @property
    def names(self) -> tuple[str, ...]:
        """One cache name a layer."""
        return tuple(f"layers.{p.layer}.{s.suffix}" for p, s in zip(self.places, self.specs, strict=True))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that this group uses."""
        return sum(p.page_bytes for p in self.places)

    @property
    def block_size(self) -> int:
        return self.specs[0].block_size

    @property
    def pool(self) -> Pool:
        return self.specs[0].pool

    @property
    def grows(self) -> bool:
        """Whether it takes a block per page of history."""
        return kind_of(type(self.specs[0])).manager.grows

    @property
    def prefix(self) -> bool:
        return all(s.prefix for s in self.specs)

    @property
    def transfer(self) -> tuple[str, ...]:
        """One flag a layer: `yes`, `no` or `own`."""
        return tuple(s.transfer for s in self.specs)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One strided view of a pool: page `b` starts at `offset + b * block_stride`; all GPU tensors alias one slab."""

    names: tuple[str, ...]
    """Caches that share it, one group at a time."""
    offset: int
    block_stride: int
    num_blocks: int
    pool: Pool

    @property
    def num_bytes(self) -> int:
        return self.block_stride * self.num_blocks


def check_specs(specs: ModelSpecs) -> None:
    """Refuses a model without C4 entries or index keys, and caches whose pages span different numbers of tokens."""
    if not specs.source or not specs.index:
        raise LayoutError(
            f"HiSparse needs DeepSeek-V4 to expose its C4 caches: found {len(specs.source)} of C4 entries and "
            f"{len(specs.index)} of index keys; both kinds are required, so compress_ratios must contain 4."
        )
    sizes = sorted({s.block_size for _, s in specs.source + specs.index})
    if len(sizes) > 1:
        raise LayoutError(f"C4 and index caches need one block size, got {sizes} tokens; give all the same page_entries.")


def check_groups(groups: Sequence[Group]) -> None:
    """Refuses groups that no coordinator can serve: mixed pages, blocks or pools, views that differ, a wrong order."""
    by_role: dict[str, list[Group]] = {}
    for group in groups:
        by_role.setdefault(group.role, []).append(group)
        for spec in group.specs[1:]:
            if not may_share_group(group.specs[0], spec):
                raise LayoutError(
                    f"a {group.role} group mixes {_describe(group.specs[0])} with {_describe(spec)}; put them in separate groups."
                )
    source, resident, hot = (by_role.get(role, []) for role in ("source", "resident", "hot"))
    for group in hot:
        if len(sizes := sorted({p.page_bytes for p in group.places})) > 1:
            raise LayoutError(f"a hot group needs one page size, got {sizes} bytes; give its layers one row format.")
    if len(sizes := sorted({g.block_size for g in resident})) > 1:
        raise LayoutError(f"resident groups need one block size, got {sizes} tokens; give all the same page_entries.")
    if len(pools := sorted({g.pool for g in resident + hot})) > 1:
        raise LayoutError(f"resident and hot groups must be in one pool, got {pools}; put both on the GPU.")
    if len(source) > 1:
        raise LayoutError(f"there must be one host group, got {len(source)}; put every C4 layer in it.")
    if source and resident:
        if source[0].block_size % resident[0].block_size:
            raise LayoutError(
                f"host blocks of {source[0].block_size} tokens and resident blocks of {resident[0].block_size} are incompatible; "
                "make the host's a multiple."
            )
        if [g.role for g in groups].index("source") > [g.role for g in groups].index("resident"):
            raise LayoutError("the host group comes after a resident group; put it first: source, indexer, resident, hot, C128.")
    if hot and [g.places for g in hot] != [g.places for g in resident]:
        raise LayoutError(
            f"resident and hot views of a layer must match in group, offset and page: resident {_offsets(resident)}, "
            f"hot {_offsets(hot)}; derive both from one list of groups."
        )


def _describe(spec: CacheSpec) -> str:
    return f"{type(spec).__name__} (blocks of {spec.block_size} tokens, {spec.pool})"


def _offsets(groups: Sequence[Group]) -> list[list[tuple[int, int]]]:
    return [[(p.layer, p.offset) for p in g.places] for g in groups]
