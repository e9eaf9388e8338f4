"""The cache of an engine and the calls that change it: one request in, a chunk, some steps, out, parked, back. No policy.

One decode shape and one chunk shape are compiled. Every call ends with what it gave on the host, so a program that failed is
noticed by the call that ran it; the state it was given is then gone, and `reset` starts over with an empty one.
"""

import contextlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from hisparse_jax import decode, images, parking, prefix_places
from hisparse_jax.drafts import Steps, take_steps
from hisparse_jax.images import RequestImage
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.requests import Request
from hisparse_jax.spill import SpillPlan, standing
from hisparse_jax.state import TieredState
from hisparse_jax.status import Status, raise_for_status


class View(NamedTuple):
    """What the state says of each slot and of the pools, without a page of data.

    traffic: i32[4, B]   rows swapped in, staged, mirrored, and pages copied, since the slot's admission.
    pages: i32[B]        pages grown.
    resident: i32[B]     those on the GPU; of them `pending` with a copy in flight, `clean` complete on the host, `unpinned`
                         clean and in free blocks.
    host_pages: i32[B]   host blocks held.
    """

    running: Bool[Array, " B"]
    length: Int32[Array, " B"]
    token: Int32[Array, " B"]
    homeless: Int32[Array, " B"]
    traffic: Int32[Array, "4 B"]
    pages: Int32[Array, " B"]
    resident: Int32[Array, " B"]
    pending: Int32[Array, " B"]
    clean: Int32[Array, " B"]
    unpinned: Int32[Array, " B"]
    host_pages: Int32[Array, " B"]
    hot: Bool[Array, " B"]
    gpu_free: Int32[Array, ""]
    host_free: Int32[Array, ""]


@jax.jit
def view(state: TieredState) -> View:
    """Reads the state; its arrays stay what they are."""
    ledger, traffic, seq = state.ledger, state.traffic, state.sequences
    on_gpu, moving = standing(ledger), ledger.transfer > 0

    def count(pages):
        return jnp.sum(pages, axis=1, dtype=jnp.int32)

    return View(
        running=seq.running,
        length=seq.length,
        token=seq.token,
        homeless=state.homeless,
        traffic=jnp.stack([traffic.swapped_rows, traffic.staged_rows, traffic.mirrored_rows, traffic.copied_pages]),
        pages=ledger.tables.num_pages,
        resident=count(on_gpu),
        pending=count(on_gpu & moving),
        clean=count(on_gpu & ledger.valid & ~moving & ~ledger.unpinned),
        unpinned=count(ledger.unpinned),
        host_pages=count(ledger.host_table > 0),
        hot=ledger.has_hot,
        gpu_free=ledger.tables.pool.num_free,
        host_free=ledger.host.num_free,
    )


