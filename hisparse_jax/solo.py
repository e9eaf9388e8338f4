"""One request alone on the resident twin, in the compiled shapes of an engine: what every engine must give, bit for bit."""

import numpy as np
from jaxtyping import Float32, Int32

from hisparse_jax import resident
from hisparse_jax.drafts import take_steps
from hisparse_jax.layout import CacheLayout
from hisparse_jax.model.blocks import DeepseekV4
from hisparse_jax.requests import Request
from hisparse_jax.status import raise_for_status


def solo(
    model: DeepseekV4, layout: CacheLayout, request: Request, *, call_steps: int
) -> tuple[Int32[np.ndarray, " S"], Float32[np.ndarray, "S V"]]:
    """Tokens, and the logits each was sampled from. `layout` is the engine's `resident_layout`, `call_steps` the engine's."""
    state = resident.admit(
        resident.init_state(layout),
        0,
        request.prompt,
        layout=layout,
        **request.options,
    )
    state, output, status = resident.prefill(model, state, 0, request.prompt, layout=layout)
    raise_for_status(status, "prefill")
    assert output.logits is not None
    tokens, logits = [np.array(state.sequences.token)[:1]], [output.logits]
    while bool(state.sequences.running[0]):
        state, steps = take_steps(
            resident, model, state, call_steps, None, layout=layout, max_steps=call_steps, return_logits=True
        )
        raise_for_status(int(steps.status[0]), "decode")
        assert steps.logits is not None
        taken = steps.tokens[0] >= 0
        tokens.append(steps.tokens[0, taken])
        logits.append(steps.logits[0, taken])
    return np.concatenate(tokens), np.concatenate(logits)
