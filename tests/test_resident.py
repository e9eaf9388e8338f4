"""The resident twin knows nothing of tiers: neither its modules nor its programs do."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TINY, build, tight_layout

from hisparse_jax import resident
from hisparse_jax.generation import resident_layout
from hisparse_jax.prompts import PromptError
from hisparse_jax.status import Status

PACKAGE = pathlib.Path(resident.__file__).parent
FORBIDDEN = {
    "resolve",
    "transfer",
    "hot_map",
    "tiered",
    "room",
    "coordinator",
    "spill",
    "reclaim",
    "decode",
    "host_memory",
    "ffi",
}


def imports_of(module: str) -> set[str]:
    """Modules of this package that a module of it imports, by their file's names below the package."""
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    if not path.exists():
        return set()
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hisparse_jax":
            inner = node.module.removeprefix("hisparse_jax").lstrip(".")
            names |= {inner} if inner else set()
            names |= {f"{inner}.{alias.name}".lstrip(".") for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("hisparse_jax.") for alias in node.names if alias.name.startswith("hisparse_jax")}
    return names


def closure(module: str) -> set[str]:
    found, todo = set(), [module]
    while todo:
        new = imports_of(todo.pop()) - found
        found |= new
        todo += new
    return found


def test_imports_nothing_of_the_tiers():
    assert FORBIDDEN & closure("decode") >= {"resolve", "transfer", "hot_map", "tiered", "room", "coordinator"}, (
        "the test is blind"
    )
    assert not FORBIDDEN & closure("resident")


@pytest.fixture(scope="module")
def layout():
    tiered = tight_layout(TINY, (2,), slack=2, max_model_len=512, max_requests=2, rows="f32", chunk_tokens=64)
    return resident_layout(tiered)


def test_programs_hold_no_host_space_value(layout):
    model, state, one = build(TINY, "f32"), resident.init_state(layout), jnp.int32(1)
    tokens = jnp.zeros(64, jnp.int32)
    programs = [
        jax.make_jaxpr(lambda m, s: resident.decode_steps(m, s, one, layout=layout, max_steps=2))(model, state),
        jax.make_jaxpr(lambda m, s: resident.prefill_chunk(m, s, tokens, one, one, layout=layout))(model, state),
        jax.make_jaxpr(lambda s: resident.prepare_chunk(s, one, one, layout=layout))(state),
    ]
    for program in programs:
        written = str(program)
        assert "while" in written or "jit" in written
        assert not any(word in written for word in ("host", "Host", "pinned", "<hbm", "ffi_call"))


def test_shapes_of_a_worked_layout(layout):
    """2 requests of 2 pages and 2 C4 layers: no host tier, a block per page and group for every slot."""
    assert (layout.host_blocks, layout.host_bytes) == (0, 0)
    assert layout.gpu_blocks == 1 + 2 * 2 * layout.growing_groups
    state = resident.init_state(layout)
    assert state.slab.shape == (layout.gpu_blocks, layout.stride)
    assert state.tables.resident.shape == (layout.num_resident_groups, 2, 2)


def test_grows_page_by_page_and_gives_all_back(layout):
    state = resident.init_state(layout)
    free = int(state.tables.pool.num_free)
    state = resident.admit(state, 1, [1] * 300, layout=layout, max_new_tokens=2)
    assert int(state.tables.pool.num_free) == free, "pages come with growth, not with admission"
    for count, pages in ((256, 1), (257, 2), (512, 2)):
        state, status = resident.prepare_chunk(state, jnp.int32(1), jnp.int32(count), layout=layout)
        assert int(status) == Status.OK and int(state.tables.num_pages[1]) == pages
        assert int(state.tables.pool.num_free) == free - pages * layout.growing_groups
    state, status = resident.finish(state, jnp.int32(1))
    assert int(status) == Status.OK and int(state.tables.pool.num_free) == free
    assert not np.asarray(state.tables.resident).any()


def test_refuses_before_it_takes(layout):
    state = resident.init_state(layout)
    with pytest.raises(PromptError, match="max_model_len is 512; shorten the prompt"):
        resident.admit(state, 0, [1] * 512, layout=layout, max_new_tokens=1)
    assert not np.asarray(state.sequences.limit).any()
