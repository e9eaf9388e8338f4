"""A request leaves one cache and goes on in another, in every bit as if it had stayed: any token, other ids, other packing."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from parking_runs import BRIEF, LAYOUT, LONG, ON_A_GPU, OPTIONS, PAGE, SMALL, STEPS, Engine, Request, undisturbed, values
from runs import failing, text, tight_layout

from hisparse_jax import ffi, images
from hisparse_jax.images import (
    ImageError,
    Progress,
    RequestImage,
    check_image,
    export_request,
    image_format,
    import_request,
)
from hisparse_jax.layout import CacheLayout, plan_layout
from hisparse_jax.parking import discard
from hisparse_jax.prompts import PromptError
from hisparse_jax.status import Status

pytestmark = pytest.mark.xdist_group("parking")

BASE = tight_layout(SMALL, (6, 5, 3), slack=1, **(OPTIONS | {"rule": "base", "num_hot_slots": 40, "parked_requests": 1}))
IN_PREFILL, IN_DECODE = (1, 3, 4, 127, 384, 385, 387, 388, 511), (600, 639, 640, 641, 643, 644, 659)
"""Around page boundaries of 128 tokens, where entries of 4 and of 128 close, and right before the end."""

WARM = {"seed": 9, "temperature": 0.9}


def shuffled(engine: Engine, seed: int, *, first: str) -> Engine:
    """An empty engine with its free blocks in random order: even ids before odd ones, or the reverse; in the parking the other
    way round."""
    rng = np.random.default_rng(seed)

    def reorder(pool, even: bool):
        ids = 1 + rng.permutation(len(pool.references) - 1)
        ids = ids[np.argsort(ids % 2 == even, kind="stable")]
        ring = np.array(pool.ring)
        ring[: len(ids)] = ids
        return pool.replace(ring=jax.device_put(ring, pool.ring.sharding))

    ledger, lot, even = engine.state.ledger, engine.parking.ledger, first == "even"
    tables = ledger.tables.replace(pool=reorder(ledger.tables.pool, even))
    engine.state = engine.state.replace(ledger=ledger.replace(tables=tables, host=reorder(ledger.host, even)))
    engine.parking = engine.parking.replace(ledger=lot.replace(pool=reorder(lot.pool, not even)))
    engine.poison()
    return engine


def source(layout: CacheLayout) -> Engine:
    return shuffled(Engine(layout), 1, first="even")


def lift(engine: Engine, name: str, slot: int) -> RequestImage:
    """Parks, exports and resumes."""
    engine.preempt(name)
    before = values((engine.state, engine.parking))
    image = export_request(engine.state, engine.parking, engine.requests[name].place, engine.layout)
    chex.assert_trees_all_equal(values((engine.state, engine.parking)), before)
    engine.resume(name, slot)
    return image


@functools.cache
def lifted(layout: CacheLayout) -> dict[int, RequestImage]:
    """Images of one request at many tokens, in prefill and in decode."""
    engine, taken = source(layout), {}
    engine.admit("brief", 3, BRIEF, STEPS)
    engine.prefill("brief")
    engine.admit("long", 0, LONG, STEPS, **WARM)
    for at in IN_PREFILL:
        engine.prefill("long", until=at)
        taken[at] = lift(engine, "long", at % 3)
    engine.prefill("long")
    for at in IN_DECODE:
        engine.decode(at - engine.length("long"))
        taken[at] = lift(engine, "long", at % 3)
    assert not engine.state.homeless.any()
    return taken


def land(engine: Engine, name: str, image: RequestImage, slot: int, prompt=LONG, steps=STEPS) -> None:
    engine.state, engine.parking, place, status = import_request(engine.state, engine.parking, image, engine.layout)
    assert status is Status.OK and place is not None
    engine.check()
    engine.requests[name] = Request(prompt, steps, place=place)
    engine.poison()
    engine.resume(name, slot)


def assert_goes_on(engine: Engine, name: str, at: int, **options) -> None:
    """Every logit from token `at` on is that of a run without a break, on the importer's layout."""
    request = engine.requests[name]
    alone = undisturbed(engine.layout, request.prompt, request.steps, tuple(options.items()))
    mine, theirs = np.concatenate(request.logits), np.concatenate(alone.logits)[at:]
    assert mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes(), f"imported at token {at}"
    assert request.tokens == alone.tokens[len(alone.tokens) - len(request.tokens) :] and len(request.tokens) <= len(mine) + 1


PAIRS = ((384, 641), (1, 3), (4, 127), (385, 387), (388, 511), (600, 639), (640, 643), (644, 659))


