"""Many prompts through a router, as fast as its replicas take them (client; torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import Overloaded

if TYPE_CHECKING:
    from nbdist.serve.generation import Generation
    from nbdist.serve.router import Router

__all__ = ["generate_all"]


def generate_all(router: Router, prompts: list[str], sampling: dict[str, Any]) -> list[Generation]:
    """Send prompts and wait until all have ended; see `Router.generate`."""
    made: list[Generation] = []
    try:
        for prompt in prompts:
            made.append(_submit_waiting(router, prompt, sampling))  # noqa: PERF401 - kept on errors
        for generation in made:
            generation.wait()
    except BaseException:
        for generation in made:
            generation.cancel()
        raise
    return made


def _submit_waiting(router: Router, prompt: str, sampling: dict[str, Any]) -> Generation:
    while True:
        before = router.num_outstanding
        try:
            return router.submit(prompt, **sampling)
        except Overloaded:
            if not before:  # all are being drained: nothing that ends would make room
                raise
            router.wait_for_fewer(before)
