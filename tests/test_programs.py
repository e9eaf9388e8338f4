"""A twin's program is compiled with what XLA must leave alone, called by itself or within a larger one."""

import copy
import inspect

import chex
import jax
import jax.numpy as jnp
import pytest

from hisparse_jax import decode, programs, resident


def scaled(model, state, *, factor: int):
    return {"rows": state["rows"] * model * factor}


def test_a_program_stands_alone_or_in_another():
    program, state = programs.program("factor")(scaled), {"rows": jnp.arange(3.0)}
    chex.assert_trees_all_equal(program(2.0, state, factor=3)["rows"], jnp.array([0.0, 6.0, 12.0]))
    assert state["rows"].is_deleted(), "the state is donated"
    assert inspect.signature(program) == inspect.signature(scaled)
    nested = jax.jit(lambda state: program(2.0, program(state=state, model=2.0, factor=3), factor=1))
    chex.assert_trees_all_equal(nested({"rows": jnp.ones(3)})["rows"], jnp.full(3, 12.0))
    alone = jax.jit(lambda model: program(model, {"rows": jnp.ones(3)}, factor=3))
    chex.assert_trees_all_equal(alone(2.0)["rows"], jnp.full(3, 6.0))
    with pytest.raises(TypeError, match="state"):
        program(2.0, factor=3)  # pyright: ignore[reportCallIssue]


def test_a_program_can_be_looked_at_without_running_it():
    program, state = programs.program("factor")(scaled), {"rows": jnp.ones(3)}
    assert program.eval_shape(2.0, state, factor=3)["rows"].shape == (3,)
    assert program.lower(2.0, state, factor=3).as_text() == program.trace(2.0, state, factor=3).lower().as_text()
    assert len(jax.make_jaxpr(lambda s: program(2.0, s, factor=3))(state).eqns) == 1 and not state["rows"].is_deleted()
    chex.assert_trees_all_equal(copy.copy(program)(2.0, state, factor=3)["rows"], jnp.full(3, 6.0))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = program.no_such_name


def test_options_reach_the_compiler(monkeypatch):
    monkeypatch.setitem(programs.COMPILER_OPTIONS, "xla_no_such_option", True)
    program = programs.program("factor")(scaled)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        program(2.0, {"rows": jnp.ones(3)}, factor=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        program.lower(2.0, {"rows": jnp.ones(3)}, factor=1).compile()


@pytest.mark.parametrize("name", ["prefill_chunk", "decode_steps", "verify_steps"])
def test_both_twins_arithmetic_is_compiled_so(name):
    assert {type(getattr(twin, name)) for twin in (decode, resident)} == {programs.Program}