@pytest.mark.slow  # two layouts to compile; `test_saving.py` imports and goes on in every run
@pytest.mark.parametrize("tokens", PAIRS, ids=str)
def test_b9_an_import_ends_on_any_token(tokens):
    """From the base rule's packing to the searched one's, beside a request of the importer's own; ids are shuffled and
    disjoint, and what nobody owns is poison."""
    engine = shuffled(Engine(LAYOUT), 2, first="odd")
    engine.admit("brief", 2, BRIEF[:60], 10)
    engine.prefill("brief")
    for at, slot in zip(tokens, (3, 0)):
        land(engine, str(at), lifted(BASE)[at], slot)
    for at in tokens:
        if at < len(LONG):
            engine.prefill(str(at))
    engine.decode()
    for at in tokens:
        assert_goes_on(engine, str(at), at, **WARM)
        engine.finish(str(at))
    assert_goes_on(engine, "brief", 0)
    engine.finish("brief")
    engine.check_empty()


@pytest.mark.slow
def test_an_image_depends_on_the_request_alone():
    """Not on ids, packing, companions or leftovers; an imported request gives the image that it came from."""
    ours, theirs = source(LAYOUT), lifted(BASE)
    ours.admit("long", 1, LONG, STEPS, **WARM)
    ours.prefill("long", until=388, chunk=61)
    mine = lift(ours, "long", 2)
    chex.assert_trees_all_equal((mine.pages, mine.snapshot), (theirs[388].pages, theirs[388].snapshot))
    assert (mine.format, theirs[388].format) == (image_format(LAYOUT),) * 2
    for at, image in theirs.items():
        assert {x.shape[0] for x in image.pages.values()} == {-(-at // PAGE)} and image.progress.length == at
        assert not any((x == 255).all() for x in image.pages.values())
    for at in (1, 388, 641):
        engine = shuffled(Engine(LAYOUT), at, first="odd")
        land(engine, "long", theirs[at], 1)
        again = lift(engine, "long", 0)
        chex.assert_trees_all_equal((again.pages, again.snapshot), (theirs[at].pages, theirs[at].snapshot))
        changed = dataclasses.replace(again.progress, traffic=theirs[at].progress.traffic)
        assert changed == theirs[at].progress


# Bytes, without a model


def noise(shape, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def made_up(layout: CacheLayout, length: int, **changes) -> RequestImage:
    """An image of noise."""
    fmt, count = image_format(layout), layout.num_pages(length)
    pages = {name: noise((count, size), i) for i, (name, size) in enumerate(fmt.page_bytes)}
    progress = Progress(
        length=length, token=5, limit=700, stop_token=-1, seed=2**32 - 1, temperature=0.7, running=length > 0, host_pages=5,
        pages_lost=1, traffic=(1, 2, 3, 4),
    )  # fmt: skip
    return RequestImage(pages, noise(layout.snapshot_bytes, 99), dataclasses.replace(progress, **changes), fmt)


@pytest.mark.parametrize("machine", ["any", ON_A_GPU])
@pytest.mark.parametrize("layout", [LAYOUT, BASE], ids=["searched", "base"])
def test_b7_each_kind_arrives_in_its_own_pool_at_its_own_ids(layout, machine, monkeypatch):
    """Chunks of two pages; ids are shuffled, odd ones on the host and even ones in the parking."""
    monkeypatch.setattr(images, "CHUNK_PAGES", 2)
    engine = shuffled(Engine(layout), 3, first="odd")
    engine.admit("brief", 1, BRIEF, 5)
    image = made_up(layout, 5 * PAGE - 1)
    before = values((engine.state, engine.parking))
    engine.state, engine.parking, place, status = import_request(engine.state, engine.parking, image, layout)
    assert (place, status) == (0, Status.OK) and place is not None
    engine.check()
    lot = values(engine.parking.ledger)
    host, parked = lot.host_table[0, :5], lot.base[0, :5]
    assert lot.valid[0].tolist() == [True] * 4 + [False] * 4
    assert set(host % 2) == {1} and 0 in parked[:4] % 2
    pools = values(engine.state.pools)
    for layer, pool in zip(SMALL.c4_layers, pools, strict=True):
        np.testing.assert_array_equal(pool[host], image.pages[f"layers.{layer}.c4"])
    for group, pool in zip(layout.base_groups, values(engine.parking.pages), strict=True):
        for p in group:
            kind = "c128" if p.layer in SMALL.c128_layers else "index"
            np.testing.assert_array_equal(
                pool[parked, p.offset : p.offset + p.page_bytes], image.pages[f"layers.{p.layer}.{kind}"]
            )
    np.testing.assert_array_equal(np.asarray(engine.parking.snapshots)[1], image.snapshot)
    for pool, old in zip(pools, before[0].pools, strict=True):
        others = np.setdiff1d(np.arange(1, len(pool)), host)
        np.testing.assert_array_equal(pool[others], old[others])
    chex.assert_trees_all_equal(values(engine.state.slab), before[0].slab)
    again = export_request(engine.state, engine.parking, 0, layout)
    assert again.progress == dataclasses.replace(image.progress, temperature=float(np.float32(0.7)))
    full = {name: x[:4] for name, x in again.pages.items()}
    chex.assert_trees_all_equal(full, {name: x[:4] for name, x in image.pages.items()})
    assert not any(x[4].tobytes() == image.pages[name][4].tobytes() for name, x in again.pages.items()), (
        "the last row is unwritten"
    )


def test_an_image_without_a_token_and_a_discarded_one_leave_no_trace():
    engine = Engine()
    image = made_up(LAYOUT, 0)
    engine.state, engine.parking, place, _ = import_request(engine.state, engine.parking, image, LAYOUT)
    assert place == 0 and int(engine.state.ledger.host.num_free) == LAYOUT.host_blocks - 1 - 5
    assert not export_request(engine.state, engine.parking, 0, LAYOUT).snapshot.any(), "nothing is written at length 0"
    engine.state, engine.parking, status = discard(engine.state, engine.parking, 0, layout=LAYOUT)
    assert status is Status.OK
    engine.check_empty()


# Refusals


def refused(engine: Engine, image: RequestImage, expected: Status) -> None:
    before = values((engine.state.ledger, engine.parking.ledger, engine.parking.sequences, engine.parking.traffic))
    engine.state, engine.parking, place, status = import_request(engine.state, engine.parking, image, engine.layout)
    assert (place, status) == (None, expected)
    after = values((engine.state.ledger, engine.parking.ledger, engine.parking.sequences, engine.parking.traffic))
    if expected is not Status.OUT_OF_MEMORY:
        chex.assert_trees_all_equal(after, before)
    engine.check()


def test_what_there_is_no_room_for_changes_nothing(monkeypatch):
    engine = Engine()
    image = made_up(LAYOUT, 600)
    engine.admit("host", 0, text(1_000, vocab=128), 5)
    engine.admit("host too", 1, text(1_000, vocab=128), 5)
    assert int(engine.state.ledger.host.num_free) == 5
    engine.admit("one page", 2, BRIEF[:9], 5)
    refused(engine, image, Status.OUT_OF_HOST_BLOCKS)
    for name in tuple(engine.requests):
        engine.finish(name)
    for number in (1, 3, 7):  # the ids of a chunk; then two of each chunk
        with monkeypatch.context() as patch:
            patch.setattr(ffi, "pinned_ids", failing(ffi.pinned_ids, number, MemoryError("no pinned memory")))
            refused(engine, image, Status.OUT_OF_MEMORY)
        engine.check_empty()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", failing(jax.device_put, 2, JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")))
        refused(engine, image, Status.OUT_OF_MEMORY)
    engine.check_empty()
    for _ in range(3):
        engine.state, engine.parking, place, status = import_request(engine.state, engine.parking, image, LAYOUT)
        assert status is Status.OK
    refused(engine, image, Status.OUT_OF_PARKING)