class Runner:
    """State of both tiers, places for parked requests, and the pages whose backup is under way."""

    def __init__(self, model: DeepseekV4, layout: CacheLayout, *, call_steps: int, keep_logits: bool):
        self.model, self.layout, self.call_steps, self.keep_logits = model, layout, call_steps, keep_logits
        self.pending: SpillPlan | None = None
        self._seen: tuple[TieredState, View] | None = None
        self._take_memory()

    def _take_memory(self) -> None:
        self.state: TieredState = decode.init_state(self.layout)
        self.parking = parking.init_parking(self.layout) if self.layout.parking_blocks else None

    def reset(self) -> None:
        """Every request is gone; both tiers are empty."""
        self.close()
        self._take_memory()

    def close(self) -> float:
        """Gives the memory back once the device is idle; seconds that it took. A second call finds nothing to give."""
        began, self.pending, self._seen = time.monotonic(), None, None
        for x in jax.tree.leaves((vars(self).pop("state", None), vars(self).pop("parking", None))):
            if not x.is_deleted():
                with contextlib.suppress(RuntimeError):  # of the program that failed on it
                    x.block_until_ready()
                x.delete()
        return time.monotonic() - began

    @property
    def sound(self) -> bool:
        """Whether the state is there: a program that fails takes what was donated to it along."""
        arrays = jax.tree.leaves((self.state, self.parking))
        if any(x.is_deleted() for x in arrays):
            return False
        try:
            jax.block_until_ready(arrays)
        except RuntimeError:
            return False
        return True

    def look(self) -> View:
        """The state's numbers, on the host; read once, however often nothing has changed."""
        if self._seen is None or self._seen[0] is not self.state:
            self._seen = self.state, jax.device_get(view(self.state))
        return self._seen[1]

    def admit(self, slot: int, request: Request) -> None:
        self.state = decode.admit(
            self.state,
            slot,
            request.prompt,
            layout=self.layout,
            **request.options,
        )

    def adopt(self, place: int, slot: int, request: Request, length: int) -> Status:
        """As `admit`, with the prefix of `length` tokens in `place`; but for `OK` nothing changed."""
        assert self.parking is not None
        self.state, self.parking, status = prefix_places.adopt(
            self.state,
            self.parking,
            place,
            slot,
            request.prompt,
            length,
            layout=self.layout,
            **request.options,
        )
        return status

    def publish(self, slot: int, like: int, num_shared: int) -> int | None:
        """Caches what a request holds: its place, or None where there is no room. No backup may be under way."""
        assert self.parking is not None
        self.state, self.parking, place, status = prefix_places.publish(
            self.state, self.parking, slot, layout=self.layout, like=like, num_shared=num_shared
        )
        if status not in (Status.OK, Status.OUT_OF_PARKING, Status.OUT_OF_HOST_BLOCKS):
            raise_for_status(status, f"publication of the request in slot {slot}")
        return place

    def prefill(self, slot: int, prompt: tuple[int, ...], begin: int, end: int) -> tuple[int, np.ndarray | None, Status]:
        """Computes the next chunk of a prompt, up to `end` at most: `(tokens in the cache, logits, status)`.

        Logits f32[V] of the prompt's last token come with the chunk that ends it; the request then runs, and `look` has its
        first token. A status other than OK says that nothing was computed.
        """
        count = min(self.layout.cache.chunk_tokens, end - begin)
        self.state, self.pending, output, status = decode.prefill_step(
            self.model, self.state, slot, prompt, begin, count, self.pending, layout=self.layout
        )
        if output is None:
            return begin, None, status
        logits = np.array(output.logits)[0]
        if begin + count < len(prompt):
            return begin + count, None, status
        self.state, self.pending = decode.end_prefill(self.state, slot, self.pending, layout=self.layout), None
        return begin + count, logits, status

    def decode(self, num_steps: int, drafts: Int32[np.ndarray, "B D"] | None) -> Steps:
        """Decodes `num_steps <= call_steps` steps of all that run; `drafts` as of `take_steps`."""
        self.state, steps = take_steps(
            decode,
            self.model,
            self.state,
            num_steps,
            drafts,
            layout=self.layout,
            max_steps=self.call_steps,
            return_logits=self.keep_logits,
        )
        return steps

    def flush(self) -> None:
        """Ends the backup under way."""
        self.state, self.pending = decode.flush_backup(self.state, self.pending, layout=self.layout), None

    def finish(self, slot: int) -> None:
        """Gives back all that a request in a slot holds."""
        self.flush()
        self.state, status = decode.finish(self.state, jnp.int32(slot))
        raise_for_status(int(status), f"end of the request in slot {slot}")

    @property
    def can_park(self) -> bool:
        return self.layout.cache.parked_requests > 0 and self.parking is not None

    def park(self, slot: int) -> int | None:
        """Takes a request off the GPU and keeps it: its place, or None where there is no room for it."""
        if not self.can_park:
            return None
        assert self.parking is not None
        self.flush()
        self.state, self.parking, place, status = parking.preempt(self.state, self.parking, slot, layout=self.layout)
        if status not in (Status.OK, Status.OUT_OF_PARKING):
            raise_for_status(status, f"preemption of the request in slot {slot}")
        jax.block_until_ready(self.parking.snapshots)
        return place

    def resume(self, place: int, slot: int) -> bool:
        """Brings a parked request back; False, and nothing changed, where GPU blocks are short."""
        assert self.parking is not None
        self.state, self.parking, status = parking.resume(self.state, self.parking, place, slot, layout=self.layout)
        if status not in (Status.OK, Status.OUT_OF_BLOCKS):
            raise_for_status(status, f"return of the request in place {place}")
        jax.block_until_ready(self.state.slab)
        return status is Status.OK

    def discard(self, place: int) -> None:
        """Gives back all that a parked request or a cached prefix holds."""
        assert self.parking is not None
        self.state, self.parking, status = parking.discard(self.state, self.parking, place, layout=self.layout)
        raise_for_status(status, f"end of what place {place} holds")

    def export(self, place: int) -> RequestImage:
        """A parked request as an image; it stays parked."""
        assert self.parking is not None
        return images.export_request(self.state, self.parking, place, self.layout)

    def take_in(self, image: RequestImage) -> int | None:
        """Parks the request of an image: its place, or None where the parking has no room for it."""
        assert self.parking is not None
        self.state, self.parking, place, status = images.import_request(self.state, self.parking, image, self.layout)
        if status is not Status.OUT_OF_PARKING:
            raise_for_status(status, "import of a request")
        return place
