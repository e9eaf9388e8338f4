"""What decoding knows of each request beside its cache: where it stands, what it samples with, when it stops."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, UInt32


class Sequences(struct.PyTreeNode):
    """`B` request slots.

    length: i32[B]        tokens in the cache; the next token is computed at this position.
    token: i32[B]         the next token to compute.
    limit: i32[B]         the request stops when `length` reaches it.
    stop_token: i32[B]    the request stops when it samples this; -1: never.
    seed: u32[B]          of the request's sampling keys.
    temperature: f32[B]   0: greedy, ties to the lower token id.
    running: bool[B]      prefilled and not stopped.
    """

    length: Int32[Array, " B"]
    token: Int32[Array, " B"]
    limit: Int32[Array, " B"]
    stop_token: Int32[Array, " B"]
    seed: UInt32[Array, " B"]
    temperature: Float32[Array, " B"]
    running: Bool[Array, " B"]


def init_sequences(batch: int) -> Sequences:
    """All slots empty. Every leaf is a buffer of its own, as donation needs."""
    return Sequences(
        length=jnp.zeros(batch, jnp.int32),
        token=jnp.zeros(batch, jnp.int32),
        limit=jnp.zeros(batch, jnp.int32),
        stop_token=jnp.full(batch, -1, jnp.int32),
        seed=jnp.zeros(batch, jnp.uint32),
        temperature=jnp.zeros(batch, jnp.float32),
        running=jnp.zeros(batch, bool),
    )


def committed(tree):
    """`tree` committed to the default device: what a jitted call returns is, and jit compiles once more for what is not."""
    return jax.device_put(tree, jax.local_devices()[0])


def sample(
    logits: Float32[Array, "R V"],
    seed: UInt32[Array, " R"],
    temperature: Float32[Array, " R"],
    position: Int32[Array, " R"],
) -> Int32[Array, " R"]:
    """The token for `position` of each request. Its key is `fold_in(key(seed), position)`: batch, slot and preemption do
    not enter, so a request samples the same tokens wherever it runs."""
    keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(seed, position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    warm = temperature > 0
    scaled = logits / jnp.where(warm, temperature, 1)[:, None]
    return jnp.argmax(jnp.where(warm[:, None], scaled + noise, logits), axis=-1).astype(jnp.int32)