def test_what_differs_is_refused_with_both_values():
    def other(**options) -> CacheLayout:
        return plan_layout(SMALL, dataclasses.replace(LAYOUT.cache, **options))

    image = made_up(LAYOUT, 600)
    check_image(image, BASE)
    wide = dataclasses.replace(SMALL, rope_theta=1e6)
    for layout, message in (
        (other(page_entries=64), "page_entries=32, this cache 64"),
        (other(rows="bf16"), "rows='f32', this cache 'bf16'"),
        (other(hadamard=True), "hadamard=False, this cache True"),
        (plan_layout(wide, LAYOUT.cache), r"model\.rope_theta=10000\.0, this cache 1000000\.0"),
        (other(max_model_len=512), "ends at 700 tokens, max_model_len is 512"),
    ):
        with pytest.raises(ImageError, match=message):
            check_image(image, layout)
    name, page = "layers.0.c4", image.pages["layers.0.c4"]
    for changed, message in (
        (
            image.replace(pages=image.pages | {name: page[:4]}),
            r"layers\.0\.c4 has \[4, 8192\] bytes, .* \[5, 8192\]",
        ),
        (image.replace(pages=image.pages | {name: page.astype(np.int8)}), r"layers\.0\.c4 has None bytes"),
        (image.replace(snapshot=image.snapshot[1:]), "snapshot has"),
        (image.replace(format=dataclasses.replace(image.format, version=0)), "version=0, this cache 1"),
        (made_up(LAYOUT, 600, token=128), "token=128.* contradicts itself"),
        (made_up(LAYOUT, 600, host_pages=4), "host_pages=4.* contradicts itself"),
        (made_up(LAYOUT, 600, limit=599, host_pages=5), "limit=599.* contradicts itself"),
    ):
        with pytest.raises(ImageError, match=message):
            check_image(changed, LAYOUT)
    with pytest.raises(PromptError, match="temperature=nan must be a finite number"):
        check_image(made_up(LAYOUT, 600, temperature=float("nan")), LAYOUT)
    engine = Engine()
    for place in (-1, 0, 3):
        with pytest.raises(ImageError, match=rf"place {place} holds no request; those that do are \[\]"):
            export_request(engine.state, engine.parking, place, LAYOUT)
