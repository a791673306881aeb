"""How predict generates text: greedily, by beam search or by sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.tasks.seq2seq import GenerationConfig


def writing_of(
    top_k: int, num_beams: int | None, temperature: float | None, max_new_tokens: int | None, seed: int | None
) -> GenerationConfig:
    """The generation settings of predict from its options."""
    from heedful.model.decode import Beam, Greedy, How, Sample
    from heedful.tasks.seq2seq import GenerationConfig

    if num_beams is not None and temperature is not None:
        raise HeedfulError(
            "--num-beams and --temperature were given: beam search does not sample; leave one of them out"
        )
    how: How = Greedy()
    if num_beams is not None:
        how = Beam(width=num_beams, best=max(1, min(top_k, num_beams)))
    elif temperature is not None:
        how = Sample(temperature=temperature)
    if seed is not None and temperature is None:
        raise HeedfulError("--seed is for sampling, which needs --temperature: give both or none")
    return GenerationConfig(how=how, max_new_tokens=128 if max_new_tokens is None else max_new_tokens, seed=seed or 0)
